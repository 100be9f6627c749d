"""Both sides of a case held against each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bluelm_jax import decoding
from bluelm_jax.weights import convert, hf_config
from tests.parity import cases, ours
from tests.parity.cases import Case

Arrays = dict[str, np.ndarray]
FLOAT32 = 1e-5  # max |ours - reference| / max |reference|.
# Our root-mean-square error over that of the reference in bfloat16: of one output of one seed, which
# luck moves by a third either way, and the geometric mean over seeds.
BFLOAT16 = 1.25
BFLOAT16_MEAN = 1.1


@dataclasses.dataclass(frozen=True)
class Result:
    """One comparison: `error` must not exceed `bound`.

    In float32 max |a - b| / max |b|, in bfloat16 see `bfloat16`, of tokens the number that differ.
    """

    check: str
    error: float
    bound: float
    dtype: str = "float32"

    @property
    def passed(self) -> bool:
        """NaN fails."""
        return self.error <= self.bound


def relative(ours: np.ndarray, reference: np.ndarray) -> float:
    """max |a - b| / max |b|."""
    a, b = same_shape(ours, reference)
    return float(np.abs(a - b).max() / np.abs(b).max())


def root_mean_square(ours: np.ndarray, reference: np.ndarray) -> float:
    """|a - b| / |b| in the Euclidean norm."""
    a, b = same_shape(ours, reference)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def same_shape(ours: np.ndarray, reference: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both in float64.

    Raises:
      ValueError: the shapes differ.
    """
    if ours.shape != reference.shape:
        raise ValueError(f"shapes differ: ours {ours.shape}, reference {reference.shape}")
    return ours.astype(np.float64), reference.astype(np.float64)


def each(found: Arrays, reference: Arrays, prefix: str = "") -> Iterator[Result]:
    """Every output of ours against the reference's of that name."""
    for name, x in found.items():
        yield Result(prefix + name, relative(x, reference[prefix + name]), FLOAT32)


def bfloat16(found: Arrays, reference: Arrays) -> Iterator[Result]:
    """Our bfloat16 outputs against float32 arithmetic on the same rounded weights.

    Two bfloat16 programs differ from each other by as much as each differs from the exact result:
    every intermediate is rounded to 8 bits, in another order. So the bound is the reference's own
    error. Root mean squares, since the largest of a few hundred rounding errors is a matter of luck.
    """
    for name, x in found.items():
        exact, coarse = reference[f"exact.{name}"], reference[f"coarse.{name}"]
        bound = BFLOAT16 * root_mean_square(coarse, exact)
        yield Result(name, root_mean_square(x, exact), bound, "bfloat16")


def over_seeds(results: list[Result]) -> list[Result]:
    """Results of several seeds, those of bfloat16 as geometric means of their ratios.

    Where the reference is exact (embeddings that nothing scales), each result stands for itself.
    """
    ratios: dict[str, list[float]] = {}
    single = [r for r in results if r.dtype != "bfloat16" or r.bound == 0]
    for r in results:
        if r.dtype == "bfloat16" and r.bound > 0:
            ratios.setdefault(r.check, []).append(BFLOAT16 * r.error / r.bound)
    means = [
        Result(check, float(np.exp(np.mean(np.log(values)))), BFLOAT16_MEAN, "bfloat16")
        for check, values in ratios.items()
    ]
    return single + means


def towers(case: Case, seed: int, reference: Arrays, facts: dict) -> Iterator[Result]:
    """Vision towers."""
    cfg, tiles = ours.vision_config(facts, case), cases.tiles(case, seed)
    p = convert.load_vision(ours.tensors(facts, seed), cfg)
    yield from each(ours.tower(p, tiles, cfg, jnp.float32), reference)
    last_but_one = reference[f"layer.{cfg.depth - 2}"]
    error = relative(ours.penultimate(facts, case, seed), last_but_one)
    yield Result("penultimate features", error, FLOAT32)
    if "resized" in case.extras:
        for size in (case.config["image_size"] + more for more in cases.RESIZED):
            found = ours.resized(p, cases.tiles(case, seed, size), cfg)
            error = relative(found, reference[f"resized.{size}"])
            yield Result(f"positions resized to {size} pixels", error, FLOAT32)
    if "bfloat16" in case.extras:
        p = convert.load_vision(ours.tensors(facts, seed, jnp.bfloat16), cfg)
        yield from bfloat16(ours.tower(p, tiles, cfg, jnp.bfloat16), reference)


def decoders(case: Case, seed: int, reference: Arrays, facts: dict) -> Iterator[Result]:
    """Causal language models."""
    cfg, ids = hf_config.decoder_config(facts["config"]), cases.tokens(case, seed)
    p = convert.load_decoder(ours.tensors(facts, seed), cfg)
    yield from each(ours.rows(p, ids, cfg, jnp.float32), reference)
    logits = reference["logits"]
    if "far" in case.extras:
        far = cases.far_positions(case, seed)
        found = ours.rows(p, ids, cfg, jnp.float32, positions=far, each_block=False)["logits"]
        error = relative(found, reference["far.logits"])
        yield Result("positions beyond the trained length", error, FLOAT32)
    if "cache" in case.extras:
        n = case.length
        for name, steps in {
            "full cache, at once": [n], "full cache, one by one": [1] * n,
            "full cache, chunks of 3": [min(3, n - i) for i in range(0, n, 3)],
        }.items():  # fmt: skip
            yield Result(name, relative(ours.cached(p, ids, cfg, steps), logits), FLOAT32)
    if "blocked" in case.extras:
        small = dataclasses.replace(cfg, attention_block=3)
        found = ours.rows(p, ids, small, jnp.float32, each_block=False)["logits"]
        yield Result("attention in blocks", relative(found, logits), FLOAT32)
    if "unequal" in case.extras:
        yield from unequal(p, case, seed, cfg, reference["unequal.logits"])
    if case.new_tokens:
        for name, q in generating(p, case, cfg).items():
            wrong = int((ours.greedy(q, case, seed, cfg) != reference["greedy"]).sum())
            yield Result(f"greedy tokens that differ{name}", wrong, 0)
    if "bfloat16" in case.extras:
        p = convert.load_decoder(ours.tensors(facts, seed, jnp.bfloat16), cfg)
        yield from bfloat16(ours.rows(p, ids, cfg, jnp.bfloat16), reference)


def generating(p, case: Case, cfg) -> dict[str, Any]:
    """The weights as declared and, where the case says so, as laid out for decoding."""
    if "prepared" not in case.extras:
        return {"": p}
    return {"": p} | {
        f", laid out for {rows} rows": decoding.prepare(p, cfg, rows=rows, dtype=jnp.float32)
        for rows in (1, 2)
    }


def unequal(p, case: Case, seed: int, cfg, logits: np.ndarray) -> Iterator[Result]:
    """Rows of unequal lengths, padded on the right; what stands in padding is nobody's business."""
    ids, lengths = cases.tokens(case, seed), cases.row_lengths(case, seed)
    real = np.arange(case.length) < lengths[:, None]
    found = ours.rows(p, ids, cfg, jnp.float32, lengths=lengths, each_block=False)["logits"]
    yield Result("unequal rows", relative(found[real], logits[real]), FLOAT32)
    ends = logits[np.arange(case.rows), lengths - 1]
    for chunk in (0, 3):
        found = ours.prefilled(p, ids, lengths, cfg, chunk)
        name = f"unequal prompts, chunks of {chunk}" if chunk else "unequal prompts"
        yield Result(name, relative(found, ends), FLOAT32)


def projectors(case: Case, seed: int, reference: Arrays, facts: dict) -> Iterator[Result]:
    """What stands between tower and decoder."""
    yield from each({"image tokens": ours.image_tokens(facts, case, seed)}, reference)


def rope(case: Case, seed: int, reference: Arrays, facts: dict) -> Iterator[Result]:
    """Position tables alone."""
    yield from each(ours.rope(case), reference)


PARTS = {
    "siglip": towers, "siglip2": towers, "llava_next": projectors, "internvl": projectors,
    "rope": rope,
}  # fmt: skip


def run(case: Case, seed: int, reference: Arrays, facts: dict) -> list[Result]:
    """All comparisons of one case. Matrix products in full float32, whatever the device."""
    with jax.default_matmul_precision("highest"):
        return list(PARTS.get(case.family, decoders)(case, seed, reference, facts))
