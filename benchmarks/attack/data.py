"""Odd images, archives of arrays and files of weights."""

import io
import json
import random
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load, save

from attack import odd
from attack.stage import FIRST, SMALL, TINY, Case, Stage

# ---------------------------------------------------------------------------------------------------------- images


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """Return a PNG with an arbitrary header."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width & 0xFFFFFFFF, height & 0xFFFFFFFF, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def _picture(rng: random.Random) -> bytes:
    """Return a small image file of any format and mode."""
    mode = rng.choice(["RGB", "L", "RGBA", "P", "1", "LA", "I;16", "CMYK", "I", "F"])
    image = Image.new(mode, (rng.choice([1, 8, 9, 300]), rng.choice([1, 8, 7, 300])))
    file = io.BytesIO()
    for kind in rng.sample(["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "ICO", "TGA"], 9):
        try:
            image.save(file, kind)
            return file.getvalue()
        except (OSError, ValueError, KeyError):
            file = io.BytesIO()
    return b""


def bad_image(rng: random.Random, file: Path) -> str:
    """Write an image that is odd in some way."""
    what = rng.choice(["spoilt", "spoilt", "spoilt", "place", "place", "head", "head", "text", "frames", "tags"])
    if what == "spoilt":
        data, what = odd.spoilt(rng, _picture(rng))
        file.write_bytes(data)
    elif what == "head":
        size = rng.choice([(0, 0), (1, 10**6), (10**5, 10**5), (2**31, 2**31), (1, 0), (10**4, 10**4), (20_000, 3)])
        file.write_bytes(png(*size, b"\0" * rng.choice([0, 10, 10_000])))
        what = f"head says {size}"
    elif what == "text":
        file.write_bytes(
            rng.choice([b"<svg/>", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"GIF89a", b"II*\0", b"RIFFxxxxWEBP", b"BM"])
        )
    elif what == "frames":
        frames = [Image.new("P", (8, 8), i) for i in range(rng.choice([1, 3, 200]))]
        frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    elif what == "tags":
        exif = Image.Exif()
        exif[0x0112] = rng.choice([0, 3, 9, 255, 65535])
        Image.new("RGB", (8, 8)).save(file, "JPEG", exif=exif, comment=odd.ESCAPE.encode())
    else:
        file.write_bytes(b"")
        what = odd.replaced(rng, file)
    return f"image: {what}"


def images(rng: random.Random, stage: Stage, folder: Path) -> Case:
    """Odd images, alone or among good ones, for prediction, evaluation and learning."""
    photos, model = Path(shutil.copytree(stage.photos / "first", folder / "photos")), stage.copy(folder)
    names = [
        "odd.png",
        "odd.jpg",
        "odd.GIF",
        "0.png",
        "\udcff\udcfe.png",
        "-x.png",
        f"{odd.ESCAPE}.png".replace("/", ""),
    ]
    file = photos / "zero" / rng.choice(names)
    file.unlink(missing_ok=True)
    what = bad_image(rng, file)
    verb = rng.choice(["predict", "predict", "predict", "evaluate", "learn"])
    if verb == "predict":
        named = [str(file)] if rng.random() < 0.5 else [str(photos)]
        form = rng.choice(["--json", "--csv", "-v"])
        return Case(what, ["predict", "model", *named, form], model, code=(0, 1))
    if verb == "evaluate":
        return Case(what, ["evaluate", "model", "--data", "photos"], model)
    photos.rename(folder / "third")
    for name in FIRST:
        (folder / "third" / name).rename(folder / "third" / f"new {name}")
    return Case(what, ["learn", "model", "--data", "third", "-q"], model, learns=True)


# -------------------------------------------------------------------------------------------------------- archives


def _arrays(rng: random.Random) -> dict[str, np.ndarray]:
    """Return a good archive's arrays, with one or two replaced."""
    good = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    for part, count in (("train", 8), ("test", 4)):
        arrays[f"{part}_images"] = good.integers(0, 255, (count, 8, 8, 3), dtype=np.uint8)
        arrays[f"{part}_labels"] = np.arange(count) % 4
    if rng.random() < 0.5:
        arrays["class_names"] = np.array(["a", "b", "c", "d"])
    labels = [2_000_000_000, 2**62, -1, 4, 100_000]
    odd_ones: list[Callable[[], np.ndarray]] = [
        lambda: np.array([0, 1, 2, 3, 0, 1, 2, rng.choice(labels)]),
        lambda: np.array([0, 1, 2, 2**63 + rng.choice([0, 5]), 0, 1, 2, 3], np.uint64),
        lambda: np.array([2**64 - 1] * 8, np.uint64),
        lambda: np.array([0.0, float("nan")]),
        lambda: np.array(["a"] * 8),
        lambda: np.array(["a", "a", odd.ESCAPE, "\0"]),
        lambda: np.array([b"\xff"] * 4),
        lambda: np.array(3),
        lambda: np.zeros(
            rng.choice([(0,), (0, 8, 8, 3), (8, 0, 8, 3), (8, 8, 8, 0), (8, 0, 0, 3), (8, 1, 1, 3)]), np.uint8
        ),
        lambda: np.zeros(
            rng.choice([(8, 8, 8, 4), (8, 8, 8), (8, 8), (8, 3, 8, 8), (8, 8, 8, 3, 1), (8, 9, 9, 3)]), np.uint8
        ),
        lambda: np.zeros((8, 8, 8, 3), rng.choice([np.float32, np.int64, np.bool_, np.complex64, "M8[s]", "S3", "V4"])),
        lambda: np.zeros(8, dtype=[("a", "i4"), ("b", "O")][:1]),
        lambda: np.zeros(8, np.bool_),
        lambda: np.zeros(8, "m8[s]"),
        lambda: np.array([]),
        lambda: np.array([[]], "U1"),
    ]
    for _ in range(rng.choice([1, 1, 2])):
        arrays[rng.choice([*arrays, "validation_images", "validation_labels", "other", "class_names"])] = rng.choice(
            odd_ones
        )()
    if rng.random() < 0.15:
        del arrays[rng.choice([*arrays])]
    return arrays


def _head(shape: str, kind: str = "|u1") -> bytes:
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) + 1) + text + b"\n"


def archives(rng: random.Random, stage: Stage, folder: Path) -> Case:
    """Archives of arrays with odd members."""
    arrays, file = _arrays(rng), folder / "data.npz"
    np.savez(file, **arrays)
    what, way = " ".join(f"{key} {array.dtype}{array.shape}" for key, array in arrays.items()), rng.random()
    if way < 0.3:
        good = {"train_images": np.zeros((8, 8, 8, 3), np.uint8), "train_labels": np.arange(8) % 4}
        np.savez(file, **good, test_images=good["train_images"][:4], test_labels=good["train_labels"][:4])
        members: dict[str, bytes] = {
            "train_images.npy": rng.choice(
                [_head("(1000000000000,)"), _head("(8, 8, 8, 3)"), _head("(-1,)"), _head("'x'")]
            ),
            "test_labels.npy": rng.choice(
                [_head("(4,)", "|O") + b"\x80\x04.", _head("(4,)", "<i8"), _head(f"({odd.HUGE},)"), b"x"]
            ),
            "class_names.npy": rng.choice(
                [_head("(4,)", "<U1000000000"), _head("(" * 2000 + ")" * 2000), b"\x93NUMPY\x09"]
            ),
            "test_images.npy": rng.choice([b"", b"\0" * 100, _head("(4, 8, 8, 3)") + b"\0" * 5_000_000]),
            rng.choice(["../x.npy", "train_images", "\0.npy", f"{odd.ESCAPE}.npy", ".npy", "a/b.npy"]): _head("(0,)"),
        }
        name = rng.choice([*members])
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr(name.replace("\0", "0"), members[name], compress_type=rng.choice([0, 8]))
        what = f"member {name} {members[name][:80]!r}"
    elif way < 0.5:
        data, what = odd.spoilt(rng, file.read_bytes())
        file.write_bytes(data)
    elif way < 0.6:
        what = odd.replaced(rng, file)
    given = ["data={name: npz, path: data.npz}", "images.size=8", *TINY, "-q"]
    return Case(
        f"archive: {what}", ["run", "digits", *given, "stream.tasks=1", *(["--dry-run"] if rng.random() < 0.7 else [])]
    )


# --------------------------------------------------------------------------------------------------------- weights


def weights(rng: random.Random, stage: Stage, folder: Path) -> Case:
    """Odd weight files: contents by torch.save and safetensors, and other files."""
    state: dict[Any, Any] = _backbone_state(stage)
    suffix = rng.choice([".pt", ".pth", ".safetensors", ".bin"])
    file = folder / f"w{suffix}"
    key = rng.choice([*state])
    value = state[key]
    ways: dict[str, Callable[[], Any]] = {
        "int64": lambda: {**state, key: value.long()},
        "bool": lambda: {**state, key: value.bool()},
        "complex": lambda: {**state, key: value.to(torch.complex64)},
        "half": lambda: {**state, key: value.half()},
        "empty": lambda: {**state, key: value[:0] if value.ndim else torch.zeros(0)},
        "another shape": lambda: {**state, key: torch.zeros(3, 1, 4, 1, 5)},
        "missing": lambda: {k: v for k, v in state.items() if k != key},
        "more": lambda: {**state, "other": value},
        "NaN": lambda: {**state, key: value.float() * float("nan")},
        "no tensors": lambda: odd.value(rng),
    }
    if suffix != ".safetensors":
        ways |= {
            "odd keys": lambda: {**state, rng.choice([1, None, (1, 2), b"x", 2.5]): value},
            "odd value": lambda: {**state, key: rng.choice([None, 1, "x", [value], {"a": value}])},
            "sparse": lambda: {**state, key: value.float().reshape(-1).to_sparse()},
            "a tensor": lambda: value,
            "a list": lambda: [value, value],
            "nested": lambda: {"state_dict": {"model": state}},
            "nested oddly": lambda: {"model": {1: 2}, "state_dict": rng.choice([{}, {"a": {}}, {3: value}])},
            "meta": lambda: {**state, key: value.to("meta")},
            "parameter": lambda: {**state, key: torch.nn.Parameter(value.float())},
            "quantized": lambda: {**state, key: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)},
            "code": lambda: {"a": Path},
            "repeated": lambda: {**state, key: torch.zeros(1).expand(10**9)},
        }
    what = rng.choice([*ways])
    made = ways[what]()
    if suffix == ".safetensors":
        good = isinstance(made, dict) and all(isinstance(item, torch.Tensor) for item in made.values())
        file.write_bytes(
            save({str(k): v.contiguous().clone() for k, v in made.items()}) if good else json.dumps(made).encode()
        )
    else:
        torch.save(made, file, _use_new_zipfile_serialization=rng.random() < 0.8 or "quant" in what)
    if rng.random() < 0.3:
        data, what = odd.spoilt(rng, file.read_bytes())
        file.write_bytes(data)
    elif rng.random() < 0.15:
        what = odd.replaced(rng, file)
    named = str(file) if rng.random() < 0.9 else rng.choice([path for path in odd.PATHS if path])
    setting = f"backbone.weights={json.dumps(named)}"
    verb = (
        ["run", "digits", "method=finetune"]
        if rng.random() < 0.7
        else [
            "learn",
            "new",
            "--data",
            str(stage.photos / "first"),
            "--backbone",
            "resnet18",
            "images.size=8",
            "images.pad=1",
            "images.flip=false",
        ]
    )
    return Case(f"weights: {what} {key}", [*verb, *(SMALL if verb[0] == "run" else TINY), setting, "-q"])


def _backbone_state(stage: Stage) -> dict[str, torch.Tensor]:
    whole = load((stage.run / "reference" / "weights.safetensors").read_bytes())
    return {key.removeprefix("backbone."): value for key, value in whole.items() if key.startswith("backbone.")}
