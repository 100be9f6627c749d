"""What validation can find, by stable name, and one finding."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


class Kind(NamedTuple):
    """How bad a defect is, and what it means.

    'error': a run raises for the sample, leaves it out or changes it, as its policies say.
    'warning': the sample is used, and is probably not what its author meant.
    'info': worth knowing.
    """

    severity: Severity
    meaning: str


_ERRORS = {
    "unreadable_source": "the file of records cannot be read",
    "empty_source": "the file holds no record",
    "broken_json": "a record that is not valid JSON",
    "not_an_object": "a record that is not a JSON object",
    "no_conversations": "no key 'conversations', or null",
    "bad_conversations": "'conversations' is not a list",
    "empty_conversations": "'conversations' is an empty list",
    "bad_turn": "a turn that is not a JSON object",
    "turn_without_key": "a turn without 'from' or 'value'",
    "unknown_speaker": "'from' is none of the known speakers",
    "bad_value": "'value' is not a string",
    "late_system_turn": "a system turn that is not the first turn, or a second one",
    "system_without_place": "a system turn, and the template has no place for it",
    "no_human_turn": "no turn of a human",
    "nothing_supervised": "no answer with text: the loss would be empty",
    "lone_surrogate": "half of a surrogate pair, which is not Unicode text",
    "image_count": "another number of <image> than of images",
    "bad_image_entry": "'image' is not a path or a list of paths",
    "invalid_record": "breaks another rule for records",
    "overlong": "more positions than seq_len",
    "too_many_tiles": "more tiles than tiles_per_group",
    "image_missing": "the file does not exist or may not be opened",
    "image_not_a_file": "a folder, pipe or device",
    "image_symlink_loop": "links that lead in a circle",
    "image_empty": "the file has no byte",
    "image_not_an_image": "not in a known image format",
    "image_damaged": "header or pixels cannot be decoded",
    "image_truncated": "the file ends before its pixels do",
    "image_too_large": "more than max_megapixels",
    "image_too_small": "a side below two pixels",
    "image_too_thin": "side ratio above max_aspect_ratio",
    "image_bad_name": "not a possible file name",
    "image_absolute_path": "an absolute path",
    "image_outside_root": "leads out of image_root",
}
_WARNINGS = {
    "empty_answer": "an answer without any text; it is not supervised",
    "blank_answer": "an answer of white space alone; it is not supervised",
    "empty_question": "a human turn with neither text nor image",
    "leading_assistant_turn": "turns before the first human turn; they are left out",
    "special_token_in_text": "text that looks like a token or marker of the template",
    "control_character": "control characters in the text",
    "replacement_character": "U+FFFD: the text was decoded wrongly at some time",
    "bad_id": "'id' is neither a string nor a number",
    "duplicate_id": "the id of an earlier record of the same file",
    "duplicate_sample": "image and conversation of an earlier record",
    "duplicate_image": "under another name the same size and tiles (with decoding)",
    "image_exif_rotated": "stored turned or mirrored; sizes are those after turning",
    "image_wrong_extension": "the content is in another format than the name says",
    "image_animated": "several frames; the first one is used",
    "image_tiny": "a side below min_side",
    "image_near_empty": "fewer than 64 bytes",
    "image_no_end_marker": "the format's end marker is missing; decoding tells whether pixels are",
}
_NOTES = {
    "no_id": "no key 'id'",
    "unanswered_turn": "the last turn is a human one",
    "repeated_speaker": "one speaker has several turns in a row",
    "image_palette": "palette colours",
    "image_cmyk": "CMYK, converted without colour management",
    "image_16_bit": "more than 8 bits a channel; the high byte is used",
    "image_transparent": "transparency, laid on the background colour",
}
KINDS: dict[str, Kind] = {
    name: Kind(severity, meaning)
    for severity, table in zip(SEVERITIES, (_ERRORS, _WARNINGS, _NOTES), strict=True)
    for name, meaning in table.items()
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One defect of one sample.

    Attributes:
      kind: one of `KINDS`.
      source: the file of records.
      record: index of the record among those that the config uses; None where the source as a
        whole is meant.
      id: the record's id as Python writes it; '' without one.
      place: where in the record, such as 'turn 2' or 'image 0'; '' for the record as a whole.
      file: the image file as the record names it; '' where no image is meant.
      where: the record's file, index and byte, as messages of a run have it.
      detail: what was found, with the bound that it breaks.
    """

    kind: str
    source: str
    record: int | None = None
    id: str = ""
    place: str = ""
    file: str = ""
    where: str = ""
    detail: str = ""

    @property
    def severity(self) -> Severity:
        """Of the kind."""
        return KINDS[self.kind].severity

    def line(self) -> str:
        """Sample, place, file and detail in one line of printable text."""
        name = "" if self.record is None else f"record {self.record}"
        parts = (f"{name} {self.id}".strip(), f"{self.place} {self.file}".strip(), self.detail)
        text = ": ".join(part for part in parts if part)
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
