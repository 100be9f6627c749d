"""The model in the form that phones take: static shapes, rank at most 4, no control flow.

Each `Model` becomes one .tflite file; its signatures share one set of weights. The cut follows the
deployment in BlueLM-V-3B (sec. 3.2-3.4): the patch convolution (CPU) stands apart from the ViT
blocks (NPU), tiles come four at a time, the decoder has a prefill signature of fixed length and one
for a single token.

Functions here are pure JAX and equal to `bluelm_jax` by test. They differ in form only:

* weights are [out, in] and unstacked, constants (score scale, residual scale, logit divisor,
  embedding scale) are multiplied into them;
* residual streams are 2-D, attention is heads first with grouped queries folded into rows;
* RoPE tables and the additive mask are inputs;
* the KV cache is an input and only the new slices are outputs; the caller appends them.
"""

from __future__ import annotations

from bluelm_jax import config
from bluelm_jax.params import Tree
from export import decoder_graphs, vision_graphs
from export.config import ExportConfig
from export.signatures import Model


def build(p: Tree, cfg: config.VLMConfig, ex: ExportConfig) -> tuple[Model, ...]:
    """All models of a VLM: patch_embed, vit, projector, embedder, decoder.

    Args:
      p: the parameter tree of `vlm.specs(cfg)`.
      cfg: the model.
      ex: batch, chunk and cache sizes.

    Raises:
      ValueError: the cache is longer than the decoder's max_length.
    """
    if ex.cache_size > cfg.decoder.max_length:
        raise ValueError(
            f"cache_size = {ex.cache_size}: must be <= max_length = {cfg.decoder.max_length}"
        )
    return (
        vision_graphs.patch_embed_model(p["vision"], cfg.vision, ex.tile_batch),
        vision_graphs.vit_model(p["vision"], cfg.vision, ex.tile_batch),
        vision_graphs.projector_model(p, cfg, ex.tile_batch),
        decoder_graphs.embedder_model(p["decoder"], cfg.decoder, ex),
        decoder_graphs.decoder_model(p["decoder"], cfg.decoder, ex),
    )
