"""Imports only go down, and a few things are never written. All read off the source, without running it."""

import ast
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import pearl

# Every module has one place here; a name with a star is a folder. A module may import its own layer and those below.
LAYERS = {
    0: ("errors", "files", "paths", "version", "launch", "registry", "config", "metrics"),
    1: ("checkpoint", "data", "data.*", "nn", "nn.*"),
    2: ("methods", "methods.*"),
    3: ("engine", "evaluate", "graphs", "ranks", "replay", "saved"),
    4: ("session", "runs", "learning", "progress", "conformance"),
    5: (
        "model",
        "plan",
        "doctor",
        "text",
        "predict",
        "plots",
        "export",
        "report",
        "tensorboard",
        "board",
        "jobs",
        "slurm",
        "sweep",
        "tables",
        "tables.*",
    ),
    6: ("__init__", "__main__", "cli", "cli.*"),
}
BOTTOM = {"numpy", "pydantic", "yaml"}  # all that layer 0 may have beside the standard library
LIGHT = (
    "text",
    "plots",
    "report",
    "board",
    "jobs",
    "slurm",
    "sweep",
    "tables",
    "tables.*",
    "__init__",
    "__main__",
    "cli",
    "cli.*",
)  # read without torch: what needs it is imported inside functions
TORCH = {"torch", "torchvision", "timm", "lightning_fabric", "safetensors"}
PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


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
        for file in root.rglob("*.py")
    }


SOURCE = read()


def imports(text: str, modules: Mapping[str, str]) -> Iterator[Import]:
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

    return walk(ast.parse(text), False)


def among(module: str, names: tuple[str, ...]) -> bool:
    return any(fnmatchcase(module, name) for name in names)


def layer(module: str) -> int | None:
    found = [number for number, names in LAYERS.items() if among(module, names)]
    return found[0] if found else None


def needs_torch(module: str, modules: Mapping[str, str], seen: frozenset[str] = frozenset()) -> bool:
    """Whether importing a module imports torch, by whatever way."""
    early = [item for item in imports(modules.get(module, ""), modules) if not item.late]
    return any(
        item.name.split(".")[0] in TORCH
        if not item.own
        else item.name not in seen and needs_torch(item.name, modules, seen | {module})
        for item in early
    )


def wrong_imports(module: str, modules: Mapping[str, str]) -> list[str]:
    """A line for each import that the table does not allow."""
    here = layer(module)
    if here is None:
        return [f"pearl.{module} has no layer: give it its place in LAYERS of tests/test_layers.py"]
    wrong = []
    for item in imports(modules[module], modules):
        there, top = layer(item.name) if item.own else None, item.name.split(".")[0]
        at = f"{module}, line {item.line}: imports {item.name}"
        if item.name.startswith("."):
            wrong.append(f"{at}; write the whole name, pearl. ...")
        elif item.own and (there is None or there > here):
            wrong.append(f"{at} of layer {there}, from layer {here}")
        elif item.own and here == 3 and there == 2 and item.name != "methods.base":
            wrong.append(f"{at}; of methods, layer 3 knows the base alone")
        elif item.own and {module.split(".")[0], top} == {"data", "nn"}:
            wrong.append(f"{at}; data and networks do not know each other")
        elif not item.own and here == 0 and top not in sys.stdlib_module_names | BOTTOM:
            wrong.append(f"{at}; layer 0 has {', '.join(sorted(BOTTOM))} only")
        elif not item.own and top in PICKLES:
            wrong.append(f"{at}; a pickle can run any code")
        elif among(module, LIGHT) and not item.late:
            heavy = needs_torch(item.name, modules) if item.own else top in TORCH
            wrong += [f"{at}, and with it torch; import it inside the function"] * heavy
    return wrong


def wrong_words(module: str, text: str) -> list[str]:
    """A line for each statement or call that the source may not have."""
    wrong = []
    for node in ast.walk(ast.parse(text)):
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
        if called.endswith(("import_module", "__import__")) and module != "registry":
            wrong.append(f"{at}: {called}; only the registry imports by name")
    return wrong


# What pearl is


@pytest.mark.parametrize("module", sorted(SOURCE))
def test_imports_only_go_down(module: str) -> None:
    assert wrong_imports(module, SOURCE) == []


@pytest.mark.parametrize("module", sorted(SOURCE))
def test_no_pickle_and_no_assert(module: str) -> None:
    assert wrong_words(module, SOURCE[module]) == []


def test_no_circle_of_imports() -> None:
    graph = {module: {i.name for i in imports(text, SOURCE) if i.own and not i.late} for module, text in SOURCE.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports go in a circle: {' -> '.join(error.args[1])}")


def test_the_table_is_of_modules_there_are() -> None:
    packages = {module.rpartition(".")[0] for module in SOURCE}
    for names in LAYERS.values():
        for name in names:
            known = name.removesuffix(".*")
            assert known in SOURCE or known in packages, f"LAYERS has {name}, which is gone; take it out"


# Whether the tests above would see


TOY = {
    "errors": "class PearlError(Exception): ...",
    "config": "import yaml\nfrom pearl.errors import PearlError",
    "data.stream": "import numpy as np\nfrom pearl.config import PearlError",
    "nn.net": "import torch.nn.functional as F",
    "methods.base": "from pearl.nn import net",
    "methods.mine": "from pearl.methods.base import Method",
    "engine": "from pearl.methods import base",
    "runs": "from pearl.engine import Engine",
    "text": "from pearl.config import PearlError\ndef page():\n    import torch\n    from pearl.runs import Run",
    "cli": "import typer\nfrom pearl import text\ndef run():\n    from pearl.runs import Run",
}


def test_a_sound_package_has_no_complaint() -> None:
    assert [line for module in TOY for line in wrong_imports(module, TOY) + wrong_words(module, TOY[module])] == []


@pytest.mark.parametrize(
    ("module", "line", "complaint"),
    [
        ("config", "from pearl.data.stream import make_stream", "imports data.stream of layer 1, from layer 0"),
        ("config", "def load():\n    from pearl import runs", "imports runs of layer 4, from layer 0"),
        ("errors", "import torch", "imports torch; layer 0 has"),
        ("errors", "def f():\n    import rich.console", "imports rich.console; layer 0 has"),
        ("data.stream", "import pearl.engine", "imports engine of layer 3, from layer 1"),
        ("data.stream", "from pearl.nn.net import F", "data and networks"),
        ("data.stream", "from pearl import PearlError", "imports __init__ of layer 6"),
        ("data.stream", "from . import cache", "write the whole name"),
        ("data.stream", "import pickle", "can run any code"),
        ("methods.base", "class A:\n    from pearl.engine import B", "imports engine of layer 3, from layer 2"),
        ("engine", "from pearl.methods.mine import Mine", "knows the base alone"),
        ("engine", "from pearl.methods import base, mine", "knows the base alone"),
        ("cli", "import torch", "import it inside the function"),
        ("cli", "from pearl.runs import Run", "import it inside the function"),
        ("text", "from pearl import engine", "import it inside the function"),
        ("novel", "", "pearl.novel has no layer: give it its place in LAYERS"),
        ("runs", "from pearl.novel import x", "imports novel of layer None"),
    ],
)
def test_a_wrong_import_is_seen(module: str, line: str, complaint: str) -> None:
    modules = {**TOY, "novel": "", module: f"{TOY.get(module, '')}\n{line}"}
    (found,) = wrong_imports(module, modules)
    assert complaint in found


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
    assert len(wrong_words("runs", line)) == 1


@pytest.mark.parametrize(
    "line", ["torch.load(path, weights_only=True)", "np.load(path, allow_pickle=False)", "load(x)"]
)
def test_a_right_word_is_let_be(line: str) -> None:
    assert wrong_words("runs", line) == []
