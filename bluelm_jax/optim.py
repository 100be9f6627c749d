"""Optimizer: AdamW with warm-up and cosine, decay on matrices only, layer-wise decay for the ViT.

Freezing a part is not the optimizer's business: `partition` splits the parameter tree first, so a
frozen weight has neither gradient nor optimizer state.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from bluelm_jax import config, params
from bluelm_jax.params import Tree


def partition(
    tree: Tree, trainable: tuple[str, ...], field: str = "trainable"
) -> tuple[Tree, Tree]:
    """Splits a model tree by top-level part into (trainable, frozen).

    Args:
      field: what names the parts, for the error.

    Raises:
      ValueError: nothing of `trainable` is in the tree.
    """
    chosen = {k: v for k, v in tree.items() if k in trainable}
    if not chosen:
        raise ValueError(f"{field} = {trainable}: the model has only {sorted(tree)}")
    return chosen, {k: v for k, v in tree.items() if k not in trainable}


def schedule(cfg: config.OptimConfig, steps: int) -> optax.Schedule:
    """Linear warm-up from 0 to peak_lr, then cosine down to final_lr_ratio * peak_lr."""
    if cfg.warmup_steps >= steps:
        raise ValueError(
            f"OptimConfig.warmup_steps = {cfg.warmup_steps}: must be < steps = {steps}"
        )
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if cfg.warmup_steps else cfg.peak_lr,
        peak_value=cfg.peak_lr,
        warmup_steps=cfg.warmup_steps,
        decay_steps=steps,
        end_value=cfg.final_lr_ratio * cfg.peak_lr,
    )


def decay_mask(specs: Tree) -> Tree:
    """True where weight decay applies."""
    return params.map_params(lambda p: p.decay, specs)


def vision_layer_scales(specs: Tree, decay: float) -> Tree:
    """Learning-rate factor of every weight: ViT block i of n gets decay ** (n - i).

    Patch and position embeddings get decay ** (n + 1), the final norm and everything outside the
    tower 1 (the scheme of BEiT, which the paper's "layer-wise LR decay 0.9" names).
    """

    def ones(tree: Tree) -> Tree:
        return params.map_params(lambda p: jnp.ones((1,) * len(p.shape)), tree)

    scales = {part: ones(tree) for part, tree in specs.items()}
    if "vision" not in specs:
        return scales
    depth = specs["vision"]["blocks"]["norm1"]["scale"].shape[0]
    by_block = decay ** jnp.arange(depth, 0, -1, dtype=jnp.float32)
    tower = dict(scales["vision"])
    for name in ("patch", "position"):
        tower[name] = jax.tree.map(lambda s: s * decay ** (depth + 1), tower[name])
    tower["blocks"] = jax.tree.map(
        lambda s: by_block.reshape((depth, *s.shape[1:])), tower["blocks"]
    )
    return {**scales, "vision": tower}


def scale_by_tree(scales: Tree) -> optax.GradientTransformation:
    """Multiplies every update by its (broadcastable) factor."""

    def scale(updates: Tree, params: Tree | None = None) -> Tree:
        del params
        return jax.tree.map(lambda u, s: u * s.astype(u.dtype), updates, scales)

    return optax.stateless(scale)


def make_optimizer(
    cfg: config.OptimConfig, steps: int, specs: Tree
) -> optax.GradientTransformation:
    """The optimizer for the weights declared in `specs` (the trainable part of the model)."""
    chain = [] if cfg.clip_norm is None else [optax.clip_by_global_norm(cfg.clip_norm)]
    chain += [
        optax.scale_by_adam(b1=cfg.b1, b2=cfg.b2, eps=cfg.eps),
        optax.add_decayed_weights(cfg.weight_decay, mask=decay_mask(specs)),
    ]
    if cfg.vision_layer_decay != 1.0:
        chain.append(scale_by_tree(vision_layer_scales(specs, cfg.vision_layer_decay)))
    return optax.chain(*chain, optax.scale_by_learning_rate(schedule(cfg, steps)))


def global_norm(tree: Tree) -> Array:
    """Square root of the sum of squares of all leaves."""
    return optax.tree.norm(tree)
