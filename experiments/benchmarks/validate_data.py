"""Records a second that validation checks on one core, and where the time goes.

    python -m experiments.benchmarks.validate_data
    python -m experiments.benchmarks.validate_data --tokenizer=tokenizer.json --bos= --eos='<|end|>'

Writes two data sets of generated conversations, short ones (2 turns) and long ones (25 turns),
each record with one of 200 JPEG files, and checks them from headers alone: with the byte tokenizer
and with a `tokenizer.json`: the given one, or a byte-level BPE of 8,000 tokens trained on the
generated text. CPU time of this process, the best of several runs. About a minute.
"""

from __future__ import annotations

import cProfile
import itertools
import json
import pstats
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tokenizers
from absl import app, flags
from PIL import Image

from bluelm_jax import data_config, layout, schemes
from bluelm_jax.data import validation

FLAGS = flags.FLAGS
_IMAGES = 200
_TILING = schemes.PRESETS["relaxed_384_3x3_a0.1"]
# Functions whose time, with what they call, is reported: name in the table -> function.
_PARTS = {
    "tokens": ("plans.py", "_ids"),
    "image headers (plan)": ("plans.py", "_find_image"),
    "image layout": ("plans.py", "_layout"),
    "image checks": ("image_checks.py", "check_image"),
    "text checks": ("record_checks.py", "check_text"),
    "JSON": ("sources.py", "__getitem__"),
    "duplicate keys": ("sample_checks.py", "_add_keys"),
}


def _words(rng: random.Random) -> list[str]:
    letters = "etaoinshrdlucmfwypvbgk"
    return ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(3000)]


def _write(folder: Path, records: int, turns: int, rng: random.Random) -> Path:
    """A file of records, each with an image and `turns` questions and answers in turn."""
    words = _words(rng)
    # A few words make most of a text (Zipf's law).
    frequencies = list(itertools.accumulate(1 / rank for rank in range(1, len(words) + 1)))

    def text(least: int, most: int) -> str:
        chosen = rng.choices(words, cum_weights=frequencies, k=rng.randint(least, most))
        return " ".join(chosen).capitalize() + "."

    path = folder / f"{turns}.jsonl"
    with path.open("w") as file:
        for i in range(records):
            said = [{"from": "human", "value": "<image>\n" + text(5, 15)}]
            for turn in range(1, turns):
                who, least, most = ("gpt", 10, 40) if turn % 2 else ("human", 5, 15)
                said.append({"from": who, "value": text(least, most)})
            image = f"{rng.randrange(_IMAGES):03d}.jpg"
            record = {"id": f"{turns}-{i}", "image": image, "conversations": said}
            file.write(json.dumps(record) + "\n")
    return path


def _write_images(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(_IMAGES):
        width, height = (int(n) for n in rng.integers(200, 700, 2))
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        image.save(folder / f"{i:03d}.jpg")


def _train_tokenizer(folder: Path, texts: list[Path]) -> data_config.TokenizerFile:
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=8000,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train([str(path) for path in texts], trainer)
    model.save(str(folder / "tokenizer.json"))
    return data_config.TokenizerFile(path=str(folder / "tokenizer.json"))


def _check(path: Path, tokenizer: data_config.TokenizerChoice) -> Callable[[], validation.Report]:
    config = data_config.DataConfig(
        sources=(data_config.SourceConfig(path=str(path)),),
        tokenizer=tokenizer,
        tiling=_TILING,
        seq_len=65536,
        batch_size=1,
        tiles_per_group=40,
    )
    side = layout.view_side(_TILING.tile_size)
    return lambda: validation.validate(config, side=side)


def _parts(run: Callable[[], object]) -> str:
    """Shares of the time, from a run under the profiler, which slows small functions most."""
    profile = cProfile.Profile()
    profile.runcall(run)
    table = pstats.Stats(profile).stats  # pyright: ignore[reportAttributeAccessIssue]
    total = sum(own for _, _, own, _, _ in table.values())
    shares = {}
    for name, (file, function) in _PARTS.items():
        times = [
            row[3] for key, row in table.items() if key[0].endswith(file) and key[2] == function
        ]
        shares[name] = sum(times) / total
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items())


def main(argv: list[str]) -> None:
    """Runs the benchmark."""
    del argv
    with tempfile.TemporaryDirectory() as name:
        folder, rng = Path(name), random.Random(0)
        _write_images(folder)
        counts = {2: FLAGS.records, 25: max(1, FLAGS.records // 5)}
        paths = {turns: _write(folder, n, turns, rng) for turns, n in counts.items()}
        bpe = data_config.TokenizerFile(
            path=FLAGS.tokenizer, bos=FLAGS.bos or None, eos=FLAGS.eos or None
        ) if FLAGS.tokenizer else _train_tokenizer(folder, list(paths.values()))  # fmt: skip
        for title, choice in (("bytes", data_config.ByteTokens()), ("tokenizer.json", bpe)):
            for turns, path in paths.items():
                run = _check(path, choice)
                seconds, errors = [], 0
                for _ in range(FLAGS.rounds):
                    start = time.process_time()
                    errors = run().count()
                    seconds.append(time.process_time() - start)
                if errors:
                    raise SystemExit(f"{errors} errors in data that has none")
                speed = counts[turns] / min(seconds)
                size = path.stat().st_size / counts[turns]
                print(f"{title}, {turns} turns ({size:,.0f} bytes): {speed:,.0f} records/s")
                print(f"  {_parts(run)}", flush=True)


if __name__ == "__main__":
    flags.DEFINE_integer("records", 5000, "Records of the short kind; a fifth of the long one.")
    flags.DEFINE_integer("rounds", 3, "Runs of each; the best counts.", lower_bound=1)
    flags.DEFINE_string("tokenizer", None, "A tokenizer.json to measure; default: trained here.")
    flags.DEFINE_string("bos", "<s>", "Its token that opens a sequence; '' for none.")
    flags.DEFINE_string("eos", "</s>", "Its token that ends a turn; '' for none.")
    app.run(main)
