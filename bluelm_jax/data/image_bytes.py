"""Images that a source holds itself, beside those that are files of their own."""

from __future__ import annotations

import dataclasses
import os


@dataclasses.dataclass(frozen=True)
class ImageBytes:
    """An image file's bytes, from a source that holds them.

    Attributes:
      name: of the file that they were.
      data: the bytes of the file.
      where: the record that holds them, for messages.
    """

    name: str
    data: bytes = dataclasses.field(repr=False)
    where: str = ""


ImageFile = str | os.PathLike[str] | ImageBytes


def image_name(file: ImageFile) -> str:
    """Path of an image file, or the name of its bytes."""
    if not isinstance(file, ImageBytes):
        return os.fspath(file)
    return f"{file.where}: {file.name}" if file.where else file.name
