"""A language model's folder as it is, without an import: its config and weights in memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp

from bluelm_jax import config, data_config, schemes
from bluelm_jax.params import Tree
from bluelm_jax.run_config import RunConfig
from bluelm_jax.weights import convert, names, tokenizer_files
from bluelm_jax.weights.folder import Folder
from bluelm_jax.weights.importing import Sources
from bluelm_jax.weights.model_config import model_for
from bluelm_jax.weights.plan import WeightsError


def default_run(model: config.VLMConfig) -> RunConfig:
    """What an imported model has beside its weights: relaxed matching, rows that it was made for."""
    return RunConfig(
        model=model,
        data=data_config.DataConfig(
            tiling=schemes.Tiling(scheme=schemes.Relaxed(), tile_size=model.vision.tile_size),
            seq_len=min(2048, model.decoder.max_length), batch_size=1, tiles_per_group=16,
        ),
        train=config.TrainConfig(steps=1, optim=config.OptimConfig(warmup_steps=0)),
    )  # fmt: skip


def load(path: str | Path) -> tuple[RunConfig, Tree]:
    """Run config and weights {"decoder": ...} of a language model's folder, in float32.

    Raises:
      WeightsError: the folder holds no language model that `hf_config` knows, has no tokenizer or
        no known chat template, or its weights do not fit its config.
    """
    folder = Folder(path)
    if "siglip" in str(folder.config.get("model_type", "")).lower():
        raise WeightsError(
            f"{path}: a vision tower alone answers nothing; `weights.load_hf_folder` loads it, and "
            "experiments.import_weights joins it to a language model"
        )
    model = model_for(Sources(llm=folder), None)
    found = tokenizer_files.find(Path(path), folder.config)
    if found.choice is None or found.path is None:
        raise WeightsError(f"{path}: no {tokenizer_files.JSON_FILE} or tokenizer.model")
    if found.template is None:
        raise WeightsError(
            f"{path}: its chat template is none of ours; experiments.import_weights --template names "
            "one"
        )
    run = default_run(model)
    choice = dataclasses.replace(found.choice, path=str(found.path))
    data = dataclasses.replace(
        run.data, tokenizer=choice, template=found.template, system=found.system
    )
    tokenizer_files.check_fits(found, found.template, model.decoder.vocab_size)
    part = names.decoder_part(model.decoder)
    folder.plan(part)
    weights = convert.load(part, folder, folder.shapes())
    weights = jax.tree.map(lambda x: x.astype(jnp.float32), weights)
    return dataclasses.replace(run, data=data), {"decoder": weights}
