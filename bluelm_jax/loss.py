"""Token-weighted cross-entropy.

Losses are returned as sums with their weights, never as means: micro-batches, packed rows and
devices then combine to the mean over all supervised tokens, whatever their distribution.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bluelm_jax import config, decoder
from bluelm_jax.batch import Batch
from bluelm_jax.params import Tree


@flax.struct.dataclass
class LossSums:
    """Sums over supervised tokens: negative log likelihood (nats), correct argmaxes, weights."""

    loss: Float[Array, ""]
    correct: Float[Array, ""]
    weight: Float[Array, ""]

    def __add__(self, other: LossSums) -> LossSums:
        return jax.tree.map(jnp.add, self, other)


def next_token_targets(batch: Batch) -> tuple[Int[Array, "B L"], Float[Array, "B L"]]:
    """Target and weight of each position: the token after it, if that is supervised.

    A sample's first token is never a target: nothing precedes it in its segment.
    """
    same = batch.segments[:, 1:] == batch.segments[:, :-1]
    weights = jnp.pad(batch.loss_weights[:, 1:] * same, ((0, 0), (0, 1)))
    return jnp.pad(batch.tokens[:, 1:], ((0, 0), (0, 1))), weights


def _chunk_sums(head: Array, hidden: Array, targets: Array, weights: Array) -> LossSums:
    scores = jnp.matmul(hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)
    picked = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    nll = jax.nn.logsumexp(scores, axis=-1) - picked
    hit = (scores.argmax(-1) == targets).astype(jnp.float32)
    return LossSums(loss=(nll * weights).sum(), correct=(hit * weights).sum(), weight=weights.sum())


def cross_entropy(
    p: Tree,
    hidden: Float[Array, "B L D"],
    batch: Batch,
    cfg: config.DecoderConfig,
    chunk: int = 0,
) -> LossSums:
    """Cross-entropy of the next token over a batch.

    Args:
      p: the decoder's weights.
      hidden: output of `decoder.forward`.
      chunk: positions whose logits exist at once; they are recomputed in the backward pass, so
        [B, L, V] never exists. 0 takes all positions at once. Rows are padded to a multiple of it.
    """
    head = decoder.head_matrix(p, cfg)
    targets, weights = next_token_targets(batch)
    length = hidden.shape[1]
    if chunk == 0 or chunk >= length:
        return _chunk_sums(head, hidden, targets, weights)

    def split(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, -length % chunk), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def step(total: LossSums, piece: tuple[Array, Array, Array]):
        return total + _chunk_sums(head, *piece), None

    zero = LossSums(*(jnp.zeros((), jnp.float32) for _ in range(3)))
    total, _ = jax.lax.scan(step, zero, tuple(map(split, (hidden, targets, weights))))
    return total
