"""What the quickstart does, as data: model, two stages, variants, pages."""

from __future__ import annotations

import dataclasses

from bluelm_jax import config, data_config
from bluelm_jax.data.rendering import reading_pages
from experiments.ablation import Variant
from experiments.evaluation import EvalConfig
from gin_configs import binding

binding.register(reading_pages.PageConfig)


@binding.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pages:
    """The rendered task: what the pages look like and how many there are."""

    stage1: reading_pages.PageConfig
    stage2: reading_pages.PageConfig
    stage1_count: int
    stage2_count: int
    eval_count: int
    seed: int = 0


@binding.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Quickstart:
    """The whole job.

    Attributes:
      model: the model, of the same shape in both stages.
      stage1_data, stage2_data: without sources; the job fills them in, and the room of a batch.
      stage1, stage2: the two stages; every variant starts from stage 1's weights.
      variants: the arms of the comparison.
      evaluation: how held-out pages are read.
      pages: what is rendered where `train_json` is None.
      seeds: training seeds of stage 2.
      subject: the variant that the others are compared with, and that is exported.
      export_count: held-out images on which the exported model is compared.
      export_gin: config of the export.
      train_json, eval_json: LLaVA files to use instead of rendered pages, with `image_root`.
    """

    model: config.VLMConfig
    stage1_data: data_config.DataConfig
    stage2_data: data_config.DataConfig
    stage1: config.TrainConfig
    stage2: config.TrainConfig
    variants: tuple[Variant, ...]
    evaluation: EvalConfig
    pages: Pages
    seeds: tuple[int, ...] = (0,)
    subject: str = "relaxed"
    export_count: int = 100
    export_gin: str = "gin_configs/export/quickstart.gin"
    train_json: str | None = None
    eval_json: str | None = None
    image_root: str = ""

    def __post_init__(self):
        names = [variant.name for variant in self.variants]
        config.check(self, "subject", self.subject in names, f"one of the variants {names}")
        if (self.train_json is None) != (self.eval_json is None):
            raise ValueError("give both Quickstart.train_json and Quickstart.eval_json, or neither")
