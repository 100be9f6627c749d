"""A whole run: model, data and training stage, checked against each other."""

from __future__ import annotations

import dataclasses

from bluelm_jax import config, data_config, layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that `train` needs.

    Raises:
      ValueError: two parts disagree; the message names both fields and both values.
    """

    model: config.VLMConfig
    data: data_config.DataConfig
    train: config.TrainConfig

    def __post_init__(self):
        vision, data, train = self.model.vision, self.data, self.train
        _agree(
            data.tiling.tile_size == vision.tile_size,
            f"data.tiling.tile_size = {data.tiling.tile_size} but "
            f"model.vision.tile_size = {vision.tile_size}",
        )
        _agree(
            data.seq_len <= self.model.decoder.max_length,
            f"data.seq_len = {data.seq_len} exceeds "
            f"model.decoder.max_length = {self.model.decoder.max_length}",
        )
        layout.check_layout(data.layout, self.token_side)
        needs_newline = isinstance(data.layout, layout.UnpadNewline)
        _agree(
            self.model.newline or not needs_newline,
            f"data.layout = {data.layout} needs model.newline = True",
        )
        for field in ("batch_size", "tile_groups"):
            value = getattr(data, field)
            _agree(
                value % train.accumulation == 0,
                f"data.{field} = {value} is not a multiple of "
                f"train.accumulation = {train.accumulation}",
            )

    @property
    def token_side(self) -> layout.Side:
        """Tokens along one side of a view, or `layout.Unordered` ones."""
        return layout.token_side(self.model)


def _agree(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)
