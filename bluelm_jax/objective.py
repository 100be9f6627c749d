"""What training minimises; `train` differentiates it and `flops` counts it."""

from __future__ import annotations

from bluelm_jax import loss, vlm
from bluelm_jax.batch import Batch
from bluelm_jax.params import Tree
from bluelm_jax.run_config import RunConfig


def loss_sums(run: RunConfig, trained: Tree, frozen: Tree, batch: Batch) -> loss.LossSums:
    """Sums of a micro-batch; `trained` and `frozen` are the parts of the weights."""
    p = {**frozen, **trained}
    hidden = vlm.forward(p, batch, run.model)
    return loss.cross_entropy(
        p["decoder"], hidden, batch, run.model.decoder, run.train.logits_chunk
    )
