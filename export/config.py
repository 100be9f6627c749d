"""What is exported, how it is quantised and how it runs, as frozen dataclasses; no JAX here."""

from __future__ import annotations

import dataclasses
from typing import Literal

from bluelm_jax.checks import check, check_positive

Precision = Literal["float", "int8", "int4"]
BLOCK_SIZES = (0, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Sizes and precisions of an exported model.

    The paper's phone runs tiles by 4 and prefills 128 tokens a call into a cache of 2048, with INT8
    weights for ViT and projector and INT4 for the decoder (BlueLM-V-3B, sec. 3.2-3.4).

    Attributes:
      cache_size: positions of the KV cache, C; prompt and new tokens must fit.
      prefill_chunk: prompt positions a call, T.
      tile_batch: tiles a call of the vision models.
      vision_precision: weights of the ViT blocks, downsampler and projector. The patch convolution
        stays float: it is small and runs on the CPU.
      decoder_precision: weights of the decoder blocks.
      decoder_block_size: input channels that share one scale in INT4 weights (32, 64, 128, 256);
        0 is one scale an output channel. A layer whose input width is not a multiple takes the
        largest smaller block that divides it, else one scale a channel. MediaTek's compiler takes
        no blocks: set 0 for an NPU.
      head_precision: weights of the output head; INT8 beside INT4 blocks, as the head is sensitive.
      embedder_precision: the embedding table, one scale a row.
    """

    cache_size: int = 2048
    prefill_chunk: int = 128
    tile_batch: int = 4
    vision_precision: Literal["float", "int8"] = "int8"
    decoder_precision: Precision = "int4"
    decoder_block_size: int = 32
    head_precision: Precision = "int8"
    embedder_precision: Literal["float", "int8"] = "int8"

    def __post_init__(self):
        check_positive(self, "cache_size", "prefill_chunk", "tile_batch")
        fits = self.prefill_chunk <= self.cache_size
        check(self, "prefill_chunk", fits, f"<= cache_size = {self.cache_size}")
        for field in ("vision_precision", "embedder_precision"):
            check(self, field, getattr(self, field) in ("float", "int8"), "'float' or 'int8'")
        for field in ("decoder_precision", "head_precision"):
            value = getattr(self, field)
            check(self, field, value in ("float", "int8", "int4"), "'float', 'int8' or 'int4'")
        blocks = self.decoder_block_size in BLOCK_SIZES
        check(self, "decoder_block_size", blocks, f"one of {BLOCK_SIZES}")


def float_weights(cfg: ExportConfig) -> ExportConfig:
    """The same sizes with every weight left in float32: the yardstick of a quantised export."""
    return dataclasses.replace(
        cfg,
        vision_precision="float",
        decoder_precision="float",
        head_precision="float",
        embedder_precision="float",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """How an exported model runs.

    Attributes:
      num_threads: CPU threads of every model.
      free_vision: unload the vision models once the image is encoded, before the prompt is read
        (sec. 3.4); the next image loads them again.
      max_new_tokens: tokens generated at most, the stop token included.
    """

    num_threads: int = 2
    free_vision: bool = False
    max_new_tokens: int = 64

    def __post_init__(self):
        check_positive(self, "num_threads", "max_new_tokens")
