"""The kinds of bad input. Each is a function that prepares a folder and returns the `pearl` command for it."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from attack import odd
from attack.data import archives, images, weights
from attack.models import directories, records, settings, tensors
from attack.outside import foreign
from attack.stage import LEARN, SECOND, SMALL, TINY, Case, Stage

Kind = Callable[[random.Random, Stage, Path], Case]
KEYS = ["seed", "data", "data.name", "data.path", "data.seed", "stream.tasks", "stream.order", "stream.per_class"]
KEYS += ["stream.classes", "stream.validation", "stream.evaluate_on", "images.size", "images.resize", "images.augment"]
KEYS += ["images.pad", "images.scale", "images.mean", "images.std", "backbone", "backbone.name", "backbone.width"]
KEYS += [
    "backbone.weights",
    "method",
    "method.name",
    "method.rank",
    "method.rank.name",
    "method.rank.r",
    "method.targets",
]
KEYS += ["method.fold", "method.stages", "train", "train.lr", "train.epochs", "train.steps", "train.batch_size"]
KEYS += ["train.betas", "train.schedule", "train.milestones", "train.phases", "train.phases.probe.lr", "train.groups"]
KEYS += [
    "engine.precision",
    "engine.max_steps",
    "engine.eval_batch_size",
    "smoke",
    "recipe",
    "about",
    "expected",
    "extends",
]
KEYS += ["", ".", "a..b", "__class__", "method.__init__", "\0", odd.ESCAPE, "x" * 3000, "a." * 2000, "train..lr"]


def _text(rng: random.Random, value: Any) -> str:
    """Return a value as YAML of one line, or invalid text."""
    if rng.random() < 0.15:
        data, _ = odd.spoilt(rng, b"{a: 1, b: [1, 2]}")
        return data[:100_000].decode("utf-8", "surrogateescape").replace("\0", "")
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    text = text.encode("utf-8", "backslashreplace").decode()
    return text.replace("NaN", ".nan").replace("Infinity", ".inf")


def overrides(rng: random.Random, stage: Stage, folder: Path) -> Case:
    """Settings on the command line with odd values or names."""
    items = [f"{rng.choice(KEYS)}={_text(rng, odd.value(rng))}" for _ in range(rng.choice([1, 1, 2, 4]))]
    if rng.random() < 0.15:
        method, option = rng.choice([("pearl", "targets"), ("seqlora", "targets"), ("pnn", "stages")])
        items = [f"method.name={method}", f"method.{option}={json.dumps(rng.choice(odd.PATTERNS))}"]
    if rng.random() < 0.1:
        keys = ["backbone.width", "images.size", "stream.tasks", "train.batch_size", "method.rank.r", "images.pad"]
        items = [f"{rng.choice(keys)}={rng.choice([10**22, 10**9, 10**6, 2**31, 2**63, 100_000])}"]
    items = [item.replace("\0", "") for item in items]
    verb = rng.choice(
        [["run", "digits", *SMALL], ["run", "digits", *SMALL], ["sweep", "digits", *SMALL], ["table", "growth"]]
    )
    return Case("overrides", [*verb, *items, "--dry-run"])


def recipes(rng: random.Random, stage: Stage, folder: Path) -> Case:
    """Recipe files that are changed, damaged or missing."""
    raw = yaml.safe_load((Path(__file__).parents[2] / "src/pearl/settings/recipes/digits.yaml").read_text())
    if rng.random() < 0.3:
        raw["extends"] = rng.choice(["digits", "recipe.yaml", "../x.yaml", "nothing", *odd.PATHS])
    if rng.random() < 0.5:
        raw, _, what = odd.mutated(rng, raw)
        data = yaml.safe_dump(raw, allow_unicode=rng.random() < 0.5).encode("utf-8", "backslashreplace")
    else:
        data, what = odd.spoilt(rng, yaml.safe_dump(raw).encode())
    file = folder / "recipe.yaml"
    file.write_bytes(data)
    if rng.random() < 0.1:
        what = odd.replaced(rng, file)
    verb = rng.choice(
        [["run", "recipe.yaml", "--dry-run", *SMALL], ["show", "recipe.yaml"], ["sweep", "recipe.yaml", "--dry-run"]]
    )
    if rng.random() < 0.2:
        verb = ["learn", "new", "--data", str(stage.photos / "first"), "--recipe", "recipe.yaml", *LEARN, "-q"]
    return Case(what, verb)


# --------------------------------------------------------------------------------------------- methods, words, names

METHOD = """
import torch
import torch.nn.functional as F
from pearl.methods import Method, Phase
{top}
class Own(Method):
    phases = {phases}
    def __init__(self, backbone, *, alpha: {hint} = {default}):
        super().__init__(backbone)
        {init}
    def learn(self, task):
        self.heads.grow(len(task.classes))
        {learn}
    def loss(self, batch):
        {loss}
        return F.cross_entropy(self(batch.x), batch.y)
"""
RAISE = ["raise SystemExit", "raise SystemExit(0)", "raise SystemExit('bye')", "raise KeyboardInterrupt", "exit(3)"]
RAISE += ["raise GeneratorExit", "raise BaseException('x')", "raise type('Mine', (KeyboardInterrupt,), {})('x')"]
RAISE += ["raise type('Own', (SystemExit,), {})()", "raise MemoryError", "raise RecursionError", "raise StopIteration"]
RAISE += ["raise type('Bad', (Exception,), {'__str__': lambda self: 1 / 0})()", "raise OSError(2, 'x', 'y')"]


def methods(rng: random.Random, stage: Stage, folder: Path) -> Case:
    """Files of methods that raise odd exceptions, yield invalid phases, or are not Python."""
    phase = "yield Phase('own', self.parameters(), self.loss)"
    parts = {"top": "", "phases": "('own',)", "hint": "float", "default": "0.0", "init": "", "learn": phase, "loss": ""}
    part = rng.choice([*parts])
    no_phase = [
        "yield None",
        "yield 'own'",
        "yield 1, 2",
        "return iter(())",
        "return None",
        "yield Phase",
        "pass",
        "yield self",
    ]
    no_phase += [
        "return [1]",
        "yield Phase('other', self.parameters(), self.loss)",
        "yield Phase('own', [], self.loss)",
    ]
    no_phase += ["yield Phase('own', [1], self.loss)", "yield Phase(1, self.parameters(), self.loss)"]
    no_phase += ["yield Phase('own', self.parameters(), None)", "yield Phase('own', None, self.loss)"]
    choices = {
        "top": [*RAISE, "1 / 0", "import nothing_of_this_name", "x = " + "(" * 300 + ")" * 300, "]", "\0", "def f(:"],
        "phases": ["()", "'own'", "None", "(1, 2)", "7", "[]", "{'own': 1}", "('own', 'own')", "(None,)"],
        "hint": ["'Nothing'", "1", "print", "Own", "dict[str, Own]", "torch.Tensor", "None", "type"],
        "default": ["None", "'x'", "object()", "float('nan')", "[]", "10 ** 30", "lambda: 1"],
        "init": [*RAISE, "self.heads = None", "self.backbone = None", "del self.heads"],
        "learn": [*(f"{way}; yield" for way in RAISE), *no_phase, f"{phase}; raise SystemExit"],
        "loss": [*RAISE, "return 1", "return None", "return batch.x", "return torch.zeros(1)", "return float('nan')"],
    }
    parts[part] = rng.choice(choices[part])
    text = METHOD.format(**parts)
    data, what = (text.encode(), f"{part}: {parts[part][:80]}")
    if rng.random() < 0.2:
        data, what = odd.spoilt(rng, data)
    file = folder / "own.py"
    file.write_bytes(data)
    if rng.random() < 0.1:
        what = odd.replaced(rng, file)
    named = (
        "own.py:Own"
        if rng.random() < 0.85
        else rng.choice(
            [
                "own.py",
                "own.py:",
                "own.py:Nothing",
                "own.py:torch",
                "own.py:F",
                "x.py:Own",
                "~nouser/own.py:Own",
                f"{odd.ESCAPE}.py:A",
                "a" * 5000 + ".py:B",
                ".py:X",
                "own.py:Phase",
            ]
        )
    )
    verb = rng.choice([["run", "digits", *SMALL, "-q"], ["run", "digits", *SMALL, "-q"], ["show"]])
    return Case(f"method: {what}", [*verb, named] if verb == ["show"] else [*verb, "--method", named], code=(0, 2, 130))


def arguments(rng: random.Random, stage: Stage, folder: Path) -> Case:
    """Odd words on the command line and in the environment."""
    model = stage.copy(folder)
    path = rng.choice([p for p in odd.PATHS if "\0" not in p and "\ud800" not in p])
    number = str(
        rng.choice(["nan", "inf", "-1", "0", "1e400", "999999999", 10**22, odd.HUGE, "x", "", "1.5", " 1", "0x10", "١"])
    )
    photo = str(stage.photos / "first")
    lines: list[list[str]] = [
        [rng.choice(["predict", "evaluate", "inspect", "report", "show", "resume", "export"]), path],
        ["predict", "model", path],
        ["predict", "model", photo, "--top", number],
        ["predict", "model", photo, "--tasks", number],
        ["predict", "model", photo, "--task", path],
        [
            "predict",
            "model",
            photo,
            "--device",
            rng.choice(["cuda:99", "cpu:1", "meta", "", path[:100], "cuda:x", "cpu:" + number]),
        ],
        ["evaluate", "model", "--data", path],
        ["learn", path, "--data", photo, "--backbone", "resnet18", *LEARN, "-q"],
        ["learn", "new", "--data", path, "--backbone", "resnet18"],
        ["learn", "new", "--data", photo, "--from", path],
        ["learn", "new", "--data", photo, "--recipe", path],
        ["learn", "new", "--data", photo, "--backbone", path],
        ["run", path],
        ["run", "digits", "--dry-run", "--devices", number],
        ["run", "digits", *SMALL, "-q", "--store-every", number],
        ["sweep", "digits", "--dry-run", "--seeds", number],
        ["sweep", "digits", "--dry-run", "--seeds", ",".join([number] * 3)],
        ["sweep", "digits", "--dry-run", "--workers", number],
        ["sweep", "digits", "--dry-run", "--per-gpu", number],
        ["sweep", "digits", "--dry-run", "-o", path],
        [
            "sweep",
            "digits",
            "--dry-run",
            f"train.lr={list(range(1, 300))}",
            f"seed={list(range(300))}",
            f"train.epochs={list(range(1, 3000))}",
        ],
        ["table", rng.choice(["growth", path]), "--seeds", number],
        ["table", "growth", "--size", "smoke", "-o", path],
        ["report", "model", "-o", path],
        ["report", *["model"] * rng.choice([1, 2])],
        ["export", "model", "--to", path],
        ["list", path],
        [path],
        [rng.choice(["list", "doctor", "table"]), *rng.choice([["runs"], []])],
    ]
    chosen = rng.choice(lines)
    env: dict[str, str] = {}
    if rng.random() < 0.3:
        name = rng.choice(
            ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"]
        )
        env = dict.fromkeys(["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"], rng.choice(["0", "1"]))
        env |= {name: rng.choice(["x", "", "-1", "0", "1.5", "9" * 30, odd.ESCAPE, "2"])}
        chosen = rng.choice([["run", "digits", *SMALL, "-q"], ["run", "digits", *SMALL, "-q", "--devices", "2"]])
        if env["WORLD_SIZE"] == "2":  # as torchrun on two machines: it would wait for the other one
            env["WORLD_SIZE"] = "x"
    elif rng.random() < 0.15:
        env = {rng.choice(["PEARL_RUNS", "PEARL_DATA"]): path}
        chosen = rng.choice(
            [["list", "runs"], ["doctor"], ["run", "digits", *SMALL, "-q"], ["report", "x"], ["show", "x"]]
        )
    stdin = b""
    if rng.random() < 0.1:
        chosen, stdin = (
            ["predict", "model", "-", "--json"],
            b"\n".join([b"a\0b", b"\xff", b"~nouser", b"x" * 5000, b"/dev/zero"][: rng.randrange(6)]),
        )
    return Case(
        "arguments",
        chosen,
        model if chosen[1:2] != ["model"] or chosen[0] != "report" else None,
        env=env,
        stdin=stdin,
        code=(0, 1, 2),
        learns=True,
    )


NAMES = [
    odd.ESCAPE,
    "a\rb",
    "a\r\nb",
    "=1+1",
    "+1",
    "-1",
    "@x",
    "\t=1",
    "\udcff\udcfe",
    "a\nb",
    "'",
    '"',
    "\u202etxt",
    "\x7f",
]
NAMES += [
    "\u200b",
    "\x9b31m",
    "😀",
    "a|b",
    "<b>",
    "{x}",
    "%s",
    ",",
    ";",
    "\\",
    " ",
    "~nouser",
    "$(ls)",
    "\u2028",
    "\ufeff",
]


def names(rng: random.Random, stage: Stage, folder: Path) -> Case:
    """Names of classes, tasks, files, models and runs that terminals or spreadsheets would interpret."""
    root, name = folder / "third", f"{rng.choice(NAMES)}{rng.choice(['', 'x'])}"
    other = f"{rng.choice(NAMES)}y"
    for source, called in zip(SECOND, (name, other), strict=True):
        target = os.fsencode(root / called)
        shutil.copytree(os.fsencode(stage.photos / "second" / source), target)
        if rng.random() < 0.5:
            os.rename(target + b"/0.png", target + os.fsencode(f"/{rng.choice(NAMES)}.png"))  # noqa: PTH104
    verb = rng.choice(["learn", "predict", "evaluate", "inspect", "run", "report", "copy"])
    question = {"predict": ["third", rng.choice(["--csv", "--json", "--top=4"])], "evaluate": ["--data", "third"]}
    if verb == "learn":
        return Case(
            f"names {name!r}",
            ["learn", "model", "--data", "third", "--task", name.encode("utf-8", "replace").decode()],
            stage.copy(folder),
            learns=True,
            code=(0, 2),
        )
    if verb == "run":
        data = json.dumps({"name": "folder", "path": "third", "test_share": 0.5})
        return Case(f"names {name!r}", ["run", "digits", f"data={data}", *TINY, "images.size=8", "stream.tasks=1"])
    model = stage.copy(folder)
    if verb in ("inspect", "report", "copy"):
        called = folder / f"m{name}".replace("/", "")
        os.rename(model, os.fsencode(called))  # noqa: PTH104
        model = Path(os.fsdecode(os.fsencode(called)))
        line = ["learn", "new", "--from", str(model), "--data", "third", "-q"] if verb == "copy" else [verb, str(model)]
        return Case(f"names {name!r}", line, model if verb != "report" else None)
    return Case(f"names {name!r}", [verb, "model", *question[verb]], model)


KINDS: dict[str, Kind] = {
    function.__name__: function
    for function in (
        overrides,
        recipes,
        settings,
        records,
        tensors,
        images,
        archives,
        weights,
        directories,
        methods,
        arguments,
        names,
        foreign,
    )
}
