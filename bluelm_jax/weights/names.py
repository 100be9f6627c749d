"""Which tensor of a Hugging Face checkpoint is which weight of ours: tables, and nothing else.

Names are written as `SiglipModel` and `LlamaForCausalLM` save them. Classes that wrap these models
put other words in front; `*_NAMINGS` lists what is accepted. A tensor that is neither in a table nor
listed as unused is an error wherever tables are used.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

import jax

from bluelm_jax import config, decoder, params, vision
from bluelm_jax.params import Param, Tree

# 'linear': theirs is [out, in], ours [in, out].
# 'patch': theirs is a convolution kernel OIHW, or [out, patch * patch * 3] for SigLIP 2's NaFlex
# towers, which cut patches first; ours is HWIO.
Transform = Literal["none", "linear", "patch"]
LAYER = "{layer}"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One weight.

    Attributes:
      path: place in our tree of the part, as in 'blocks/attn/q/kernel'.
      name: tensor, with `{layer}` where the blocks are numbered; ours are stacked.
      transform: what turns their tensor of one block into ours.
    """

    path: str
    name: str
    transform: Transform = "none"

    @property
    def stacked(self) -> bool:
        """Whether each block has a tensor of its own."""
        return LAYER in self.name


def _linear(path: str, module: str) -> list[Entry]:
    return [
        Entry(f"{path}/kernel", f"{module}.weight", "linear"),
        Entry(f"{path}/bias", f"{module}.bias"),
    ]


def _norm(path: str, module: str) -> list[Entry]:
    return [Entry(f"{path}/scale", f"{module}.weight"), Entry(f"{path}/bias", f"{module}.bias")]


VISION_PREFIX = "vision_model."
_D, _V = "model.layers.{layer}", "vision_model.encoder.layers.{layer}"
# Every weight that some configuration has; `decoder_names` keeps those that one declares.
DECODER = (
    Entry("embed", "model.embed_tokens.weight"),
    *_norm("embed_norm", "model.embed_layer_norm"),
    *_norm("blocks/norm1", f"{_D}.input_layernorm"),
    *_linear("blocks/attn/q", f"{_D}.self_attn.q_proj"),
    *_linear("blocks/attn/k", f"{_D}.self_attn.k_proj"),
    *_linear("blocks/attn/v", f"{_D}.self_attn.v_proj"),
    *_linear("blocks/attn/out", f"{_D}.self_attn.o_proj"),
    *_norm("blocks/norm2", f"{_D}.post_attention_layernorm"),
    *_linear("blocks/mlp/gate", f"{_D}.mlp.gate_proj"),
    *_linear("blocks/mlp/up", f"{_D}.mlp.up_proj"),
    *_linear("blocks/mlp/down", f"{_D}.mlp.down_proj"),
    *_norm("norm", "model.norm"),
    Entry("head", "lm_head.weight", "linear"),
)
VISION = (
    Entry("patch/kernel", "vision_model.embeddings.patch_embedding.weight", "patch"),
    Entry("patch/bias", "vision_model.embeddings.patch_embedding.bias"),
    Entry("position", "vision_model.embeddings.position_embedding.weight"),
    *_norm("blocks/norm1", f"{_V}.layer_norm1"),
    *_linear("blocks/attn/q", f"{_V}.self_attn.q_proj"),
    *_linear("blocks/attn/k", f"{_V}.self_attn.k_proj"),
    *_linear("blocks/attn/v", f"{_V}.self_attn.v_proj"),
    *_linear("blocks/attn/out", f"{_V}.self_attn.out_proj"),
    *_norm("blocks/norm2", f"{_V}.layer_norm2"),
    *_linear("blocks/mlp/fc1", f"{_V}.mlp.fc1"),
    *_linear("blocks/mlp/fc2", f"{_V}.mlp.fc2"),
    *_norm("norm", "vision_model.post_layernorm"),
)


@dataclasses.dataclass(frozen=True)
class Naming:
    """How one family of classes spells the names of a part.

    Attributes:
      prefixes: (start of a name in the tables, what stands there instead).
      others: patterns of further tensors of such a file that belong to other parts.
    """

    prefixes: tuple[tuple[str, str], ...]
    others: tuple[str, ...] = ()

    def spell(self, name: str) -> str:
        """The name of a table as this naming writes it."""
        for start, instead in self.prefixes:
            if name.startswith(start):
                return instead + name.removeprefix(start)
        raise ValueError(f"{name!r} starts with none of {[start for start, _ in self.prefixes]}")


_PROJECTOR = (r"(model\.)?multi_modal_projector\..+", r"(model\.)?image_newline")
_TOWER = (r"(model\.)?vision_tower\..+", r"(model\.)?vision_model\..+", *_PROJECTOR)
_LANGUAGE = (r"(model\.)?language_model\..+", r"lm_head\..+", *_PROJECTOR)
_TEXT = (r"text_model\..+", r"logit_scale", r"logit_bias")

DECODER_NAMINGS = (
    Naming((("model.", "model."), ("lm_head.", "lm_head."))),
    Naming((("model.", ""), ("lm_head.", "lm_head."))),
    Naming((("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")), _TOWER),
    Naming((("model.", "model.language_model."), ("lm_head.", "lm_head.")), _TOWER),
)
VISION_NAMINGS = (
    Naming((("vision_model.", "vision_model."),), _TEXT),
    Naming((("vision_model.", ""),)),
    Naming((("vision_model.", "vision_tower.vision_model."),), _LANGUAGE),
    Naming((("vision_model.", "vision_tower."),), _LANGUAGE),
    Naming((("vision_model.", "model.vision_tower.vision_model."),), _LANGUAGE),
    Naming((("vision_model.", "model.vision_tower."),), _LANGUAGE),
)

# Tensors of the part itself that this library has no use for, as the tables would spell them: the
# pooling head of SigLIP, and buffers that old releases of transformers saved.
DECODER_UNUSED = (
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    r"model\.rotary_emb\.inv_freq",
)
VISION_UNUSED = (r"vision_model\.head\..+", r"vision_model\.embeddings\.position_ids")


@dataclasses.dataclass(frozen=True)
class Part:
    """All about one part of the model that importing and exporting need.

    Attributes:
      name: 'decoder' or 'vision'.
      specs: declared weights of the part.
      entries: one for each declared weight, in the tables' order.
      namings: accepted spellings, the one that is written first.
      unused: patterns of tensors that are known and not wanted.
      twins: pairs of names whose tensors must be equal if both are there (a tied head).
    """

    name: str
    specs: Tree
    entries: tuple[Entry, ...]
    namings: tuple[Naming, ...]
    unused: tuple[str, ...]
    twins: tuple[tuple[str, str], ...] = ()

    def declared(self) -> dict[str, Param]:
        """Declarations by path."""
        return declared(self.specs)


def declared(specs: Tree) -> dict[str, Param]:
    """The weights of a tree of declarations by path, as in 'blocks/attn/q/kernel'."""
    leaves = jax.tree_util.tree_leaves_with_path(specs, is_leaf=params.is_param)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): p for path, p in leaves}


def _chosen(table: tuple[Entry, ...], specs: Tree) -> tuple[Entry, ...]:
    weights = declared(specs)
    unnamed = weights.keys() - {entry.path for entry in table}
    if unnamed:
        raise ValueError(f"weights without a row in the table: {sorted(unnamed)}")
    return tuple(entry for entry in table if entry.path in weights)


def decoder_part(cfg: config.DecoderConfig) -> Part:
    """The decoder of a configuration."""
    specs = decoder.specs(cfg)
    twins = (("lm_head.weight", "model.embed_tokens.weight"),) if cfg.tied_head else ()
    entries = _chosen(DECODER, specs)
    return Part("decoder", specs, entries, DECODER_NAMINGS, DECODER_UNUSED, twins)


def vision_part(cfg: config.VisionConfig) -> Part:
    """The vision tower of a configuration.

    A tower read before its last block does not declare what it does not use; those tensors of a
    checkpoint are unused, too.
    """
    specs = vision.specs(cfg)
    entries = _chosen(VISION, specs)
    weights = declared(specs)
    unused = VISION_UNUSED
    stored = next(p.shape[0] for path, p in weights.items() if path.startswith("blocks/"))
    for layer in range(stored, cfg.depth):
        unused += (re.escape(_V.replace(LAYER, str(layer))) + r"\..+",)
    if "norm/scale" not in weights:
        unused += (r"vision_model\.post_layernorm\..+",)
    return Part("vision", specs, entries, VISION_NAMINGS, unused)


def part_of(cfg: config.DecoderConfig | config.VisionConfig) -> Part:
    """The part that a configuration describes."""
    return decoder_part(cfg) if isinstance(cfg, config.DecoderConfig) else vision_part(cfg)


def decoder_names(cfg: config.DecoderConfig) -> tuple[Entry, ...]:
    """Entries of the weights that a decoder declares."""
    return decoder_part(cfg).entries


def vision_names(cfg: config.VisionConfig) -> tuple[Entry, ...]:
    """Entries of the weights that a vision tower declares."""
    return vision_part(cfg).entries
