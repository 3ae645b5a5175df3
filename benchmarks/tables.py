"""Tables of the paper at a size for CPUs, a few runs at a time, on several machines in sequence.

    python benchmarks/tables.py rank_rules                   start missing runs; docs/results/tables/rank_rules.md
    python benchmarks/tables.py rank_rules --only cpu-cifar100-deit_tiny    only runs with this prefix
    python benchmarks/tables.py rank_rules --only-page       run nothing; write the page from existing runs

`pearl table` does the same on a single machine. Here, the directory of each finished run without weights, a few kB, is
kept in docs/results/tables/runs.tar.xz and first copied to $PEARL_RUNS, where tables and reports read it like any run.
So only the rest is run. Two of these commands can run in parallel. Data is searched under $PEARL_DATA.
"""

import argparse
import sys
import tarfile
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pearl
from pages import RESULTS
from pearl.cli.memory import keep_freed_memory
from pearl.errors import Busy
from pearl.lifecycle.refit import run_or_refit
from pearl.lifecycle.saved import read_config
from pearl.reports.progress import display
from pearl.settings.config import RunConfig
from pearl.storage.files import write_file
from pearl.storage.paths import runs_root
from pearl.tables.spec import SIZES, names

KEPT = RESULTS / "tables" / "runs.tar.xz"
LEFT_OUT = ("*.safetensors", "resume/*", ".lock", "events.jsonl")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", choices=names(), metavar="TABLE")
    parser.add_argument("--size", default="cpu", choices=SIZES)
    parser.add_argument("--seeds", type=int, help="default: the table's")
    parser.add_argument("--only", default="", metavar="START", help="of the names of run directories")
    parser.add_argument("--only-page", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)
    keep_freed_memory()
    lay_out()
    for name in options.tables:
        page = RESULTS / "tables" / (f"{name}.md" if options.size == "cpu" else f"{name}-{options.size}.md")
        given = {"size": options.size, "seeds": options.seeds, "output": page}
        filled = pearl.table(name, **given)
        keep(filled.runs)
        waiting = [one for one in filled.missing if one.path.name.startswith(options.only)]
        for one in [] if options.only_page else sorted(waiting, key=lambda one: one.seed):  # heads before statistics
            try:
                run_or_refit(one.request.config.model_copy(update={"seed": one.seed}), show=display())
            except Busy:  # locked by another of these commands
                continue
            keep(pearl.table(name, **given).runs)


def lay_out() -> set[str]:
    """Copy stored runs to $PEARL_RUNS, each under the name that its settings have today; return these names.

    Existing runs are kept, finished or not. A new option gives runs other names, and stored ones its default.
    """
    names = set()
    if KEPT.is_file():
        runs_root().mkdir(parents=True, exist_ok=True)
        with tarfile.open(KEPT) as archive, TemporaryDirectory(dir=runs_root()) as folder:
            archive.extractall(folder, filter="data")
            for run in Path(folder).iterdir():
                config = read_config(run)
                assert isinstance(config, RunConfig)
                names.add(config.id)
                if not (runs_root() / config.id).exists():
                    run.rename(runs_root() / config.id)
    return names


def keep(runs: Iterable[Path]) -> None:
    """Add these runs to the stored ones; equal runs give equal bytes."""
    kept = {path.name for path in runs} | lay_out()
    packed = BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as archive:
        for file in sorted(file for run in kept for file in (runs_root() / run).rglob("*") if file.is_file()):
            if not any(file.match(pattern) for pattern in LEFT_OUT):
                member = tarfile.TarInfo(file.relative_to(runs_root()).as_posix())
                member.size = file.stat().st_size
                with file.open("rb") as content:
                    archive.addfile(member, content)
    write_file(KEPT, packed.getvalue())


if __name__ == "__main__":
    main(sys.argv[1:])
