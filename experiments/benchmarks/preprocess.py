"""From JPEG files to a batch of views on one core: this library against transformers.

    python -m experiments.benchmarks.preprocess
    python -m experiments.benchmarks.preprocess --rounds=3 --batch=2   (a quick look)

Both decode, choose a grid, resize, split and collate the same files under the same scheme. Ours
ends with uint8, as the training pipeline does (the device normalises); '+ float' adds what theirs
does on the CPU, rescaling and normalising to float32 with channels first. Times are CPU seconds of
this process, pinned to one core, the least of several rounds taken in turn. Before timing, our
pixels are compared byte for byte with plain Pillow, and with theirs after undoing their
normalisation. Ours runs with `keep_freed_pixels`, as in a data worker; theirs with the default.
'decode and resize by Pillow' is Pillow's own calls and nothing else: what ours costs at least
without Numba. The first line says which of the two resized ours.

Needs Pillow and NumPy; without Numba (`requirements-fast.txt`) ours is slower. The comparison needs
`transformers` with `torch`, and is left out, saying so, where they are missing. The
torchvision-backed processors join where torchvision is installed.
Goals: 2.5 times LlavaNextImageProcessorPil at 640x480 and 1280x960, 1.6 times at 2480x3508, where
decoding the JPEG, the same for both, takes most of the time.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from absl import app, flags
from PIL import Image

from bluelm_jax.aspect_ratio import choose_grid
from bluelm_jax.data.images import keep_freed_pixels, read_image
from bluelm_jax.patching import make_views, placement
from bluelm_jax.resample import backend
from bluelm_jax.schemes import GRIDS_LLAVA_P5, InternVL15, LlavaNext, Tiling

_SIZES = ("640x480", "1280x960", "2480x3508")
_TILE = 384
_MEAN, _STD = 0.5, 0.5


@dataclasses.dataclass(frozen=True)
class Case:
    """A scheme of ours and the processor of theirs that implements it."""

    name: str
    tiling: Tiling
    processor: str  # class name without the suffix of its backend
    options: dict[str, Any]


def _cases() -> list[Case]:
    side = {"height": _TILE, "width": _TILE}
    pinpoints = [[cols * _TILE, rows * _TILE] for cols, rows in GRIDS_LLAVA_P5]
    llava = {
        "size": {"shortest_edge": _TILE},
        "crop_size": side,
        "image_grid_pinpoints": pinpoints,
    }
    internvl = {"size": side, "crop_to_patches": True, "max_patches": 6}
    common = {"image_mean": [_MEAN] * 3, "image_std": [_STD] * 3}
    return [
        Case(
            "LLaVA-NeXT",
            Tiling(scheme=LlavaNext(grids=GRIDS_LLAVA_P5), tile_size=_TILE),
            "LlavaNextImageProcessor",
            llava | common,
        ),
        Case(
            "InternVL 1.5",
            Tiling(scheme=InternVL15(max_tiles=6), tile_size=_TILE),
            "GotOcr2ImageProcessor",
            internvl | common,
        ),
    ]


def ours(paths: Sequence[str], tiling: Tiling) -> np.ndarray:
    """All views of a batch, uint8 [I, S, S, 3]."""
    return np.concatenate([make_views(read_image(path), tiling) for path in paths])


def ours_float(paths: Sequence[str], tiling: Tiling) -> np.ndarray:
    """The same normalised on the CPU, float32 [I, 3, S, S]."""
    pixels = ours(paths, tiling).transpose(0, 3, 1, 2).astype(np.float32, order="C")
    pixels *= 1 / (255 * _STD)
    pixels -= _MEAN / _STD
    return pixels


def plain_pillow(path: str, tiling: Tiling) -> np.ndarray:
    """The views drawn step by step: resize, paste on a canvas, crop."""
    with Image.open(path) as opened:
        image = opened.convert("RGB")
    side, grid = tiling.tile_size, choose_grid(*image.size, tiling)
    left, top, width, height = placement(*image.size, grid, tiling)
    canvas = Image.new("RGB", (grid.cols * side, grid.rows * side))
    canvas.paste(image.resize((width, height), Image.Resampling.BICUBIC), (left, top))
    corners = [(c * side, r * side) for r in range(grid.rows) for c in range(grid.cols)]
    views = [canvas.crop((x, y, x + side, y + side)) for x, y in corners]
    thumbnail = image.resize((side, side), Image.Resampling.BICUBIC)
    if tiling.has_thumbnail(grid):
        views.insert(0 if tiling.resolved_thumbnail == "first" else len(views), thumbnail)
    return np.stack([np.asarray(view) for view in views])


def _floor(paths: Sequence[str], tiling: Tiling) -> None:
    """Nothing but the calls of Pillow that give these pixels: decode, resize, thumbnail."""
    for path in paths:
        image = read_image(path)
        grid = choose_grid(*image.size, tiling)
        place = placement(*image.size, grid, tiling)
        image.resize((place.width, place.height), Image.Resampling.BICUBIC)
        if tiling.has_thumbnail(grid):
            image.resize((tiling.tile_size, tiling.tile_size), Image.Resampling.BICUBIC)


def _their_runs(case: Case) -> dict[str, Callable[[Sequence[str]], np.ndarray]]:
    """Name -> function from paths to normalised pixels, for each backend that is installed."""
    if not all(importlib.util.find_spec(name) for name in ("transformers", "torch")):
        return {}
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    torch.set_num_threads(1)
    names = [case.processor + "Pil"]
    if _torchvision_works():
        names.append(case.processor)
    runs = {}
    for name in names:
        processor = getattr(transformers, name)(**case.options)

        def run(paths: Sequence[str], processor=processor) -> np.ndarray:
            images = []
            for path in paths:
                with Image.open(path) as image:
                    image.load()
                    images.append(image)
            # The torchvision backend gives tensors only; for both this is the cheapest format.
            pixels = processor(images=images, return_tensors="np")["pixel_values"]
            return np.asarray(pixels).reshape(-1, *pixels.shape[-3:])

        runs[name] = run
    return runs


def _torchvision_works() -> bool:
    """Whether torchvision can be imported; its releases fit one release of torch each."""
    if not importlib.util.find_spec("torchvision"):
        return False
    try:
        importlib.import_module("torchvision")
    except Exception:
        return False
    return True


def _write_jpeg(path: str, size: tuple[int, int]) -> None:
    """A photograph-like file: noise at several scales, the coarser the stronger."""
    rng = np.random.default_rng(0)
    total = np.zeros((size[1], size[0], 3), np.float32)
    for scale, strength in ((4, 0.15), (16, 0.3), (128, 0.55)):
        small = (size[1] // scale + 2, size[0] // scale + 2, 3)
        noise = Image.fromarray(rng.integers(0, 256, small, dtype=np.uint8))
        total += strength * np.asarray(noise.resize(size, Image.Resampling.BICUBIC))
    Image.fromarray(total.astype(np.uint8)).save(path, quality=85)


def _least_seconds(
    runs: dict[str, Callable[[], Any]], theirs: Collection[str], rounds: int, images: int
) -> dict[str, float]:
    """CPU seconds an image of each run, the least of `rounds` taken in turn."""
    seconds = dict.fromkeys(runs, float("inf"))
    kept = -1
    for _ in range(rounds):
        for name, run in runs.items():
            megabytes = 0 if name in theirs else 128  # as each would run in its own workers
            if megabytes != kept:
                keep_freed_pixels(megabytes)
                run()
                kept = megabytes
            start = time.process_time()
            run()
            seconds[name] = min(seconds[name], (time.process_time() - start) / images)
    return seconds


def _compare(case: Case, path: str, theirs: dict[str, Callable]) -> str:
    """Checks our pixels against Pillow; says how theirs compare."""
    views = ours([path], case.tiling)
    if not np.array_equal(views, plain_pillow(path, case.tiling)):
        raise SystemExit(f"{case.name}: {path}: our pixels differ from Pillow's")
    notes = [f"{len(views)} views, pixels equal to Pillow's"]
    for name, run in theirs.items():
        pixels = np.rint((run([path]) * _STD + _MEAN) * 255).transpose(0, 2, 3, 1)
        if pixels.shape != views.shape:
            notes.append(f"{name}: {len(pixels)} views")
            continue
        gap = np.abs(pixels - views)
        notes.append(f"{name}: largest gap {gap.max():.0f}, {np.mean(gap > 0):.2%} differ")
    return "; ".join(notes)


def _bench(case: Case, path: str, size: tuple[int, int], rounds: int, batch: int) -> None:
    theirs = _their_runs(case)
    paths = [path] * batch
    note = _compare(case, path, theirs)
    runs: dict[str, Callable[[], Any]] = {
        "decode alone": lambda: [read_image(path) for path in paths],
        "decode and resize by Pillow": lambda: _floor(paths, case.tiling),
        "ours": lambda: ours(paths, case.tiling),
        "ours + float": lambda: ours_float(paths, case.tiling),
    }
    for name, run in theirs.items():
        runs[name] = lambda run=run: run(paths)
    seconds = _least_seconds(runs, theirs, rounds, batch)
    print(
        f"\n{case.name}, {size[0]}x{size[1]} ({pathlib.Path(path).stat().st_size:,} bytes): {note}"
    )
    for name, value in seconds.items():
        ratio = f"{value / seconds['ours']:6.2f}x ours" if name in theirs else ""
        print(f"  {name:30}{1000 * value:8.1f} ms{1 / value:9.1f} images/s  {ratio}".rstrip())


def parse_size(text: str) -> tuple[int, int]:
    """Width and height from text such as '640x480'."""
    width, height = text.split("x")
    return int(width), int(height)


def main(argv: list[str]) -> None:
    """Runs the benchmark."""
    del argv
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(f"ours resizes with {backend()}")
    if not _their_runs(_cases()[0]):
        print("transformers or torch is not installed: timing ours alone")
    elif not _torchvision_works():
        print("torchvision is not installed or does not import: its processors are left out")
    with tempfile.TemporaryDirectory() as folder:
        for size in (parse_size(text) for text in flags.FLAGS.sizes):
            path = os.path.join(folder, f"{size[0]}x{size[1]}.jpg")
            _write_jpeg(path, size)
            for case in _cases():
                _bench(case, path, size, flags.FLAGS.rounds, flags.FLAGS.batch)


if __name__ == "__main__":
    flags.DEFINE_integer("rounds", 10, "Timed rounds, taken in turn.", lower_bound=1)
    flags.DEFINE_list("sizes", list(_SIZES), "Sizes of the JPEG files.")
    flags.DEFINE_integer("batch", 4, "Images a batch.", lower_bound=1)
    app.run(main)
