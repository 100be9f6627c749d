"""Pictures of what each tiling scheme makes of an image: canvas, padding, grid, thumbnail, tokens.

All canvases of a picture share one scale, so that a scheme which enlarges an image four times
looks four times as large, as in the figure of BlueLM-V-3B's sec. 3.2.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping, Sequence

from PIL import Image, ImageDraw, ImageFont

from bluelm_jax.aspect_ratio import choose_grid
from bluelm_jax.data.images import ImageError, read_image
from bluelm_jax.layout import image_layout, view_side
from bluelm_jax.patching import placement
from bluelm_jax.schemes import Grid, Layout, MiniCPMV, Plain, Relaxed, Tiling

_INK, _MUTED, _PAPER = (25, 25, 25), (105, 105, 105), (255, 255, 255)
_PADDING, _HATCH = (222, 222, 222), (178, 178, 178)
_GRID_LINE, _THUMBNAIL_LINE = (214, 39, 40), (31, 119, 180)
_MARGIN, _HEADER, _LINE = 18, 24, 17
_LARGEST_CANVAS = 460  # pixels on paper of the longest canvas side
_LEAST_COLUMN = 190
_SIZE_ARGUMENT = re.compile(r"(\d+)x(\d+)")


def write(
    folder: str,
    names: Sequence[str],
    tilings: Mapping[str, Tiling],
    layout: Layout,
    patch_size: int = 14,
    downsample: int = 2,
) -> list[pathlib.Path]:
    """Writes one PNG for each name: an image file, or a size such as '394x390'.

    A file that cannot be read is reported on the standard output and left out.
    """
    out = pathlib.Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    written: list[pathlib.Path] = []
    for name in names:
        try:
            match = _SIZE_ARGUMENT.fullmatch(name)
            image = synthetic_picture(int(match[1]), int(match[2])) if match else read_image(name)
        except ImageError as error:
            print(f"left out: {error}")
            continue
        stem = pathlib.PurePath(name).stem
        path = out / f"{stem}.png"
        if path in written:  # two files of one name in different folders
            path = out / f"{stem}_{len(written)}.png"
        draw(image, tilings, layout, patch_size, downsample, title=stem).save(path)
        written.append(path)
    return written


def synthetic_picture(width: int, height: int) -> Image.Image:
    """A synthetic picture whose squashing and padding show: a colour ramp under circles.

    Raises:
      ImageError: the size is outside 1..20000 a side or above 64 megapixels.
    """
    size = (width, height)
    if not (1 <= width <= 20000 and 1 <= height <= 20000 and width * height <= 64e6):
        raise ImageError(
            f"{width}x{height}", "too_large", "no synthetic picture of this size", size
        )
    red = Image.linear_gradient("L").rotate(90).resize(size)
    green = Image.linear_gradient("L").resize(size)
    picture = Image.merge("RGB", (red, green, Image.new("L", size, 150)))
    pen = ImageDraw.Draw(picture)
    radius, step = min(size) / 2, max(min(size) // 8, 1)
    for x in range(int(radius), max(width, int(radius) + 1), max(int(2 * radius), 1)):
        for r in range(int(radius), 0, -step):
            box = (x - r, height / 2 - r, x + r, height / 2 + r)
            pen.ellipse(box, outline=(255, 255, 255), width=max(step // 6, 1))
    return picture


def draw(
    image: Image.Image,
    tilings: Mapping[str, Tiling],
    layout: Layout | None = None,
    patch_size: int = 14,
    downsample: int = 2,
    title: str = "image",
) -> Image.Image:
    """The image and, side by side on one scale, what each scheme makes of it.

    Args:
      image: upright, mode RGB.
      tilings: by the name to print.
      layout: in which tokens are counted; None is `Plain()`.
      patch_size, downsample: of the vision encoder, for the token count.
      title: name of the image.
    """
    layout = Plain() if layout is None else layout
    grids = {name: choose_grid(*image.size, tiling) for name, tiling in tilings.items()}
    scale = _scale(image, tilings, grids)
    panels = [_original_panel(image, scale, title)]
    for name, tiling in tilings.items():
        side = view_side(tiling.tile_size, patch_size, downsample)
        tokens = image_layout(*image.size, tiling, layout, side).num_tokens
        panels.append(_panel(image, name, tiling, grids[name], tokens, scale))
    width = sum(panel.width for panel in panels) + _MARGIN * (len(panels) + 1)
    height = max(panel.height for panel in panels) + 2 * _MARGIN
    paper = Image.new("RGB", (width, height), _PAPER)
    x = _MARGIN
    for panel in panels:
        paper.paste(panel, (x, _MARGIN))
        x += panel.width + _MARGIN
    return paper


def _scale(image: Image.Image, tilings: Mapping[str, Tiling], grids: Mapping[str, Grid]) -> float:
    """Pixels on paper for each pixel of a canvas."""
    canvases = [max(grid) * tilings[name].tile_size for name, grid in grids.items()]
    return _LARGEST_CANVAS / max(*canvases, *image.size)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _blank_panel(width: float, height: float, caption: Sequence[str]) -> Image.Image:
    """Room for a drawing below its header, and for captions below that."""
    font = _font(12)
    least = max(_LEAST_COLUMN, *(int(font.getlength(line)) + 8 for line in caption))
    size = (max(int(width) + 2, least), int(height) + 2 + _HEADER)
    return Image.new("RGB", size, _PAPER)


def _original_panel(image: Image.Image, scale: float, title: str) -> Image.Image:
    small = image.resize([max(round(side * scale), 1) for side in image.size])
    caption = [f"{image.width}x{image.height}", f"{image.width * image.height:,} pixels"]
    panel = _blank_panel(small.width, small.height, caption)
    panel.paste(small, (0, _HEADER))
    return _with_text(panel, title, caption)


def _panel(
    image: Image.Image, name: str, tiling: Tiling, grid: Grid, tokens: int, scale: float
) -> Image.Image:
    side = tiling.tile_size
    width, height = grid.cols * side, grid.rows * side
    has_thumbnail = tiling.has_thumbnail(grid)
    place = placement(*image.size, grid, tiling)
    waste = 1 - place.width * place.height / (width * height)
    caption = [
        f"{grid.cols}:{grid.rows}, {width}x{height}",
        f"{width * height / (image.width * image.height):.1f}x the image, {waste:.0%} padding",
        _views_in_order(grid, tiling),
        f"{tokens:,} tokens",
    ]
    if isinstance(tiling.scheme, MiniCPMV):
        caption.append("(drawn as square views)")
    thumbnail_height = side * scale + _MARGIN / 2 if has_thumbnail else 0
    panel = _blank_panel(width * scale, height * scale + thumbnail_height, caption)
    canvas = _canvas(image, tiling, grid, scale)
    panel.paste(canvas, (0, _HEADER))
    if has_thumbnail:
        small = image.resize([round(side * scale)] * 2)
        pen = ImageDraw.Draw(small)
        pen.rectangle((0, 0, small.width - 1, small.height - 1), outline=_THUMBNAIL_LINE, width=2)
        panel.paste(small, (0, _HEADER + canvas.height + _MARGIN // 2))
    return _with_text(panel, name, caption, _alpha_note(tiling))


def _views_in_order(grid: Grid, tiling: Tiling) -> str:
    tiles = grid.cols * grid.rows
    parts = [f"{tiles} tile{'' if tiles == 1 else 's'}"]
    if tiling.has_thumbnail(grid):
        parts.insert(0 if tiling.resolved_thumbnail == "first" else 1, "thumbnail")
    return ", then ".join(parts)


def _alpha_note(tiling: Tiling) -> str:
    return f"alpha {tiling.scheme.alpha:g}" if isinstance(tiling.scheme, Relaxed) else ""


def _canvas(image: Image.Image, tiling: Tiling, grid: Grid, scale: float) -> Image.Image:
    """Canvas with hatched padding, the image in place, and lines between tiles."""
    side = tiling.tile_size
    size = [round(count * side * scale) for count in grid]
    canvas = Image.new("RGB", size, _PADDING)
    pen = ImageDraw.Draw(canvas)
    for offset in range(-size[1], size[0], 9):
        pen.line((offset, size[1], offset + size[1], 0), fill=_HATCH)
    left, top, width, height = (value * scale for value in placement(*image.size, grid, tiling))
    small = image.resize((max(round(width), 1), max(round(height), 1)))
    canvas.paste(small, (round(left), round(top)))
    for col in range(grid.cols + 1):
        x = min(round(col * side * scale), size[0] - 1)
        pen.line((x, 0, x, size[1]), fill=_GRID_LINE, width=2)
    for row in range(grid.rows + 1):
        y = min(round(row * side * scale), size[1] - 1)
        pen.line((0, y, size[0], y), fill=_GRID_LINE, width=2)
    return canvas


def _with_text(
    panel: Image.Image, title: str, caption: Sequence[str], note: str = ""
) -> Image.Image:
    """Adds the header and, below the drawing, the caption."""
    lines = [line for line in (*caption, note) if line]
    font, bold = _font(12), _font(14)
    width = max(panel.width, int(bold.getlength(title)) + 4)
    full = Image.new("RGB", (width, panel.height + 6 + _LINE * len(lines)), _PAPER)
    full.paste(panel, (0, 0))
    pen = ImageDraw.Draw(full)
    pen.text((0, 2), title, fill=_INK, font=bold)
    for number, line in enumerate(lines):
        pen.text((0, panel.height + 4 + number * _LINE), line, fill=_MUTED, font=font)
    return full
