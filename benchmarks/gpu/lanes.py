"""Shared parts of the programs in this folder: their command line, and processes side by side on one GPU."""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).parent


def with_options(about: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of these programs; `about` describes the program."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--full-data", type=Path, help="file that exists once all classes are in $PEARL_DATA")
    parser.add_argument("--smoke", action="store_true", help="one step a phase, to try the program itself")
    return parser


def candidates(names: Sequence[str], seed: int, to: Path, *, smoke: bool) -> list[str]:
    """Return the command that runs candidates of `paper_recipe.py` at the paper's width."""
    command = [str(HERE.parent / "paper_recipe.py"), "--candidates", *names, "--seeds", str(seed), "--to", str(to)]
    at = ["--width", "8", "--smoke"] if smoke else ["--width", "64", "--precision", "auto", "--cuda-graphs"]
    return command + at


def queue(recipe: str, seed: int, variants: Iterable[str], to: Path, *, minutes: float, smoke: bool) -> list[str]:
    """Return the command that runs variants of a recipe by `run_queue.py`."""
    command = [str(HERE / "run_queue.py"), "--out", str(to), "--recipes", recipe, "--seeds", str(seed)]
    return [*command, "--minutes", str(minutes), "--smoke" if smoke else "--graphs", "--variants", *variants]


def call(command: Sequence[str], folder: Path, *, seconds: float | None, first: bool) -> None:
    """Run a Python program until it ends or its time is up; its output goes to `folder`/log.txt.

    Under MPS, those that are `first` have priority on the GPU.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"CUDA_MPS_CLIENT_PRIORITY": "0" if first else "1", "OMP_NUM_THREADS": "1"}
    with (folder / "log.txt").open("a") as log:
        try:
            subprocess.run([sys.executable, *command], env=environment, stdout=log, stderr=log, timeout=seconds)
        except subprocess.TimeoutExpired:
            log.write("out of time\n")
