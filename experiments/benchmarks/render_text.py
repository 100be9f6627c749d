"""Images a second on one core for each kind of rendered data, and where the time goes.

    python -m experiments.benchmarks.render_text
    python -m experiments.benchmarks.render_text --images=100 --rounds=1   (a quick look)

Times are CPU seconds of this process, the least of several rounds, after one that fills the caches.
The variants of `text` are run in turn within each round: without noise, with the faces that come
with Matplotlib only, with the scripts that need shaping only and the others only, with PNG at
level 6, and with faces opened anew for every image. The parts are measured inside a round of
their own. Goal: 200 text images a second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from absl import app, flags

from bluelm_jax.data.rendering import (
    corpus,
    font_index,
    formulas,
    jobs,
    line_breaking,
    looks,
    sampling,
    scripts,
    shards,
    text_block,
    text_images,
)

IMAGES = flags.DEFINE_integer("images", 300, "Text images a round; a fifth of the others.")
ROUNDS = flags.DEFINE_integer("rounds", 3, "Rounds; the fastest counts.", lower_bound=1)

# Where a text image's time goes: what to call it, and the function that is timed.
_PARTS = (
    ("choose faces", font_index.FontIndex, "numbers"),
    ("open faces", text_block.Setter, "__init__"),
    ("break lines", line_breaking, "wrap"),
    ("draw lines", text_block.Setter, "line"),
    ("look (colours)", looks, "colourise"),
    ("look (noise)", looks, "finish"),
    ("encode", text_images, "encode"),
)


@dataclasses.dataclass
class Case:
    """Something to draw, and under which circumstances."""

    name: str
    task: sampling.Task
    images: int
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    best: float = float("inf")

    def run(self) -> float:
        """CPU seconds for one round; keeps the least."""
        with self.around():
            start = time.process_time()
            for index in range(self.images):
                self.task.sample(shards.sample_rng(0, self.task.kind, index), index)
            seconds = time.process_time() - start
        self.best = min(self.best, seconds)
        return seconds


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Puts another function in a function's place for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _slow_png() -> Iterator[None]:
    def encode(image: Any, quality: int | None) -> tuple[bytes, str]:
        if quality is not None:
            return sampling.encode(image, quality)
        import io

        buffer = io.BytesIO()
        image.save(buffer, "PNG", compress_level=6)
        return buffer.getvalue(), ".png"

    with replaced(text_images, "encode", encode):
        yield


@contextlib.contextmanager
def _no_font_cache() -> Iterator[None]:
    with replaced(font_index, "load", font_index.load.__wrapped__):
        yield


def _text(passages: tuple[corpus.Passage, ...], noise: float = 1.0, **where: Any) -> sampling.Task:
    index = font_index.scan(corpus.alphabet(passages), **where)
    covered = tuple(
        passage
        for passage in passages
        if any(index.numbers(line, passage.language) for line in passage.lines)
        and (scripts.has_raqm() or not any(map(scripts.needs_shaping, passage.lines)))
    )
    cfg = text_images.TextConfig(noise=noise)
    return text_images.TextTask(covered, index, cfg, {}, scripts.has_raqm())


def cases(images: int) -> list[Case]:
    """What is compared."""
    texts = corpus.builtin()
    shaped = tuple(p for p in texts if any(map(scripts.needs_shaping, p.lines)))
    plain = tuple(p for p in texts if p not in shaped)
    everything, few = _text(texts), max(1, images // 5)
    found = [
        Case("text", everything, images),
        Case("text, no noise", _text(texts, noise=0.0), images),
        Case(
            "text, DejaVu and STIX", _text(plain, folders=[font_index.matplotlib_folder()]), images
        ),
        Case("text, unshaped scripts", _text(plain), images),
        Case("text, PNG level 6", everything, images, _slow_png),
        Case("text, no font cache", everything, images, _no_font_cache),
        Case("formulas", formulas.FormulaTask(formulas.FormulaConfig()), few),
        Case("markdown", jobs.make_task("markdown"), few),
    ]
    if scripts.has_raqm():
        found.insert(4, Case("text, shaped scripts", _text(shaped), images))
    else:
        print(f"shaped scripts are left out: {scripts.RAQM_MISSING}")
    return found


def parts(case: Case) -> dict[str, float]:
    """CPU seconds of a round by part. Lines are broken inside no other part, so parts add up."""
    seconds = dict.fromkeys([name for name, _, _ in _PARTS], 0.0)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[name] += time.process_time() - start

        return call

    with contextlib.ExitStack() as stack:
        for name, owner, attribute in _PARTS:
            function = timed(name, getattr(owner, attribute))
            stack.enter_context(replaced(owner, attribute, function))
        total = case.run()
    return {**seconds, "everything else": total - sum(seconds.values()), "total": total}


def main(argv: list[str]) -> None:
    """Prints both tables."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    compared = cases(IMAGES.value)
    for _ in range(ROUNDS.value + 1):
        for case in compared:
            case.run()
    print(f"{'kind':<24}{'images/s a core':>16}{'ms an image':>14}")
    for case in compared:
        each = case.best / case.images
        print(f"{case.name:<24}{1 / each:>16.0f}{1e3 * each:>14.2f}")
    table = parts(compared[0])
    print(f"\n{'part of a text image':<24}{'ms an image':>16}{'share':>14}")
    for name, seconds in table.items():
        each = 1e3 * seconds / compared[0].images
        print(f"{name:<24}{each:>16.2f}{seconds / table['total']:>14.0%}")


if __name__ == "__main__":
    app.run(main)
