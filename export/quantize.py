"""Quantises the weights of a float .tflite with ai-edge-quantizer; activations stay float.

Recipes name layers, not patterns of operations: only FULLY_CONNECTED and EMBEDDING_LOOKUP weights
are touched. Norms, softmax and attention products stay float (quantised norm composites have
crashed the CPU runtime on their second call). 'Dynamic' recipes keep INT8 or INT4 weights through
to the kernels, which round activations to INT8 on the fly; nothing is expanded to float32.
"""

from __future__ import annotations

import contextlib
import io
import re

import jax
import jax.numpy as jnp
import numpy as np

from bluelm_jax import config
from bluelm_jax.params import Tree
from export import flatbuffer
from export.config import BLOCK_SIZES, ExportConfig, Precision

Rule = tuple[str, str, Precision, int]  # layer regex, TFLite operation, precision, block size


def block_size(requested: int, input_width: int) -> int:
    """The largest block <= `requested` that divides a layer's input width; 0 if none does.

    A block never crosses the end of a row, so width 96 in blocks of 64 falls back to 32 and width
    80 to one scale a channel.
    """
    fits = [b for b in BLOCK_SIZES if 0 < b <= requested and input_width % b == 0]
    return max(fits, default=0)


def decoder_rules(cfg: config.DecoderConfig, ex: ExportConfig) -> list[Rule]:
    """One rule a layer kind, because the block size depends on the layer's input width."""
    widths = {
        "q": cfg.width, "k": cfg.width, "v": cfg.width, "out": cfg.num_heads * cfg.head_dim,
        "gate": cfg.width, "up": cfg.width, "down": cfg.mlp_dim,
    }  # fmt: skip
    size = ex.decoder_block_size if ex.decoder_precision == "int4" else 0
    rules: list[Rule] = [
        (rf"/block_\d+/{name}/", "FULLY_CONNECTED", ex.decoder_precision, block_size(size, width))
        for name, width in widths.items()
    ]
    head_size = ex.decoder_block_size if ex.head_precision == "int4" else 0
    head = ("/head/", "FULLY_CONNECTED", ex.head_precision, block_size(head_size, cfg.width))
    return [*rules, head]


def rules(model: str, cfg: config.VLMConfig, ex: ExportConfig) -> list[Rule]:
    """The recipe of one model file.

    Raises:
      ValueError: no such model.
    """
    match model:
        case "patch_embed":
            return []
        case "vit" | "projector":
            return [(".*", "FULLY_CONNECTED", ex.vision_precision, 0)]
        case "embedder":
            return [(".*", "EMBEDDING_LOOKUP", ex.embedder_precision, 0)]
        case "decoder":
            return decoder_rules(cfg.decoder, ex)
    raise ValueError(f"no recipe for model {model!r}")


def round_weight(weight: np.ndarray, precision: Precision, size: int) -> np.ndarray:
    """Weight [out, in] on its quantisation grid: symmetric, one scale a row or a block of `size`.

    The scale is the largest magnitude over 127 or 7; -128 and -8 are not used. Scales of blocks
    are rounded to bfloat16 (7 bits of mantissa), as the quantiser rounds them.
    """
    top = 2 ** (int(precision.removeprefix("int")) - 1) - 1
    blocks = weight.reshape(len(weight), -1, size or weight.shape[1])
    scale = np.maximum(np.abs(blocks).max(-1, keepdims=True) / top, np.float32(1e-30))
    if size:
        scale = scale.astype(jnp.bfloat16).astype(np.float32)
    return (np.round(blocks / scale) * scale).reshape(weight.shape).astype(np.float32)


def rounded_weights(weights: Tree, recipe: list[Rule]) -> Tree:
    """A model's weights as a recipe leaves them: what its quantised file computes with."""

    def one(path, weight):
        keys = [str(getattr(entry, "key", getattr(entry, "idx", ""))) for entry in path]
        scope = "/" + "/".join(keys).replace("blocks/", "block_") + "/"
        for regex, _, precision, size in recipe:
            is_matrix = keys[-1] in ("weight", "embed")
            if is_matrix and precision != "float" and re.search(regex, scope):
                return round_weight(weight, precision, size)
        return weight

    return jax.tree_util.tree_map_with_path(one, weights)


def quantize(data: bytes, recipe: list[Rule]) -> bytes:
    """Applies a recipe to a float flatbuffer; rules of precision 'float' do nothing.

    Raises:
      ValueError: the quantiser broke a signature.
    """
    active = [rule for rule in recipe if rule[2] != "float"]
    if not active:
        return data
    from ai_edge_quantizer import qtyping, quantizer

    tool = quantizer.Quantizer(bytearray(data))
    for regex, operation, precision, size in active:
        tool.add_dynamic_config(
            regex=regex,
            operation_name=qtyping.TFLOperationName(operation),
            num_bits=int(precision.removeprefix("int")),
            granularity=qtyping.QuantGranularity(f"BLOCKWISE_{size}" if size else "CHANNELWISE"),
        )
    # The tool reports sizes and progress on its own; callers report what they did themselves.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        found = tool.quantize().quantized_model
    if found is None:
        raise ValueError(f"the quantiser made nothing of the recipe {active}")
    quantized = bytes(found)
    flatbuffer.check_signatures(quantized, data)
    return quantized
