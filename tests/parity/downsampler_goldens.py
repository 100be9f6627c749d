"""Writes tests/testdata/downsamplers.npz: downsamplers and resized positions by PyTorch.

    python -m tests.parity.downsampler_goldens

needs torch and transformers. Sources: InternVLModel.pixel_shuffle and InternVLMultiModalProjector,
SiglipVisionEmbeddings.interpolate_pos_encoding (all transformers), torch.nn.AvgPool2d, and for
MiniCPM-V's resampler, which transformers does not have, its published structure (arXiv 2408.01800
and the models' public code) put together from torch.nn parts.
"""

import math
import pathlib

import numpy as np
import torch
import transformers
from torch import nn
from transformers.models.internvl import modeling_internvl
from transformers.models.siglip import modeling_siglip

OUT = pathlib.Path(__file__).parents[1] / "testdata" / "downsamplers.npz"
SIDE, WIDTH, DECODER, QUERIES, HEADS = 4, 6, 16, 5, 2


class Resampler(nn.Module):
    """MiniCPM-V 2.5's: norms, positions on the keys only, one attention, norm, projection."""

    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.randn(QUERIES, DECODER))
        self.kv = nn.Linear(WIDTH, DECODER, bias=False)
        self.norm_q, self.norm_kv, self.norm_post = (
            nn.LayerNorm(DECODER, eps=1e-6) for _ in range(3)
        )
        self.attn = nn.MultiheadAttention(DECODER, HEADS, batch_first=True)
        self.proj = nn.Parameter(torch.randn(DECODER, DECODER) / math.sqrt(DECODER))

    def forward(self, x):
        x = self.norm_kv(self.kv(x))
        q = self.norm_q(self.query).expand(len(x), -1, -1)
        read, _ = self.attn(q, x + positions(SIDE), x)
        return self.norm_post(read) @ self.proj


def positions(side):
    """Channel by channel: columns in the first half, rows in the second, sines before cosines."""
    table = torch.zeros(side, side, DECODER)
    quarter = DECODER // 4
    for row in range(side):
        for column in range(side):
            for half, place in enumerate((column, row)):
                for i in range(quarter):
                    angle = place / 10000 ** (i / quarter)
                    at = half * 2 * quarter + i
                    table[row, column, at] = math.sin(angle)
                    table[row, column, at + quarter] = math.cos(angle)
    return table.reshape(side * side, DECODER)


def randomise(module):
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn_like(weight) * 0.5)


def weights(prefix, module):
    return {f"{prefix}/{name}": w.detach().numpy() for name, w in module.named_parameters()}


def internvl(x):
    """Pixel shuffle of tower features and the projector with its norm, as InternVLModel does."""
    cfg = transformers.InternVLConfig(
        vision_config={"hidden_size": WIDTH, "num_attention_heads": 2},
        text_config={"model_type": "qwen2", "hidden_size": DECODER, "num_attention_heads": 2},
    )
    maps = x.reshape(len(x), SIDE, SIDE, WIDTH)
    shuffle = modeling_internvl.InternVLModel.pixel_shuffle
    shuffled = shuffle(None, maps, scale_factor=0.5).reshape(len(x), -1, 4 * WIDTH)
    projector = modeling_internvl.InternVLMultiModalProjector(cfg)
    randomise(projector)
    found = {"shuffle": shuffled.numpy(), "mlp": projector(shuffled).detach().numpy()}
    return found | weights("projector", projector)


def resized_positions():
    """The position table of a 5 x 5 map read for maps of other sides."""
    cfg = transformers.SiglipVisionConfig(hidden_size=WIDTH, image_size=20, patch_size=4)
    embeddings = modeling_siglip.SiglipVisionEmbeddings(cfg)
    table = torch.randn(25, WIDTH)
    with torch.no_grad():
        embeddings.position_embedding.weight.copy_(table)
    found = {"positions/table": table.numpy()}
    for side in (3, 7, 12):
        resized = embeddings.interpolate_pos_encoding(
            torch.zeros(1, side * side, WIDTH), side * 4, side * 4
        )
        found[f"positions/{side}"] = resized[0].detach().numpy()
    return found


def main():
    """Makes everything from one seed."""
    torch.manual_seed(0)
    x = torch.randn(2, SIDE * SIDE, WIDTH)
    resampler = Resampler()
    randomise(resampler)
    found = {"features": x.numpy(), "resampler": resampler(x).detach().numpy()}
    odd = torch.randn(2, 25, WIDTH)
    pool = nn.AvgPool2d(2, ceil_mode=True, count_include_pad=False)
    pooled = pool(odd.reshape(2, 5, 5, WIDTH).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    found |= {"pool/features": odd.numpy(), "pool": pooled.reshape(2, 9, WIDTH).numpy()}
    found |= weights("resampler", resampler) | internvl(x) | resized_positions()
    np.savez_compressed(OUT, **found)
    print(f"{OUT}: {len(found)} arrays, {OUT.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
