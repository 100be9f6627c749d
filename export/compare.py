r"""Compares exported models with each other and with JAX, on a file of prompts.

    python -m export.compare --bundle=float=runs/quickstart/export_float \
        --bundle=int4=runs/quickstart/export --prompts=runs/quickstart/export_prompts.npz \
        --result=runs/quickstart/export.json

Prints, and writes as JSON: exact match and character accuracy against the reference texts, the
share of answers equal to JAX's, bytes of every file, and median milliseconds of every stage.

The .npz holds: tokens int32 [n, L] padded on the right, lengths [n], image_index [n, L], tiles
uint8 [G, I, S, S, 3] (row b takes those of group b * G // n, as in `Batch`), references [n] texts,
and JAX's greedy answers jax_tokens int32 [n, T] with jax_lengths [n]. Answers are bounded by T
tokens here too, the stop token included.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from bluelm_jax.evals import metrics
from export import gin_setup as gin_setup
from export import prompt
from export.bundle import Manifest
from export.config import RunnerConfig
from export.runner import Runner
from gin_configs import command

BUNDLE = flags.DEFINE_multi_string("bundle", [], "name=directory; may be repeated.")
PROMPTS = flags.DEFINE_string("prompts", None, "The .npz of prompts.")
RESULT = flags.DEFINE_string("result", None, "JSON file to write.")
flags.adopt_module_key_flags(command)
Decode = Callable[[Sequence[int]], str]


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    """A prompt with the views it uses, its reference text, JAX's answer and that one's bound."""

    tiles: np.ndarray
    tokens: np.ndarray
    image_index: np.ndarray
    reference: str
    jax_tokens: list[int]
    max_new_tokens: int


def load_questions(path: str | Path) -> list[Question]:
    """Reads the .npz described above.

    Raises:
      ValueError: an array is missing, or there are no prompts.
    """
    with np.load(path) as file:
        names = ("tokens", "lengths", "image_index", "tiles", "references", "jax_tokens")
        missing = [name for name in (*names, "jax_lengths") if name not in file]
        if missing:
            raise ValueError(f"{path}: holds no {', '.join(missing)}")
        arrays = {name: file[name] for name in file.files}
    count = len(arrays["tokens"])
    if count == 0 or count % len(arrays["tiles"]):
        raise ValueError(f"{path}: {count} prompts for {len(arrays['tiles'])} groups of tiles")
    return [_question(arrays, row) for row in range(count)]


def _question(arrays: Mapping[str, np.ndarray], row: int) -> Question:
    length, count = int(arrays["lengths"][row]), len(arrays["tokens"])
    tiles = arrays["tiles"][row * len(arrays["tiles"]) // count]
    return Question(
        tiles=tiles,
        tokens=arrays["tokens"][row, :length],
        image_index=arrays["image_index"][row, :length],
        reference=str(arrays["references"][row]),
        jax_tokens=arrays["jax_tokens"][row, : int(arrays["jax_lengths"][row])].tolist(),
        max_new_tokens=arrays["jax_tokens"].shape[1],
    )


def used_views(question: Question, tokens_per_tile: int) -> Question:
    """The same question with only the tiles that its image tokens come from, renumbered."""
    index = question.image_index
    views = np.unique(index[index >= 0] // tokens_per_tile)
    moved = np.searchsorted(views, index // tokens_per_tile) * tokens_per_tile
    renumbered = np.where(index >= 0, moved + index % tokens_per_tile, index)
    return dataclasses.replace(question, tiles=question.tiles[views], image_index=renumbered)


def answer_all(runner: Runner, questions: Sequence[Question]) -> list[list[int]]:
    """Token ids of every answer, bounded as JAX's were."""
    answers = []
    for question in questions:
        q = used_views(question, runner.shapes.tokens_per_tile)
        bound = question.max_new_tokens
        found = runner.generate(q.tiles, q.tokens, q.image_index, max_new_tokens=bound)
        answers.append(found.tokens)
    return answers


def score(
    name: str, answers: Sequence[list[int]], questions: Sequence[Question], decode: Decode
) -> dict[str, Any]:
    """Mean exact match, character accuracy, and agreement with JAX (shares of 1)."""
    texts = [(decode(a), q.reference) for a, q in zip(answers, questions, strict=True)]
    same = [decode(a) == decode(q.jax_tokens) for a, q in zip(answers, questions, strict=True)]
    return {
        "name": name,
        "exact_match": float(np.mean([metrics.exact_match(*pair) for pair in texts])),
        "character_accuracy": float(np.mean([metrics.character_accuracy(*t) for t in texts])),
        "agreement": float(np.mean(same)),
    }


def compare(
    bundles: Mapping[str, str | Path],
    questions: Sequence[Question],
    *,
    config: RunnerConfig,
    decode: Decode | None = None,
) -> dict[str, Any]:
    """Runs every bundle on every question.

    Args:
      bundles: name -> directory.
      questions: prompts, references and JAX's answers.
      config: threads; the bound of an answer comes from the questions.
      decode: ids to text; None takes the tokenizer that each bundle names.

    Returns:
      {'num_images', 'rows', 'files', 'stages'}; a row for JAX comes first. Times leave out the
      first question, which pays for the interpreter's allocations, if there are others.
    """
    rows, files, stages = [], [], []
    for name, directory in bundles.items():
        runner = Runner(directory, config)
        text = decode or prompt.Prompter(directory, runner.manifest).tokenizer.decode
        if not rows:
            jax_row = score("JAX float32", [q.jax_tokens for q in questions], questions, text)
            rows.append({**jax_row, "agreement": None})
        answers = answer_all(runner, questions[:1])
        if len(questions) > 1:
            runner.times.calls.clear()
            answers += answer_all(runner, questions[1:])
        rows.append(score(name, answers, questions, text))
        files += _files(name, runner.manifest)
        times = runner.times.median()
        stages += [{"stage": s, "variant": name, "ms": ms} for s, ms in times.items()]
    return {"num_images": len(questions), "rows": rows, "files": files, "stages": stages}


def _files(name: str, manifest: Manifest) -> list[dict[str, Any]]:
    return [
        {"name": f"{name}/{file}", "bytes": entry["bytes"]}
        for file, entry in manifest.files.items()
    ]


def _print(result: dict[str, Any]) -> None:
    print(f"{'form':<14}{'exact':>8}{'chars':>8}{'as JAX':>8}   on {result['num_images']} prompts")
    for row in result["rows"]:
        same = "-" if row["agreement"] is None else f"{row['agreement']:.3f}"
        exact, chars = row["exact_match"], row["character_accuracy"]
        print(f"{row['name']:<14}{exact:>8.3f}{chars:>8.3f}{same:>8}")
    for file in result["files"]:
        print(f"{file['name']:<34}{file['bytes']:>12,} bytes")
    for time in result["stages"]:
        print(f"{time['variant'] + ' ' + time['stage']:<34}{time['ms']:>12.3f} ms")


def main() -> None:
    """Reads the prompts, runs the bundles, prints and writes the result."""
    config = command.build(RunnerConfig)
    if not BUNDLE.value or PROMPTS.value is None:
        raise ValueError("name at least one --bundle=name=directory, and --prompts=file.npz")
    if bad := [item for item in BUNDLE.value if "=" not in item]:
        raise ValueError(f"--bundle={bad[0]}: must be name=directory")
    bundles = dict(item.split("=", 1) for item in BUNDLE.value)
    questions = load_questions(PROMPTS.value)
    if command.DRY_RUN.value:
        print(f"{len(questions)} prompts; bundles {bundles}; {config}")
        return
    result = compare(bundles, questions, config=config)
    _print(result)
    if RESULT.value:
        Path(RESULT.value).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    command.run(main)
