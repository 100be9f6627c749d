r"""Turns records into ArrayRecord shards, which many hosts read at random and in few files.

    python -m experiments.prepare_data --in=train.json --out=train_shards --shards=16 --workers=8
    python -m experiments.prepare_data --in=train.json --image_root=images --embed_images \
        --out=train_shards --shard_mb=512 --workers=8

--in is a JSON array, JSON lines, or a Hugging Face data set on disk. --out receives
name-00000-of-00016.array_record, ... and, last, manifest.json: counts, sizes and checksums, what was
left out and why. A folder with its manifest serves as SourceConfig.path. With --embed_images the
shards hold the images' files, byte for byte, and nothing else is read; without, the images stay where
they are and SourceConfig.image_root says where.

The same input and flags write the same bytes, with any number of --workers. An interrupted command
goes on where it was when it is given again; shards whose checksum is right are kept.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import shutil
import sys
from typing import Any

from absl import app, flags, logging

from bluelm_jax.data import shard_writer
from bluelm_jax.data.array_records import FORMAT, MANIFEST, VERSION, read_manifest
from bluelm_jax.data.opening import matching, open_all
from bluelm_jax.data.plans import UnreadableImageError
from bluelm_jax.data.shard_writer import PROGRESS, Job
from bluelm_jax.data.sources import InvalidRecordError, Records
from bluelm_jax.data_config import SourceConfig
from experiments.shard_workers import write_shards
from gin_configs.errors import guarded

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the command's flags; not on import, where they could clash with another command's."""
    flags.DEFINE_string(
        "in", None, "Records: .json, .jsonl, or a data set's folder.", required=True
    )
    flags.DEFINE_string("out", None, "Folder of the shards.", required=True)
    flags.DEFINE_string(
        "image_root", "", "Folder the images are relative to; default: that of --in."
    )
    flags.DEFINE_string("name", None, "Start of the shards' names; default: that of --in.")
    flags.DEFINE_integer("shards", None, "How many shards.", lower_bound=1, upper_bound=99999)
    flags.DEFINE_float(
        "shard_mb", None, "Or: about how large each, before compression; default 256.", 0.001
    )
    flags.DEFINE_integer("workers", os.cpu_count() or 1, "Processes.", lower_bound=1)
    flags.DEFINE_bool("embed_images", False, "Put the images' files into the shards.")
    flags.DEFINE_enum(
        "on_invalid_record", "raise", ["raise", "skip"], "For a record that breaks a rule."
    )
    flags.DEFINE_enum(
        "on_unreadable_image",
        "raise",
        ["raise", "skip"],
        "For a sample whose image to embed is bad.",
    )
    flags.DEFINE_integer("max_names", 20, "Names kept of what is left out, a shard and reason.", 0)


def _job(out: pathlib.Path) -> tuple[Job, Records]:
    """The job that the flags ask for, and its records."""
    path: str = FLAGS["in"].value  # type: ignore[assignment] (the flag is required)
    source = SourceConfig(
        path=path, image_root=FLAGS.image_root, index_dir=str(out / PROGRESS / "index")
    )
    if FLAGS.shards and FLAGS.shard_mb:
        raise ValueError("give --shards or --shard_mb, not both")
    records = open_all(source)
    if len(records) == 0:
        raise ValueError(f"{path}: the file holds no record")
    shards = FLAGS.shards or shard_writer.shards_of(
        source, records, FLAGS.shard_mb or 256, FLAGS.embed_images
    )
    if shards > len(records):
        raise ValueError(f"--shards={shards}, but {path} has {len(records)} records")
    job = Job(
        source=source,
        out=str(out),
        name=FLAGS.name or plain_name(source.label),
        shards=shards,
        embed_images=FLAGS.embed_images,
        on_invalid_record=FLAGS.on_invalid_record,
        on_unreadable_image=FLAGS.on_unreadable_image,
        max_names=FLAGS.max_names,
    )
    return job, records


def plain_name(label: str) -> str:
    """A label as a file name; that of a pattern, `part-*`, is `part`."""
    return re.sub(r"[^\w.+=@ -]+", "_", label).strip("_-. ") or "records"


def check_names(path: str, out: pathlib.Path, name: str | None) -> None:
    """Looks at the flags before anything is written.

    Raises:
      ValueError: `--name` is no plain file name; `--out` is or lies in what `--in` names.
    """
    if name and (re.search(r'[/\\*?\[\]:"<>|\0-\37]', name) or name.startswith(".")):
        raise ValueError(f"--name={name!r}: must be a plain file name, without / * ? [ ]")
    target = out.resolve()
    found = matching(path)
    inputs = {pathlib.Path(each).resolve() for each in found if pathlib.Path(each).is_dir()}
    if found != [path]:
        inputs |= {pathlib.Path(each).resolve().parent for each in found} & {target}
    for folder in inputs:
        if folder == target or folder in target.parents:
            raise ValueError(
                f"--out={out}: lies in --in={path}, which would change; choose another"
            )


def plan(job: Job, count: int) -> dict[str, Any]:
    """What the shards are made of and how; the same plan gives the same shards."""
    chosen = dataclasses.asdict(job)
    settings = {key: chosen[key] for key in chosen if key not in ("source", "out", "shards")}
    return {
        "format": FORMAT,
        "version": VERSION,
        "input": shard_writer.fingerprint(job.source.path),
        "input_records": count,
        "image_root": job.source.image_root,
        "num_shards": job.shards,
        **settings,
    }


def make_folder(out: pathlib.Path) -> None:
    """Makes the folder; ValueError where one is there that this command did not make."""
    out.mkdir(parents=True, exist_ok=True)
    found = sorted(path.name for path in out.iterdir())
    if found and PROGRESS not in found and MANIFEST not in found:
        raise ValueError(f"{out}: not empty ({found[0]}, ...); choose another --out")


def read_plan(path: pathlib.Path) -> dict[str, Any]:
    """What a command before this one wrote; ValueError if it is something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"an object is expected, got {type(found).__name__}")
    except ValueError as error:
        raise ValueError(
            f"{path}: damaged ({error}); remove the folder of --out or choose another"
        ) from error
    if path.name == MANIFEST:
        read_manifest(str(path.parent))
    return found


def nothing_finished(out: pathlib.Path) -> bool:
    """Whether an unfinished folder holds no whole shard yet."""
    return not (out / MANIFEST).is_file() and not any(out.glob("*.array_record"))


def check_plan(out: pathlib.Path, wanted: dict[str, Any]) -> None:
    """Writes the plan of a new folder, and refuses one of another plan.

    A folder in which no shard was finished counts as new. An unfinished one goes on with a policy
    that leaves out where it raised before: its whole shards left nothing out.

    Raises:
      ValueError: the folder holds shards of other input or flags.
    """
    progress, manifest = out / PROGRESS, out / MANIFEST
    plans = [path for path in (progress / "plan.json", manifest) if path.is_file()]
    for partial in out.glob("*.array_record.*partial"):  # Of a command that was killed.
        partial.unlink()
    if not plans or nothing_finished(out):
        shard_writer.write_json(progress / "plan.json", wanted)
        return
    before = read_plan(plans[0])
    changed = [key for key in wanted if before.get(key) != wanted[key] and key != "input"]
    if before.get("input", {}).get("sha256") != wanted["input"]["sha256"]:
        changed.insert(0, "input")
    leaves_out = all((before.get(key), wanted[key]) == ("raise", "skip") for key in changed)
    if leaves_out and not manifest.is_file():
        shard_writer.write_json(progress / "plan.json", wanted)
    elif changed:
        shown = "; ".join(f"{key} {before.get(key)!r} -> {wanted[key]!r}" for key in changed)
        raise ValueError(f"{out}: made otherwise: {shown}. Choose another --out or remove it")
    if manifest.is_file():  # Finished once: its notes come back, in case a shard was damaged since.
        shard_writer.write_json(progress / "plan.json", wanted)
        for shard in before["shards"]:
            shard_writer.write_json(progress / f"{shard['file']}.json", shard)


def finish(out: pathlib.Path, wanted: dict[str, Any], notes: list[dict[str, Any]]) -> None:
    """Writes the manifest and removes what only an unfinished folder needs."""
    skipped: dict[str, int] = {}
    for note in notes:
        for reason, count in note["skipped"].items():
            skipped[reason] = skipped.get(reason, 0) + count
    manifest = {
        **wanted,
        "records": sum(note["records"] for note in notes),
        "bytes": sum(note["bytes"] for note in notes),
        "skipped": skipped,
        "shards": notes,
    }
    shard_writer.write_json(out / MANIFEST, manifest)
    shutil.rmtree(out / PROGRESS)
    print(
        f"{manifest['records']:,} of {wanted['input_records']:,} records in {len(notes)} shards, "
        f"{manifest['bytes'] / 2**20:,.1f} MiB, in {out}"
    )
    for reason, count in sorted(skipped.items()):
        print(f"  {reason}: {count} left out; names are in {MANIFEST}")


def main(argv: list[str]) -> None:
    """Runs the command."""
    if argv[1:]:
        raise ValueError(f"unexpected arguments {argv[1:]}; options start with --")
    out = pathlib.Path(FLAGS.out)
    check_names(FLAGS["in"].value, out, FLAGS.name)  # type: ignore[arg-type] (--in is required)
    make_folder(out)
    job, records = _job(out)
    wanted = plan(job, len(records))
    check_plan(out, wanted)
    try:
        notes = write_shards(job, records, FLAGS.workers)
    except UnreadableImageError as error:
        raise ValueError(f"{error} (--on_unreadable_image=skip leaves such samples out)") from error
    except InvalidRecordError as error:
        raise ValueError(f"{error} (--on_invalid_record=skip leaves such records out)") from error
    finish(out, wanted, notes)


if __name__ == "__main__":
    define_flags()
    logging.set_verbosity(logging.WARNING)
    sys.exit(app.run(guarded(main)))
