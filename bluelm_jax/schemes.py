"""The tiling schemes and token layouts as data: which rule, with which numbers.

A scheme says how an image is cut into views: the grid it chooses (`aspect_ratio.py`), the pixels
of each view (`patching.py`) and, with a layout, the places of their tokens (`layout.py`). Sizes
are (width, height) in pixels and grids (columns, rows) in tiles throughout.

Sources: LLaVA-NeXT and LLaVA-OneVision (public code), InternVL 1.5 (arXiv 2404.16821), MiniCPM-V
(arXiv 2408.01800), BlueLM-V-3B (arXiv 2411.10640, sec. 3.2 and Algorithm 1).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

from bluelm_jax.checks import check

Fit = Literal["pad", "stretch"]
ThumbnailPlace = Literal["first", "last", "none"]
Resample = Literal["bicubic", "bilinear"]
RGB = tuple[int, int, int]


class Grid(NamedTuple):
    """Columns and rows of tiles."""

    cols: int
    rows: int


def grids_up_to(cols: int, rows: int) -> tuple[Grid, ...]:
    """All grids from 1x1 to `cols` x `rows`, columns outermost, ascending."""
    return tuple(Grid(c, r) for c in range(1, cols + 1) for r in range(1, rows + 1))


def grids_from_pinpoints(pinpoints: Iterable[tuple[int, int]], tile_size: int) -> tuple[Grid, ...]:
    """A list of canvas sizes in pixels, as LLaVA checkpoints store it, as grids in the same order.

    Args:
      pinpoints: (width, height) of each candidate canvas. LLaVA's own code reads the pairs so;
        other implementations read the same list as (height, width), which breaks ties differently.
      tile_size: side of a tile in pixels.

    Raises:
      ValueError: a side is not a positive multiple of `tile_size`.
    """
    pinpoints = list(pinpoints)
    for pair in pinpoints:
        if any(side < tile_size or side % tile_size for side in pair):
            raise ValueError(f"pinpoint {pair}: must be multiples of tile_size = {tile_size}")
    return tuple(Grid(width // tile_size, height // tile_size) for width, height in pinpoints)


def _normalise_grids(owner: LlavaNext | Relaxed) -> None:
    """Turns `owner.grids` into a tuple of Grid, so that lists from a config file hash too."""
    object.__setattr__(owner, "grids", grids := tuple(Grid(*grid) for grid in owner.grids))
    check(owner, "grids", bool(grids), "a non-empty list of (cols, rows)")
    check(owner, "grids", all(min(grid) >= 1 for grid in grids), "pairs >= 1")
    check(owner, "grids", len(set(grids)) == len(grids), "without duplicates")


GRIDS_3X3 = grids_up_to(3, 3)
GRIDS_4X4 = grids_up_to(4, 4)
GRIDS_6X6 = grids_up_to(6, 6)
GRIDS_LLAVA_P5 = (Grid(1, 2), Grid(2, 1), Grid(2, 2), Grid(3, 1), Grid(1, 3))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlavaNext:
    """Largest effective resolution, then least waste; padded canvas; squashed base view first.

    Attributes:
      grids: candidates in the order they are compared; a full tie keeps the earlier one.
    """

    grids: tuple[tuple[int, int], ...] = GRIDS_3X3

    def __post_init__(self):
        _normalise_grids(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InternVL15:
    """Nearest aspect ratio among all grids of min_tiles..max_tiles tiles; stretched, never padded.

    With several images in a sample each may use max(1, max_tiles // images) tiles.

    Attributes:
      thumbnail: add a squashed thumbnail after the tiles when there is more than one of them.
    """

    min_tiles: int = 1
    max_tiles: int = 9
    thumbnail: bool = True

    def __post_init__(self):
        check(self, "min_tiles", self.min_tiles >= 1, ">= 1")
        check(self, "max_tiles", self.max_tiles >= self.min_tiles, f">= {self.min_tiles}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiniCPMV:
    """Adaptive slicing: about area / tile_size^2 slices, nearest log aspect ratio; overview first.

    Its own views are rectangles whose sides are multiples of `patch_size` and whose area is about
    tile_size^2 (`patching.make_native_views`); as square views only its grid is used.
    """

    max_slices: int = 9
    patch_size: int = 14

    def __post_init__(self):
        check(self, "max_slices", self.max_slices >= 1, ">= 1")
        check(self, "patch_size", self.patch_size >= 1, ">= 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relaxed:
    """BlueLM-V-3B's relaxed aspect-ratio matching (sec. 3.2, Algorithm 1).

    Candidates are compared in descending order (columns, then rows), whatever their order here.

    Attributes:
      alpha: share of the best effective resolution so far that a candidate may lose when it wastes
        less, and must gain to win outright.
      grids: candidates; the paper's ablation uses 1x1..3x3, its second stage 1x1..4x4.
      max_total_loss: None is the paper's rule, in which losses of consecutive relaxations add up.
        A value in [0, 1) first drops each candidate whose effective resolution is below
        (1 - max_total_loss) of the best candidate's.
    """

    alpha: float = 0.1
    grids: tuple[tuple[int, int], ...] = GRIDS_3X3
    max_total_loss: float | None = None

    def __post_init__(self):
        _normalise_grids(self)
        check(self, "alpha", math.isfinite(self.alpha) and self.alpha >= 0, "finite and >= 0")
        loss = self.max_total_loss
        check(self, "max_total_loss", loss is None or 0 <= loss < 1, "None or in [0, 1)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fixed:
    """One view: no dynamic resolution (stage 1 of BlueLM-V-3B; LLaVA-1.5).

    Attributes:
      fit: 'stretch' squashes the image to a square, 'pad' letterboxes it.
    """

    fit: Fit = "stretch"

    def __post_init__(self):
        check(self, "fit", self.fit in ("pad", "stretch"), "'pad' or 'stretch'")


Scheme = LlavaNext | InternVL15 | MiniCPMV | Relaxed | Fixed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """A scheme at a tile size, with overrides for a controlled comparison.

    An override of None keeps the scheme's own rule. Setting `fit` and `thumbnail` to the same
    values under several schemes leaves the grid as their only difference. As soon as `thumbnail`
    is set, one rule holds for every scheme: a one-tile image gets a thumbnail only if
    `single_tile_thumbnail` is set to True, because beside one tile it shows the same pixels again.

    Attributes:
      tile_size: side of a view, pixels.
      fit: 'pad' keeps the aspect ratio and centres the image on the canvas, 'stretch' fills it.
      thumbnail: where the whole image, squashed to one view, stands among the views.
      single_tile_thumbnail: whether an image of one tile has a thumbnail too.
      pad_color: RGB of the canvas around a padded image.
      resample: Pillow's filter; SigLIP 2 was trained on 'bilinear'ly resized images.
    """

    scheme: Scheme
    tile_size: int = 384
    fit: Fit | None = None
    thumbnail: ThumbnailPlace | None = None
    single_tile_thumbnail: bool | None = None
    pad_color: RGB = (0, 0, 0)
    resample: Resample = "bicubic"

    def __post_init__(self):
        object.__setattr__(self, "pad_color", tuple(self.pad_color))
        check(self, "scheme", isinstance(self.scheme, Scheme), "one of the scheme classes")
        check(self, "tile_size", self.tile_size >= 1, ">= 1")
        check(self, "fit", self.fit in (None, "pad", "stretch"), "None, 'pad' or 'stretch'")
        ok = self.thumbnail in (None, "first", "last", "none")
        check(self, "thumbnail", ok, "None, 'first', 'last' or 'none'")
        ok = len(self.pad_color) == 3 and all(0 <= value <= 255 for value in self.pad_color)
        check(self, "pad_color", ok, "three values in 0..255")
        ok = self.resample in ("bicubic", "bilinear")
        check(self, "resample", ok, "'bicubic' or 'bilinear'")

    @property
    def resolved_fit(self) -> Fit:
        """The fit that applies: the override, else the scheme's own."""
        if self.fit is not None:
            return self.fit
        if isinstance(self.scheme, Fixed):
            return self.scheme.fit
        return "pad" if isinstance(self.scheme, LlavaNext | Relaxed) else "stretch"

    @property
    def resolved_thumbnail(self) -> ThumbnailPlace:
        """The place of the thumbnail that applies: the override, else the scheme's own."""
        if self.thumbnail is not None:
            return self.thumbnail
        match self.scheme:
            case LlavaNext() | Relaxed() | MiniCPMV():
                return "first"
            case InternVL15(thumbnail=True):
                return "last"
            case InternVL15() | Fixed():
                return "none"

    @property
    def resolved_single_tile_thumbnail(self) -> bool:
        """Whether one tile alone is joined by a thumbnail: the override, else the scheme's own.

        LLaVA-NeXT adds its base view always, and the paper's "tiles and one thumbnail" is read in
        the same way; InternVL and MiniCPM-V never repeat a single view.
        """
        if self.single_tile_thumbnail is not None:
            return self.single_tile_thumbnail
        return self.thumbnail is None and isinstance(self.scheme, LlavaNext | Relaxed)

    def has_thumbnail(self, grid: tuple[int, int]) -> bool:
        """Whether an image cut by `grid` (columns, rows) has a thumbnail beside its tiles."""
        if self.resolved_thumbnail == "none":
            return False
        return grid[0] * grid[1] > 1 or self.resolved_single_tile_thumbnail


def controlled(
    scheme: Scheme,
    *,
    tile_size: int = 384,
    fit: Fit = "pad",
    thumbnail: ThumbnailPlace = "last",
) -> Tiling:
    """The default form of the ablation: same view order, thumbnail and fit; the grid differs."""
    return Tiling(scheme=scheme, tile_size=tile_size, fit=fit, thumbnail=thumbnail)


# Named as the columns of the reference decisions. `onevision_384_6x6_max9` goes with the layout
# UnpadNewline(anyres_max=9); the paper's ablation compares `relaxed_384_3x3_a0.1`,
# `llava_next_384_3x3` and `internvl_384_max9`.
PRESETS: dict[str, Tiling] = {
    "llava_next_336_p5": Tiling(scheme=LlavaNext(grids=GRIDS_LLAVA_P5), tile_size=336),
    "llava_next_384_3x3": Tiling(scheme=LlavaNext(grids=GRIDS_3X3)),
    "onevision_384_6x6_max9": Tiling(scheme=LlavaNext(grids=GRIDS_6X6)),
    "internvl_448_max12": Tiling(scheme=InternVL15(max_tiles=12), tile_size=448),
    "internvl_448_max6": Tiling(scheme=InternVL15(max_tiles=6), tile_size=448),
    "internvl_384_max9": Tiling(scheme=InternVL15(max_tiles=9)),
    "minicpm_v_448_max9": Tiling(scheme=MiniCPMV(max_slices=9), tile_size=448),
    "relaxed_384_3x3_a0.1": Tiling(scheme=Relaxed(alpha=0.1)),
    "relaxed_384_4x4_a0.1": Tiling(scheme=Relaxed(alpha=0.1, grids=GRIDS_4X4)),
    **{f"relaxed_384_3x3_a{a}": Tiling(scheme=Relaxed(alpha=a)) for a in (0.0, 0.05, 0.2, 0.5)},
    "fixed_384": Tiling(scheme=Fixed()),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain:
    """BlueLM-V-3B: the tokens of every view, one view after the other."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnpadNewline:
    """LLaVA-NeXT's 'spatial_unpad': tiles stitched, padding dropped, a newline after each row.

    Attributes:
      anyres_max: LLaVA-OneVision's anyres_max_k; a stitched map much above k views of tokens is
        resized bilinearly to about that many. None never resizes.
      allow_empty: True reproduces the original in dropping *all* tile tokens of some extreme
        shapes (1000x1); False keeps at least one row and one column.
    """

    anyres_max: int | None = None
    allow_empty: bool = False

    def __post_init__(self):
        check(self, "anyres_max", self.anyres_max is None or self.anyres_max >= 1, "None or >= 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SliceTags:
    """MiniCPM-V's spatial schema: tags around each view, a line break between rows of slices.

    The overview stands between <image> and </image>, each slice between <slice> and </slice>.
    """


Layout = Plain | UnpadNewline | SliceTags
