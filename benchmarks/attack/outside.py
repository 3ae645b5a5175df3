"""The user's folders and files beside a model, or behind links in it: none of them may change."""

import os
import random
import shutil
from pathlib import Path

from attack.odd import ESCAPE
from attack.stage import Case, Stage

TARGETS = ("report.html", "classes.json", "config.yaml", "events.jsonl", "environment.json", ".lock", ".holder.json")
TARGETS += ("tasks", "resume", "reference", "logs", "method.py")
BELOW = ("tasks/001-second", "tasks/002-again", "resume/002-00-00000002", "reference/weights.safetensors", "logs/csv")
BESIDE = (".{}.copy", ".{}.new", ".{}.0123456789abcdef0123456789abcdef.new", ".{}.tmp")
PIDS = 4000  # process numbers with prepared links: those that a fork may get


def foreign(rng: random.Random, stage: Stage, folder: Path) -> Case:
    """A model with links to a folder of the user's, or beside folders named like temporary ones."""
    home = folder / "home"
    (home / "photos").mkdir(parents=True)
    for name in ("diary.txt", "photos/one.jpg", "manifest.json", "weights.safetensors", "metrics.csv"):
        (home / name).write_text(f"of another user {ESCAPE}")
    model, photos = stage.copy(folder), str(stage.photos / "first")
    what = rng.choice([_links, _below, _guessed, _beside, _beside])(rng, model, home)
    commands = [
        ["report", "model"],
        ["learn", "model", "--data", photos, "--task", "again", "-q"],
        ["learn", "model", "--data", photos, "--task", "again", "-q", "--discard", "--log", "csv"],
        ["learn", "new", "--from", "model", "--data", photos, "--task", "again", "-q"],
        ["export", "model", "--to", "torch", "-o", "out.pt2"],
        ["export", "model", "--to", "torch", "-o", "out.pt2", "--force"],
        ["resume", "model", "-q"],
        ["inspect", "model"],
    ]
    return Case(what, rng.choice(commands), home, sealed=True, code=(0, 1, 2))


def _place(link: Path, target: Path) -> None:
    if link.is_dir() and not link.is_symlink():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)


def _links(rng: random.Random, model: Path, home: Path) -> str:
    name = rng.choice(TARGETS)
    _place(model / name, rng.choice([home, home / "diary.txt"]))
    return f"{name} is a link"


def _below(rng: random.Random, model: Path, home: Path) -> str:
    name = rng.choice(BELOW)
    _place(model / name, rng.choice([home, home / "photos", home / "diary.txt"]))
    return f"{name} is a link"


def _guessed(rng: random.Random, model: Path, home: Path) -> str:
    """Return the names that version 0.1 wrote to, for every possible process number."""
    name = rng.choice(TARGETS)
    for pid in range(os.getpid(), os.getpid() + PIDS):
        (model / f".{name}.{pid}.tmp").symlink_to(home / "diary.txt")
    return f"links wait where {name} is written"


def _beside(rng: random.Random, model: Path, home: Path) -> str:
    """Create a link beside a command's output, or move the user's folder and link to it."""
    made = rng.choice(["new", "out.pt2", "model"])
    path = model.with_name(rng.choice(BESIDE).format(made))
    path.symlink_to(home, target_is_directory=True)
    if rng.random() < 0.5:
        path.unlink()
        home.rename(path)
        home.symlink_to(path, target_is_directory=True)
    return f"{path.name} is a user's"
