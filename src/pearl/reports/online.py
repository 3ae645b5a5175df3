"""A run with hidden task boundaries as text: the curve of accuracy over images seen, metrics, cost and growth."""

from typing import TYPE_CHECKING

from pearl.errors import counted
from pearl.storage.tabular import aligned

if TYPE_CHECKING:
    from pearl.online.run import OnlineRun


def online_page(run: "OnlineRun") -> str:
    """Return a run's results as text; also of an unfinished run."""
    lines, points = [f"run directory: {run.path}"], run.curve
    if not points:
        return "\n".join([*lines, "no image seen yet"])
    table = [["images seen", "classes", "accuracy (%)"]]
    table += [[f"{p.seen}", f"{len(p.total)}", f"{p.accuracy:.2f}"] for p in points]
    lines += ["", aligned(table, numbers=True), ""]
    facts, summary = run.results["facts"], run.summary
    if any(point.regular for point in points):
        lines.append(f"A_auc {summary['a_auc']:.2f} %, the mean of the evaluations at the fixed interval")
    lines.append(f"A_last {summary['a_last']:.2f} %, forgetting per class {summary['forgetting']:.2f} points")
    pause, each = facts["longest_pause_seconds"], 1000 * facts["seconds_per_image"]
    lines.append(f"learning: {each:.1f} ms per image, longest pause {pause:.1f} s")
    stored = [facts[f"{what}_bytes"] / 1e6 for what in ("images", "statistics")]
    lines.append(
        f"prediction: {counted(facts['passes'], 'pass')} per image; stored: {stored[0]:.2f} MB of images, "
        f"{stored[1]:.2f} MB of statistics"
    )
    for number, seen in enumerate(facts.get("grown_at", []), 1):
        lines.append(f"sub-network {number} was trained after {counted(seen, 'image')}, {facts['reasons'][number - 1]}")
    if not run.done:
        lines.append("unfinished; the same `pearl run` resumes it")
    return "\n".join(lines)
