"""Unexpected values, and their insertion into documents, bytes and folders. All are functions of a random state."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

HUGE = "9" * 5000
ESCAPE = "\x1b[31mred\x1b]0;title\x07"
PATTERNS = [
    "(a+)+$",
    "(.*)*x",
    "(.|.)*!",
    "((a|aa)+)+$",
    ".*" * 12 + "!",
    "(",
    "[",
    "(?P<a",
    "a{65536}{65536}",
    "(?=" * 200,
]
PATTERNS += ["(" * 3000 + ")" * 3000, r"(\w+\.?)+!", "^(layer|layer1|[a-z0-9.]+)*$", "*", "(?<=.*)x", "x" * 100_000]
PATHS = ["~nouser/x", "~", "~/x", "a\0b", "x" * 5000, "\ud800", "/dev/zero", "/proc/self/mem", "", ".", "..", "/", "-"]
PATHS += ["//", "a/" * 3000, "\n", ESCAPE, "/dev/stdin", "CON", "*", "$HOME", "`ls`", "\u202egnp.exe"]
TEXTS = [
    "",
    " ",
    "x",
    "0",
    "nan",
    "\0",
    "\ud800",
    ESCAPE,
    "\r\n",
    "=1+1",
    "é" * 3,
    "日本",
    "x" * 100_000,
    *PATHS,
    *PATTERNS,
]
NUMBERS = [0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**22, 10**400, 0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf")]
NUMBERS += [float("-inf"), 3.0, 999_999_999]


def deep(rng: random.Random) -> Any:
    """Return nested lists."""
    value: Any = 1
    for _ in range(rng.choice([3, 40, 150])):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def value(rng: random.Random) -> Any:
    """Return any JSON value."""
    kinds: list[Callable[[], Any]] = [
        lambda: rng.choice(NUMBERS),
        lambda: rng.choice(NUMBERS),
        lambda: rng.choice(TEXTS),
        lambda: rng.choice([None, True, False]),
        lambda: rng.choice([[], {}, [[]], [None], {"": None}, [1, "a"], {"name": []}, [float("nan")]]),
        lambda: deep(rng),
        lambda: [rng.choice(NUMBERS)] * rng.choice([1, 3, 1000]),
        lambda: {rng.choice(TEXTS): rng.choice(NUMBERS)},
    ]
    return rng.choice(kinds)()


def paths(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all values of a document."""
    results = [path]
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, item in items:
        results += paths(item, (*path, key))
    return results


def mutated(rng: random.Random, document: Any) -> tuple[Any, tuple[Any, ...], str]:
    """Return a document with one value changed, removed or added; its path; and a description."""
    document = json.loads(json.dumps(document))
    path = rng.choice(paths(document)[1:] or [()])
    if not path:
        return value(rng), (), "another document"
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    how = rng.choice(["set", "set", "set", "set", "drop", "wrap", "double", "text"])
    key = path[-1]
    if how == "drop":
        del parent[key]
    elif how == "wrap":
        parent[key] = [parent[key]]
    elif how == "text":
        parent[key] = str(parent[key])
    elif how == "double" and isinstance(parent, list):
        parent.append(parent[key])
    elif how == "double":
        parent[f"{key}2"] = parent[key]
    else:
        parent[key] = value(rng)
    return document, path, f"{how} {'.'.join(map(str, path))} {_short(parent)}"


def _short(parent: Any) -> str:
    return repr(parent)[:120]


def spoilt(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """Return damaged bytes, and a description."""
    at = rng.randrange(len(data) + 1)
    ways: dict[str, Callable[[], bytes]] = {
        "cut": lambda: data[:at],
        "empty": lambda: b"",
        "flipped": lambda: data[:at] + bytes([(data + b"\0")[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :],
        "NUL inside": lambda: data[:at] + b"\0" * rng.choice([1, 100]) + data[at:],
        "no UTF-8": lambda: data[:at] + b"\xff\xfe\x80" + data[at:],
        "UTF-16": lambda: data.decode("latin-1").encode("utf-16"),
        "BOM": lambda: b"\xef\xbb\xbf" + data,
        "twice": lambda: data + data,
        "brackets": lambda: (b"[" * 100_000) + data,
        "braces": lambda: b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        "indented": lambda: b"".join(b" " * i + b"a:\n" for i in range(1500)),
        "digits": lambda: data.replace(b"1", HUGE.encode(), 1),
        "random": lambda: rng.randbytes(rng.choice([1, 100, 10_000])),
        "a key twice": lambda: data.replace(b"\n", b"\nformat: 1\n", 1) if b"{" not in data[:1] else _twice(data),
        "aliases": lambda: _aliases(),
        "tag": lambda: b"!!python/object/apply:os.system [ls]\n" + data,
        "carriage returns": lambda: data.replace(b"\n", b"\r"),
    }
    way = rng.choice([*ways])
    return ways[way](), way


def _twice(data: bytes) -> bytes:
    return data.replace(b"{", b'{"format": 1, "name": "x", "tasks": [], ', 1)


def _aliases() -> bytes:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    return "\n".join(lines).encode()


def replaced(rng: random.Random, folder: Path) -> str:
    """Replace a file or folder by something else, and return a description."""
    what = rng.choice(["FIFO", "folder", "loop", "device", "nowhere", "gone", "sparse", "socket"])
    if folder.is_dir() and not folder.is_symlink():
        folder.rename(folder.with_name("was-there"))
    else:
        folder.unlink(missing_ok=True)
    if what == "FIFO":
        os.mkfifo(folder)
    elif what == "folder":
        folder.mkdir()
    elif what == "loop":
        folder.symlink_to(folder.name)
    elif what == "device":
        folder.symlink_to(rng.choice(["/dev/zero", "/dev/random", "/dev/tty"]))
    elif what == "nowhere":
        folder.symlink_to("/nowhere/at/all")
    elif what == "sparse":
        with folder.open("wb") as file:
            file.truncate(2**31)
    elif what == "socket":
        os.mknod(folder, 0o140644)
    return f"{folder.name} is a {what}" if what != "gone" else f"{folder.name} is gone"
