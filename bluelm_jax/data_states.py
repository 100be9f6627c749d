"""The data states of all hosts in one checkpoint, and each host's part of them after a restart.

Which samples a host has read is known to that host alone, and only one writes the checkpoint.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from bluelm_jax.data.host_states import merge_states

State = dict[str, Any]


def of_all(state: State) -> State:
    """What a checkpoint keeps: {"hosts": [the state of every process, in their order]}.

    All processes must call it at the same step.
    """
    if jax.process_count() == 1:
        return {"hosts": [state]}
    mine = np.frombuffer(json.dumps(state).encode(), np.uint8)
    lengths = np.asarray(multihost_utils.process_allgather(np.array([mine.size])))
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: mine.size] = mine
    everyone = np.asarray(multihost_utils.process_allgather(padded))
    lengths = lengths.reshape(-1)
    texts = [row[:size].tobytes() for row, size in zip(everyone, lengths, strict=True)]
    return {"hosts": [json.loads(text) for text in texts]}


def own(saved: State) -> State:
    """This process's state from what `of_all` returned, on any number of processes.

    Raises:
      ValueError: states of some hosts are missing.
    """
    return merge_states(saved["hosts"], jax.process_count())[jax.process_index()]
