"""Comparison of runs and models: those that differ only by seed form a group, with mean and standard deviation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pearl.evaluation import metrics
from pearl.reports.html import Cell, Chapter, Figure, PagePart, Table, curve_figure, plain
from pearl.reports.records import SCENARIOS, Record, flat, metric_title
from pearl.reports.text import HEADLINES

MODEL_NOTE = (
    "A model stores no test images, so it has no accuracies and no task confusion here; "
    "`pearl evaluate MODEL --data FOLDER` measures them."
)
SHARE_NOTE = (
    "Shares are of all parameters that tasks added. Without pretraining the first task trains the "
    "reference itself, and adds only its head."
)


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ only by seed, or one model.

    Only complete runs count: a mean over different stages would be meaningless.
    """

    label: str
    runs: list[Record]

    @property
    def complete(self) -> list[Record]:
        """Return the finished runs."""
        return [run for run in self.runs if run.complete]

    def statistics(self, key: str) -> tuple[float | None, float | None]:
        """Return mean and standard deviation of one metric over the seeds."""
        values = [run.summary[key] for run in self.complete if key in run.summary]
        mean, std = spread(np.array(values))
        return (None if mean is None else float(mean)), (None if std is None else float(std))


def spread(values: Any) -> tuple[Any, Any]:
    """Return mean and standard deviation (n - 1) over the first axis; None with too few values."""
    mean = np.mean(values, axis=0) if len(values) else None
    return mean, np.std(values, axis=0, ddof=1) if len(values) > 1 else None


def groups(records: Sequence[Record]) -> list[SeedGroup]:
    """Group runs by all settings but the seed, with numbers, since groups may have equal recipes and methods."""
    members: dict[str, list[Record]] = {}
    for record in records:
        members.setdefault(record.kind, []).append(record)
    return [SeedGroup(f"{number}. {runs[0].label}", runs) for number, runs in enumerate(members.values(), start=1)]


def compare(records: Sequence[Record]) -> Chapter:
    """Return the comparison of runs and models, and the mean over seeds within groups."""
    together = groups(records)
    seeds = [group for group in together if group.runs[0].counts]
    models = len(seeds) < len(together)
    what = "Models" if not seeds else "Runs and models" if models else "Runs"
    label = {id(run): group.label for group in together for run in group.runs}
    keys = [key for key in [*HEADLINES, "mean_rank"] if any(key in run.summary for run in records)]
    runs = Table(
        what,
        ["run", "group", "seed", "state", *map(metric_title, keys)],
        [
            [run.name, label[id(run)], run.config["seed"], run.state, *(run.summary.get(key) for key in keys)]
            for run in records
        ],
    )
    differing = _differing(records)
    settings = Table(
        "Settings that differ",
        ["run", "group", *differing],
        [[run.name, label[id(run)], *(plain(flat(run.config).get(key)) for key in differing)] for run in records],
    )
    share = {run.name: np.array(run.shares) for run in records if run.complete}
    parts = [
        PagePart(what, tables=[runs], note=MODEL_NOTE if models else ""),
        *([PagePart("Mean over seeds", tables=[_group_table(seeds)], note=_GROUP_NOTE)] if seeds else []),
        *([PagePart("Stage by stage", figures=figures)] if (figures := _group_figures(together)) else []),
        *([PagePart("Resource allocation", [_shares(share)], note=SHARE_NOTE)] if share else []),
        PagePart("Settings", tables=[settings]),
    ]
    return Chapter("Comparison", parts)


_GROUP_NOTE = (
    "A group is one configuration with several seeds. Mean and standard deviation (n - 1) are over its complete runs; "
    "a single run has no standard deviation."
)


def _shares(share: Mapping[str, Any]) -> Figure:
    """Return the paper's figure on resource allocation for several runs; shares of unfinished runs would mislead."""
    return curve_figure("Share of the added parameters, by run (%)", share, "all-share", "share (%)", x="task")


def _group_table(together: Sequence[SeedGroup]) -> Table:
    keys = dict.fromkeys(key for group in together for run in group.complete for key in run.summary)
    order = [key for key in [*HEADLINES, "mean_rank"] if key in keys]
    rows: list[list[Cell]] = [
        ["complete runs (n)", *(cell for group in together for cell in (len(group.complete), None))]
    ]
    rows += [
        [metric_title(key), *(cell for group in together for cell in group.statistics(key))]
        for key in dict.fromkeys([*order, *keys])
    ]
    names = [f"{group.label}: {what}" for group in together for what in ("mean", "std")]
    return Table("Mean and standard deviation over seeds", ["metric", *names], rows)


def _group_figures(together: Sequence[SeedGroup]) -> list[Figure]:
    figures = []
    with_runs = [group for group in together if group.complete]
    for scenario, title in SCENARIOS.items():
        curves = {
            f"{group.label} (n={len(group.complete)})": spread(
                [metrics.stage_accuracy(metrics.accuracy_matrix(counts, scenario)) for counts in all_counts]
            )
            for group in with_runs
            if (all_counts := [run.counts for run in group.complete if run.counts])
        }
        if curves:
            figures.append(curve_figure(f"{title}, mean over seeds (%)", curves, f"all-{scenario}", "accuracy (%)"))
    millions = {
        f"{group.label} (n={len(group.complete)})": spread([np.array(run.parameters) / 1e6 for run in group.complete])
        for group in with_runs
    }
    if millions:
        figures.append(
            curve_figure("Parameters, mean over seeds (million)", millions, "all-growth", "parameters (million)")
        )
    return figures


def _differing(records: Sequence[Record]) -> list[str]:
    """Return the settings that differ between these runs."""
    settings = [flat(record.config) for record in records]
    keys = dict.fromkeys(key for each in settings for key in each)
    missing = object()  # a missing setting differs from one that is None
    return [
        key
        for key in keys
        if key.partition(".")[0] not in {"about", "expected"}
        and any(each.get(key, missing) != settings[0].get(key, missing) for each in settings)
    ]
