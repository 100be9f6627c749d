"""The commands on a messy data set: every defect by name, and training agrees sample by sample."""

import collections
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import messy_data
import pytest
from data_helpers import SIDE, record, write_image, write_json

from bluelm_jax.data import validation
from bluelm_jax.data.findings import KINDS
from bluelm_jax.data.pipeline import Pipeline
from bluelm_jax.data.sample_checks import STOPS

ROOT = pathlib.Path(__file__).parent.parent
# Kinds that no record of the set can have: they are about files, or about rules with other names.
ELSEWHERE = {"unreadable_source", "empty_source", "invalid_record"}
NEED_PIXELS = {"image_truncated", "image_damaged", "duplicate_image"}


@pytest.fixture(scope="module")
def messy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("messy") / "data"
    folder.mkdir()
    return messy_data.write(folder)


def check(path, **options):
    """Report and findings of the set under the bounds of `messy_data`."""
    found = []
    report = validation.validate(
        messy_data.config(path),
        side=SIDE,
        options=validation.Options(**options),
        on_finding=found.append,
    )
    return report, found


def command(module, path, *flags):
    """Arguments of a command that reads the set by a gin file's bindings."""
    bindings = {
        "SourceConfig.path": str(path),
        "DataConfig.seq_len": messy_data.BOUNDS["seq_len"],
        "DataConfig.tiles_per_group": messy_data.BOUNDS["tiles_per_group"],
        "DataConfig.max_megapixels": messy_data.BOUNDS["max_megapixels"],
        "DataConfig.max_aspect_ratio": messy_data.BOUNDS["max_aspect_ratio"],
        "DecoderConfig.max_length": messy_data.BOUNDS["seq_len"],
        "DataConfig.batch_size": 2,
        "DataConfig.shuffle": False,
        "DataConfig.epochs": 1,
        "DataConfig.drop_remainder": False,
        "ByteTokens.extra_special_tokens": (),
    }
    relaxed = ("Tiling.scheme = @Relaxed()",)
    bound = [f"--gin_bindings={name} = {value!r}" for name, value in bindings.items()]
    bound += [f"--gin_bindings={each}" for each in relaxed]
    gin = "--gin_file=tests/testdata/tiny.gin"
    return [sys.executable, "-m", module, gin, *bound, *flags]


def run(arguments, status):
    env = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE")} | {"NO_COLOR": "1"}
    done = subprocess.run(
        arguments, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def test_the_set_has_every_kind(messy):
    _, defects = messy
    assert {defect.kind for defect in defects} == set(KINDS) - ELSEWHERE
    assert len(set(KINDS) - ELSEWHERE) >= 50


@pytest.mark.parametrize("decode", [False, True])
def test_every_defect_is_named_by_kind_record_place_and_file(messy, decode):
    path, defects = messy
    _, found = check(path, decode=decode)
    named = collections.Counter((f.kind, f.record, f.place, f.file) for f in found)
    wanted = {tuple(d) for d in defects if decode or d.kind not in NEED_PIXELS}
    assert set(named) == wanted
    assert set(named.values()) == {1}
    assert all(f.where.startswith(f"{path}[{f.record}] (byte ") for f in found)
    assert not [f for f in found if f.record == 0]  # The clean one.


def test_errors_are_exactly_what_training_leaves_out(messy):
    """The same counters, and sample by sample the same reason and detail."""
    path, _ = messy
    report, found = check(path, decode=True)
    stream = iter(Pipeline(messy_data.config(path), side=SIDE))
    batches = list(stream)
    counts = collections.Counter(stream.counters.counts)
    for name in ("batches", "positions", "supervised", "tiles"):
        counts.pop(name)
    (source,) = report.sources
    assert source.counters == counts
    assert (
        sum(len(set(row[row > 0])) for b in batches for row in b["segments"]) == counts["samples"]
    )
    reasons = ("invalid_record", "unreadable_image", "overlong", "too_many_tiles")
    details = [text for reason in reasons for text in stream.counters.names[reason]]
    errors = {f.where for f in found if f.severity == "error"}
    assert len(errors) == len(details) == sum(counts[reason] for reason in reasons)
    assert all(sum(where in text for text in details) == 1 for where in errors)
    assert source.counters["samples"] == source.records - len(errors)


@pytest.mark.parametrize("decode", [False, True])
def test_verdict_and_example_maker_agree_on_every_record(messy, decode):
    path, _ = messy
    _, found = check(path, decode=decode)
    pipeline = Pipeline(messy_data.config(path), side=SIDE)
    (records,), (source,) = pipeline.records, pipeline.config.sources
    make = pipeline.maker.make if decode else pipeline.maker.make_plan
    for i in range(len(records)):
        made = pipeline.maker.of_record(make, records, i, source)
        errors = {f.kind for f in found if f.record == i and f.severity == "error"}
        assert (made.kind in errors) if hasattr(made, "reason") else not errors, i


def test_policies_that_change_samples_are_counted_as_training_counts(messy):
    path, _ = messy
    fields = {"on_unreadable_image": "replace_with_text_only", "on_overlong": "truncate_text"}
    config = messy_data.config(path, **fields)
    report = validation.validate(config, side=SIDE, options=validation.Options(decode=True))
    stream = iter(Pipeline(config, side=SIDE))
    samples = sum(1 for _ in stream) and stream.counters.counts
    counters = report.sources[0].counters
    for reason in ("samples", "invalid_record", "replaced_with_text_only", "overlong"):
        assert counters[reason] == samples.get(reason, 0), reason
    assert counters["replaced_with_text_only"] >= 14 and not counters["unreadable_image"]


def test_policies_that_raise_are_counted_as_stops(messy):
    path, _ = messy
    config = messy_data.config(path, on_invalid_record="raise")
    (source,) = validation.validate(config, side=SIDE).sources
    (lenient,) = check(path)[0].sources
    assert source.counters[STOPS] == lenient.counters["invalid_record"] > 10
    assert source.kinds == lenient.kinds


def test_validate_data_as_a_user_runs_it(messy, tmp_path):
    path, defects = messy
    report = tmp_path / "check.json"
    flags = ("--decode", f"--report={report}", "--workers=2", "--names=1")
    out = run(command("experiments.validate_data", path, *flags), status=1)
    for kind in {defect.kind for defect in defects}:
        assert f" {kind} " in out, kind
    summary = json.loads(report.read_text())
    assert summary["partial"] is False and summary["findings"] == "check.findings.jsonl"
    lines = [
        json.loads(line) for line in (tmp_path / "check.findings.jsonl").read_text().splitlines()
    ]
    named = {(line["kind"], line["record"], line["place"], line["file"]) for line in lines}
    assert named == {tuple(defect) for defect in defects}
    (source,) = summary["sources"]
    counted = {kind: entry["count"] for kind, entry in source["kinds"].items()}
    assert counted == collections.Counter(line["kind"] for line in lines)
    assert summary["counts"]["error"] == sum(
        KINDS[line["kind"]].severity == "error" for line in lines
    )


def test_inspect_data_as_a_user_runs_it(messy, tmp_path):
    """Bad samples are named where they would have stood; the others are shown."""
    path, _ = messy
    html = tmp_path / "page.html"
    flags = (f"--html={html}", "--batches=100", "--width=400")
    out = run(command("experiments.inspect_data", path, *flags), status=0)
    (source,) = check(path, decode=True)[0].sources
    assert out.count("│ 1. sample ") == source.counters["samples"]
    last = out.rsplit("batch ", 1)[1]
    stopped = sum(n for reason, n in source.counters.items() if reason in last)
    assert (
        last.count("a run would stop here: ")
        == stopped - source.counters["samples"] - (source.counters["leading_turns_left_out"])
    )
    assert "\x00" not in out and "a\\x00b" in out
    assert html.read_text().count('class="left-out"') == last.count("a run would stop here: ")


def test_interrupted_check_reports_what_it_knows(messy, tmp_path):
    """Ctrl-C: exit status 130, a partial report, findings up to there."""
    path, _ = messy
    long = path.with_name("long.jsonl")
    long.write_text(path.read_text() * 3000)
    report = tmp_path / "part.json"
    arguments = command("experiments.validate_data", long, "--names=0", f"--report={report}")
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    lines = report.with_suffix(".findings.jsonl")
    deadline = time.time() + 120
    while time.time() < deadline and not (lines.is_file() and lines.stat().st_size):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, (out, err)
    summary = json.loads(report.read_text())
    (source,) = summary["sources"]
    assert summary["partial"] and 0 < source["checked"] < source["records"]
    assert b"partial" in out


def test_exit_statuses_and_usage_errors(messy, tmp_path):
    """0 clean, 1 findings of --fail_on or worse, 2 a wrong command; several processes at once."""
    path, _ = messy
    write_image(tmp_path, "a.png")
    warned = [record("a", "<image>Q", "A", image="a.png"), record("a", "Q", "A")]
    warned = write_json(tmp_path / "warned.json", warned)
    module = (sys.executable, "-m", "experiments.validate_data")
    cases = {
        (f"--data_json={warned}",): (0, "0 errors, 1 warning, 0 info"),
        (f"--data_json={warned}", "--fail_on=warning"): (1, "duplicate_id"),
        (f"--data_json={path}", "--seq_len=160", "--tiles_per_group=10"): (1, "too_many_tiles"),
        (f"--data_json={tmp_path / 'none.json'}",): (1, "unreadable_source"),
        ("--list_kinds",): (0, "image_symlink_loop"),
        (): (2, "name the data: --run, --gin_file or --data_json"),
        (f"--data_json={warned}", f"--report={warned}"): (2, "would write over the data"),
        (f"--data_json={warned}", "--run=x"): (2, "--data_json stands alone"),
        ("--run=x", "--seq_len=9"): (2, "--seq_len only with --data_json"),
        (f"--data_json={warned}", "--template=llama3"): (2, "needs the token '<|begin_of_text|>'"),
    }
    started = {
        flags: subprocess.Popen(
            [*module, *flags], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for flags in cases
    }
    for flags, (status, message) in cases.items():
        out, _ = started[flags].communicate(timeout=240)
        assert started[flags].returncode == status and message in out, (flags, out)
        assert "Traceback" not in out
