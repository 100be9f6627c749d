"""The reference's side: PyTorch and transformers, on the CPU, in one thread, without fused kernels."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers.models.llama import modeling_llama

from tests.parity import cases, reference_vision
from tests.parity.cases import Case
from tests.parity.torch_tools import Arrays, Run, fill, in_both_dtypes, record, to_numpy


def llama(config: dict) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))


def qwen2(config: dict) -> Any:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**config))


def minicpm(config: dict) -> Any:
    """MiniCPM has no class of its own here; Granite's multipliers are its scalings."""
    config = dict(config)
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    head_dim = width // config["num_attention_heads"]
    return transformers.GraniteForCausalLM(
        transformers.GraniteConfig(
            embedding_multiplier=config.pop("scale_emb"),
            residual_multiplier=config.pop("scale_depth") / layers**0.5,
            logits_scaling=width / config.pop("dim_model_base"),
            attention_multiplier=head_dim**-0.5,
            **config,
        )
    )


def bluelm(config: dict) -> Any:
    """Llama with PyTorch's LayerNorm right after the embedding."""
    model = llama(config)
    norm = nn.LayerNorm(config["hidden_size"], eps=config["rms_norm_eps"])
    model.model.embed_layer_norm = norm
    model.model.embed_tokens.register_forward_hook(lambda _, args, out: norm(out))
    return model


DECODERS = {"llama": llama, "qwen2": qwen2, "minicpm": minicpm, "bluelm": bluelm}


def run_rows(model: Any, ids: np.ndarray, mask: np.ndarray | None = None, **inputs) -> Arrays:
    """Every block's output, the last hidden state and the logits."""
    store: dict[str, torch.Tensor] = {}
    undo = record(model.model.layers, store)
    mask = np.ones_like(ids) if mask is None else mask
    handle = model.model.norm.register_forward_hook(
        lambda _, args, out: store.__setitem__("last", out)
    )
    out = model(
        torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), use_cache=False, **inputs
    )
    undo()
    handle.remove()
    return to_numpy(store | {"logits": out.logits})


def greedy(model: Any, case: Case, seed: int) -> np.ndarray:
    """int64 [rows, new_tokens]: the continuation of unequal prompts, padded on the left."""
    ids, lengths = cases.tokens(case, seed), cases.row_lengths(case, seed)
    left, mask = np.zeros_like(ids), np.zeros_like(ids)
    for row, n in enumerate(lengths):
        left[row, case.length - n :] = ids[row, :n]
        mask[row, case.length - n :] = 1
    out = model.generate(
        torch.from_numpy(left), attention_mask=torch.from_numpy(mask), do_sample=False,
        max_new_tokens=case.new_tokens, pad_token_id=0, eos_token_id=None, use_cache=True,
    )  # fmt: skip
    return np.ascontiguousarray(out[:, case.length :].numpy())


def decoder(case: Case, seed: int) -> Run:
    """A causal language model."""
    config = dict(case.config, attn_implementation="eager", bos_token_id=None, eos_token_id=None)
    model = DECODERS[case.family](config | {"pad_token_id": None}).eval()
    shapes = fill(model, seed)
    ids = cases.tokens(case, seed)
    out = run_rows(model, ids)
    if "far" in case.extras:
        far = torch.from_numpy(cases.far_positions(case, seed))
        out["far.logits"] = run_rows(model, ids, position_ids=far)["logits"]
    if "unequal" in case.extras:
        mask = np.arange(case.length) < cases.row_lengths(case, seed)[:, None]
        out["unequal.logits"] = run_rows(model, ids, mask.astype(np.int64))["logits"]
    if case.new_tokens:
        out["greedy"] = greedy(model, case, seed)
    stated = model.config.to_dict()
    if case.family == "minicpm":  # In the words of MiniCPM's own config.json.
        stated = case.config | {"model_type": "minicpm"}
    if case.family == "bluelm":
        stated["model_type"] = "bluelm"
    facts = {"config": stated, "shapes": shapes}
    if "bfloat16" in case.extras:
        out |= in_both_dtypes(model, lambda m: run_rows(m, ids))
    return out, facts


def rope(case: Case, seed: int) -> Run:
    """Cosines and sines of far positions; heads of published widths are too wide for a small model."""
    out = {}
    positions = torch.tensor([case.config["positions"]])
    for head_dim, theta in cases.rope_tables(case):
        sizes: dict[str, Any] = dict(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim)
        config: Any = transformers.LlamaConfig(
            **sizes, rope_parameters={"rope_type": "default", "rope_theta": theta}
        )
        table = modeling_llama.LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
        both = torch.stack(table)[:, 0, :, : head_dim // 2]
        out[f"cos, sin: heads of {head_dim}, base {theta:g}"] = both
    return to_numpy(out), {"config": {}, "shapes": {}}


FAMILIES: dict[str, Callable[[Case, int], Run]] = {
    "siglip": reference_vision.vision,
    "siglip2": reference_vision.vision,
    "llava_next": reference_vision.projector,
    "internvl": reference_vision.projector,
    "rope": rope,
    **dict.fromkeys(DECODERS, decoder),
}


@torch.no_grad()
def run(case: Case, seed: int) -> Run:
    """All outputs of one case, and a JSON-ready dict of its config and weight shapes."""
    out, facts = FAMILIES[case.family](case, seed)
    return out, json.loads(json.dumps(facts, default=str))
