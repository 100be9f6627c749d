"""A mixture with the lengths of LLaVA-665k, for benchmarks: sizes of samples, not samples.

Known: 665,298 samples, about 41,000 of them (6 %) without an image, up to 25 turns, one image at the
start of the first question (public file). Image sizes are real: those of COCO and receipt images in
`bluelm_jax/data/assets/image_sizes.csv`. ASSUMED: shares of the kinds of samples with an image,
numbers of turns, and tokens of a question, an answer and a template (`KINDS`), after the sources
that the file was put together from (visual question answering with answers of a word, conversations
and descriptions by a language model, chats without images cut to 2,048 tokens).
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import importlib.resources

import numpy as np

from bluelm_jax import layout, schemes
from bluelm_jax.data.packing import Size

TEXT_ONLY = 0.06
TEMPLATE_TOKENS = 8  # Around a question and its answer; assumed.


@dataclasses.dataclass(frozen=True)
class Kind:
    """Samples of one kind: their share, most turns, median tokens of a question and an answer."""

    share: float
    turns: int
    question: int
    answer: int
    image: bool = True
    longest: int = 2048


KINDS = (
    Kind(0.62, 25, 12, 3),  # Answers of a word or a phrase, several questions an image.
    Kind(0.12, 8, 15, 45),  # Conversations.
    Kind(0.20, 1, 25, 110),  # Descriptions and reasoning.
    Kind(TEXT_ONLY, 8, 60, 220, image=False),
)


@functools.cache
def image_sizes() -> list[tuple[int, int]]:
    """(width, height) of every image in the list."""
    path = importlib.resources.files("bluelm_jax.data") / "assets" / "image_sizes.csv"
    with path.open() as file:
        return [(int(row["width"]), int(row["height"])) for row in csv.DictReader(file)]


def text_tokens(rng: np.random.Generator, kind: Kind) -> int:
    """Tokens of all turns of a sample."""
    turns = 1 if kind.turns == 1 else min(kind.turns, int(rng.geometric(3 / kind.turns)))
    medians = np.array([kind.question, kind.answer])
    lengths = np.exp(rng.normal(np.log(medians), 0.6, (turns, 2)))
    return min(kind.longest, int(lengths.sum()) + turns * TEMPLATE_TOKENS)


def draw(
    count: int, tiling: schemes.Tiling, side: int, seed: int = 0, text_scale: float = 1.0
) -> list[Size]:
    """Sizes of `count` samples, their images cut by `tiling`, side * side tokens a view.

    `text_scale` shortens the texts, to keep the ratio to images with fewer tokens a view.
    """
    rng = np.random.default_rng(seed)
    images = image_sizes()
    shares = [kind.share for kind in KINDS]
    sizes = []
    for _ in range(count):
        kind = KINDS[rng.choice(len(KINDS), p=shares)]
        text = max(2, round(text_scale * text_tokens(rng, kind)))
        if not kind.image:
            sizes.append(Size(text, 0))
            continue
        width, height = images[rng.integers(len(images))]
        laid_out = layout.image_layout(width, height, tiling, schemes.Plain(), side)
        sizes.append(Size(len(laid_out.index) + text, laid_out.num_views))
    return sizes
