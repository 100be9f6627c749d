"""What the pages of the reading task look like, as data."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from bluelm_jax.data.rendering import fonts, page_geometry

KINDS = ("stage1", "stage2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageConfig:
    """What the pages look like. Lengths are pixels unless they say otherwise.

    Attributes:
      kind: `stage1`, square pages of one tile; `stage2`, pages of real image sizes.
      tile_size: tile side S.
      num_digits: digits a page.
      arrangement: (rows, columns) of the digits; None chooses by the page's aspect ratio, and on
        stage-1 pages draws among those that fit.
      prompt: the question, after the image.
      stage1_height: range of the digits' height on a stage-1 page, at most what the cell holds.
      stage2_height: range of the digits' height in canvas pixels, at most what the cell holds.
      min_height: sizes whose cells hold no digit of this many canvas pixels are not used.
      receipts_fraction: share of stage-2 sizes taken from receipts; the rest are photographs.
      max_aspect: longest over shortest side allowed.
      max_side_tiles: longer pages are shrunk to this many tiles; it exceeds every canvas, where
        the choice of grid depends on the aspect ratio alone, and keeps the files small.
      jitter: share of a cell's free room over which a digit's place varies, 0..1.
      max_noise: largest standard deviation of the noise, in grey levels.
      num_faces: how many of `fonts.FACES` are used, from the front.
      ramp: (a, b) makes training pages harder along the file: up to index a the easiest (one face,
        a fifth of the jitter, no noise, the tallest digits of stage 1), from b on as varied as the
        fields above say, linear between. Read in file order it is a curriculum. Held-out pages
        are always at full difficulty. None has no easy pages.
    """

    kind: str
    tile_size: int = 56
    num_digits: int = 12
    arrangement: tuple[int, int] | None = None
    prompt: str = "Read."
    stage1_height: tuple[float, float] = (9.0, 14.0)
    stage2_height: tuple[float, float] = (8.0, 13.0)
    min_height: float = 6.0
    receipts_fraction: float = 0.5
    max_aspect: float = 4.0
    max_side_tiles: int = 9
    jitter: float = 0.5
    max_noise: float = 5.0
    num_faces: int = len(fonts.FACES)
    ramp: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind {self.kind!r}: must be one of {KINDS}")
        if self.tile_size < 16 or self.num_digits < 1:
            raise ValueError(
                f"tile_size {self.tile_size} must be >= 16 and num_digits {self.num_digits} >= 1"
            )
        if self.arrangement is not None and math.prod(self.arrangement) != self.num_digits:
            raise ValueError(f"arrangement {self.arrangement}: must hold {self.num_digits} digits")
        for name in ("receipts_fraction", "jitter"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} {getattr(self, name)}: must lie in 0..1")
        for name in ("stage1_height", "stage2_height"):
            low, high = getattr(self, name)
            if not self.min_height <= low <= high:
                raise ValueError(
                    f"{name} {(low, high)}: must rise and start at min_height {self.min_height} "
                    "or above"
                )
        if not 1 <= self.num_faces <= len(fonts.FACES):
            raise ValueError(f"num_faces {self.num_faces}: must lie in 1..{len(fonts.FACES)}")
        if self.ramp is not None and not 0 <= self.ramp[0] < self.ramp[1]:
            raise ValueError(f"ramp {self.ramp}: must be two rising page numbers")
        if self.max_aspect < 1 or self.max_side_tiles < page_geometry.CANVAS_TILES:
            raise ValueError(
                f"max_aspect {self.max_aspect} must be >= 1 and max_side_tiles "
                f"{self.max_side_tiles} >= {page_geometry.CANVAS_TILES}"
            )

    def at(self, index: int) -> PageConfig:
        """The look of training page `index`: this config, or an easier one inside the ramp."""
        if self.ramp is None:
            return self
        start, stop = self.ramp
        hard = min(1.0, max(0.0, (index - start) / (stop - start)))
        if hard == 1.0:
            return self
        low, high = self.stage1_height
        return dataclasses.replace(
            self,
            stage1_height=(high - hard * (high - low), high),
            jitter=self.jitter * (0.2 + 0.8 * hard),
            max_noise=self.max_noise * hard,
            num_faces=1 + int(hard * (self.num_faces - 1)),
        )


def stage1(*, num_digits: int = 8, **overrides: Any) -> PageConfig:
    """Returns the default stage-1 pages (8 digits on one tile), with overrides."""
    return PageConfig(kind="stage1", num_digits=num_digits, **overrides)


def stage2(**overrides: Any) -> PageConfig:
    """Returns the default stage-2 pages (12 digits, real image sizes), with overrides."""
    return PageConfig(kind="stage2", **overrides)
