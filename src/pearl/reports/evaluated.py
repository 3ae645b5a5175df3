"""An HTML page about an evaluation: confusions, calibration, and detection of unknown classes."""

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pearl.errors import counted
from pearl.reports.html import (
    Chapter,
    Figure,
    PagePart,
    Picture,
    Table,
    bar_figure,
    heat_map,
    line_figure,
    render,
)
from pearl.storage.files import HTML, check_output, write_output

if TYPE_CHECKING:
    from pearl.lifecycle.evaluation import Evaluation

SHOWN = 24  # maximum classes in a figure and mistakes as pictures, for readability
PIXELS = 96  # of a picture
FEW = 5  # minimum images of a bin


def write(evaluation: "Evaluation", output: Path, title: str) -> Path:
    """Write the page atomically; return its path.

    Raises:
        ReportError: see `files.check_output`.
        DataError: an image of the page cannot be read any more.
    """
    check_output(output, HTML, "page")
    write_output(output, page(evaluation, title))
    return output


def page(evaluation: "Evaluation", title: str) -> str:
    """Return the page as HTML."""
    known = int(evaluation.is_known.sum())
    parts = [
        PagePart(
            "Results", tables=[_results(evaluation)], note="Accuracies are in percent; all images have equal weight."
        ),
        PagePart("Confusion between classes", *_confusion(evaluation)),
        PagePart("Accuracy by class and task", *_accuracy(evaluation)),
        PagePart("Calibration", figures=[_reliability(evaluation)], note=SURE_NOTE),
        *([PagePart("Unknown classes", *_unknown(evaluation))] if evaluation.coverage else []),
        *([PagePart("The worst mistakes", pictures=worst, note=WORST_NOTE)] if (worst := _worst(evaluation)) else []),
        *([PagePart("Notes", text="\n".join(evaluation.notes))] if evaluation.notes else []),
    ]
    return render(f"{title}: {counted(known, 'image')}, {evaluation.accuracy:.1f} % correct", [Chapter(title, parts)])


SURE_NOTE = (
    "Images by the probability of the prediction, in bins of equal width: above the diagonal the model is "
    "underconfident, below it overconfident. Bins of few images are left out. The calibration error is the mean "
    "distance of all bins from the diagonal, weighted by images."
)
WORST_NOTE = "The most confident ones, as the model reads them: true class, prediction, probability."


def _results(evaluation: "Evaluation") -> Table:
    rows: list[list[str | float | int]] = [
        ["images of known classes", int(evaluation.is_known.sum())],
        ["accuracy among all classes (class-IL)", evaluation.accuracy],
        ["accuracy among the classes of the image's task (task-IL)", evaluation.task_accuracy],
        ["calibration error", evaluation.calibration_error],
    ]
    if evaluation.coverage:
        refused = 100 * evaluation.refused[evaluation.is_known].mean()
        rows.append([f"known images called unknown at --unknown-rate {evaluation.unknown_rate:g}", refused])
    if evaluation.unknown_classes:
        rows += [
            ["images of unknown classes", int((~evaluation.is_known).sum())],
            ["unknown classes' images detected at that rate", 100 * evaluation.refused[~evaluation.is_known].mean()],
            ["AUROC, known against unknown classes", evaluation.auroc],
        ]
    return Table("Results", ["what", "value"], rows)


def _confusion(evaluation: "Evaluation") -> tuple[list[Figure], list[Table], str]:
    """Return the confusion matrix, limited to the classes with the most mistakes, and pairs."""
    confusion, names = evaluation.confusion, evaluation.classes
    wrong = confusion.sum(0) + confusion.sum(1) - 2 * confusion.diagonal()
    rows = np.arange(len(names)) if len(names) <= SHOWN else np.sort(np.argsort(-wrong, kind="stable")[:SHOWN])
    total = np.maximum(evaluation.total, 1)[:, None]
    figure = heat_map(
        "Predicted class of the images of each class (%)",
        (100 * confusion / total)[np.ix_(rows, rows)],
        name="confusion",
        rows=[f"{names[row]} {row + 1}" for row in rows],
        columns=[str(row + 1) for row in rows],
        x="predicted class",
        y="true class",
        unit="images (%)",
        top=100,
    )
    pairs = Table("Most frequent mistakes", ["true class", "taken for", "images"], evaluation.mistakes())
    note = f"The {SHOWN} of {len(names)} classes with the most mistakes." if len(names) > SHOWN else ""
    return [figure], [pairs] if pairs.rows else [], note


def _accuracy(evaluation: "Evaluation") -> tuple[list[Figure], list[Table], str]:
    """Return bars of the tasks and the lowest classes, and a table of all."""
    total, right, in_task = evaluation.total, evaluation.class_il, evaluation.task_il
    there = np.flatnonzero(total)
    share = 100 * right / np.maximum(total, 1)
    lowest = there[np.argsort(share[there], kind="stable")[:SHOWN]]
    names = evaluation.classes
    task_of = [task.name for task in evaluation.tasks for _ in task.classes]
    by_class = [[names[c], task_of[c], int(total[c]), share[c], 100 * in_task[c] / total[c]] for c in there.tolist()]
    by_task = {
        task.name: 100 * right[part].sum() / total[part].sum()
        for task in evaluation.tasks
        if total[part := slice(task.first_class, task.first_class + len(task.classes))].any()
    }
    title = "Class-IL accuracy of each class (%)" if len(there) <= SHOWN else f"The {SHOWN} lowest classes (%)"
    x = "correct images (%)"
    figures = [
        bar_figure(title, [names[c] for c in lowest], share[lowest].tolist(), "classes", x=x, y="class"),
        bar_figure("Class-IL accuracy of each task (%)", [*by_task], [*by_task.values()], "tasks", x=x, y="task"),
    ]
    columns = ["class", "task", "images", "class-IL (%)", "task-IL (%)"]
    return figures, [Table("Accuracy of each class", columns, by_class)], ""


def _reliability(evaluation: "Evaluation") -> Figure:
    diagram = evaluation.reliability
    images, sure, right = diagram[diagram[:, 0] >= min(FEW, diagram[:, 0].max())].T
    lines = {
        f"the model, calibration error {evaluation.calibration_error:.1f}": (100 * sure / images, 100 * right / images),
        "perfect calibration": ([0.0, 100.0], [0.0, 100.0]),
    }
    return line_figure("Accuracy (%)", lines, "reliability", x="confidence (%)", y="right (%)")


def _unknown(evaluation: "Evaluation") -> tuple[list[Figure], list[Table], str]:
    coverage = evaluation.coverage
    line = {"accuracy": ([*map(float, coverage)], [*coverage.values()])}
    axes = {"x": "images, highest in-distribution scores first (%)", "y": "right (%)"}
    figures, tables = [line_figure("Coverage against accuracy (%)", line, "coverage", **axes)], []
    note = "Accuracy should be higher on images with high in-distribution scores."
    if evaluation.unknown_classes and evaluation.in_distribution is not None:
        known, strange = (evaluation.in_distribution[part] for part in (evaluation.is_known, ~evaluation.is_known))
        at = np.quantile(known, np.linspace(0, 1, 21))
        refused, seen = ([100 * float((part < limit).mean()) for limit in at] for part in (known, strange))
        curves = {
            f"in-distribution score, AUROC {evaluation.auroc:.1f}": (refused, seen),
            "by chance": ([0.0, 100.0], [0.0, 100.0]),
        }
        axes = {"x": "known images called unknown (%)", "y": "unknown classes found (%)"}
        figures.append(line_figure("Unknown classes found (%)", curves, "unknown-classes", **axes))
        tables.append(_unknown_classes(evaluation))
        note += " Unknown classes are those that the model has not learnt."
    return figures, tables, note


def _unknown_classes(evaluation: "Evaluation") -> Table:
    """Return the predictions for the folders of unknown classes."""
    rows = []
    for index, name in enumerate(evaluation.unknown_classes, len(evaluation.classes)):
        part = evaluation.answers.true == index
        said, times = np.unique(evaluation.answers.best[part], return_counts=True)
        nearest = evaluation.classes[said[times.argmax()]]
        rows.append([name, int(part.sum()), 100 * evaluation.refused[part].mean(), nearest])
    return Table("Unknown classes", ["folder", "images", "found unknown (%)", "most like"], rows)


def _worst(evaluation: "Evaluation") -> list[Picture]:
    """Return mistakes on known classes, the most confident first."""
    from PIL import Image

    from pearl.data.images import to_pixels

    answers, names = evaluation.answers, evaluation.classes
    wrong = np.flatnonzero(evaluation.is_known & (answers.best != answers.true))
    pictures = []
    for row in wrong[np.argsort(-answers.sure[wrong], kind="stable")][:SHOWN].tolist():
        file, true, said = evaluation.files[row], names[answers.true[row]], names[answers.best[row]]
        jpeg = io.BytesIO()
        Image.fromarray(to_pixels(file, PIXELS)).save(jpeg, "JPEG", quality=85)
        words = [f"{true}", f"taken for {said}", f"{100 * answers.sure[row]:.0f} % confident"]
        pictures.append(Picture(jpeg.getvalue(), f"{true}, taken for {said}", words))
    return pictures
