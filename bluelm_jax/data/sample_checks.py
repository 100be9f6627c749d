"""One sample checked: the verdict of the code that makes examples, then what else is odd.

Whether a sample is used is never decided here: an `ExampleMaker` is asked, first with every policy
set to leave out, so that each defect shows whatever the policies are, then with the run's own
policies. So findings of severity 'error' and what training leaves out are the same samples.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from bluelm_jax.data import conversation, duplicates, image_checks, images, record_checks
from bluelm_jax.data.examples import (
    Example,
    ExampleMaker,
    OverlongError,
    Skipped,
    TooManyTilesError,
)
from bluelm_jax.data.findings import KINDS, Finding
from bluelm_jax.data.image_bytes import ImageBytes, image_name
from bluelm_jax.data.plans import Plan, Planner, UnreadableImageError
from bluelm_jax.data.record_checks import Odd
from bluelm_jax.data.sources import InvalidRecordError, Records, image_files, sample_name
from bluelm_jax.data_config import DataConfig, SourceConfig

# Events that policies do not cause; the sample is used as any other.
STOPS = "stops_the_run"
_REFUSALS = (InvalidRecordError, OverlongError, TooManyTilesError, UnreadableImageError)


@dataclasses.dataclass
class Checked:
    """What is known of one record.

    Attributes:
      findings: its defects.
      events: (reason, detail) as the counters of a run with the config's own policies have them,
        'samples' for a sample that is used, `STOPS` where a policy raises.
      size: (positions, tiles) of a sample that fits; None for others.
      id_key, sample_key: hashes of the id and of image and conversation; 0 without.
      image_keys: of each image, where decoded.
    """

    findings: list[Finding] = dataclasses.field(default_factory=list)
    events: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    size: tuple[int, int] | None = None
    id_key: int = 0
    sample_key: int = 0
    image_keys: list[duplicates.ImageKey] = dataclasses.field(default_factory=list)


def lenient(config: DataConfig) -> DataConfig:
    """`config` with every policy set to leave out what it would raise for, change or leave out."""
    return dataclasses.replace(
        config,
        on_invalid_record="skip",
        on_unreadable_image="skip",
        on_overlong="drop",
        on_too_many_tiles="skip",
    )


class SampleChecker:
    """Checks records by the rules of a config.

    Args:
      planner: plans the sequences by the config.
      decode: decode every image; else its header alone is read.
      min_side: images with a shorter side get a warning.
    """

    def __init__(self, planner: Planner, *, decode: bool, min_side: int):
        self.config, self.decode, self._min_side = planner.config, decode, min_side
        self._planner = planner
        self._own = ExampleMaker(planner)
        self._lenient = ExampleMaker(planner, lenient(planner.config))
        self._markers: dict[str, Any] = {}

    def check(self, records: Records, index: int, source: SourceConfig) -> Checked:
        """Everything about record `index` of a source."""
        where = records.where(index)
        try:
            record = records[index]
        except InvalidRecordError as error:
            return self._unparsed(source, index, where, error)
        checked = Checked()
        verdict = self._verdict(self._lenient, record, source, where)
        odd = list(self._odd(record, source, verdict))
        if isinstance(verdict, Skipped):
            checked.events = self._own_events(record, source, where)
            kind = verdict.kind if verdict.kind in KINDS else verdict.reason
            if not any(each.kind == kind for each, _ in odd):
                detail = verdict.detail.removeprefix(f"{sample_name(record, where)}: ")
                odd.insert(0, (Odd(kind, verdict.place, detail), ""))
        else:
            checked.events = [("samples", ""), *verdict.events]
            checked.size = (verdict.length, verdict.num_views)
            checked.image_keys = _image_keys(verdict, record, source)
        name = id_of(record)
        checked.findings = [
            Finding(each.kind, source.path, index, name, each.place, file, where, each.detail)
            for each, file in odd
        ]
        _add_keys(checked, record, source)
        return checked

    def _unparsed(
        self, source: SourceConfig, index: int, where: str, error: InvalidRecordError
    ) -> Checked:
        """A record that is no JSON object; what there is has no id."""
        detail = str(error).removeprefix(f"{where}: ")
        skip = self.config.on_invalid_record == "skip"
        event = ("invalid_record" if skip else STOPS, str(error))
        finding = Finding(error.kind, source.path, index, where=where, detail=detail)
        return Checked([finding], [event])

    def _verdict(
        self, maker: ExampleMaker, record: Mapping[str, Any], source: SourceConfig, where: str
    ) -> Example | Plan | Skipped:
        make = maker.make if self.decode else maker.make_plan
        return make(record, source, where)

    def _own_events(
        self, record: Mapping[str, Any], source: SourceConfig, where: str
    ) -> list[tuple[str, str]]:
        """What a run with the config's own policies would count for a sample with an error."""
        try:
            made = self._verdict(self._own, record, source, where)
        except _REFUSALS as error:
            return [(STOPS, str(error))]
        if isinstance(made, Skipped):
            return [(made.reason, made.detail)]
        return [("samples", ""), *made.events]

    def _odd(
        self, record: Mapping[str, Any], source: SourceConfig, verdict: object
    ) -> Iterator[tuple[Odd, str]]:
        """(finding, image file) of everything that can be seen in a record and its images."""
        template = source.template or self.config.template
        if template not in self._markers:
            found = conversation.get_template(template)
            self._markers[template] = record_checks.marker_pattern(found, self._planner.tokenizer)
        for odd in record_checks.check_text(record, self._markers[template]):
            yield odd, ""
        if isinstance(verdict, Skipped) and verdict.kind == "lone_surrogate":
            yield from ((odd, "") for odd in record_checks.surrogates(record))
        try:
            files = image_files(record, "")
        except InvalidRecordError:  # The verdict says so too.
            return
        # A sample that is used had its pixels decoded for the verdict.
        decode = self.decode and isinstance(verdict, Skipped)
        for i, file in enumerate(files):
            for odd in self._check_image(source, file, decode):
                yield odd._replace(place=f"image {i}"), image_name(file)

    def _check_image(
        self, source: SourceConfig, file: str | ImageBytes, decode: bool
    ) -> Iterator[Odd]:
        try:
            held = isinstance(file, ImageBytes)
            found = file if held else images.resolve_path(source.folder, file)
        except images.ImageError as error:
            yield image_checks.of_error(error)
            return
        yield from image_checks.check_image(
            found, self._planner.limits, min_side=self._min_side, decode=decode
        )


def id_of(record: Mapping[str, Any]) -> str:
    """A record's id as Python writes it, not too long; '' without one."""
    return repr(record["id"])[:200] if "id" in record else ""


def _add_keys(checked: Checked, record: Mapping[str, Any], source: SourceConfig) -> None:
    if "id" in record:  # Equal ids in different files are no defect.
        name = f"{source.path} {record['id']!r}"
        checked.id_key = duplicates.key(name.encode("utf-8", "surrogatepass"))
    if record.get("conversations"):
        entry = record.get("image") or []
        entries = entry if isinstance(entry, list) else [entry]
        content = ([_identity(e, source) for e in entries], record["conversations"])
        checked.sample_key = duplicates.key(json.dumps(content, default=repr).encode())


def name_key(file: str | ImageBytes) -> int:
    """Hash of an image's name in its record."""
    name = file.name if isinstance(file, ImageBytes) else file
    return duplicates.key(name.encode("utf-8", "surrogatepass"))


def _identity(file: Any, source: SourceConfig) -> Any:
    """What makes an image the same as another: where its file lies, or else name and bytes."""
    if isinstance(file, ImageBytes):
        return file.name, hashlib.blake2b(file.data, digest_size=16).hexdigest()
    return (_real_folder(source.folder), file) if isinstance(file, str) else file


@functools.lru_cache(maxsize=64)
def _real_folder(folder: str) -> str:
    return os.path.realpath(folder)


def _image_keys(
    made: Example | Plan, record: Mapping[str, Any], source: SourceConfig
) -> list[duplicates.ImageKey]:
    """Keys of each image of an example; of its content by size and tiles."""
    if not isinstance(made, Example) or not made.images:
        return []
    keys, start = [], 0
    for span, file in zip(made.images, image_files(record, ""), strict=False):
        tiles = made.tiles[start : start + span.num_views]
        digest = hashlib.blake2b(f"{span.width}x{span.height}".encode(), digest_size=8)
        digest.update(tiles.tobytes())
        name = file.name if isinstance(file, ImageBytes) else _identity(file, source)
        where = duplicates.key(repr(name).encode())
        keys.append(duplicates.ImageKey(duplicates.key(digest.digest()), where, name_key(file)))
        start += span.num_views
    return keys
