"""Runs and models side by side: those that differ by their seed alone are a group, with mean and spread."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pearl.evaluation import metrics
from pearl.reports.parts import Cell, Chapter, Figure, Part, Table, curve_figure, plain
from pearl.reports.records import SCENARIOS, Record, flat, metric_title
from pearl.reports.text import HEADLINES

MODEL_NOTE = (
    "A model keeps no test images, so it has no accuracies and no confusion between tasks here; "
    "`pearl evaluate MODEL --data FOLDER` measures them."
)
SHARE_NOTE = (
    "Shares are of all parameters that tasks added. Without pretraining the first task trains the reference itself, "
    "and adds its head alone."
)


@dataclass(frozen=True)
class Group:
    """Runs that differ by their seed alone, or one model.

    Only complete runs count: a mean over unlike stages means nothing.
    """

    label: str
    runs: list[Record]

    @property
    def complete(self) -> list[Record]:
        """Runs that are done."""
        return [run for run in self.runs if run.complete]

    def statistics(self, key: str) -> tuple[float | None, float | None]:
        """Mean and standard deviation of one metric over the seeds."""
        values = [run.summary[key] for run in self.complete if key in run.summary]
        mean, std = spread(np.array(values))
        return (None if mean is None else float(mean)), (None if std is None else float(std))


def spread(values: Any) -> tuple[Any, Any]:
    """Mean and standard deviation (n - 1) over the first axis; None where there are too few for it."""
    mean = np.mean(values, axis=0) if len(values) else None
    return mean, np.std(values, axis=0, ddof=1) if len(values) > 1 else None


def groups(records: Sequence[Record]) -> list[Group]:
    """Runs by all that decides a result but the seed, numbered, since recipe and method may not tell them apart."""
    members: dict[str, list[Record]] = {}
    for record in records:
        members.setdefault(record.kind, []).append(record)
    return [Group(f"{number}. {runs[0].label}", runs) for number, runs in enumerate(members.values(), start=1)]


def compare(records: Sequence[Record]) -> Chapter:
    """Runs and models side by side, and the mean over seeds of runs that differ by nothing else."""
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
        Part(what, tables=[runs], note=MODEL_NOTE if models else ""),
        *([Part("Mean over seeds", tables=[_group_table(seeds)], note=_GROUP_NOTE)] if seeds else []),
        *([Part("Stage by stage", figures=figures)] if (figures := _group_figures(together)) else []),
        *([Part("Resource allocation", [_shares(share)], note=SHARE_NOTE)] if share else []),
        Part("Settings", tables=[settings]),
    ]
    return Chapter("Comparison", parts)


_GROUP_NOTE = (
    "A group is one configuration with several seeds. Mean and standard deviation (n - 1) are over its complete runs; "
    "a single run has no standard deviation."
)


def _shares(share: Mapping[str, Any]) -> Figure:
    """The paper's figure on resource allocation over several runs; shares of a run half done would mislead."""
    return curve_figure("Share of the added parameters, by run (%)", share, "all-share", "share (%)", x="task")


def _group_table(together: Sequence[Group]) -> Table:
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


def _group_figures(together: Sequence[Group]) -> list[Figure]:
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
    """The settings that are not the same in all of these runs."""
    settings = [flat(record.config) for record in records]
    keys = dict.fromkeys(key for each in settings for key in each)
    missing = object()  # a setting that is not there differs from one that is None
    return [
        key
        for key in keys
        if key.partition(".")[0] not in {"about", "expected"}
        and any(each.get(key, missing) != settings[0].get(key, missing) for each in settings)
    ]
