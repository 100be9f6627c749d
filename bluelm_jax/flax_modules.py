"""The model as Flax Linen modules, over the same parameter trees as the functions.

    module = flax_modules.VLM(cfg)
    logits = module.apply({"params": weights}, batch)       # weights: a tree of vlm.specs(cfg)
    weights = module.init(jax.random.key(0), batch)["params"]

A module declares the weights of its part and calls the part's functions; no mathematics is here. What
`params.init`, a checkpoint or an import produced goes in as it is, and what a Flax trainer made comes
out as such a tree. `flax.nnx.bridge.ToNNX` turns each into an NNX module.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from bluelm_jax import config, decoder, downsample, params, vision, vlm
from bluelm_jax.batch import Batch
from bluelm_jax.params import Tree


def _declare(module: nn.Module, specs: Tree) -> Tree:
    """One Linen parameter, which may be a tree, for each top-level name of `specs`."""

    def initializer(name: str):
        return lambda key: params.init({name: specs[name]}, key)[name]

    return {name: module.param(name, initializer(name)) for name in specs}


class VisionTower(nn.Module):
    """`vision.encode`: tiles to patch features. Parameters: `vision.specs(cfg)`."""

    cfg: config.VisionConfig
    dtype: config.Dtype = "float32"

    @nn.compact
    def __call__(self, tiles: UInt8[Array, "I S S 3"]) -> Float[Array, "I P D"]:
        """Features of every patch, in `dtype`."""
        weights = _declare(self, vision.specs(self.cfg))
        return vision.encode(weights, tiles, self.cfg, jnp.dtype(self.dtype))


class Connector(nn.Module):
    """Downsampler and projector: patch features to the decoder's tokens.

    Parameters: {"downsampler": downsample.specs(cfg), "projector": downsample.projector_specs(cfg)}.
    """

    cfg: config.VLMConfig

    @nn.compact
    def __call__(self, features: Float[Array, "I P D"]) -> Float[Array, "I Q Z"]:
        """Q tokens a tile, in the features' dtype."""
        parts = {
            "downsampler": downsample.specs(self.cfg),
            "projector": downsample.projector_specs(self.cfg),
        }
        # A part without weights, such as a pixel shuffle, is not in the tree.
        weights = _declare(self, {name: specs for name, specs in parts.items() if specs})
        x = downsample.downsample(weights.get("downsampler", {}), features, self.cfg)
        return downsample.project(weights.get("projector", {}), x, self.cfg)


class Decoder(nn.Module):
    """The language model. Parameters: `decoder.specs(cfg)`."""

    cfg: config.DecoderConfig
    dtype: config.Dtype = "float32"

    def setup(self):
        """Declares the weights."""
        self.weights = _declare(self, decoder.specs(self.cfg))

    def __call__(
        self,
        tokens: Int[Array, "B L"],
        positions: Int[Array, "B L"] | None = None,
        segments: Int[Array, "B L"] | None = None,
    ) -> Float[Array, "B L V"]:
        """float32 logits; rows are one sample each unless positions and segments say otherwise."""
        x = decoder.embed_tokens(self.weights, tokens, self.cfg, jnp.dtype(self.dtype))
        return decoder.logits(self.weights, self.hidden(x, positions, segments), self.cfg)

    def hidden(
        self,
        x: Float[Array, "B L D"],
        positions: Int[Array, "B L"] | None = None,
        segments: Int[Array, "B L"] | None = None,
    ) -> Float[Array, "B L D"]:
        """Final hidden states of embedded rows (`decoder.forward`)."""
        shape = x.shape[:2]
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(shape[1])[None], shape)
        segments = jnp.ones(shape, jnp.int32) if segments is None else segments
        return decoder.forward(self.weights, x, positions, segments, self.cfg)


class VLM(nn.Module):
    """The whole model over a `Batch`. Parameters: `vlm.specs(cfg)`."""

    cfg: config.VLMConfig

    def setup(self):
        """Declares the weights."""
        self.weights = _declare(self, vlm.specs(self.cfg))

    def __call__(self, batch: Batch) -> Float[jax.Array, "B L V"]:
        """float32 logits at every position."""
        return vlm.logits(self.weights, batch, self.cfg)

    def hidden(self, batch: Batch) -> Float[Array, "B L D"]:
        """Final hidden states, for a loss in chunks (`loss.cross_entropy`)."""
        return vlm.forward(self.weights, batch, self.cfg)
