"""How the evaluation command comes to its EvalConfig."""

from __future__ import annotations

import dataclasses

import gin

from experiments import evaluation
from gin_configs import binding, command


def eval_config(max_new_tokens: int | None, limit: int | None) -> evaluation.EvalConfig:
    """EvalConfig of gin, with what is not None on top.

    Where EvalConfig.sampling is not bound, fields of SamplingConfig may be: they change its default.
    """
    try:
        cfg = command.build(evaluation.EvalConfig)
    except binding.ConfigError:  # Most likely SamplingConfig is bound and nothing reads it.
        bindings = ["EvalConfig.sampling = @SamplingConfig()", *command.GIN_BINDINGS.value]
        cfg = binding.build(evaluation.EvalConfig, command.GIN_FILE.value, bindings)
        try:
            gin.query_parameter("SamplingConfig.max_new_tokens")
        except ValueError:  # Not bound: the default is EvalConfig's.
            new = evaluation.EvalConfig().sampling.max_new_tokens
            cfg = dataclasses.replace(
                cfg, sampling=dataclasses.replace(cfg.sampling, max_new_tokens=new)
            )
    if max_new_tokens is not None:
        sampling = dataclasses.replace(cfg.sampling, max_new_tokens=max_new_tokens)
        cfg = dataclasses.replace(cfg, sampling=sampling)
    return cfg if limit is None else dataclasses.replace(cfg, limit=limit)
