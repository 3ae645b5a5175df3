"""Imports only go down between rooms, and a few things are never written. All read off the source, without running it.

A file needs no line here: what it may do is its room's.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import pearl


class Room(NamedTuple):
    """What the files of a room may do; `light` ones are read without torch, all but those named."""

    name: str
    light: bool = False
    but: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()  # rooms below that it does not know
    base_only: bool = False  # of methods it knows the base alone


# From the ground up: each may import itself and the rooms above it in this list.
ROOMS = {
    room.name: room
    for room in (
        Room("ground", light=True),  # errors.py, names.py, version.py, yaml_io.py
        Room("settings", light=True),
        Room("storage", light=True, but=("checkpoint",), apart=("settings",)),
        Room("data"),
        Room("nn", apart=("data",)),
        Room("methods"),
        Room("training", base_only=True),
        Room("evaluation", apart=("training",), base_only=True),
        Room("testing"),  # for those who write methods; nothing stands on it
        Room("lifecycle"),
        Room("online", apart=("testing",)),
        Room("export", apart=("online",)),
        Room("reports", light=True, but=("plan", "progress", "logs", "doctor"), apart=("export",)),
        Room("serve"),
        Room("sweeps", light=True, apart=("export",)),
        Room("tables", light=True, apart=("export",)),
        Room("cli", light=True),
        Room("front", light=True, but=("objects",)),  # __init__.py, __main__.py, objects.py
    )
}
GROUND, FRONT = {"errors", "names", "version", "yaml_io"}, {"__init__", "__main__", "objects"}
PLAIN = {"numpy", "pydantic", "regex", "yaml"}  # what ground and settings may import beside the standard library
TORCH = {"torch", "torchvision", "timm", "lightning_fabric", "safetensors"}
PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
BY_NAME = {"settings.registry"}  # who imports by name

Source = Mapping[str, str]


class Import(NamedTuple):
    name: str  # "numpy.typing", "data.stream"; pearl's own without "pearl."
    own: bool
    line: int
    late: bool  # inside a function, or for type checkers alone


def read() -> dict[str, str]:
    """Source by module: "data.stream", "data" for data/__init__.py, "__init__" for the package itself."""
    root = Path(pearl.__file__).parent
    return {
        ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file.read_text()
        for file in sorted(root.rglob("*.py"))
    }


SOURCE = read()


def room_of(module: str) -> Room | None:
    top = module.partition(".")[0]
    return ROOMS.get("ground" if module in GROUND else "front" if module in FRONT else top)


def imports(text: str, modules: Source) -> Iterator[Import]:
    return _imports(text, frozenset(modules))


@cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def _imports(text: str, modules: frozenset[str]) -> Iterator[Import]:
    def walk(node: ast.AST, late: bool) -> Iterator[Import]:
        match node:
            case ast.Import():
                for alias in node.names:
                    yield of(alias.name, node.lineno, late)
            case ast.ImportFrom():
                prefix = "." * node.level + (node.module or "")
                for alias in node.names:
                    below = f"{prefix}.{alias.name}".removeprefix("pearl.")
                    yield of(f"pearl.{below}" if below in modules else prefix, node.lineno, late)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                late = True
            case ast.If(test=ast.Name("TYPE_CHECKING")):
                late = True
        for child in ast.iter_child_nodes(node):
            yield from walk(child, late)

    def of(name: str, line: int, late: bool) -> Import:
        own = name == "pearl" or name.startswith("pearl.")
        return Import(name.removeprefix("pearl.") if name != "pearl" else "__init__", own, line, late)

    return walk(_parsed(text), False)


def packages(module: str, modules: Source) -> list[str]:
    """What Python runs on the way to a module: the packages above it, and itself."""
    parts = module.split(".")
    return [name for end in range(1, len(parts) + 1) if (name := ".".join(parts[:end])) in modules]


def brings_torch(modules: Source) -> set[str]:
    """The modules whose import imports torch, by whatever way."""
    early = {module: [item for item in imports(text, modules) if not item.late] for module, text in modules.items()}
    actual = {
        module for module, items in early.items() if any(not i.own and i.name.split(".")[0] in TORCH for i in items)
    }
    while True:
        more = {
            module
            for module, items in early.items()
            if any(i.own and actual & {*packages(i.name, modules)} for i in items) and module not in actual
        }
        if not more:
            return actual
        actual |= more


def wrong_imports(modules: Source, name: str) -> list[str]:
    """A line for each import of a room's files that the table does not allow."""
    heavy, order = brings_torch(modules), [*ROOMS]
    wrong = []
    for module, text in modules.items():
        room = room_of(module)
        if room is None:
            wrong += [f"pearl.{module} is in no room: put it into one, or give ROOMS of tests/test_rooms.py a line"]
        if room is None or room.name != name:
            continue
        light = room.light and module.rpartition(".")[2] not in room.but
        for item in imports(text, modules):
            there, top = room_of(item.name) if item.own else None, item.name.split(".")[0]
            at = f"{module}, line {item.line}: imports {item.name}"
            if item.name.startswith("."):
                wrong.append(f"{at}; write the whole name, pearl. ...")
            elif item.own and (there is None or order.index(there.name) > order.index(name)):
                wrong.append(f"{at}, which is above {name}")
            elif item.own and there and there.name in room.apart:
                wrong.append(f"{at}; {name} and {there.name} do not know each other")
            elif item.own and room.base_only and top == "methods" and item.name != "methods.base":
                wrong.append(f"{at}; of methods, {name} knows the base alone")
            elif not item.own and name in ("ground", "settings") and top not in sys.stdlib_module_names | PLAIN:
                wrong.append(f"{at}; here are only {', '.join(sorted(PLAIN))}")
            elif not item.own and top in PICKLES:
                wrong.append(f"{at}; a pickle can run any code")
            elif light and not item.late:
                with_torch = heavy & {*packages(item.name, modules)} if item.own else top in TORCH
                wrong += [f"{at}, and with it torch; import it inside the function"] * bool(with_torch)
    return wrong


def graph_of(modules: Source) -> dict[str, set[str]]:
    """The modules of pearl that each one imports, early or late."""
    return {m: {i.name for i in imports(text, modules) if i.own} for m, text in modules.items()}


def circle(graph: Mapping[str, set[str]]) -> str:
    """A circle of imports in words; nothing if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " -> ".join(error.args[1])
    return ""


def wrong_words(module: str, text: str) -> list[str]:
    """A line for each statement or call that the source may not have."""
    wrong = []
    for node in ast.walk(_parsed(text)):
        at = f"{module}, line {getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Assert):
            wrong.append(f"{at}: assert; raise an error that says what to do")
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        given = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if called == "torch.save" or (called == "torch.load" and given.get("weights_only") != "True"):
            wrong.append(f"{at}: {called} pickles; use safetensors, or weights_only=True for a user's file")
        if given.get("allow_pickle", "False") != "False":
            wrong.append(f"{at}: {called} opens pickles")
        if called.endswith(("import_module", "__import__")) and module not in BY_NAME:
            wrong.append(f"{at}: {called}; only the registry imports by name")
    return wrong


# What pearl is


@pytest.mark.parametrize("room", ROOMS)
def test_imports_only_go_down(room: str) -> None:
    assert wrong_imports(SOURCE, room) == []


def test_no_pickle_and_no_assert() -> None:
    assert [line for module, text in SOURCE.items() for line in wrong_words(module, text)] == []


def test_no_circle_of_imports() -> None:
    """Imports inside functions and for type checkers count as well."""
    assert circle(graph_of(SOURCE)) == ""


def test_nothing_stands_on_the_test_equipment() -> None:
    above = {module for module, used in graph_of(SOURCE).items() if any(name.startswith("testing") for name in used)}
    assert {module.partition(".")[0] for module in above} == {"testing"}


def test_no_circle_between_wings() -> None:
    """Of methods, a family may build on another one, and that one then not on it."""
    graph: dict[str, set[str]] = {}
    for module, text in SOURCE.items():
        wing = module.split(".")[1:-1]
        if module.startswith("methods.") and wing:
            used = {item.name.split(".")[1] for item in imports(text, SOURCE) if item.name.count(".") > 1 and item.own}
            used &= {name.split(".")[1] for name in SOURCE if name.count(".") == 2 and name.startswith("methods.")}
            graph.setdefault(wing[0], set()).update(used - {wing[0]})
    assert circle(graph) == ""
    assert graph["common"] == set(), "what several wings share stands on none of them"


def test_no_file_has_two_ideas() -> None:
    long = {module: text.count("\n") for module, text in SOURCE.items() if text.count("\n") > 400}
    assert long == {}, "a file over 400 lines is two: split it"


def test_the_table_is_of_rooms_there_are() -> None:
    there = {module.partition(".")[0] for module in SOURCE} - GROUND - FRONT
    assert there == ROOMS.keys() - {"ground", "front"}
    for room in ROOMS.values():
        above = "" if room.name in ("ground", "front") else f"{room.name}."
        assert {f"{above}{file}" for file in room.but} <= SOURCE.keys(), f"{room.name}: a file that is gone"


# Whether the tests above would see


TOY = {
    "__init__": "",
    "errors": "class PearlError(Exception): ...",
    "settings.config": "import yaml\nfrom pearl.errors import PearlError",
    "storage.files": "from pearl.errors import PearlError",
    "storage.checkpoint": "import torch\nfrom pearl.storage import files",
    "data": "from pearl.data.batches import Batch",
    "data.batches": "import torch",
    "data.stream": "import numpy as np\nfrom pearl.settings.config import StreamConfig",
    "nn.net": "import torch.nn.functional as F\nfrom pearl.storage.checkpoint import load",
    "methods.base": "from pearl.nn import net",
    "methods.wing.mine": "from pearl.methods.base import Method",
    "training.engine": "from pearl.methods import base",
    "evaluation.metrics": "import numpy",
    "lifecycle.runs": "from pearl.training.engine import Engine",
    "reports.text": "from pearl.storage import files\ndef f():\n    import torch\n    from pearl.lifecycle import runs",
    "reports.plan": "from pearl.lifecycle.runs import Run",
    "cli": "import typer\nfrom pearl.reports import text\ndef run():\n    from pearl.lifecycle.runs import Run",
}


def test_a_sound_package_has_no_complaint() -> None:
    assert [line for room in ROOMS for line in wrong_imports(TOY, room)] == []
    assert [line for module, text in TOY.items() for line in wrong_words(module, text)] == []


@pytest.mark.parametrize(
    ("module", "line", "complaint"),
    [
        (
            "settings.config",
            "from pearl.data.stream import make_stream",
            "imports data.stream, which is above settings",
        ),
        (
            "settings.config",
            "def load():\n    from pearl.lifecycle import runs",
            "imports lifecycle.runs, which is above",
        ),
        ("settings.config", "import rich", "imports rich; here are only"),
        ("storage.files", "from pearl.settings.config import x", "storage and settings do not know each other"),
        ("errors", "import torch", "imports torch; here are only"),
        ("errors", "def f():\n    import rich.console", "imports rich.console; here are only"),
        ("data.stream", "import pearl.training.engine", "imports training.engine, which is above data"),
        ("nn.net", "from pearl.data.stream import F", "nn and data do not know each other"),
        ("data.stream", "from pearl import PearlError", "imports __init__, which is above data"),
        ("data.stream", "from . import cache", "write the whole name"),
        ("data.stream", "import pickle", "can run any code"),
        (
            "methods.base",
            "class A:\n    from pearl.training.engine import B",
            "imports training.engine, which is above",
        ),
        ("training.engine", "from pearl.methods.wing.mine import Mine", "knows the base alone"),
        ("evaluation.metrics", "from pearl.methods.wing import mine", "knows the base alone"),
        ("evaluation.metrics", "from pearl.training import engine", "evaluation and training do not know each other"),
        ("cli", "import torch", "import it inside the function"),
        ("cli", "from pearl.lifecycle.runs import Run", "import it inside the function"),
        ("cli", "from pearl.data import stream", "import it inside the function"),  # the package brings torch
        ("reports.text", "from pearl.storage import checkpoint", "import it inside the function"),
        ("novel", "", "pearl.novel is in no room"),
        ("lifecycle.runs", "from pearl.novel import x", "imports novel, which is above lifecycle"),
    ],
)
def test_a_wrong_import_is_seen(module: str, line: str, complaint: str) -> None:
    modules = {**TOY, module: f"{TOY.get(module, '')}\n{line}"} | ({"novel": ""} if "novel" in line else {})
    room = room_of(module)
    actual = wrong_imports(modules, room.name if room else "settings")
    assert [complaint in each for each in actual if "in no room" not in each or module == "novel"] == [True]


@pytest.mark.parametrize(
    "line",
    [
        "def f(x):\n    assert x",
        "torch.save(state, path)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "importlib.import_module(name)",
    ],
)
def test_a_wrong_word_is_seen(line: str) -> None:
    assert len(wrong_words("lifecycle.runs", line)) == 1


@pytest.mark.parametrize(
    "line", ["torch.load(path, weights_only=True)", "np.load(path, allow_pickle=False)", "load(x)"]
)
def test_a_right_word_is_let_be(line: str) -> None:
    assert wrong_words("lifecycle.runs", line) == []


def test_a_circle_is_seen() -> None:
    assert circle({"a": {"b"}, "b": {"a"}}) in ("a -> b -> a", "b -> a -> b")


@pytest.mark.parametrize(
    "late", ["def f():\n    from pearl.data import b", "if TYPE_CHECKING:\n    from pearl.data.b import B"]
)
def test_a_circle_of_late_imports_is_seen(late: str) -> None:
    assert circle(graph_of({"data.a": late, "data.b": "from pearl.data.a import A"})) != ""
