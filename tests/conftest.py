import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

# a thread per test process, and per process that a test starts: as many as there are cores run side by side
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PEARL_CACHE"] = "off"  # what a test says of training is said of training

import pytest
import torch
from lightning_fabric.utilities import registry

import zygote

registry.entry_points = cache(registry.entry_points)  # type: ignore[attr-defined]  # asked for with each engine

SHARED = Path(__file__).parents[2] / "shared" / "data"


def pytest_configure(config: pytest.Config) -> None:
    """All test processes of a session share a zygote, if one of them needs it."""
    if not hasattr(config, "workerinput"):
        config.zygote = tempfile.TemporaryDirectory()  # type: ignore[attr-defined]
        os.environ[zygote.PLACE] = f"{config.zygote.name}/zygote"  # type: ignore[attr-defined]
        os.environ[zygote.SESSION] = str(os.getpid())


def pytest_unconfigure(config: pytest.Config) -> None:
    """The zygote ends when its session is no more; its folder goes at once."""
    if hasattr(config, "zygote"):
        config.zygote.cleanup()


QUICK_METHODS = ("pearl", "finetune", "er", "lwf", "ncm", "packnet", "l2p", "seqlora")  # one of each family


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make check` asks for it."""
    parser.addoption("--quick", action="store_true", help="what takes under a minute: one method of each family")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests first, so that no process is left with one when the others have ended."""
    if config.getoption("--quick"):
        items[:] = [item for item in items if is_quick(item)]
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def is_quick(item: pytest.Item) -> bool:
    """Return True unless a test is marked as slow, or is the contract of one of many methods."""
    method = item.callspec.params.get("method") if hasattr(item, "callspec") else None
    other = item.path.stem == "test_conformance" and method is not None and method not in QUICK_METHODS
    return not other and item.get_closest_marker("slow") is None


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pearl starts in this process are forks, see `zygote`."""
    from pearl.training import launch

    monkeypatch.setattr(launch, "child", zygote.child)


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's data or runs."""
    monkeypatch.setenv("PEARL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("PEARL_RUNS", str(tmp_path / "runs"))


@pytest.fixture
def double() -> Iterator[None]:
    """New networks are in float64: what two ways round differently does not grow to what tells them apart."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """`pearl` in this process: standard output and standard error."""

    def call(*arguments: object, code: int = 0, stdin: str = "") -> tuple[str, str]:
        import pearl.cli

        monkeypatch.setattr(sys, "argv", ["pearl", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as end:
            pearl.cli.main()
        out, err = capsys.readouterr()
        assert (end.value.code or 0) == code, (out, err)
        return out, err

    return call


@pytest.fixture
def one(shop: Path, tmp_path: Path) -> Path:
    """A copy of the model that a test file's own `shop` holds, as it was after its first task."""
    return Path(shutil.copytree(shop / "one", tmp_path / "one"))


@pytest.fixture
def two(shop: Path, tmp_path: Path) -> Path:
    """A copy of that model with both its tasks."""
    return Path(shutil.copytree(shop / "model", tmp_path / "two"))
