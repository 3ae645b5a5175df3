"""The list of all tables: requirements, progress, estimated time of the rest."""

from collections.abc import Sequence
from pathlib import Path

from pearl.errors import counted
from pearl.reports.text import duration
from pearl.settings.config import RunConfig
from pearl.storage.tabular import aligned
from pearl.tables import spec
from pearl.tables.model_values import CPU_CORE, GPU, seconds
from pearl.tables.spec import Size
from pearl.tables.values import Filled, Missing, fill
from pearl.tables.words import Lines


def listing(size: Size, seeds: int | None = None, extra: Sequence[str] = ()) -> str:
    """Return all tables with their location in the paper, requirements, progress and estimated time of the rest."""
    rows: Lines = [["name", "where", "title", "cells done", "runs missing", "CPU core", "GPU", "needs"]]
    waiting: dict[Path, Missing] = {}
    for name in spec.names():
        filled = fill(spec.read(name), size, seeds, extra)
        waiting |= {missing.path: missing for missing in filled.missing}
        done, cells = filled.ours
        rows.append(
            [
                name,
                filled.table.where,
                filled.table.title,
                f"{done}/{cells}" if cells else "-",
                str(len(filled.missing)),
                *_times(filled.missing),
                _needs(filled),
            ]
        )
    rows.append(["all", "", "", "", str(len(waiting)), *_times([*waiting.values()]), ""])
    counts = f"Size {size}, {counted(seeds, 'seed')}" if seeds else f"Size {size}"
    return f"{counts}. Runs that several tables share are run once. Times are rough.\n{aligned(rows)}"


def _times(missing: Sequence[Missing]) -> tuple[str, str]:
    cpu, gpu = (sum(seconds(one.request.config, machine) for one in missing) for machine in (CPU_CORE, GPU))
    return duration(cpu) if cpu else "-", duration(gpu) if gpu else "-"


def _needs(filled: Filled) -> str:
    """Return the data and networks of its runs."""
    configs: list[RunConfig] = [one.request.config for one in filled.missing]
    parts = [*(config.data["name"] for config in configs), *(config.backbone["name"] for config in configs)]
    return ", ".join(dict.fromkeys(parts)) or ("nothing" if filled.ours[1] or not filled.columns else "")
