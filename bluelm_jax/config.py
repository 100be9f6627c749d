"""What is built and how it is trained, as frozen dataclasses.

A config says everything that fixes a shape or a number; functions take it beside parameters and
inputs. Nothing here imports JAX, so reading a config costs nothing. Values are checked when the
object is made, and the error names the field, the value and the bound.

Presets with published numbers name their source. BlueLM-3B itself is unpublished: what this file
assumes for it is said in `bluelm_v_3b`.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Dtype = Literal["float32", "bfloat16"]


def check(owner: object, field: str, ok: bool, bound: str) -> None:
    """Raises ValueError naming class, field, value and bound unless `ok`."""
    if not ok:
        value = getattr(owner, field)
        raise ValueError(f"{type(owner).__name__}.{field} = {value!r}: must be {bound}")


def check_positive(owner: object, *fields: str) -> None:
    """Raises ValueError for the first of `fields` whose value is not above zero."""
    for field in fields:
        check(owner, field, getattr(owner, field) > 0, "> 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """A SigLIP-shaped ViT (no class token, learned positions, tanh GELU).

    Defaults are SigLIP so400m/14 at 384 pixels: a VALID 14x14 convolution gives 27x27 patches and
    drops the last 6 pixels of each side.

    Attributes:
      tile_size: side of a tile, pixels.
      patch_size: side of a patch, pixels.
      feature: 'last' is the output of the final layer norm; 'penultimate' is the residual stream
        before the last block, without final norm, as LLaVA-style models read SigLIP.
      unroll: blocks per scan step; the exporter sets it to `depth` so that no loop is left.
      remat: recompute each block in the backward pass instead of keeping its activations.
    """

    tile_size: int = 384
    patch_size: int = 14
    width: int = 1152
    depth: int = 27
    mlp_dim: int = 4304
    num_heads: int = 16
    norm_eps: float = 1e-6
    feature: Literal["last", "penultimate"] = "last"
    position_scale: float = 0.02
    unroll: int = 1
    remat: bool = False

    def __post_init__(self):
        check_positive(self, "patch_size", "width", "depth", "mlp_dim", "num_heads", "norm_eps")
        check(self, "tile_size", self.tile_size >= self.patch_size, f">= {self.patch_size}")
        check(self, "num_heads", self.width % self.num_heads == 0, f"a divisor of {self.width}")
        check(self, "feature", self.feature in ("last", "penultimate"), "'last' or 'penultimate'")
        check(self, "unroll", 1 <= self.unroll <= self.depth, f"in 1..{self.depth}")

    @property
    def side(self) -> int:
        """Patches along one side of a tile."""
        return self.tile_size // self.patch_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class VilaConcat:
    """Concatenate each factor x factor block of tokens, fuse it with one linear layer (VILA).

    The token map is zero-padded at the end of each side to a multiple of `factor`: 27 -> 28 -> 14,
    so 729 tokens become 196 (BlueLM-V-3B, sec. 3.3).
    """

    factor: int = 2

    def __post_init__(self):
        check_positive(self, "factor")


Downsampler = VilaConcat


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProjectorConfig:
    """MLP from vision width to decoder width; the paper's has two layers and a GELU between."""

    depth: int = 2
    activation: Literal["gelu", "silu"] = "gelu"

    def __post_init__(self):
        check_positive(self, "depth")
        check(self, "activation", self.activation in ("gelu", "silu"), "'gelu' or 'silu'")


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
    unroll: int = 1
    remat: bool = False

    def __post_init__(self):
        check_positive(self, "vocab_size", "width", "depth", "mlp_dim", "num_heads", "max_length")
        check_positive(self, "rope_theta", "norm_eps", "logit_divisor", "num_kv_heads")
        check(self, "head_dim", self.head_dim > 0 and self.head_dim % 2 == 0, "even and > 0")
        divides = self.num_heads % self.num_kv_heads == 0
        check(self, "num_kv_heads", divides, f"a divisor of num_heads = {self.num_heads}")
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
    downsampler: Downsampler = VilaConcat()
    projector: ProjectorConfig = ProjectorConfig()
    newline: bool = False
    dtype: Dtype = "float32"

    def __post_init__(self):
        check(self, "dtype", self.dtype in ("float32", "bfloat16"), "'float32' or 'bfloat16'")


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
      logits_chunk: sequence positions whose logits exist at one time in the loss; 0 takes all.
    """

    steps: int
    trainable: tuple[str, ...] = ("vision", "downsampler", "projector", "decoder", "newline")
    accumulation: int = 1
    seed: int = 0
    optim: OptimConfig = OptimConfig()
    mesh: MeshConfig = MeshConfig()
    init_from: str | None = None
    logits_chunk: int = 0
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


# Presets -----------------------------------------------------------------------------------------


def siglip_so400m() -> VisionConfig:
    """SigLIP so400m/14 at 384 pixels, final-layer features (public checkpoint config)."""
    return VisionConfig()


def minicpm_2b(**overrides) -> DecoderConfig:
    """MiniCPM-2B (openbmb/MiniCPM-2B-sft-bf16 config), the LLM of the paper's open ablation."""
    values = dict(
        vocab_size=122_753, width=2304, depth=40, mlp_dim=5760, num_heads=36, num_kv_heads=36,
        head_dim=64, max_length=4096, norm_eps=1e-5, tied_head=True, embed_scale=12.0,
        residual_scale=1.4 / 40**0.5, logit_divisor=2304 / 256,
    )  # fmt: skip
    return DecoderConfig(**{**values, **overrides})


def bluelm_3b(**overrides) -> DecoderConfig:
    """A 2.7B decoder in BlueLM's published 7B style. ASSUMED: BlueLM-3B's shape is unpublished.

    From the public BlueLM-7B: embedding LayerNorm, RMSNorm eps 1e-6, no linear biases, theta 1e4,
    vocabulary 100,096. Width, depth, heads and MLP width are guesses that give 2.73B parameters.
    """
    values = dict(
        vocab_size=100_096, width=2560, depth=32, mlp_dim=6656, num_heads=20, num_kv_heads=20,
        head_dim=128, max_length=4096, norm_eps=1e-6, tied_head=True, embed_norm=True,
    )  # fmt: skip
    return DecoderConfig(**{**values, **overrides})


def bluelm_v_minicpm_2b(dtype: Dtype = "bfloat16") -> VLMConfig:
    """SigLIP-400M + MiniCPM-2B: the model of the paper's ablation (table 2)."""
    return VLMConfig(vision=siglip_so400m(), decoder=minicpm_2b(), dtype=dtype)


def bluelm_v_3b(dtype: Dtype = "bfloat16") -> VLMConfig:
    """SigLIP-400M + the assumed BlueLM-3B decoder (see `bluelm_3b`)."""
    return VLMConfig(vision=siglip_so400m(), decoder=bluelm_3b(), dtype=dtype)


def tiny(**decoder_overrides) -> VLMConfig:
    """The smallest model with every part of the real one; for tests."""
    values = dict(
        vocab_size=280, width=32, depth=2, mlp_dim=64, num_heads=4, num_kv_heads=2, head_dim=8,
        max_length=512,
    )  # fmt: skip
    return VLMConfig(
        vision=VisionConfig(tile_size=20, patch_size=4, width=24, depth=2, mlp_dim=48, num_heads=2),
        decoder=DecoderConfig(**{**values, **decoder_overrides}),
    )
