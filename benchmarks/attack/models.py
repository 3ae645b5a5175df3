"""Models and runs with changed files: settings, JSON, tensors, and contents of the directory."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load, save
from torch import Tensor

from attack import odd
from attack.stage import RUN, Case, Stage, asked

MEANT = ("images", "backbone", "method", "engine", "smoke")  # settings that may change predictions


def question(rng: random.Random, stage: Stage, folder: Path, name: str, what: str, *, same: bool = True) -> Case:
    """Run a query on a copy, whose result is known if it must be the `same` as before."""
    photos = str(stage.photos / "first")
    if name == "run":
        directory = folder / "runs" / stage.run.name
        lines = [
            ["show", str(directory)],
            ["report", str(directory)],
            ["list", "runs"],
            [*RUN],
            ["resume", str(directory), "-q"],
        ]
        lines += [["inspect", str(directory)], ["sweep", *RUN[1:-1], "--dry-run"]]
    else:
        directory = folder / "model"
        lines = [
            ["inspect", "model"],
            ["report", "model"],
            ["export", "model", "--to", "peft"],
            ["resume", "model", "-q"],
        ]
        lines += [["learn", "model", "--data", photos, "--task", "again", "-q"], ["inspect", "model", "--json"]]
        lines += [["learn", "new", "--from", "model", "--data", photos, "--task", "again", "-q"]]
    chosen = rng.choice([*lines, *asked(directory, stage.photos).values(), asked(directory, stage.photos)["predict"]])
    if name == "run" and chosen[0] == "evaluate":
        chosen = ["show", str(directory)]
    answers = stage.answers
    right = answers.get(f"{name} {chosen[0]}") if chosen[0] in ("predict", "evaluate") else None
    if chosen[0] == "show" or chosen[:1] == RUN[:1]:
        right = answers["page"]
    learns = chosen[0] in ("learn", "resume", "run", "report", "export")
    return Case(what, chosen, directory, learns=learns, answer=right if same else None, code=(0, 1, 2))


def settings(rng: random.Random, stage: Stage, folder: Path) -> Case:
    """A changed or damaged config.yaml."""
    name = rng.choice(["model", "run"])
    file = stage.copy(folder, name) / "config.yaml"
    raw, same = yaml.safe_load(file.read_text()), False
    if rng.random() < 0.6:
        raw, path, what = odd.mutated(rng, raw)
        same = bool(path) and path[0] not in MEANT and name == "model"
        file.write_bytes(yaml.safe_dump(raw, sort_keys=False).encode("utf-8", "backslashreplace"))
    elif rng.random() < 0.8:
        data, what = odd.spoilt(rng, file.read_bytes())
        file.write_bytes(data)
    else:
        what = odd.replaced(rng, file)
    return question(rng, stage, folder, name, f"config.yaml: {what}", same=same)


def records(rng: random.Random, stage: Stage, folder: Path) -> Case:
    """Changed or damaged JSON files."""
    name = rng.choice(["model", "run"])
    model = stage.copy(folder, name)
    files = sorted(file for file in model.rglob("*.json*") if not file.name.startswith("."))
    if rng.random() < 0.1:
        (model / "resume").mkdir(exist_ok=True)
        (model / "resume" / "task.json").write_text('{"format": 1, "data": "x", "name": "y", "index": 9, "config": {}}')
        files = [model / "resume" / "task.json"]
    file = rng.choice(files)
    if rng.random() < 0.7 and file.suffix == ".json":
        raw, _, what = odd.mutated(rng, json.loads(file.read_text()))
        file.write_text(json.dumps(raw))
    elif rng.random() < 0.8:
        data, what = odd.spoilt(rng, file.read_bytes())
        file.write_bytes(data)
    else:
        what = odd.replaced(rng, file)
    return question(rng, stage, folder, name, f"{file.relative_to(model)}: {what}", same=file.name != "results.json")


def tensors(rng: random.Random, stage: Stage, folder: Path) -> Case:
    """Other tensors, or none, with a matching checksum."""
    name = rng.choice(["model", "run"])
    model = stage.copy(folder, name)
    file = rng.choice(sorted(model.rglob("*.safetensors")))
    state = load(file.read_bytes())
    key = rng.choice([*state])
    value = state[key]
    more: list[Callable[[], Tensor]] = [
        lambda: value.long(), lambda: value.bool(), lambda: value.to(torch.complex64), lambda: value.half(),
        lambda: value.to(torch.uint8), lambda: value.bfloat16(), lambda: value.double(),
        lambda: value.to(torch.float8_e5m2),
        lambda: value[:0] if value.ndim else torch.zeros(0), lambda: value.reshape(-1), lambda: value[None],
        lambda: torch.zeros(()), lambda: value.float() * float("nan"), lambda: value.float() / 0,
        lambda: torch.zeros(7, 3),
        lambda: torch.cat([value, value]) if value.ndim else value.reshape(1),
        lambda: value.transpose(0, -1).contiguous() if value.ndim else value,
    ]  # fmt: skip
    ways: dict[str, Callable[[], Any]] = {
        "missing": lambda: {k: v for k, v in state.items() if k != key},
        "more": lambda: {
            **state,
            rng.choice(["other", f"{key}x", "heads.blocks.9.weight", "", "tensors.9/x", odd.ESCAPE]): value,
        },
        "renamed": lambda: {k if k != key else f"{key}2": v for k, v in state.items()},
        "none": dict,
        "swapped": lambda: dict(zip(state, [*state.values()][::-1], strict=True)),
    }
    way = rng.choice([*ways, *["tensor"] * 8])
    number = rng.randrange(len(more))
    made = ways[way]() if way in ways else {**state, key: more[number]()}
    data = save({k: v.contiguous().clone() for k, v in made.items()})
    if rng.random() < 0.15:
        data, way = odd.spoilt(rng, data)
    file.write_bytes(data)
    manifest = json.loads((file.parent / "manifest.json").read_text())
    manifest["sha256"][file.name] = hashlib.sha256(data).hexdigest()
    manifest["bytes"] = sum(each.stat().st_size for each in file.parent.glob("*.safetensors"))
    if rng.random() < 0.7:
        others = {k: shape for k, shape in manifest["tensors"].items() if k not in state}
        manifest["tensors"] = others | {k: list(v.shape) for k, v in made.items()}
    (file.parent / "manifest.json").write_text(json.dumps(manifest))
    what = f"{file.parent.name}: {way} {key} {tuple(value.shape)} {number if way == 'tensor' else ''}"
    # other valid numbers are another model, whose author could also write a matching checksum
    return question(rng, stage, folder, name, what, same=False)


def directories(rng: random.Random, stage: Stage, folder: Path) -> Case:
    """Files and folders of a model that are replaced, moved, swapped, or point outside."""
    name = rng.choice(["model", "run"])
    model = stage.copy(folder, name)
    there = sorted(path for path in model.rglob("*") if not path.name.startswith("."))
    chosen = rng.choice(there)
    tasks = sorted((model / "tasks").iterdir())
    outside = folder / "outside"
    outside.mkdir()
    (outside / "kept.txt").write_text("of another user")

    def lead_outside() -> str:
        target = outside / "kept.txt"
        where = model / rng.choice(
            ["events.jsonl", "events.jsonl", ".lock", ".holder.json", "classes.json", "resume", "tasks"]
        )
        if where.is_dir():
            shutil.rmtree(where)
            target = outside
        where.unlink(missing_ok=True)
        where.symlink_to(target)
        return f"{where.name} leads outside"

    def swap() -> str:
        names = [task.name for task in tasks]
        tasks[0].rename(model / "aside")
        tasks[1].rename(model / "tasks" / names[0])
        (model / "aside").rename(model / "tasks" / names[1])
        return "tasks swapped"

    def renumber() -> str:
        tasks[1].rename(model / "tasks" / rng.choice(["002-x", "000-z", "001-other", "999999999999-x", "00١-x", "001"]))
        return "a task renamed"

    def double() -> str:
        shutil.copytree(tasks[rng.randrange(2)], model / "tasks" / rng.choice(["002-x", "000-0", "001-zz"]))
        return "a task twice"

    def move() -> str:
        file, other = rng.sample([path for path in there if path.is_file()], 2)
        file.write_bytes(other.read_bytes())
        return f"{file.name} is a copy of {other.name}"

    def shut() -> str:
        chosen.chmod(0)
        return f"{chosen.name} shut"

    def more() -> str:
        strange = os.fsencode(model / "tasks") + rng.choice([b"/\xff", b"/000-" + b"x" * 200, b"/003-\x1b[31m"])
        os.mkdir(strange)  # noqa: PTH102
        return "a strange folder"

    def gone() -> str:
        shutil.rmtree(chosen) if chosen.is_dir() else chosen.unlink()
        return f"{chosen.name} gone"

    ways = [
        lead_outside,
        lead_outside,
        swap,
        renumber,
        double,
        move,
        shut,
        more,
        gone,
        lambda: odd.replaced(rng, chosen),
    ]
    what = rng.choice(ways)()
    asked_for = question(rng, stage, folder, name, what, same="results" not in what)
    if "outside" in what:  # none of its bytes may change
        asked_for.model, asked_for.learns = outside, False
    return asked_for
