"""What is compared: small configs in transformers' own terms, and the draws of weights and inputs.

Neither PyTorch nor JAX is imported here. Weights follow from a seed, a name and a shape, so stored
references hold outputs only. `RandomState` is used because NumPy froze its streams for good.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One model shape and the sizes of its inputs.

    Attributes:
      family: which classes of transformers build it, a key of `reference.FAMILIES`.
      config: keyword arguments of their config class.
      rows: images, or rows of tokens.
      length: tokens of a row.
      new_tokens: tokens generated greedily; 0 generates none.
      extras: the checks beside every layer's output. Towers: 'resized' (position tables for other
        tile sizes). Decoders: 'far' (positions beyond the trained length), 'cache', 'blocked'
        (attention in blocks), 'unequal' (rows of unequal lengths), 'prepared' (generation with
        weights laid out for it, too). Both: 'bfloat16'.
    """

    family: str
    config: dict[str, Any]
    rows: int = 2
    length: int = 7
    new_tokens: int = 0
    extras: tuple[str, ...] = ()


def far_positions(case: Case, seed: int) -> np.ndarray:
    """int64 [rows, length]: rising positions with wide gaps, the last of them 3 * the trained length.

    Gaps matter: attention sees differences of positions only, and in neighbouring positions an
    error of the frequencies cancels.
    """
    end = 3 * case.config["max_position_embeddings"]
    rng = np.random.RandomState(seed + 500)
    rows = [np.sort(rng.choice(end, case.length - 1, replace=False)) for _ in range(case.rows)]
    return np.concatenate([np.stack(rows), np.full((case.rows, 1), end)], axis=1)


def draw(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """float32 values of one weight, spread so that every part of the model matters.

    Norm scales stand away from 1 and biases from 0; queries and keys are large enough for attention
    to pick; nothing is so large that float32 rounding grows from layer to layer.
    """
    rng = np.random.RandomState((zlib.crc32(name.encode()) + 7919 * seed) % 2**32)
    noise = rng.standard_normal(shape)
    parts = name.split(".")
    if parts[-1] == "bias":
        values = 0.3 * noise
    elif any("norm" in part for part in parts):
        values = 1.0 + 0.3 * noise
    elif "embed_tokens" in parts:
        values = 0.15 * noise
    elif "position_embedding" in parts:
        values = 0.7 * noise
    else:
        fan_in = int(np.prod(shape[1:]))
        gain = 1.7 if parts[-2] in ("q_proj", "k_proj", "lm_head") else 1.0
        values = gain * noise / np.sqrt(fan_in)
    return values.astype(np.float32)


def tokens(case: Case, seed: int) -> np.ndarray:
    """int64 [rows, length] of vocabulary ids."""
    rng = np.random.RandomState(seed + 1000)
    return rng.randint(0, case.config["vocab_size"], (case.rows, case.length))


def row_lengths(case: Case, seed: int) -> np.ndarray:
    """Unequal row lengths: the first row is full, the others are shorter."""
    rng = np.random.RandomState(seed + 2000)
    shorter = rng.randint(1, case.length, case.rows - 1)
    return np.concatenate([[case.length], shorter])


def tiles(case: Case, seed: int, size: int = 0) -> np.ndarray:
    """uint8 [rows, S, S, 3]; `size` replaces the tile size that the model was made for."""
    size = size or case.config["image_size"]
    rng = np.random.RandomState(seed + 3000)
    return rng.randint(0, 256, (case.rows, size, size, 3)).astype(np.uint8)


def features(case: Case, seed: int) -> np.ndarray:
    """float32 [rows, side * side, width]: what a tower might hand to a projector."""
    rng = np.random.RandomState(seed + 4000)
    shape = (case.rows, case.config["side"] ** 2, case.config["vision_width"])
    return rng.standard_normal(shape).astype(np.float32)


def rope_tables(case: Case) -> list[tuple[int, float]]:
    """Widths of heads and bases."""
    return list(itertools.product(case.config["head_dims"], case.config["thetas"]))


RESIZED = (-5, 9)  # Pixels by which other tile sizes differ, where position tables are resized.


def _decoder(**values: Any) -> dict[str, Any]:
    """A decoder's config.json, in the keys that all families share."""
    shared = dict(
        vocab_size=41, hidden_size=20, intermediate_size=29, num_hidden_layers=3,
        num_attention_heads=5, num_key_value_heads=1, max_position_embeddings=4096,
        rope_theta=10_000.0, rms_norm_eps=1e-5, tie_word_embeddings=False,
    )  # fmt: skip
    return shared | values


ALL = ("far", "cache", "blocked", "unequal", "bfloat16")
LIVE_ALL = (*ALL, "prepared")
# An odd number of heads, heads of odd width, a tile that patches do not fill, lengths that no block
# or chunk divides. Large epsilons, so that one in the wrong place shows.
GOLDEN = {
    "siglip": Case(
        family="siglip", rows=1, extras=("resized", "bfloat16"),
        config=dict(image_size=14, patch_size=4, hidden_size=15, num_hidden_layers=3,
                    intermediate_size=23, num_attention_heads=3, layer_norm_eps=1e-3),
    ),
    "siglip2": Case(
        family="siglip2", rows=1,
        config=dict(image_size=11, patch_size=3, hidden_size=15, num_hidden_layers=3,
                    intermediate_size=23, num_attention_heads=5, layer_norm_eps=1e-6),
    ),
    "llama": Case(
        family="llama", extras=(*ALL, "prepared"), new_tokens=9,
        config=_decoder(head_dim=6, rms_norm_eps=1e-3),
    ),
    "llama_tied": Case(
        family="llama", extras=("far",),
        config=_decoder(num_attention_heads=10, num_key_value_heads=5, head_dim=4,
                        tie_word_embeddings=True, rope_theta=100_000.0),
    ),
    "qwen2": Case(
        family="qwen2", extras=("far", "cache", "unequal"), new_tokens=9,
        config=_decoder(hidden_size=30, num_hidden_layers=2, num_attention_heads=3,
                        rope_theta=1_000_000.0, tie_word_embeddings=True, rms_norm_eps=1e-6),
    ),
    "minicpm": Case(
        family="minicpm", extras=("far", "cache", "bfloat16"),
        config=_decoder(hidden_size=24, num_attention_heads=3, num_key_value_heads=3,
                        tie_word_embeddings=True, scale_emb=3.0, scale_depth=1.4, dim_model_base=5),
    ),
    "llava_next": Case(
        family="llava_next", config=dict(side=3, vision_width=13, width=10),
    ),
    "internvl": Case(
        family="internvl", config=dict(side=6, vision_width=5, width=14),
    ),
    "rope": Case(
        family="rope",
        config=dict(head_dims=[72, 80, 128], thetas=[1e4, 1e6], positions=[1, 12_287]),
    ),
    "bluelm": Case(
        family="bluelm", rows=1, extras=("far",),
        config=_decoder(num_attention_heads=5, num_key_value_heads=5, head_dim=4, rms_norm_eps=1e-3),
    ),
}  # fmt: skip
SEEDS = (0, 1, 2)
# More sizes, for a comparison with PyTorch at hand: heads and widths of published models, lengths
# that are prime and beyond the trained length, three bases of RoPE.
LIVE = GOLDEN | {
    "siglip, heads of 72": Case(
        family="siglip", rows=3, extras=("resized", "bfloat16"),
        config=dict(image_size=45, patch_size=7, hidden_size=144, num_hidden_layers=4,
                    intermediate_size=269, num_attention_heads=2, layer_norm_eps=1e-6),
    ),
    "siglip2, patches of 16": Case(
        family="siglip2", rows=2, extras=("bfloat16",),
        config=dict(image_size=100, patch_size=16, hidden_size=192, num_hidden_layers=3,
                    intermediate_size=301, num_attention_heads=3, layer_norm_eps=1e-6),
    ),
    "llama, SmolLM2's heads": Case(
        family="llama", rows=3, length=53, extras=LIVE_ALL, new_tokens=24,
        config=_decoder(vocab_size=1009, hidden_size=576, intermediate_size=1536,
                        num_attention_heads=9, num_key_value_heads=3, rope_theta=100_000.0,
                        tie_word_embeddings=True, max_position_embeddings=8192),
    ),
    "llama, 97 of 32 positions": Case(
        family="llama", rows=2, length=97, extras=LIVE_ALL,
        config=_decoder(vocab_size=257, hidden_size=128, intermediate_size=200, head_dim=128,
                        num_attention_heads=1, max_position_embeddings=32, rope_theta=500_000.0),
    ),
    "qwen2, 7 heads of 64": Case(
        family="qwen2", rows=3, length=41, extras=LIVE_ALL, new_tokens=24,
        config=_decoder(vocab_size=509, hidden_size=448, intermediate_size=600,
                        num_attention_heads=7, rope_theta=1_000_000.0, rms_norm_eps=1e-6,
                        tie_word_embeddings=True, max_position_embeddings=32_768),
    ),
    "minicpm, 8 layers": Case(
        family="minicpm", rows=3, length=47, extras=LIVE_ALL, new_tokens=24,
        config=_decoder(vocab_size=509, hidden_size=192, intermediate_size=480, num_hidden_layers=8,
                        num_attention_heads=3, num_key_value_heads=3, tie_word_embeddings=True,
                        scale_emb=3.0, scale_depth=1.4, dim_model_base=17),
    ),
    "bluelm, heads of 80": Case(
        family="bluelm", rows=2, length=43, extras=LIVE_ALL, new_tokens=24,
        config=_decoder(vocab_size=509, hidden_size=240, intermediate_size=416, head_dim=80,
                        num_attention_heads=3, num_key_value_heads=3, rms_norm_eps=1e-6),
    ),
    "llava_next, 24 x 24": Case(
        family="llava_next", config=dict(side=24, vision_width=72, width=128),
    ),
    "internvl, 16 x 16": Case(
        family="internvl", config=dict(side=16, vision_width=48, width=112),
    ),
}  # fmt: skip
