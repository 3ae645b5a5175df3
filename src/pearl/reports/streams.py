"""A run with hidden task boundaries as text: the curve of accuracy over images seen, metrics, cost and growth."""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from pearl.errors import RunError, counted, printable
from pearl.evaluation.online_metrics import Point, class_forgetting, summary
from pearl.storage.arrivals import unlabelled
from pearl.storage.run_directory import RunDirectory
from pearl.storage.tabular import aligned

if TYPE_CHECKING:
    from pearl.online.stream_run import OnlineRun


def online_page(run: "OnlineRun") -> str:
    """Return a run's results as text; also of an unfinished run."""
    lines, results = [f"run directory: {run.path}"], run.results  # read once: its files are checked each time
    points = [Point.from_json(point) for point in results["curve"]]
    if not points:
        return "\n".join([*lines, "no image seen yet"])
    facts, numbers = results["facts"], summary(results)
    table = [["images seen", "classes", "accuracy (%)"]]
    table += [[f"{p.seen}", f"{len(p.total)}", f"{p.accuracy:.2f}"] for p in points]
    if "grown_at" in facts:
        grown = [sum(at <= point.seen for at in facts["grown_at"]) for point in points]
        table = [[*row, *cell] for row, cell in zip(table, [["sub-networks"], *([f"{n}"] for n in grown)], strict=True)]
    lines += ["", aligned(table, numbers=True), ""]
    if any(point.regular for point in points):
        lines.append(f"A_auc {numbers['a_auc']:.2f} %, the mean of the evaluations at the fixed interval")
    lost = numbers["forgetting"]
    forgotten = "" if math.isnan(lost) else f", forgetting per class {lost:.2f} points"
    lines.append(f"A_last {numbers['a_last']:.2f} %{forgotten}")
    lines += most_forgotten(points, results["names"])
    pause, each = facts["longest_pause_seconds"], 1000 * facts["seconds_per_image"]
    lines.append(f"learning: {each:.1f} ms per image, longest pause {pause:.1f} s")
    stored = [facts[f"{what}_bytes"] / 1e6 for what in ("images", "statistics")]
    lines.append(
        f"prediction: {counted(facts['passes'], 'pass')} per image; stored: {stored[0]:.2f} MB of images, "
        f"{stored[1]:.2f} MB of statistics"
    )
    lines += growth(facts)
    if not run.done:
        lines.append("unfinished; the same `pearl run` resumes it")
    return "\n".join(lines)


def most_forgotten(points: Sequence[Point], names: Sequence[str], count: int = 3) -> list[str]:
    """Return a line with the classes that lost the most accuracy, if any lost some; `pearl report` lists all."""
    if not any(point.regular for point in points):
        return []
    lost = class_forgetting(points)
    worst = [(lost[c], names[c]) for c in np.argsort(-np.nan_to_num(lost), kind="stable")[:count] if lost[c] > 0]
    shown = ", ".join(f"{printable(name)} {points:.2f} points" for points, name in worst)
    return [f"most forgotten: {shown}"] if worst else []


def growth(facts: dict[str, Any]) -> list[str]:
    """Return a line for each sub-network: when and why it was trained."""
    grown = zip(facts.get("grown_at", []), facts.get("reasons", []), strict=True)
    return [
        f"sub-network {i} was trained after {counted(seen, 'image')}, {why}" for i, (seen, why) in enumerate(grown, 1)
    ]


def stream_of(directory: RunDirectory) -> dict[str, Any]:
    """Return the images seen, the classes and the facts of an online learner; empty for models and runs of tasks.

    Also empty if its manifest is damaged, which `verify` reports.
    """
    manifest: dict[str, Any] = {}
    with suppress(RunError):
        manifest = directory.online_manifest
    if not manifest:
        return {}
    stream = manifest.get("online", manifest)  # of a run, or of a model
    scored, unknown = unlabelled(directory)
    without = {"unlabelled": scored, "unknown": len(unknown)} if scored else {}
    return {
        **stream["facts"],
        "images": manifest["seen"],
        "classes": stream.get("names") or stream["classes"],
        **without,
    }


def stream_lines(stream: dict[str, Any]) -> list[str]:
    """Return what `stream_of` returns as text."""
    names = ", ".join(map(printable, stream["classes"]))
    classes = counted(len(stream["classes"]), "class")
    lines = [f"{counted(stream['images'], 'image')} of a stream, {classes} ({names})", *growth(stream)]
    if count := stream.get("unlabelled"):
        hint = ": pearl discover groups them" if stream["unknown"] else ""
        looked = f"{stream['unknown']:,} of them looked unknown when they came{hint}"
        lines.append(f"{counted(count, 'unlabelled image')}; {looked}")
    return lines


def online_state(run: RunDirectory) -> str:
    """Return the progress of a run with hidden boundaries in a line."""
    if not (manifest := run.online_manifest):
        return "no image seen yet"
    numbers = summary(manifest["online"])
    state = "done" if run.is_done else "unfinished"
    accuracy = f"A_auc {numbers['a_auc']:.2f} %, A_last {numbers['a_last']:.2f} %"
    return f"{state}, {counted(manifest['seen'], 'image')}, {accuracy}"
