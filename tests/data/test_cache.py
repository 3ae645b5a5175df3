import errno
import json
import multiprocessing
import os
import shutil
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import layouts
from pearl.data import cache, images
from pearl.data import decoding as decoding_of
from pearl.data.cache import decode, decode_rows, read_image
from pearl.data.decoding import Decoding, upright_square
from pearl.data.images import to_pixels
from pearl.data.sources import Split
from pearl.errors import DataError

pytestmark = pytest.mark.slow


def save(path: Path, image: np.ndarray | Image.Image, **settings: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(path, **settings)
    return path


def never(done: int, total: int) -> None:
    """For on_progress: nothing may be decoded."""
    raise AssertionError(f"image {done} of {total} was decoded")


def split_of(*files: Path) -> Split:
    return Split(files, np.zeros(len(files), dtype=np.int64))


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return layouts.pixels(np.random.default_rng(seed), *shape)


@pytest.fixture
def photos(tmp_path: Path) -> Split:
    """Five images of several shapes and kinds."""
    sizes = [(30, 20), (20, 30), (64, 64), (8, 8), (17, 51)]
    kinds = (".png", ".jpg", ".bmp", ".webp", ".tif")
    return split_of(
        *(save(tmp_path / "photos" / f"{i}{kinds[i]}", pixels(*size, 3, seed=i)) for i, size in enumerate(sizes))
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that have been decoded."""
    files: list[Path] = []

    def counted(path: Path, size: int, decoding: Decoding) -> np.ndarray:
        files.append(path)
        return read_image(path, size, decoding)

    monkeypatch.setattr(cache, "read_image", counted)
    return files


def resize_and_crop(image: Image.Image, size: int) -> np.ndarray:
    from torchvision.transforms.v2 import functional as transforms  # here, as spawned processes import this module

    resized = transforms.resize(image, [size], interpolation=transforms.InterpolationMode.BICUBIC, antialias=True)
    return np.asarray(transforms.center_crop(resized, [size, size]))


def by_torchvision(path: Path, size: int) -> np.ndarray:
    """What the published pipelines of vision transformers make of a file."""
    return resize_and_crop(Image.open(path).convert("RGB"), size)


# What an image becomes


@pytest.mark.parametrize("size", [8, 16, 33])
def test_content_is_that_of_resize_and_centre_crop(photos: Split, root: Path, size: int) -> None:
    images = decode(photos, size, root=root)
    assert images.shape == (5, size, size, 3) and images.dtype == np.uint8
    for image, path in zip(images, photos.images, strict=True):
        assert np.array_equal(image, by_torchvision(Path(path), size))


@settings(deadline=None)
@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 40))
def test_resize_and_crop_at_any_size(width: int, height: int, size: int) -> None:
    image = Image.fromarray(pixels(height, width, 3))
    assert np.array_equal(np.asarray(decoding_of._square(image, size)), resize_and_crop(image, size))


def test_same_size_is_exact(tmp_path: Path, root: Path) -> None:
    content = pixels(16, 16, 3)
    assert np.array_equal(decode(split_of(save(tmp_path / "a.png", content)), 16, root=root)[0], content)


def test_very_long_image_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "long.png", np.zeros((30_000, 2, 3), np.uint8))
    assert read_image(path, 8).shape == (8, 8, 3)
    with pytest.raises(DataError, match=r"long\.png: 2 x 30000 pixels are too long and narrow"):
        read_image(path, 256)  # resized before it is cropped, it would have three billion values


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(tmp_path: Path, orientation: int) -> None:
    content = np.zeros((16, 16, 3), np.uint8)
    content[:8, :8], content[:8, 8:] = (255, 0, 0), (0, 255, 0)
    image = Image.fromarray(content)
    turned_back = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = image if turned_back is None else image.transpose(turned_back)
    assert np.array_equal(read_image(save(tmp_path / "a.png", stored, exif=exif), 16), content)


def test_modes(tmp_path: Path) -> None:
    grey = pixels(12, 12)
    three = np.repeat(grey[..., None], 3, axis=-1)
    wide = grey.astype(np.uint16) << 8 | 77
    colour = pixels(12, 12, 3, seed=1)

    assert np.array_equal(read_image(save(tmp_path / "grey.png", grey), 12), three)
    assert np.array_equal(read_image(save(tmp_path / "wide.png", wide), 12), three)
    assert np.array_equal(read_image(save(tmp_path / "wide.tif", wide), 12), three)
    assert np.array_equal(read_image(save(tmp_path / "int.tif", wide.astype(np.int32)), 12), three)
    assert np.array_equal(read_image(save(tmp_path / "bits.png", Image.fromarray(grey > 99)), 12), 255 * (three > 99))

    palette = Image.fromarray(colour).quantize(32)
    assert np.array_equal(read_image(save(tmp_path / "p.png", palette), 12), np.asarray(palette.convert("RGB")))
    assert np.array_equal(read_image(save(tmp_path / "p.gif", palette), 12), np.asarray(palette.convert("RGB")))
    cmyk = Image.fromarray(colour).convert("CMYK")
    assert np.array_equal(read_image(save(tmp_path / "cmyk.tif", cmyk), 12), np.asarray(cmyk.convert("RGB")))
    jpeg = save(tmp_path / "cmyk.jpg", cmyk)
    assert np.array_equal(read_image(jpeg, 12), np.asarray(Image.open(jpeg).convert("RGB")))


def test_transparency_is_laid_on_white(tmp_path: Path) -> None:
    colour, alpha = pixels(12, 12, 3), np.zeros((12, 12, 1), np.uint8)
    alpha[:4], alpha[4:8] = 255, 51
    expected = colour * (alpha / 255.0) + 255 * (1 - alpha / 255.0)
    rgba = read_image(save(tmp_path / "rgba.png", np.concatenate([colour, alpha], axis=-1)), 12)
    assert np.abs(rgba - expected).max() <= 1
    la = read_image(save(tmp_path / "la.png", np.concatenate([colour[..., :1], alpha], axis=-1)), 12)
    assert np.abs(la - np.repeat(expected[..., :1], 3, axis=-1)).max() <= 1

    palette = Image.new("P", (12, 12), 1)
    palette.putpalette([200, 10, 10, 10, 200, 10])
    palette.paste(0, (0, 0, 12, 6))
    for transparency in (0, b"\x00\xff"):
        read = read_image(save(tmp_path / "p.png", palette, transparency=transparency), 12)
        assert (read[:6] == 255).all() and (read[6:] == (10, 200, 10)).all()


def test_ranges_that_cannot_be_known(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"f\.tif: floating-point pixels have no fixed range"):
        read_image(save(tmp_path / "f.tif", np.ones((4, 4), np.float32)), 4)
    with pytest.raises(DataError, match=r"i\.tif: 32-bit pixels lie outside 0 to 65535"):
        read_image(save(tmp_path / "i.tif", np.full((4, 4), 70_000, np.int32)), 4)


def test_of_16_bits_as_many_are_used_as_the_images_have(tmp_path: Path) -> None:
    grey = pixels(12, 12)
    save(tmp_path / "twelve.png", grey.astype(np.uint16) << 4 | 5)
    assert len(np.unique(read_image(tmp_path / "twelve.png", 12))) <= 16
    decoding = Decoding(bits=12)
    assert np.array_equal(read_image(tmp_path / "twelve.png", 12, decoding)[..., 0], grey)
    assert decoding.notes() == []
    with pytest.raises(DataError, match=r"a value of \d\d,\d+, above the 12 bits of images\.bits"):
        read_image(save(tmp_path / "wide.png", grey.astype(np.uint16) << 8), 12, decoding)


def test_most_of_16_bits_left_unused_is_noted(tmp_path: Path, root: Path) -> None:
    """Also where the pixels come from the cache."""
    values = (np.arange(64).reshape(8, 8) * 64).astype(np.uint16)
    split = split_of(
        save(tmp_path / "a.png", values), save(tmp_path / "b.png", values), save(tmp_path / "c.png", pixels(8, 8, 3))
    )
    for _ in range(2):
        decoding = Decoding()
        decode(split, 8, decoding, root=root)
        assert decoding.notes() == [
            "2 images of 16 bits with values up to 4,032 only, of which 16 levels of grey out of 256 are left; set "
            "images.bits=12 if that is their range"
        ]
    bright = Decoding()
    decode(split_of(save(tmp_path / "d.png", values * 16), *split.images), 8, bright, root=root)
    assert bright.met == (3, 64_512) and bright.notes() == []


def test_each_way_of_decoding_has_a_cache_of_its_own(tmp_path: Path, root: Path) -> None:
    split = split_of(save(tmp_path / "a.png", (pixels(8, 8) // 16).astype(np.uint16)))
    assert decode(split, 8, Decoding(bits=8), root=root).max() > 5 > decode(split, 8, root=root).max() == 0
    assert len(list(root.iterdir())) == 2


def test_a_large_jpeg_is_decoded_smaller_if_that_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned
    smooth = np.asarray(Image.fromarray(pixels(6, 4, 3)).resize((400, 600), Image.Resampling.BICUBIC))
    path = save(tmp_path / "a.jpg", smooth, exif=exif, quality=95)
    sizes = []
    square = decoding_of._square
    monkeypatch.setattr(decoding_of, "_square", lambda image, size: sizes.append(image.size) or square(image, size))
    whole, reduced = (read_image(path, 40, Decoding(reduced=each)) for each in (False, True))
    assert sizes == [(600, 400), (150, 100)], "a quarter is twice the size that is kept"
    assert np.abs(whole.astype(int) - reduced).max() < 12


def test_a_picture_in_memory_is_not_changed() -> None:
    """What a user has opened stays as it is; of a file of ours nothing is copied."""
    picture = Image.fromarray(pixels(8, 6, 3))
    picture.getexif()[0x0112] = 6
    to_pixels(picture, 4)
    assert picture.size == (6, 8) and picture.getexif()[0x0112] == 6


def test_a_file_is_decoded_into_memory_once(tmp_path: Path) -> None:
    """4 bytes a pixel in Pillow; exif_transpose and convert would make a copy each."""
    opened = Image.open(save(tmp_path / "a.jpg", pixels(300, 400, 3)))
    seen = []
    resize = Image.Image.resize
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Image.Image, "resize", lambda self, *a: seen.append(self) or resize(self, *a))
        upright_square(opened, 8, in_place=True)
    assert seen == [opened]


def test_strips_are_converted_as_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [
        save(tmp_path / "rgba.png", pixels(13, 9, 4)),
        save(tmp_path / "wide.png", pixels(13, 9).astype(np.uint16) << 7),
    ]
    palette = Image.fromarray(pixels(13, 9, 3)).quantize(16)
    files += [save(tmp_path / f"{key}.png", palette, transparency=key) for key in (3, bytes(range(0, 160, 10)))]
    whole = [read_image(file, 9) for file in files]
    monkeypatch.setattr(decoding_of, "_STRIP", 20)  # two rows
    for file, expected in zip(files, whole, strict=True):
        assert np.array_equal(read_image(file, 9), expected), file


def test_libtiff_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It writes to standard error by itself, beside what Pillow raises."""
    file = save(tmp_path / "a.tif", pixels(64, 64, 3), compression="tiff_adobe_deflate")
    content = bytearray(file.read_bytes())
    content[9:12] = b"\xff\xff\xff"
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.tif: "):
        read_image(file, 8)
    assert capfd.readouterr().err == ""


def test_arrays_are_left_alone(root: Path) -> None:
    images = pixels(4, 9, 9, 3)
    assert decode(Split(images, np.zeros(4, np.int64)), 5, root=root) is images
    assert not root.exists()


def test_rows_are_found_by_their_place_in_the_split(
    photos: Split, read: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEARL_DATA", str(tmp_path))
    some, files = decode_rows(photos, np.array([1, 4]), 8), photos.images
    assert sorted(read) == [files[1], files[4]]
    expected = np.stack([by_torchvision(Path(files[row]), 8) for row in (4, 1, 4)])
    assert np.array_equal(some[np.array([4, 1, 4])], expected)
    with pytest.raises(IndexError):
        some[np.array([1, 2])]

    every = decode_rows(photos, np.arange(5), 8)
    assert isinstance(every.pixels, np.memmap) and np.array_equal(every.pixels, decode(photos, 8))


def test_digest_of_rows_is_of_their_pixels_alone(
    photos: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEARL_DATA", str(tmp_path))
    rows = np.array([1, 4])
    some, every = decode_rows(photos, rows, 8), decode_rows(photos, np.arange(5), 8)
    assert some.sha256(rows) == every.sha256(rows) != every.sha256(every.rows)
    monkeypatch.setattr(cache, "_BATCH", 1)
    assert some.sha256(rows) == every.sha256(rows)
    turned = cache.Images(rows, np.array(some.pixels).reshape(2, 4, 16, 3))
    assert turned.sha256(rows) != some.sha256(rows)


def test_rows_of_arrays_are_not_copied() -> None:
    images = pixels(4, 9, 9, 3)
    some = decode_rows(Split(images, np.zeros(4, np.int64)), np.array([1, 3]), 5)
    assert some.pixels is images and np.array_equal(some[np.array([3])], images[[3]])


# When it is built


def test_decoded_once(photos: Split, root: Path, read: list[Path]) -> None:
    first = decode(photos, 8, root=root)
    assert sorted(read) == sorted(photos.images)
    second = decode(photos, 8, root=root)
    assert len(read) == 5 and np.array_equal(first, second)
    assert isinstance(second, np.memmap) and not second.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        second[0] = 0

    (folder,) = root.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["images.npy", "meta.json"]
    meta = json.loads((folder / "meta.json").read_text())
    assert set(meta) == {"format", "sources", "count", "size", "sha256"}
    assert (meta["sources"], meta["count"], meta["size"]) == (folder.name, 5, 8)
    assert np.array_equal(np.load(folder / "images.npy"), first)


def test_default_place(photos: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEARL_DATA", str(tmp_path / "elsewhere"))
    decode(photos, 8)
    assert len(list((tmp_path / "elsewhere" / "cache").iterdir())) == 1


def test_change_of_anything_builds_anew(photos: Split, root: Path, read: list[Path]) -> None:
    files = tuple(Path(path) for path in photos.images)
    decode(photos, 8, root=root)
    decode(photos, 9, root=root)
    assert len(read) == 10
    decode(split_of(*reversed(files)), 8, root=root)
    assert len(read) == 15
    save(files[0], pixels(30, 20, 3, seed=9))
    assert np.array_equal(decode(photos, 8, root=root)[0], by_torchvision(files[0], 8)) and len(read) == 20
    os.utime(files[0], ns=(0, 0))
    decode(photos, 8, root=root)
    assert len(read) == 25
    assert len(list(root.iterdir())) == 5


def test_relative_path_and_link_share_a_cache(
    photos: Split, root: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tuple(Path(path) for path in photos.images)
    decode(photos, 8, root=root)
    monkeypatch.chdir(files[0].parent)
    decode(split_of(*(Path(file.name) for file in files)), 8, root=root)
    (root.parent / "link").symlink_to(files[0].parent)
    decode(split_of(*(root.parent / "link" / file.name for file in files)), 8, root=root)
    assert len(read) == 5


def test_progress(photos: Split, root: Path) -> None:
    calls: list[tuple[int, int]] = []
    decode(photos, 8, root=root, on_progress=lambda done, total: calls.append((done, total)))
    assert calls == [(done, 5) for done in range(1, 6)]
    decode(photos, 8, root=root, on_progress=lambda done, total: calls.append((done, total)))
    assert len(calls) == 5


def test_order_holds_over_many_batches(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_BATCH", 3)
    files = [save(tmp_path / f"{i}.png", np.full((4, 4, 3), i, np.uint8)) for i in range(20)]
    assert decode(split_of(*files), 4, root=root)[:, 0, 0, 0].tolist() == list(range(20))


def flip_bit(folder: Path) -> None:
    content = bytearray((folder / "images.npy").read_bytes())
    content[-1] ^= 4
    (folder / "images.npy").write_bytes(content)


def no_count(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "count": 4}))


DAMAGE: list[Callable[[Path], object]] = [
    flip_bit,
    no_count,
    lambda folder: (folder / "images.npy").write_bytes(b""),
    lambda folder: (folder / "images.npy").write_bytes((folder / "images.npy").read_bytes()[:-1]),
    lambda folder: (folder / "images.npy").unlink(),
    lambda folder: (folder / "meta.json").unlink(),
    lambda folder: (folder / "meta.json").write_bytes(b"\xff{"),
    lambda folder: (folder / "meta.json").write_text("[]"),
    lambda folder: shutil.rmtree(folder),
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_mended(photos: Split, root: Path, read: list[Path], damage: Callable[[Path], object]) -> None:
    expected = np.array(decode(photos, 8, root=root))
    (folder,) = root.iterdir()
    damage(folder)
    assert np.array_equal(decode(photos, 8, root=root), expected) and len(read) == 10
    assert np.array_equal(decode(photos, 8, root=root), expected) and len(read) == 10
    assert list(root.iterdir()) == [folder]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 7))
def test_any_flipped_bit_is_seen(position: int, bit: int) -> None:
    with tempfile.TemporaryDirectory() as location:
        file = save(Path(location) / "a.png", pixels(4, 4, 3))
        decode(split_of(file), 4, root=Path(location) / "cache")
        (folder,) = (Path(location) / "cache").iterdir()
        stored = folder / ("images.npy" if position % 2 else "meta.json")
        content = bytearray(stored.read_bytes())
        content[position % len(content)] ^= 1 << bit
        stored.write_bytes(content)
        assert np.array_equal(decode(split_of(file), 4, root=Path(location) / "cache")[0], pixels(4, 4, 3))


# Together with other processes


def test_another_build_that_finishes_first_is_used(photos: Split, root: Path, read: list[Path]) -> None:
    theirs: list[np.ndarray] = []
    inodes: list[int] = []

    def other(done: int, total: int) -> None:
        if done == 1:
            theirs.append(decode(photos, 8, root=root))
            inodes.extend(location.stat().st_ino for location in root.iterdir() if location.suffix != ".tmp")

    ours = decode(photos, 8, root=root, on_progress=other)
    assert np.array_equal(ours, theirs[0]) and len(read) == 10
    assert [location.stat().st_ino for location in root.iterdir()] == inodes


def test_damaged_one_that_appears_meanwhile_is_replaced(photos: Split, root: Path) -> None:
    def other(done: int, total: int) -> None:
        if done == 1:
            decode(photos, 8, root=root)
            (folder,) = (path for path in root.iterdir() if path.suffix != ".tmp")
            flip_bit(folder)

    ours = np.array(decode(photos, 8, root=root, on_progress=other))
    assert len(list(root.iterdir())) == 1
    assert np.array_equal(decode(photos, 8, root=root, on_progress=never), ours)


def build(files: tuple[Path, ...], root: Path, barrier: Any) -> None:
    """In another process: start together with the others, and be right."""
    barrier.wait(60)
    images = decode(split_of(*files), 8, root=root)
    expected = np.stack([read_image(file, 8) for file in files])
    raise SystemExit(0 if np.array_equal(images, expected) else 1)


@pytest.mark.parametrize("damaged", [False, True])
def test_two_processes_at_once(tmp_path: Path, root: Path, damaged: bool) -> None:
    files = tuple(save(tmp_path / f"{i}.png", pixels(40, 40, 3, seed=i)) for i in range(60))
    if damaged:
        decode(split_of(*files), 8, root=root)
        flip_bit(next(root.iterdir()))
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    processes = [context.Process(target=build, args=(files, root, barrier)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(list(root.iterdir())) == 1
    decode(split_of(*files), 8, root=root, on_progress=never)


# When it cannot be built


def test_every_bad_image_is_listed(photos: Split, root: Path) -> None:
    good = [Path(path) for path in photos.images]
    folder = good[0].parent
    bad = {name: folder / name for name in ("empty.jpg", "cut.jpg", "cut.png", "text.png", "folder.png", "gone.png")}
    bad["empty.jpg"].touch()
    bad["text.png"].write_text("not an image")
    bad["folder.png"].mkdir()
    for name in ("cut.jpg", "cut.png"):
        save(bad[name], pixels(64, 64, 3))
        content = bad[name].read_bytes()
        bad[name].write_bytes(content[: len(content) // 2])

    with pytest.raises(DataError) as caught:
        decode(split_of(good[0], *bad.values(), *good[1:]), 8, root=root)
    first, *lines = str(caught.value).splitlines()
    assert first == "6 of 11 images cannot be read: remove or replace them"
    reasons = dict(line.split(": ", 1) for line in lines)
    assert set(reasons) == {str(path) for path in bad.values()}
    assert reasons[str(bad["text.png"])] == "not an image, or of a kind that Pillow cannot read"
    assert reasons[str(bad["gone.png"])] == "No such file or directory"
    assert "truncated" in reasons[str(bad["cut.jpg"])] and "truncated" in reasons[str(bad["cut.png"])]
    assert list(root.iterdir()) == []


def test_long_lists_are_not_cut(tmp_path: Path, root: Path) -> None:
    files = [tmp_path / f"{i}.png" for i in range(600)]
    with pytest.raises(DataError) as caught:
        decode(split_of(*files), 8, root=root)
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("600 of 600 images")
    assert [line.partition(": ")[0] for line in lines] == [str(file) for file in files]


def test_too_many_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "big.png", pixels(20, 11, 3))
    monkeypatch.setattr(images, "MAX_PIXELS", 219)
    with pytest.raises(DataError, match=r"big\.png: 11 x 20 pixels are more than 219"):
        read_image(path, 8)
    monkeypatch.setattr(images, "MAX_PIXELS", 220)
    read_image(path, 8)


def test_decompression_bombs_are_refused_by_their_header(tmp_path: Path, root: Path) -> None:
    def header(name: str, side: int) -> Path:
        path = save(tmp_path / name, np.zeros((1, 1), np.uint8))
        content = bytearray(path.read_bytes())
        content[16:24] = side.to_bytes(4, "big") * 2
        path.write_bytes(content[:29] + zlib.crc32(content[12:29]).to_bytes(4, "big") + content[33:])
        return path

    with pytest.raises(DataError, match="3 of 3 images") as caught:
        decode(split_of(*(header(f"{side}.png", side) for side in (10_001, 14_000, 60_000))), 8, root=root)
    assert "10001 x 10001 pixels are more than 100,000,000" in str(caught.value)


def test_harmless_warnings_of_pillow_are_not_shown(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        assert len(decode(split_of(save(tmp_path / "a.png", pixels(20, 20, 3))), 8, root=root)) == 1
    assert not shown


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_cache_that_cannot_be_made(photos: Split, root: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code), str(root))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(DataError) as caught:
        decode(photos, 224, root=root)
    assert str(caught.value) == (
        f"the cache of decoded images cannot be written to {root} ({os.strerror(code)}): "
        "set PEARL_DATA to a folder you may write to, with at least 0.1 GB free"
    )


def test_root_that_is_a_file(photos: Split, root: Path) -> None:
    root.write_text("")
    with pytest.raises(DataError, match=r"cannot be written to .* set PEARL_DATA"):
        decode(photos, 8, root=root)


def test_too_little_space_is_seen_before_decoding(
    photos: Split, root: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda location: shutil._ntuple_diskusage(100, 100, 5 * 8 * 8 * 3 - 1))
    with pytest.raises(DataError, match="No space left on device"):
        decode(photos, 8, root=root)
    assert read == [] and list(root.iterdir()) == []


def test_disk_that_fills_up_meanwhile(photos: Split, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"No space left on device\): set PEARL_DATA to a folder .* 0\.1 GB free"):
        decode(photos, 8, root=root)
    assert list(root.iterdir()) == []


def test_interruption_leaves_nothing(photos: Split, root: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decode(photos, 8, root=root, on_progress=interrupt)
    assert list(root.iterdir()) == []


def test_leftovers_of_killed_builds_are_removed(photos: Split, root: Path) -> None:
    old, live, new = (root / f"{name * 64}.{name * 32}.tmp" for name in "abc")
    another = root / "holiday.tmp"  # somebody's
    for location in (old, live, new, another):
        location.mkdir(parents=True)
        (location / "images.npy").touch()
    two_days_ago = time.time() - 2 * 24 * 3600
    # a build that has long been going on still writes to its file
    for path in (old / "images.npy", old, live, another / "images.npy", another):
        os.utime(path, (two_days_ago, two_days_ago))
    decode(photos, 8, root=root)
    assert not old.exists() and live.exists() and new.exists() and another.exists()
