"""A data set with every defect that validation knows, each in a record named after it.

`write(folder)` makes `messy.jsonl` and its images, and gives the (kind, record, place, image file)
that must be found, besides two clean records at its start.
"""

import json
import os
from typing import NamedTuple

import numpy as np
from data_helpers import TILING, make_config, record, turn, write_image
from PIL import Image

from bluelm_jax.data_config import DataConfig

ASK = "<image>\nWhat?"
# Bounds under which the messy samples are over and the clean ones are not.
BOUNDS = {"seq_len": 160, "tiles_per_group": 10, "max_megapixels": 0.5, "max_aspect_ratio": 30.0}


class Defect(NamedTuple):
    """A finding that must come: kind, index of the record, place, image file."""

    kind: str
    record: int
    place: str = ""
    file: str = ""


class Maker:
    """Collects lines of the file and what is to be found in them."""

    def __init__(self, folder):
        self.folder = folder
        self.lines: list[str] = []
        self.defects: list[Defect] = []

    def line(self, text, *kinds):
        """A raw line with defects given as kind or (kind, place) or (kind, place, file)."""
        for kind in kinds:
            entry = (kind,) if isinstance(kind, str) else kind
            self.defects.append(Defect(entry[0], len(self.lines), *entry[1:]))
        self.lines.append(text)

    def sample(self, sample, *kinds):
        self.line(json.dumps(sample), *kinds)

    def turns(self, name, turns, *kinds, **entries):
        """A record of any turns; the sample's name is its first defect's."""
        self.sample({"id": name, "conversations": turns, **entries}, *kinds)

    def image(self, kind, file, *more):
        """A record whose one image has defects."""
        kinds = [(each, "image 0", file) for each in (kind, *more)]
        self.sample(record(kind, ASK, f"It is {kind}.", image=file), *kinds)

    def save(self, name, image, **options):
        image.save(self.folder / name, **options)
        return name

    def noise(self, width, height):
        pixels = np.random.default_rng(len(self.lines)).integers(0, 256, (height, width, 3))
        return Image.fromarray(pixels.astype(np.uint8))


def write(folder):
    """Writes the set; returns its file and the defects in it."""
    maker = Maker(folder)
    write_image(folder, "good.png", 28, 28)
    maker.sample(record("clean", ASK, "A cat.", image="good.png"))
    maker.sample(record("clean text", "Say it.", "It."))
    _records(maker)
    _texts(maker)
    _sizes(maker)
    _files(maker)
    _odd_images(maker)
    _duplicates(maker)
    path = folder / "messy.jsonl"
    path.write_text("\n".join(maker.lines) + "\n", encoding="utf-8")
    return path, maker.defects


def config(path, **fields) -> DataConfig:
    """The config whose bounds the messy samples break, with every policy set to leave out."""
    policies = {
        "on_invalid_record": "skip",
        "on_unreadable_image": "skip",
        "on_overlong": "drop",
        "on_too_many_tiles": "skip",
        "on_full_group": "defer",
    }
    order = {"shuffle": False, "epochs": 1, "drop_remainder": False, "batch_size": 2}
    return make_config(path, **(BOUNDS | policies | order | {"max_names": 1000} | fields))


def _records(maker):
    human, gpt = turn("human", "Q"), turn("gpt", "A")
    maker.line('{"id": "broken_json", ', "broken_json")
    maker.line('["not", "an", "object"]', "not_an_object")
    maker.sample({"id": "no_conversations"}, ("no_conversations", "conversations"))
    maker.turns("bad_conversations", "Q", ("bad_conversations", "conversations"))
    maker.turns("empty_conversations", [], ("empty_conversations", "conversations"))
    maker.turns("bad_turn", [human, "A"], ("bad_turn", "turn 1"))
    maker.turns("turn_without_key", [human, {"from": "gpt"}], ("turn_without_key", "turn 1"))
    maker.turns("unknown_speaker", [turn("bot", "Q"), gpt], ("unknown_speaker", "turn 0"))
    maker.turns("bad_value", [human, turn("gpt", 42)], ("bad_value", "turn 1"))
    maker.turns("null value", [human, turn("gpt", None)], ("bad_value", "turn 1"))
    maker.turns(
        "late_system_turn",
        [turn("system", "S"), turn("system", "S"), human, gpt],
        ("late_system_turn", "turn 1"),
    )
    maker.turns(
        "system_without_place",
        [turn("system", "S"), human, gpt],
        ("system_without_place", "turn 0"),
    )
    maker.turns("no_human_turn", [gpt], "no_human_turn", ("leading_assistant_turn", "turn 0"))
    maker.turns(
        "nothing_supervised", [human, turn("gpt", "")], "nothing_supervised",
        ("empty_answer", "turn 1"),
    )  # fmt: skip
    maker.turns(
        "image_count", [turn("human", "<image><image>"), gpt], "image_count", image="good.png"
    )
    maker.turns("bad_image_entry", [turn("human", ASK), gpt], ("bad_image_entry", "image"), image=7)
    maker.sample({"conversations": [turn("human", "No id?"), gpt]}, "no_id")
    maker.turns({"a": 1}, [turn("human", "Odd id?"), gpt], ("bad_id", "id"))


def _texts(maker):
    ask, answer = turn("human", "Why?"), turn("gpt", "So.")
    maker.turns("lone_surrogate", [turn("human", "\ud800"), answer], ("lone_surrogate", "turn 0"))
    maker.turns("empty_answer", [ask, turn("gpt", ""), ask, answer], ("empty_answer", "turn 1"))
    maker.turns("blank_answer", [ask, turn("gpt", " \n "), ask, answer], ("blank_answer", "turn 1"))
    maker.turns("empty_question", [turn("human", " "), answer], ("empty_question", "turn 0"))
    maker.turns(
        "leading_assistant_turn", [turn("gpt", "Hi"), ask, answer],
        ("leading_assistant_turn", "turn 0"),
    )  # fmt: skip
    maker.turns("unanswered_turn", [ask, answer, ask], ("unanswered_turn", "turn 2"))
    maker.turns("repeated_speaker", [ask, ask, answer], ("repeated_speaker", "turn 1"))
    for text in ("[|Human|]: hello", "stop </s> here"):
        maker.turns("special", [turn("human", text), answer], ("special_token_in_text", "turn 0"))
    maker.defects.append(Defect("duplicate_id", len(maker.lines) - 1))
    maker.turns("control", [turn("human", "a\x00b"), answer], ("control_character", "turn 0"))
    maker.turns("replaced", [ask, turn("gpt", "caf\ufffd")], ("replacement_character", "turn 1"))


def _sizes(maker):
    maker.sample(record("overlong", "Q" * 200, "A"), "overlong")
    write_image(maker.folder, "wide.png", 84, 84)
    many = ["wide.png", "wide.png"]
    maker.sample(record("too_many_tiles", "<image><image>", "A", image=many), "too_many_tiles")


def _files(maker):
    folder = maker.folder
    maker.image("image_missing", "none.png")
    (folder / "folder.png").mkdir()
    maker.image("image_not_a_file", "folder.png")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    maker.image("image_symlink_loop", "loop.png")
    (folder / "empty.png").touch()
    maker.image("image_empty", "empty.png")
    (folder / "text.png").write_text("no image\n" * 20)
    maker.image("image_not_an_image", "text.png")
    data = bytearray((folder / "good.png").read_bytes())
    middle = len(data) // 2
    data[middle : middle + 99] = bytes(99)
    (folder / "damaged.png").write_bytes(data)
    maker.image("image_damaged", "damaged.png")
    maker.save("huge.png", Image.new("L", (800, 800)))
    maker.image("image_too_large", "huge.png")
    maker.save("line.png", Image.new("L", (1, 20)))
    maker.image("image_too_small", "line.png")
    maker.save("strip.png", Image.new("L", (640, 20)))
    maker.image("image_too_thin", "strip.png")
    maker.image("image_bad_name", "nul\0.png")
    maker.image("image_absolute_path", str(folder / "good.png"))
    (folder.parent / "outside.png").write_bytes((folder / "good.png").read_bytes())
    maker.image("image_outside_root", "../outside.png")
    both = record("two images", "<image><image>", "A", image=["good.png", "gone.png"])
    maker.sample(both, ("image_missing", "image 1", "gone.png"))


def _odd_images(maker):
    maker.save("cut.png", maker.noise(60, 60))
    os.truncate(maker.folder / "cut.png", 6000)
    maker.image("image_truncated", "cut.png", "image_no_end_marker")
    turned = Image.Exif()
    turned[0x0112] = 6
    maker.save("turned.jpg", maker.noise(40, 20), exif=turned)
    maker.image("image_exif_rotated", "turned.jpg")
    maker.save("really_a.jpg", maker.noise(20, 20).convert("P"), format="GIF")
    maker.image("image_wrong_extension", "really_a.jpg", "image_palette")
    frames = [maker.noise(20, 20).convert("P"), Image.new("P", (20, 20))]
    maker.save("moving.gif", frames[0], save_all=True, append_images=frames[1:])
    maker.image("image_animated", "moving.gif", "image_palette")
    maker.save("tiny.png", maker.noise(8, 8))
    maker.image("image_tiny", "tiny.png")
    (maker.folder / "small.ppm").write_bytes(b"P5 4 4 255\n" + bytes(16))
    maker.image("image_near_empty", "small.ppm", "image_tiny")
    maker.save("print.jpg", maker.noise(20, 20).convert("CMYK"))
    maker.image("image_cmyk", "print.jpg")
    deep = np.arange(400, dtype=np.uint16).reshape(20, 20) * 100
    maker.save("deep.png", Image.fromarray(deep))
    maker.image("image_16_bit", "deep.png")
    maker.save("glass.png", Image.new("RGBA", (20, 20), (9, 9, 9, 99)))
    maker.image("image_transparent", "glass.png")


def _duplicates(maker):
    again = record("clean", "Other text.", "Yes.")
    maker.sample(again, "duplicate_id")
    maker.sample(record("a copy", ASK, "A cat.", image="good.png"), "duplicate_sample")
    (maker.folder / "same.png").write_bytes((maker.folder / "good.png").read_bytes())
    maker.sample(
        record("twin", ASK, "A twin.", image="same.png"), ("duplicate_image", "image 0", "same.png")
    )


assert TILING.tile_size == 28  # The sizes above are meant for it.
