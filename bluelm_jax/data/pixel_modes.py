"""Any of Pillow's modes -> RGB; `images` says which becomes what."""

from __future__ import annotations

import numpy as np
from PIL import Image


def to_rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """A loaded image as mode RGB, transparency laid on `background` (RGB)."""
    if image.mode == "F" or image.mode.startswith("I"):
        return _deep_to_grey(image).convert("RGB")
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    if image.mode == "La":
        image = image.convert("LA")
    colour = image.convert("RGBA")
    canvas = Image.new("RGB", image.size, background)
    canvas.paste(colour, mask=colour)
    return canvas


def _deep_to_grey(image: Image.Image) -> Image.Image:
    """Modes F, I, I;16 and its byte orders as 8-bit grey; Pillow's own conversion saturates."""
    values = np.asarray(image)
    if image.mode == "F":
        values = np.nan_to_num(values, nan=0.0, posinf=255.0, neginf=0.0)
        scale = 255.0 if values.max() <= 1 else 1.0
        grey = np.clip(np.rint(values * scale), 0, 255)
    else:
        grey = np.clip(values, 0, 65535) >> 8
    return Image.fromarray(grey.astype(np.uint8))
