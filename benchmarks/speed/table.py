"""Write the table of speed in docs/performance.md from the figures that `make bench` measured.

python benchmarks/speed/table.py
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "speed"
PERFORMANCE = ROOT / "docs" / "performance.md"
START, END = "<!-- speed: written by benchmarks/speed/table.py -->\n", "<!-- end of speed -->"
MACHINES = ("training", "training_float32")  # each may be from another machine
STEPS = {"probe": 5 * 38, "adapt": 12 * 38}  # per task in the recipe cpu-cifar20-resnet18


def rows(name: str) -> list[dict[str, Any]]:
    """Return the results of one benchmark."""
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def spread(values: list[float]) -> str:
    """Return median, lowest and highest."""
    middle, low, high = (f"{value:.2f}" for value in values)
    return f"{middle} ({low} to {high})"


def training() -> Iterator[tuple[str, str, str]]:
    """The engine against two loops, and updates trained parallel to their layers."""
    for row in rows("training"):
        net = row["network"].removeprefix("timm/")
        if "engine / usual loop" in row:
            yield f"training, {net}: engine / DataLoader loop", spread(row["engine / usual loop"]), "0.5"
        elif "rank" in row:
            yield (
                f"adapt at rank {row['rank']}, {net}: as trained / merged",
                spread(row["as trained / updates merged"]),
                "",
            )
        else:
            yield f"{row['phase']}, {net}: engine / bare loop", spread(row["engine / bare loop"]), f"{row['goal']}"


def training_float32() -> Iterator[tuple[str, str, str]]:
    """The same on a CPU that computes in float32."""
    for row in rows("training_float32"):
        if "engine / bare loop" in row:
            what = f"{row['phase']}, {row['network']}, float32, {row['cpu']}: engine / bare loop"
            yield what, spread(row["engine / bare loop"]), f"{row['goal']}"


def ranks() -> Iterator[tuple[str, str, str]]:
    """Choosing ranks against an SVD, and against training."""
    for row in rows("ranks"):
        if row["layers"] == "all layers":
            yield f"choosing ranks, {row['net']}: ours / float64 SVD", spread(row["ours / svd64"]), "0.25"
    step = {
        row["phase"]: row["milliseconds"]["engine"] / row["steps"]
        for row in rows("training")
        if row["network"] == "resnet18" and "phase" in row and "rank" not in row
    }
    task = sum(STEPS[phase] * step[phase] for phase in STEPS)
    share = rows("ranks")[0]["milliseconds"]["ours"] / task
    yield f"choosing ranks / training a task of {sum(STEPS.values())} steps, ResNet-18", f"{share:.2%}", "1 %"


def inference() -> Iterator[tuple[str, str, str]]:
    """All sub-networks against as many plain passes."""
    for row in rows("inference"):
        net, many = row["net"].removeprefix("timm/"), row["part"] == "test sets"
        goal = ("0.9" if net == "resnet18" else "1.02") if many else ""
        what = (
            f"{row['part']} of {row['batch'] * row.get('batches', 1)}{', bfloat16' * (row.get('precision') == 'bf16')}"
            if many
            else f"{row['batch']} image{'s' * (row['batch'] > 1)}"
        )
        yield (
            f"{row['tasks']} sub-networks, {net}, {what}: ours / plain passes",
            spread(row["ours / plain passes"]),
            goal,
        )


def allocator() -> Iterator[tuple[str, str, str]]:
    """Test sets in a process of pearl against plain passes in one without."""
    for row in rows("allocator"):
        words = {"fp32": "float32", "bf16": "bfloat16"}[row["precision"]]
        yield (
            f"{row['tasks']} sub-networks, {row['net']}, test sets of {row['batch'] * row['batches']} in {words}: "
            f"pearl / plain passes in a process of their own",
            spread(row["ours / plain passes"]),
            "0.9",
        )


def class_statistics() -> Iterator[tuple[str, str, str]]:
    """Class statistics against one plain pass."""
    for row in rows("class_statistics"):
        what = f"{row['batch']} image{'s' * (row['batch'] > 1)}"
        yield (
            f"{row['tasks']} tasks by statistics in {row['spaces']} sub-networks, {row['net'].removeprefix('timm/')}, "
            f"{what}: ours / a plain pass",
            spread(row["ours / a plain pass"]),
            f"{row['spaces'] + 0.3}",
        )


def reuse() -> Iterator[tuple[str, str, str]]:
    """Phases trained once, against runs that each train them."""
    (row,) = rows("reuse")
    runs = f"{row['runs']} rank rules on digits, {row['reused']} of {row['phases']} phases shared"
    yield f"{runs}: CPU time / each run by itself", f"{row['shared / each by itself']:.2f}", ""


def footprint() -> Iterator[tuple[str, str, str]]:
    """Start-up time, memory, bytes."""
    for row in rows("footprint"):
        if "start-up" in row:
            yield (
                f"`{row['start-up'].partition(',')[0]}`{row['start-up'].partition(',')[2]} (s)",
                f"{row['seconds']}",
                f"{row.get('goal', '')}",
            )
        elif "peak / counted" in row:
            measured = f"{row['peak (MB)']} / {row['counted (MB)']} = {row['peak / counted']}"
            yield (
                f"peak memory, {row['phase']}, {row['network'].removeprefix('timm/')}: measured / counted (MB)",
                measured,
                "",
            )
        else:
            yield (
                f"bytes of a task on disk / its tensors, {row['network'].removeprefix('timm/')}",
                f"{row['written / tensors']}",
                "",
            )


def people() -> Iterator[tuple[str, str, str]]:
    """Whole commands against a script that loads timm and passes one image, and learning a late task."""
    goals = {"predict a photo": "0.9", "add a class of 20 photos, --fast": "1.3"}
    for row in rows("people"):
        if row["command"] in goals:
            yield f"{row['command']}: CPU seconds / timm alone", spread(row["ratio"]), goals[row["command"]]
        else:
            yield f"{row['command']}: CPU seconds / those of tasks 3 to 7", f"{row['ratio'][0]}", ""


def scale() -> Iterator[tuple[str, str, str]]:
    """A hundred tasks."""
    (row,) = rows("scale")
    tasks = row.pop("tasks")
    for what, value in row.items():
        yield f"{tasks} tasks: {what}", f"{value}", ""


def size() -> Iterator[tuple[str, str, str]]:
    """A thousand tasks."""
    (row,) = rows("size")
    model = f"{row.pop('tasks'):,} tasks, {row.pop('classes'):,} classes"
    for what, value in row.items():
        yield f"{model}: {what}", f"{value:,}", "1" if "manifests (s)" in what else ""


def many_photos() -> Iterator[tuple[str, str, str]]:
    """A task of more photos than fit into memory."""
    for row in rows("many_photos"):
        yield f"{row['photos']:,} photos in a task: memory of its own (GB)", f"{row['own memory GB']}", ""


PARTS = (
    training,
    training_float32,
    ranks,
    allocator,
    inference,
    class_statistics,
    reuse,
    footprint,
    people,
    scale,
    size,
    many_photos,
)


def page() -> str:
    """Return the page with a new table between its marks."""
    lines = [f"| {' | '.join(line)} |" for part in PARTS for line in part()]
    torch, other = (json.loads((RESULTS / f"{name}.json").read_text())["machine"]["torch"] for name in MACHINES)
    note = f"Medians (lowest to highest) in turns, on one thread; torch {torch}, in rows of float32 with AVX2 {other}."
    table = ["| | measured | goal |", "|---|---|---|", *lines, "", note]
    before, _, rest = PERFORMANCE.read_text(encoding="utf-8").partition(START)
    return before + START + "\n".join(table) + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PERFORMANCE.write_text(page(), encoding="utf-8")
