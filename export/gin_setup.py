"""Registers the exporter's config classes with gin."""

from __future__ import annotations

from export.config import ExportConfig, RunnerConfig
from gin_configs import binding

for _cls in (ExportConfig, RunnerConfig):
    binding.register(_cls)
