"""Token downsamplers and the projector as data; `downsample` holds what they compute.

A tower gives each tile side x side features. A downsampler makes Q tokens of them, the projector MLP
brings these to the decoder's width. Where a downsampler works on blocks of factor x factor features
and `factor` does not divide the side, the map is filled up with zeros at the end of each side: 27
become 28, so 729 features become 196 tokens at factor 2 (BlueLM-V-3B, sec. 3.3).
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from bluelm_jax.checks import check, check_positive

Activation = Literal["gelu", "gelu_exact", "silu"]
ACTIVATIONS = ("gelu", "gelu_exact", "silu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VilaConcat:
    """Concatenate each factor x factor block of features, fuse it with one linear layer (VILA)."""

    factor: int = 2

    def __post_init__(self):
        check_positive(self, "factor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PixelShuffle:
    """Concatenate each factor x factor block of features and nothing more (InternVL's "v2" order).

    The projector reads tokens factor^2 times as wide; InternVL has `ProjectorConfig.norm` before it.
    InternVL itself refuses a side that `factor` does not divide; here the map is filled up.
    """

    factor: int = 2

    def __post_init__(self):
        check_positive(self, "factor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AvgPool:
    """Mean of each factor x factor block of features.

    Only features that are there count: a block that reaches beyond the map is the mean of its part
    inside (torch's AvgPool2d with ceil_mode and without count_include_pad).
    """

    factor: int = 2

    def __post_init__(self):
        check_positive(self, "factor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resampler:
    """Learned queries read a tile through one cross-attention layer (MiniCPM-V, arXiv 2408.01800).

    Its width is the decoder's and its tokens have no order in space, so layouts that stitch tiles
    refuse it. MiniCPM-V has no MLP after it: `ProjectorConfig(depth=0)`.

    Attributes:
      num_queries: tokens a tile, Q: 64 in MiniCPM-V 1.0 and 2.0, 96 in 2.5.
      head_dim: width of a head; the decoder's width / head_dim heads.
      norm_eps: of its three LayerNorms.
    """

    num_queries: int = 64
    head_dim: int = 128
    norm_eps: float = 1e-6

    def __post_init__(self):
        check_positive(self, "num_queries", "head_dim", "norm_eps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """Every feature becomes a token (LLaVA)."""


Downsampler = VilaConcat | PixelShuffle | AvgPool | Resampler | Identity


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProjectorConfig:
    """MLP from the downsampler's width to the decoder's; the paper's has two layers and a GELU.

    Attributes:
      depth: linear layers; 0 hands the downsampler's tokens on (`Resampler`).
      activation: between layers; 'gelu' is the tanh form, 'gelu_exact' the erf form that LLaVA and
        InternVL use.
      norm: a LayerNorm before the first layer (InternVL).
      norm_eps: of that LayerNorm.
    """

    depth: int = 2
    activation: Activation = "gelu"
    norm: bool = False
    norm_eps: float = 1e-5

    def __post_init__(self):
        check(self, "depth", self.depth >= 0, ">= 0")
        check(self, "activation", self.activation in ACTIVATIONS, f"one of {ACTIVATIONS}")
        check_positive(self, "norm_eps")
