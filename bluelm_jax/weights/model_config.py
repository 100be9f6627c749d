"""The model of an import: what the folders say, and a given model in its remaining choices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from bluelm_jax import config, presets, serialize
from bluelm_jax.weights.importing import Sources
from bluelm_jax.weights.plan import WeightsError

# What a folder does not fix: how we run or read a model, not what its weights mean.
_FREE_VISION = {"feature", "position_scale", "tile_size", "unroll", "remat"}
_FREE_DECODER = {"max_length", "attention_block", "unroll", "remat"}


def model_for(sources: Sources, base: config.VLMConfig | None) -> config.VLMConfig:
    """The model that the folders' weights belong to.

    Args:
      base: the model that is wanted; None takes the folders' own configs and, for what they leave
        open, the model of the paper's ablation.

    Raises:
      WeightsError: a folder holds another model than `base`; every difference is listed.
    """
    start = base or presets.bluelm_v_minicpm_2b("float32")
    fields: dict[str, Any] = {}
    if sources.vision:
        found = sources.vision.vision_config()
        fields["vision"] = _agreed(found, start.vision, _FREE_VISION, base, sources.vision.path)
    if sources.llm:
        found = sources.llm.decoder_config()
        fields["decoder"] = _agreed(found, start.decoder, _FREE_DECODER, base, sources.llm.path)
        longest = found.max_length
        if fields["decoder"].max_length > longest:
            raise WeightsError(
                f"decoder.max_length = {fields['decoder'].max_length}, {sources.llm.path} was made "
                f"for {longest}"
            )
    if sources.connector:
        fields |= _connector(sources, base)
    return dataclasses.replace(start, **fields)


def _agreed(found: Any, wanted: Any, free: set[str], base: Any, where: Any) -> Any:
    if base is None:
        return found
    names = [f.name for f in dataclasses.fields(found) if f.name not in free]
    _refuse_other(found, wanted, names, where)
    return wanted


def _refuse_other(found: Any, wanted: Any, names: Iterable[str], where: Any) -> None:
    """Raises WeightsError if any of the fields differ; all that do are listed."""
    pairs = [(name, getattr(found, name), getattr(wanted, name)) for name in names]
    wrong = [f"{n}: {a!r}, the model has {b!r}" for n, a, b in pairs if not _same(a, b)]
    if wrong:
        raise WeightsError(f"{where} holds another model: {'; '.join(wrong)}")


def _same(a: Any, b: Any) -> bool:
    return math.isclose(a, b, rel_tol=1e-9) if isinstance(a, float) else a == b


def _connector(sources: Sources, base: config.VLMConfig | None) -> dict[str, Any]:
    """Downsampler, projector and newline as the connector's config.json has them.

    A given model must have the same: most of what they are shows in no tensor's shape.
    """
    if sources.connector is None:
        return {}
    try:
        stored = serialize.from_plain(sources.connector.config)
    except ValueError as e:
        raise WeightsError(f"{sources.connector.path / 'config.json'}: {e}") from e
    if not isinstance(stored, config.VLMConfig):
        raise WeightsError(f"{sources.connector.path / 'config.json'}: not a VLMConfig")
    names = ("downsampler", "projector", "newline")
    if base is not None:
        _refuse_other(stored, base, names, sources.connector.path)
    return {name: getattr(stored, name) for name in names}
