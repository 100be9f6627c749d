"""Reading image files: every mode with a file made here, every refusal, and paths."""

import io
import os
import pickle
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms, PngImagePlugin

from bluelm_jax.data import images
from bluelm_jax.data.images import ImageError, ImageLimits, read_image, read_size

WHITE, RED = (255, 255, 255), (200, 30, 10)
RAMP = np.arange(6 * 8, dtype=np.uint8).reshape(6, 8) * 5


def save(tmp_path, image, name, **options):
    path = tmp_path / name
    image.save(path, **options)
    return path


def pixels(path, **limits):
    image = read_image(path, ImageLimits(**limits))
    assert image.mode == "RGB" and image.size == read_size(path)
    return np.asarray(image)


def rgb_ramp():
    return np.stack([RAMP, 255 - RAMP, RAMP // 2], axis=-1)


def test_rgb_png_is_untouched(tmp_path):
    path = save(tmp_path, Image.fromarray(rgb_ramp()), "a.png")
    np.testing.assert_array_equal(pixels(path), rgb_ramp())


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tiff"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_once(tmp_path, orientation, suffix):
    """The stored pixels, turned as EXIF says; a photograph-like ramp survives JPEG well enough."""
    stored = np.kron(rgb_ramp(), np.ones((8, 8, 1), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = save(tmp_path, Image.fromarray(stored), f"a.{suffix}", exif=exif)
    turned = {
        1: stored,
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.swapaxes(0, 1),
        6: np.rot90(stored, -1),
        7: stored[::-1, ::-1].swapaxes(0, 1),
        8: np.rot90(stored),
    }[orientation]
    found = pixels(path).astype(int)
    assert found.shape == turned.shape
    assert np.abs(found - turned).mean() < (0.1 if suffix in ("png", "tiff") else 12)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_orientation_from_xmp_and_from_damaged_exif(tmp_path):
    image = Image.fromarray(rgb_ramp())
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    path = save(tmp_path, image, "xmp.jpg", xmp=xmp)
    assert read_size(path) == read_image(path).size == (6, 8)
    path = save(tmp_path, image, "damaged.jpg", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert read_size(path) == read_image(path).size == (8, 6)


def test_png_orientation_after_the_pixels_is_not_searched_for(tmp_path):
    """Both functions agree, and reading a size stays independent of the file's length."""
    buffer = io.BytesIO()
    Image.fromarray(rgb_ramp()).save(buffer, "png")
    exif = Image.Exif()
    exif[0x0112] = 6
    chunk = b"eXIf" + exif.tobytes()[6:]
    data = buffer.getvalue()
    end = data.index(b"IEND") - 4
    late = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    path = tmp_path / "late.png"
    path.write_bytes(data[:end] + late + data[end:])
    assert read_size(path) == read_image(path).size == (8, 6)


@pytest.mark.parametrize("suffix", ["png", "webp", "tiff"])
def test_alpha_is_composited(tmp_path, suffix):
    rgba = np.dstack([rgb_ramp(), np.full_like(RAMP, 255)])
    rgba[:3, :, 3], rgba[0, 0, 3] = 0, 128
    path = save(tmp_path, Image.fromarray(rgba), f"a.{suffix}", **_lossless(suffix))
    found = pixels(path, background=RED)
    assert (found[1:3] == RED).all()  # and not the colour hidden under alpha 0
    np.testing.assert_array_equal(found[3:], rgba[3:, :, :3])
    half = (rgba[0, 0, :3].astype(float) * 128 + np.array(RED) * 127) / 255
    np.testing.assert_allclose(found[0, 0], half, atol=1)
    assert (pixels(path)[1:3] == WHITE).all()


def _lossless(suffix):
    return {"lossless": True, "exact": True} if suffix == "webp" else {}


def test_grey_alpha(tmp_path):
    array = np.dstack([RAMP, np.where(RAMP < 100, 0, 255).astype(np.uint8)])
    found = pixels(save(tmp_path, Image.fromarray(array), "a.png"), background=RED)
    assert (found[RAMP < 100] == RED).all()
    np.testing.assert_array_equal(found[RAMP >= 100], np.repeat(RAMP[RAMP >= 100, None], 3, 1))


def palette_image():
    image = Image.new("P", (8, 6), 1)
    image.putpalette([0, 0, 0, *RED, 10, 20, 30])
    image.paste(2, (0, 0, 8, 3))
    return image


@pytest.mark.parametrize("suffix", ["png", "gif", "tiff", "bmp"])
def test_palette(tmp_path, suffix):
    found = pixels(save(tmp_path, palette_image(), f"a.{suffix}"))
    assert (found[:3] == (10, 20, 30)).all() and (found[3:] == RED).all()


@pytest.mark.parametrize("transparency", [2, bytes([255, 255, 0])], ids=["index", "table"])
def test_palette_with_transparency(tmp_path, transparency):
    path = save(tmp_path, palette_image(), "a.png", transparency=transparency)
    found = pixels(path)
    assert (found[:3] == WHITE).all() and (found[3:] == RED).all()


def test_transparent_colour_of_opaque_modes(tmp_path):
    path = save(tmp_path, Image.fromarray(RAMP), "grey.png", transparency=5)
    assert (pixels(path, background=RED)[RAMP == 5] == RED).all()
    path = save(tmp_path, Image.new("RGB", (4, 4), RED), "rgb.png", transparency=RED)
    assert (pixels(path) == WHITE).all()
    path = save(tmp_path, Image.new("1", (4, 4), 1), "one.png", transparency=255)
    assert (pixels(path, background=RED) == RED).all()


def test_one_bit_and_grey(tmp_path):
    bits = RAMP > 100
    found = pixels(save(tmp_path, Image.fromarray(bits), "bits.png"))
    np.testing.assert_array_equal(found, np.repeat(bits[..., None] * np.uint8(255), 3, 2))
    found = pixels(save(tmp_path, Image.fromarray(RAMP), "grey.png"))
    np.testing.assert_array_equal(found, np.repeat(RAMP[..., None], 3, 2))


@pytest.mark.parametrize("suffix", ["png", "tiff", "pgm"])
def test_16_bit_grey_keeps_its_high_byte(tmp_path, suffix):
    deep = (RAMP.astype(np.uint16) << 8) + 200
    found = pixels(save(tmp_path, Image.fromarray(deep), f"a.{suffix}"))
    np.testing.assert_array_equal(found, np.repeat(RAMP[..., None], 3, 2))


def test_16_bit_big_endian_tiff(tmp_path):
    path = tmp_path / "a.tiff"
    _write_tiff16(path, RAMP.astype(np.uint16) << 8)
    np.testing.assert_array_equal(pixels(path), np.repeat(RAMP[..., None], 3, 2))


def _write_tiff16(path, values):
    """A minimal big-endian TIFF, which Pillow opens as mode I;16B."""
    height, width = values.shape
    tags = [(256, width), (257, height), (258, 16), (259, 1), (262, 1), (273, 122), (277, 1)]
    tags += [(278, height), (279, values.nbytes)]
    entries = b"".join(struct.pack(">HHIHH", tag, 3, 1, value, 0) for tag, value in tags)
    head = b"MM\0*" + struct.pack(">IH", 8, len(tags)) + entries + b"\0\0\0\0"
    assert len(head) == 122
    path.write_bytes(head + values.astype(">u2").tobytes())


def _png(width, height, bit_depth, colour_type, rows):
    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, bit_depth, colour_type, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("alpha", [False, True])
def test_16_bit_colour_png_keeps_its_high_byte(tmp_path, alpha):
    colour = np.dstack([rgb_ramp(), np.full_like(RAMP, 255)]) if alpha else rgb_ramp()
    deep = (colour.astype(np.uint16) << 8) + 200
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in deep)
    path = tmp_path / "a.png"
    path.write_bytes(_png(8, 6, 16, 6 if alpha else 2, rows))
    np.testing.assert_array_equal(pixels(path), rgb_ramp())


def test_32_bit_integers_are_clipped_to_16(tmp_path):
    deep = RAMP.astype(np.int32) << 8
    deep[0, :2] = -5, 10**6
    found = pixels(save(tmp_path, Image.fromarray(deep), "a.tiff"))
    expected = RAMP.copy()
    expected[0, :2] = 0, 255
    np.testing.assert_array_equal(found, np.repeat(expected[..., None], 3, 2))


def test_floats(tmp_path):
    unit = RAMP.astype(np.float32) / 255
    found = pixels(save(tmp_path, Image.fromarray(unit), "unit.tiff"))
    np.testing.assert_array_equal(found, np.repeat(RAMP[..., None], 3, 2))
    wild = RAMP.astype(np.float32)
    wild[0, :3] = np.nan, -7, 1e30
    expected = RAMP.copy()
    expected[0, :3] = 0, 0, 255
    found = pixels(save(tmp_path, Image.fromarray(wild), "wild.tiff"))
    np.testing.assert_array_equal(found, np.repeat(expected[..., None], 3, 2))


def test_cmyk(tmp_path):
    image = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    for name in ("a.tiff", "a.jpg"):
        found = pixels(save(tmp_path, image, name)).astype(int)
        assert np.abs(found - (255, 0, 0)).max() <= 3


def test_ycck_jpeg(tmp_path):
    """Adobe's transform 2: the same bytes, read as luma and chroma of inverted CMYK."""
    path = save(tmp_path, Image.new("CMYK", (16, 16), (10, 60, 200, 30)), "a.jpg")
    data = bytearray(path.read_bytes())
    transform = data.index(b"Adobe") + 11
    assert data[transform] == 0
    data[transform] = 2
    path.write_bytes(data)
    y, cb, cr = (245.0, 195 - 128.0, 55 - 128.0)  # the file holds 255 - ink
    inks = np.clip([y + 1.402 * cr, y - 0.344136 * cb - 0.714136 * cr, y + 1.772 * cb], 0, 255)
    with Image.open(path) as image:
        assert image.mode == "CMYK"
        assert np.abs(np.asarray(image)[0, 0] - [*inks, 30]).max() <= 3
    expected = (255 - inks) * (255 - 30) / 255
    assert np.abs(pixels(path) - expected).max() <= 4


@pytest.mark.parametrize("suffix", ["gif", "webp", "png"])
def test_animations_give_their_first_frame(tmp_path, suffix):
    frames = [Image.new("RGB", (8, 6), colour) for colour in (RED, (0, 0, 255))]
    path = save(
        tmp_path, frames[0], f"a.{suffix}", save_all=True, append_images=frames[1:],
        **_lossless(suffix),
    )  # fmt: skip
    assert (pixels(path) == RED).all()


def test_gif_in_a_jpg(tmp_path):
    buffer = io.BytesIO()
    palette_image().save(buffer, "gif")
    path = tmp_path / "a.jpg"
    path.write_bytes(buffer.getvalue())
    assert (pixels(path)[3:] == RED).all()


def test_progressive_jpeg_equals_baseline_decode(tmp_path):
    image = Image.fromarray(np.kron(rgb_ramp(), np.ones((8, 8, 1), np.uint8)))
    path = save(tmp_path, image, "a.jpg", progressive=True, quality=90)
    with Image.open(path) as opened:
        assert opened.info["progressive"]
        np.testing.assert_array_equal(pixels(path), np.asarray(opened))


def test_icc_profile_is_left_alone(tmp_path):
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    path = save(tmp_path, Image.fromarray(rgb_ramp()), "a.png", icc_profile=profile)
    np.testing.assert_array_equal(pixels(path), rgb_ramp())


def refusal(path, limits=images.DEFAULT_LIMITS, read=read_image):
    with pytest.raises(ImageError) as caught:
        read(path, limits)
    error = caught.value
    assert error.path == str(path) and str(path) in str(error) and error.reason in str(error)
    return error


def jpeg_bytes(size=(64, 48)):
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "jpeg")
    return buffer.getvalue()


def test_truncated(tmp_path):
    path = tmp_path / "a.jpg"
    data = jpeg_bytes()
    path.write_bytes(data[: len(data) // 2])
    error = refusal(path)
    assert (error.kind, error.size) == ("truncated", (64, 48))
    assert "truncated" in error.reason and "64x48" in str(error)


@pytest.mark.parametrize("suffix", ["jpg", "png", "gif", "webp", "tiff", "bmp"])
def test_every_cut_and_flip_is_an_image_or_a_typed_error(tmp_path, suffix):
    buffer = io.BytesIO()
    Image.fromarray(rgb_ramp()).save(buffer, Image.registered_extensions()[f".{suffix}"])
    data, path = buffer.getvalue(), tmp_path / f"a.{suffix}"
    rng = np.random.default_rng(0)
    refused = 0
    for trial in range(120):
        damaged = bytearray(data[: rng.integers(1, len(data))] if trial % 2 else data)
        for _ in range(3):
            damaged[rng.integers(len(damaged))] = rng.integers(256)
        path.write_bytes(damaged)
        for read in (read_image, read_size):
            try:
                result = read(path, images.DEFAULT_LIMITS)
            except ImageError:
                refused += 1
            except Warning as warning:
                raise AssertionError(f"a warning came through: {warning}") from warning
            else:
                assert result
    assert refused > 20


def test_empty_missing_folder_and_text(tmp_path):
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "text.jpg").write_text("<html>404</html>")
    assert refusal(tmp_path / "empty.jpg").kind == "empty"
    assert refusal(tmp_path / "text.jpg").kind == "not_an_image"
    assert refusal(tmp_path / "none.jpg").kind == "missing"
    assert refusal(tmp_path).kind == "not_a_file"
    assert refusal(str(tmp_path / "nul\0.jpg")).kind == "missing"


def test_a_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    assert refusal(tmp_path / "pipe.jpg").reason == "not a regular file"


def test_postscript_is_never_interpreted(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n")
    assert refusal(path).kind == "not_an_image"


@pytest.mark.parametrize("read", [read_image, read_size])
@pytest.mark.parametrize("size", [(9000, 8000), (40000, 40000), (2**31 - 1, 2**31 - 1)])
def test_decompression_bombs(tmp_path, size, read):
    path = tmp_path / "bomb.png"
    path.write_bytes(_png(*size, 8, 2, b"\0" * 100))
    error = refusal(path, read=read)
    assert error.kind in ("too_large", "damaged") and error.size in (size, None)
    if size != (2**31 - 1, 2**31 - 1):
        assert (error.kind, error.size) == ("too_large", size)


def test_megapixel_limit_is_configurable(tmp_path):
    path = save(tmp_path, Image.new("RGB", (100, 100)), "a.png")
    error = refusal(path, ImageLimits(max_megapixels=0.009))
    assert error.reason == "0.0 megapixels, above max_megapixels = 0.009"
    assert read_image(path, ImageLimits(max_megapixels=0.01)).size == (100, 100)


def test_hostile_header_costs_no_memory(tmp_path):
    """A child with little address space left reads a bomb of gigapixels and lives."""
    path = tmp_path / "bomb.png"
    path.write_bytes(_png(13000, 13000, 8, 2, b"\0" * 100))
    program = """
import resource, sys
from bluelm_jax.data.images import ImageError, read_image
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))
try:
    read_image(sys.argv[1])
except ImageError as error:
    print(error.kind, error.size)
"""
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "too_large (13000, 13000)"


@pytest.mark.parametrize("size", [(1, 40), (40, 1), (1, 300_000), (3, 900)])
def test_thin_images(tmp_path, size):
    path = save(tmp_path, Image.new("L", size), "thin.png")
    error = refusal(path)
    kind = "too_small" if min(size) == 1 else "too_thin"
    assert (error.kind, error.size) == (kind, size)
    assert refusal(path, read=read_size).kind == kind
    allowed = ImageLimits(min_side=1, max_aspect_ratio=1e6)
    assert read_image(path, allowed).size == read_size(path) == size


def test_reading_a_size_decodes_nothing(tmp_path):
    path = tmp_path / "a.jpg"
    data = jpeg_bytes()
    path.write_bytes(data[: len(data) // 2])
    assert read_size(path) == (64, 48)


def test_keeping_freed_pixels_is_bounded_and_reversible(tmp_path):
    path = save(tmp_path, Image.fromarray(rgb_ramp()), "a.png")
    try:
        images.keep_freed_pixels(128)
        assert Image.core.get_blocks_max() * Image.core.get_block_size() == 128 * 2**20
        for _ in range(3):
            np.testing.assert_array_equal(pixels(path), rgb_ramp())
    finally:
        images.keep_freed_pixels(0)
    assert Image.core.get_blocks_max() == 0
    with pytest.raises(ValueError, match="megabytes = -1"):
        images.keep_freed_pixels(-1)


def test_text_chunks_do_not_expand(tmp_path):
    info = PngImagePlugin.PngInfo()
    info.add_text("comment", "x" * 3_000_000, zip=True)
    path = save(tmp_path, Image.new("L", (4, 4)), "a.png", pnginfo=info)
    assert refusal(path).kind == "damaged"


def test_messages_name_a_file_once(tmp_path):
    path = str(tmp_path / "nowhere.png")
    with pytest.raises(ImageError) as caught:
        images.read_image(path)
    assert str(caught.value) == f"{path}: cannot be opened: No such file or directory"
    with pytest.raises(ImageError) as caught:
        images.read_size(images.ImageBytes("a.png", b"no image", "x[1]"))
    assert str(caught.value) == "a.png: not an image in a known format"
    assert str(ImageError("a.png", "too_large", "large", (3, 4))) == "a.png: large (3x4)"


def test_errors_survive_pickling():
    error = ImageError("a.jpg", "damaged", "truncated", (3, 4))
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.path, copy.kind, copy.reason, copy.size) == (
        "a.jpg",
        "damaged",
        "truncated",
        (3, 4),
    )
    assert str(copy) == "a.jpg: truncated (3x4)"


def test_paths_stay_under_the_root(tmp_path):
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (tmp_path / "rootless").mkdir()
    for file in (root / "a.jpg", root / "sub" / "b.jpg", tmp_path / "secret"):
        file.touch()
    (root / "inside").symlink_to(root / "a.jpg")
    (root / "outside").symlink_to(tmp_path / "secret")
    (root / "folder").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to(root)
    for name in ("a.jpg", "sub/b.jpg", "sub/../a.jpg", "inside", "missing.jpg"):
        for base in (root, tmp_path / "link"):
            assert images.resolve_path(base, name).startswith(str(root.resolve()))
    refused = ("../secret", "../../etc/passwd", "/etc/passwd", str(root / "a.jpg"), "outside",
               "folder/secret", "../rootless/x", "", "a\0.jpg")  # fmt: skip
    for name in refused:
        with pytest.raises(ImageError) as caught:
            images.resolve_path(root, name)
        kind = "absolute_path" if name.startswith("/") else "outside_root"
        assert caught.value.kind == ("bad_name" if not name or "\0" in name else kind)
        assert caught.value.path in (name, repr(name))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_megapixels": -1.0}, "ImageLimits.max_megapixels = -1.0"),
        ({"min_side": 0}, "ImageLimits.min_side = 0"),
        ({"max_aspect_ratio": 0.5}, "ImageLimits.max_aspect_ratio = 0.5"),
        ({"background": (0, 0, 300)}, "ImageLimits.background"),
    ],
)
def test_bad_limits_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ImageLimits(**options)
