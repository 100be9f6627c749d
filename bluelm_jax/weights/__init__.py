"""Weights of public checkpoints in Hugging Face's layout, in and out, strict both ways.

`names` says which tensor is which weight, `hf_config` reads their config.json, `convert` works on
arrays in memory, `folder` and `stream` on folders of safetensors files too big for that.
"""

from bluelm_jax.weights.folder import load_hf_folder as load_hf_folder
from bluelm_jax.weights.plan import WeightsError as WeightsError
