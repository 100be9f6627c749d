"""A batch as a page: tokens with their ids under the pointer, samples, padding, tiles as pictures."""

from __future__ import annotations

import base64
import functools
import io
from pathlib import Path

import jinja2
import numpy as np
from PIL import Image

from experiments.data_view import MEANINGS, Token, View
from experiments.token_texts import printable

_TEMPLATES = Path(__file__).parent / "templates"
_LARGEST = 192  # Pixels; larger tiles are shown smaller, so that a page of many can be opened.


def write(path: str, view: View, title: str, notes: dict[str, str]) -> None:
    """Writes the page of a batch; `notes` are lines about the data as a whole."""
    Path(path).write_text(render(view, title, notes), encoding="utf-8")


def render(view: View, title: str, notes: dict[str, str]) -> str:
    """The self-contained page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["visible"] = printable
    environment.filters["shown"] = shown
    environment.filters["hover"] = hover
    template = environment.get_template("data.html.j2")
    picture = functools.lru_cache(maxsize=None)(lambda g, i: _uri(view.tiles[g, i]))
    return template.render(view=view, title=title, notes=notes, meanings=MEANINGS, picture=picture)


def shown(token: Token) -> str:
    """Text of a token with line breaks visible."""
    return printable(token.text).replace("\n", "↵\n")


def hover(token: Token) -> str:
    """What the pointer shows of a token."""
    ids = ", ".join(map(str, token.ids))
    last = token.at + len(token.ids) - 1
    where = f"position {token.at}" if len(token.ids) == 1 else f"positions {token.at}-{last}"
    return f"{'id' if len(token.ids) == 1 else 'ids'} {ids}, {where}"


def _uri(tile: np.ndarray) -> str:
    image = Image.fromarray(tile)
    stream = io.BytesIO()
    if image.width > _LARGEST:
        image = image.resize((_LARGEST, _LARGEST), Image.Resampling.BOX)
        image.save(stream, "JPEG", quality=85)
        kind = "jpeg"
    else:
        image.save(stream, "PNG")
        kind = "png"
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"
