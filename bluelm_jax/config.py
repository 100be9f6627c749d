"""What is built and how it is trained, as frozen dataclasses.

A config says everything that fixes a shape or a number; functions take it beside parameters and
inputs. Nothing here imports JAX, so reading a config costs nothing. Values are checked when the
object is made, and the error names the field, the value and the bound.

Ready-made models stand in `presets`.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from bluelm_jax.checks import check, check_positive
from bluelm_jax.downsampler_config import (
    ACTIVATIONS,
    Activation,
    AvgPool,
    Downsampler,
    Identity,
    PixelShuffle,
    ProjectorConfig,
    Resampler,
    VilaConcat,
)

Dtype = Literal["float32", "bfloat16"]
_VILA, _MLP = VilaConcat(), ProjectorConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """A SigLIP-shaped ViT (no class token, learned positions, pre-norm blocks).

    Defaults are SigLIP so400m/14 at 384 pixels: a VALID 14x14 convolution gives 27x27 patches and
    drops the last 6 pixels of each side.

    Attributes:
      tile_size: side of a tile, pixels.
      patch_size: side of a patch, pixels.
      depth: blocks of the published tower; `num_blocks` of them are there.
      activation: of the MLPs; 'gelu' is the tanh form that SigLIP uses, 'gelu_exact' the erf form.
      feature: 'last' is the output of the final layer norm; 'penultimate' is the residual stream
        before the last block, without final norm, as LLaVA-style models read SigLIP. Last block
        and final norm then do not exist.
      unroll: blocks per scan step.
      remat: keep only the input of each block for the backward pass and compute the block again
        there: a third more work. Small models switch it off.
    """

    tile_size: int = 384
    patch_size: int = 14
    width: int = 1152
    depth: int = 27
    mlp_dim: int = 4304
    num_heads: int = 16
    norm_eps: float = 1e-6
    activation: Activation = "gelu"
    feature: Literal["last", "penultimate"] = "last"
    position_scale: float = 0.02
    unroll: int = 1
    remat: bool = True

    def __post_init__(self):
        check_positive(self, "patch_size", "width", "depth", "mlp_dim", "num_heads", "norm_eps")
        check(self, "tile_size", self.tile_size >= self.patch_size, f">= {self.patch_size}")
        check(self, "num_heads", self.width % self.num_heads == 0, f"a divisor of {self.width}")
        check(self, "activation", self.activation in ACTIVATIONS, f"one of {ACTIVATIONS}")
        check(self, "feature", self.feature in ("last", "penultimate"), "'last' or 'penultimate'")
        least = 1 if self.feature == "last" else 2
        check(self, "depth", self.depth >= least, f">= {least} with feature = {self.feature!r}")
        check(self, "unroll", 1 <= self.unroll <= self.num_blocks, f"in 1..{self.num_blocks}")

    @property
    def side(self) -> int:
        """Patches along one side of a tile."""
        return self.tile_size // self.patch_size

    @property
    def num_blocks(self) -> int:
        """Blocks that exist: all that the feature depends on."""
        return self.depth - (self.feature == "penultimate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A LLaMA-shaped decoder; the options cover Llama, Qwen2, MiniCPM and BlueLM.

    Attributes:
      num_kv_heads: key/value heads; each serves num_heads / num_kv_heads query heads.
      max_length: positions the model is meant for; prompts beyond it are refused.
      tied_head: the output head is the embedding table.
      qkv_bias: biases on the q, k and v projections (Qwen2).
      embed_norm: a LayerNorm with bias right after the embedding (BlueLM).
      embed_scale: multiplies embeddings (MiniCPM: 12).
      residual_scale: multiplies each residual branch (MiniCPM: 1.4 / sqrt(layers)).
      logit_divisor: divides the last hidden state before the head (MiniCPM: width / 256).
      attention_block: queries of a training row whose scores exist at one time; 0 takes all.
    """

    vocab_size: int
    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length: int = 4096
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied_head: bool = False
    qkv_bias: bool = False
    embed_norm: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    attention_block: int = 512
    unroll: int = 1
    remat: bool = True

    def __post_init__(self):
        check_positive(self, "vocab_size", "width", "depth", "mlp_dim", "num_heads", "max_length")
        check_positive(self, "rope_theta", "norm_eps", "logit_divisor", "num_kv_heads")
        check(self, "head_dim", self.head_dim > 0 and self.head_dim % 2 == 0, "even and > 0")
        divides = self.num_heads % self.num_kv_heads == 0
        check(self, "num_kv_heads", divides, f"a divisor of num_heads = {self.num_heads}")
        check(self, "attention_block", self.attention_block >= 0, ">= 0")
        check(self, "unroll", 1 <= self.unroll <= self.depth, f"in 1..{self.depth}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VLMConfig:
    """The whole model: tiles -> ViT -> downsampler -> projector -> decoder.

    Attributes:
      newline: whether a learned vector stands at the end of each token row (the `UnpadNewline`
        layout needs it; BlueLM's plain layout has none).
      dtype: dtype of activations and of the weights as they are used; master weights are float32.
    """

    vision: VisionConfig
    decoder: DecoderConfig
    downsampler: Downsampler = _VILA
    projector: ProjectorConfig = _MLP
    newline: bool = False
    dtype: Dtype = "float32"

    def __post_init__(self):
        check(self, "dtype", self.dtype in ("float32", "bfloat16"), "'float32' or 'bfloat16'")
        width = self.decoder.width
        if isinstance(self.downsampler, Resampler):
            whole = width % self.downsampler.head_dim == 0 and width % 4 == 0
            bound = f"of a head_dim that divides decoder.width = {width}, itself a multiple of 4"
            check(self, "downsampler", whole, bound)
        entering = self.token_width
        joined = self.projector.depth > 0 or entering == width
        bound = f"of depth >= 1: tokens of width {entering} enter a decoder of width {width}"
        check(self, "projector", joined, bound)

    @property
    def token_width(self) -> int:
        """Width of a token between downsampler and projector."""
        match self.downsampler:
            case VilaConcat() | AvgPool() | Identity():
                return self.vision.width
            case PixelShuffle(factor=factor):
                return factor**2 * self.vision.width
            case Resampler():
                return self.decoder.width


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW with linear warm-up and cosine decay to `final_lr_ratio` of the peak.

    Defaults are stage 1 of BlueLM-V-3B (table 7). `vision_layer_decay` scales the learning rate of
    ViT block i by decay ** (depth - i) (stage 2: 0.9); embeddings get decay ** (depth + 1).
    `weight_decay` applies to matrices only, never to biases, norms or position embeddings.
    """

    peak_lr: float = 1e-3
    warmup_steps: int = 34
    final_lr_ratio: float = 0.0
    b1: float = 0.9
    b2: float = 0.98
    eps: float = 1e-6
    weight_decay: float = 0.05
    clip_norm: float | None = 1.0
    vision_layer_decay: float = 1.0

    def __post_init__(self):
        check_positive(self, "peak_lr", "eps")
        check(self, "warmup_steps", self.warmup_steps >= 0, ">= 0")
        check(self, "final_lr_ratio", 0 <= self.final_lr_ratio <= 1, "in 0..1")
        for field in ("b1", "b2"):
            check(self, field, 0 <= getattr(self, field) < 1, "in [0, 1)")
        check(self, "weight_decay", self.weight_decay >= 0, ">= 0")
        check(self, "clip_norm", self.clip_norm is None or self.clip_norm > 0, "None or > 0")
        check(self, "vision_layer_decay", 0 < self.vision_layer_decay <= 1, "in (0, 1]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices as a data x fsdp x tensor mesh; -1 in `data` takes what the others leave."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self):
        check(self, "data", self.data == -1 or self.data > 0, "-1 or > 0")
        check_positive(self, "fsdp", "tensor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training stage.

    Attributes:
      trainable: top-level parts of the parameter tree that train; the rest is frozen, without
        gradients and without optimizer state. The paper's stage 1 trains ('downsampler',
        'projector'), stage 2 everything.
      accumulation: micro-batches a step; gradients are those of the token-weighted mean over all.
      init_from: checkpoint directory of an earlier stage to take the weights from.
      init_parts: parts of the tree taken from there, the others being drawn from the seed; None
        takes all. ('vision', 'decoder') starts another downsampler from a trained tower and decoder.
      logits_chunk: sequence positions whose logits exist at one time in the loss; 0 takes all.
    """

    steps: int
    trainable: tuple[str, ...] = ("vision", "downsampler", "projector", "decoder", "newline")
    accumulation: int = 1
    seed: int = 0
    optim: OptimConfig = OptimConfig()
    mesh: MeshConfig = MeshConfig()
    init_from: str | None = None
    init_parts: tuple[str, ...] | None = None
    logits_chunk: int = 512
    log_every: int = 10
    save_every: int = 500
    keep_checkpoints: int = 2

    def __post_init__(self):
        check_positive(self, "steps", "accumulation", "log_every", "save_every")
        check_positive(self, "keep_checkpoints")
        warmup = self.optim.warmup_steps
        check(self, "steps", self.steps > warmup, f"> optim.warmup_steps = {warmup}")
        check(self, "logits_chunk", self.logits_chunk >= 0, ">= 0")
        known = {"vision", "downsampler", "projector", "decoder", "newline"}
        bad = not self.trainable or set(self.trainable) - known
        check(self, "trainable", not bad, f"a non-empty choice of {sorted(known)}")
        taken = self.init_parts
        bad = taken is not None and (not taken or set(taken) - known or self.init_from is None)
        check(self, "init_parts", not bad, f"None or, with init_from, a choice of {sorted(known)}")
