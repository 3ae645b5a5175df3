"""From counts of correct predictions to the metrics of continual learning.

Evaluation only counts (`Counts`); `accuracy_matrix` turns the counts into A, and everything else is a few lines on A.

A is the matrix of the literature: A[i, t] is the accuracy, in percent, on the test images of task i after task t was
learnt. It is upper triangular, with NaN where a task had not been seen yet (i > t). Formulas below number tasks and
stages from 1 to T, as papers do; arrays and error messages number them from 0.

With a single task nothing can be forgotten: `forgetting`, `stability` (and with it `trade_off`), `bwt`, `ffm`, `cfm`
and `cfm_pearl` are NaN.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pearl.errors import RunError, counted

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Scenario = Literal["class_il", "task_il", "domain_il"]
SCENARIOS: tuple[Scenario, ...] = ("class_il", "task_il")


@dataclass(frozen=True, eq=False)
class Stage:
    """The counts of one evaluation after one task: c classes seen, t tasks seen.

    `class_il` is the arg-max over all seen classes; `task_il` uses the same logits among the classes of the image's own
    task (both as in Mammoth). `domain_il` is counted for methods designed for domains, where class i of every task is
    the same, so that a prediction is correct in any task (as in S-Prompts).
    """

    total: Ints  # (c,) test images of each class
    class_il: Ints  # (c,) of these, correct among all seen classes
    task_il: Ints  # (c,) of these, correct within their own task
    confusion: Ints  # (t, t) test images by true task (row) and task of the arg-max class (column)
    domain_il: Ints | None = None  # (c,) of these, those whose arg-max has the position of their class, in any task

    def to_json(self) -> dict[str, list]:
        """Return the counts as plain lists: one entry of "stages" in results.json, without other modules' keys."""
        counts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value.tolist() for name, value in counts.items() if value is not None}


@dataclass(frozen=True, eq=False)
class Counts:
    """The counts of a whole run: one stage per task, the classes in order of arrival.

    Raises:
        RunError: the stages cannot have come from evaluations of one run on one set of test images.
    """

    task_of_class: Ints  # (C,) 0 .. T-1, non-decreasing; a class of several tasks is repeated in each
    stages: tuple[Stage, ...]  # T of them
    domains: tuple[str, ...] = ()  # of each task, if the stream has domains

    def __post_init__(self) -> None:
        if not self.stages:
            raise RunError("stages: empty, no task was evaluated; let the run finish at least one task")
        order = self.task_of_class[_starts(self.task_of_class)].tolist()
        if order != list(range(len(self.stages))):
            raise RunError(
                f"task_of_class: {counted(len(self.stages), 'stage')} need classes of the tasks 0 to "
                f"{len(self.stages) - 1} in this order, found those of {order}; evaluate the run again"
            )
        for index, stage in enumerate(self.stages):
            self._check(stage, index)

    @classmethod
    def from_results(cls, results: dict[str, Any]) -> "Counts":
        """Read the parsed results.json: {"tasks": [{"classes": [...]}], "stages": [{"total": [...], ...}]}.

        Keys that are not counts are left alone.

        Raises:
            RunError: a list is missing or ragged, or the counts contradict each other.
        """
        tasks = _list(results, "tasks", "results")
        sizes = [len(_list(task, "classes", f"tasks[{i}]")) for i, task in enumerate(tasks)]
        stages = tuple(
            Stage(**{name: _array(stage, name, f"stages[{i}]") for name in _counted(stage)})
            for i, stage in enumerate(_list(results, "stages", "results"))
        )
        domains = tuple(task["domain"] for task in tasks if "domain" in task)
        return cls(np.repeat(np.arange(len(sizes)), sizes), stages, domains)

    def by_task(self, per_class: Ints) -> Ints:
        """Sum the counts of the first c classes, (c,), over the classes of each task, (t,)."""
        return np.add.reduceat(per_class, _starts(self.task_of_class[: len(per_class)]))

    def _check(self, stage: Stage, index: int) -> None:
        seen = int(np.searchsorted(self.task_of_class, index, side="right"))
        here = f"stages[{index}]"
        per_class = ("total", "class_il", "task_il", *(["domain_il"] if stage.domain_il is not None else []))
        shapes = dict.fromkeys(per_class, (seen,)) | {"confusion": (index + 1, index + 1)}
        for name, shape in shapes.items():
            counts = getattr(stage, name)
            if counts.shape != shape or counts.dtype.kind != "i":
                raise RunError(
                    f"{here}.{name}: expected whole numbers of shape {shape}, found {counts.dtype} of shape "
                    f"{counts.shape}; evaluate the run again"
                )
            _refuse(counts < 0, f"{here}.{name}", "a negative count")
        _refuse(stage.task_il > stage.total, f"{here}.task_il", "more correct predictions than test images")
        # A correct arg-max over all classes is also the arg-max within its task.
        _refuse(
            stage.class_il > stage.task_il, f"{here}.class_il", "more correct predictions than within the task alone"
        )
        if stage.domain_il is not None:
            _refuse(stage.domain_il > stage.total, f"{here}.domain_il", "more correct predictions than test images")
            _refuse(stage.class_il > stage.domain_il, f"{here}.class_il", "more correct predictions than in any task")
        images = self.by_task(stage.total)
        _refuse(images == 0, f"{here}.total, task", "no test images")
        _refuse(
            stage.confusion.sum(axis=1) != images,
            f"{here}.confusion",
            "the row does not sum to the number of test images",
        )
        too_few = stage.confusion.diagonal() < self.by_task(stage.class_il)
        _refuse(too_few, f"{here}.confusion", "fewer images in the right task than in the right class")
        if index:
            before = self.stages[index - 1].total
            _refuse(stage.total[: len(before)] != before, f"{here}.total", "other test images than in the stage before")


def _starts(task_of_class: Ints) -> NDArray[np.intp]:
    """Index of the first class of every stretch of one task."""
    return np.flatnonzero(np.diff(task_of_class, prepend=task_of_class[:1] - 1))


def _refuse(bad: NDArray[np.bool_], where: str, what: str) -> None:
    """Raise RunError for the first place where `bad` holds."""
    if bad.any():
        raise RunError(f"{where}{np.argwhere(bad)[0].tolist()}: {what}; evaluate the run again")


def _counted(stage: Any) -> list[str]:
    """Return the counts that an entry of "stages" has or must have."""
    optional = {"domain_il"} - (stage.keys() if isinstance(stage, dict) else set())
    return [field.name for field in fields(Stage) if field.name not in optional]


def _list(holder: Any, key: str, where: str) -> list:
    value = holder.get(key) if isinstance(holder, dict) else None
    if not isinstance(value, list):
        raise RunError(f"{where}: no list {key!r}; the file is damaged or foreign, evaluate the run again")
    return value


def _array(holder: Any, key: str, where: str) -> NDArray:
    try:
        return np.array(_list(holder, key, where))
    except ValueError:
        raise RunError(f"{where}.{key}: rows of different lengths; evaluate the run again") from None


def accuracy_matrix(counts: Counts, scenario: Scenario) -> Floats:
    """Return A, (T, T) in percent: A[i, t] = 100 * correct / test images of task i after task t, NaN for i > t.

    Source: the matrix R of GEM (Lopez-Paz and Ranzato 2017), transposed; A_{i,t} of PEARL (TMLR 2026), eq. A58.
    """
    A = np.full((len(counts.stages),) * 2, np.nan)
    for t, stage in enumerate(counts.stages):
        A[: t + 1, t] = 100 * counts.by_task(getattr(stage, scenario)) / counts.by_task(stage.total)
    return A


# ------------------------------------------------------------------------------------------------ accuracy


def stage_accuracy(A: Floats) -> Floats:
    """Return A_t = (1/t) sum_{i<=t} A[i, t], (T,) in percent: all tasks have equal weight.

    Source: PEARL's A_tau on tasks of equal size; Mammoth, L2P, DualPrompt, HiDe-Prompt.
    """
    return np.nanmean(A, axis=0)


def pooled_accuracy(counts: Counts, scenario: Scenario) -> Floats:
    """Return 100 * correct / test images over all seen classes, (T,) in percent: all images have equal weight.

    The same as `stage_accuracy` when tasks have equally many test images, as on CIFAR-100 and TinyImageNet.
    Source: PyCIL, PILOT, InfLoRA; likely PEARL's A_T on ImageNet-R, which is not the task mean its other columns imply.
    """
    return np.array([100 * getattr(stage, scenario).sum() / stage.total.sum() for stage in counts.stages])


def final_accuracy(A: Floats) -> float:
    """Return A_T, the last of `stage_accuracy`, in percent. Source: PEARL, section Results; FAA in HiDe-Prompt."""
    return float(stage_accuracy(A)[-1])


def average_accuracy(A: Floats) -> float:
    """Return (1/T) sum_t A_t, in percent. Source: PEARL's A-bar, section Results; CAA in HiDe-Prompt."""
    return float(stage_accuracy(A).mean())


def plasticity(A: Floats) -> float:
    """Return P = (1/T) sum_i A[i, i], in percent: every task right after its training.

    Source: PEARL, forgetting table.
    """
    return float(A.diagonal().mean())


def stability(A: Floats) -> float:
    """Return S = (1/(T-1)) sum_{i<T} A[i, T], in percent: all tasks but the last, at the end.

    Source: PEARL, forgetting table, whose rows fit only if the last task is left out of S and kept in P.
    """
    return _mean(A[:-1, -1])


def trade_off(S: float, P: float) -> float:
    """Return 2 S P / (S + P), the harmonic mean of stability and plasticity, in percent; 0 where both are 0.

    Source: PEARL, forgetting table.
    """
    return 2 * S * P / (S + P) if S + P else 0.0


def task_identification(counts: Counts) -> Floats:
    """Return 100 * images whose arg-max class lies in their own task / all images, (T,) in percent.

    It is what Class-IL requires in addition to Task-IL, and an upper bound of Class-IL accuracy (pooled).
    """
    return np.array([100 * stage.confusion.trace() / stage.confusion.sum() for stage in counts.stages])


def domain_accuracy(counts: Counts) -> Floats:
    """Return 100 * correct / test images of each domain, in order of arrival, after the last task.

    All classes compete, and a domain's tasks are pooled. Its mean is the accuracy of domain-incremental learning (three
    scenarios of van de Ven et al. 2022), its minimum that of the worst domain.
    """
    stage, of_task = counts.stages[-1], np.array(counts.domains)
    right, total = counts.by_task(stage.class_il), counts.by_task(stage.total)
    return np.array(
        [100 * right[of_task == domain].sum() / total[of_task == domain].sum() for domain in dict.fromkeys(of_task)]
    )


# ---------------------------------------------------------------------------------------------- forgetting


def forgetting(A: Floats) -> float:
    """Return F = (1/(T-1)) sum_{i<T} (max_{t<=T} A[i, t] - A[i, T]), in percentage points, never negative.

    The maximum includes the last stage, so a task that improved counts as 0.
    Source: Mammoth, PyCIL, PILOT, HiDe-Prompt; it fits PEARL's forgetting table.
    """
    return _mean(np.nanmax(A[:-1], axis=1) - A[:-1, -1])


def bwt(A: Floats) -> float:
    """Return (1/(T-1)) sum_{i<T} (A[i, T] - A[i, i]), in percentage points: backward transfer, positive is good.

    Source: GEM (Lopez-Paz and Ranzato 2017); Mammoth, HiDe-Prompt.
    """
    return _mean(A[:-1, -1] - A.diagonal()[:-1])


def ffm(A: Floats) -> float:
    """Return (1/(T-1)) sum_{i<T} max_{t<T} (A[i, t] - A[i, T]), in percentage points, negative for tasks that improved.

    Source: final forgetting measure, PEARL eq. A58; the forgetting of Chaudhry et al. 2018.
    """
    return _mean(_drops(A, len(A) - 1))


def cfm(A: Floats) -> float:
    """Return the mean over j = 2..T of the `ffm` at stage j, in percentage points.

    (1/(T-1)) sum_{j=2..T} (1/(j-1)) sum_{i<j} max_{t<j} (A[i, t] - A[i, j]): the cumulative forgetting measure with
    each stage averaged over the tasks it can forget, so that equal forgetting everywhere gives cfm = ffm.
    """
    return _mean([_drops(A, j).mean() for j in range(1, len(A))])


def cfm_pearl(A: Floats) -> float:
    """Return the cumulative forgetting measure as printed in PEARL, eq. A59, in percentage points.

    (1/(T-1)^2) sum_{j=2..T} sum_{i<j} max_{t<j} (A[i, t] - A[i, j]): every stage is divided by T-1, though stage j has
    only j-1 tasks to forget. Equal forgetting everywhere gives T/(2(T-1)) of `cfm`.
    """
    return _mean([_drops(A, j).sum() / (len(A) - 1) for j in range(1, len(A))])


def _drops(A: Floats, j: int) -> Floats:
    """Return how far each of the j tasks before stage j (from 0) is below its best earlier accuracy, (j,)."""
    best = np.nanmax(A[:j, :j], axis=1, initial=0)  # initial: before the first task there is no best
    return best - A[:j, j]


def _mean(values: Sequence[float] | Floats) -> float:
    return float(np.mean(values)) if len(values) else math.nan


# ------------------------------------------------------------------------------------------------- cost


def efficiency(final_accuracy_percent: float, parameters: int) -> float:
    """Return final Class-IL accuracy per million parameters, in percent per million.

    Source: PEARL, table of complete parameter isolation.
    """
    return final_accuracy_percent / (parameters / 1e6)


def growth(parameters: int, isolation_parameters: int) -> float:
    """Return the parameters as a fraction of those of complete isolation, one whole network per task.

    Source: the two rows of each backbone in PEARL's growth table.
    """
    return parameters / isolation_parameters


def mean_rank(layers: Sequence[Mapping[str, float]]) -> float | None:
    """Return the mean "rank" of layers, weighted by "rows_and_columns" as parameters are; None without layers."""
    weight = sum(layer["rows_and_columns"] for layer in layers)
    return sum(layer["rank"] * layer["rows_and_columns"] for layer in layers) / weight if weight else None


def summary(
    counts: Counts, parameters: Sequence[int] | None = None, isolation_parameters: Sequence[int] | None = None
) -> dict[str, float]:
    """Return every metric of a run by a stable name; units as in the function of the same name.

    Args:
        counts: counts of the run.
        parameters: parameters of the whole model after each stage; adds "parameters_million" and "efficiency" (of
            class_il.final).
        isolation_parameters: parameters of one network per task, after each stage; with `parameters`, adds "growth".
    """
    values: dict[str, float] = {}
    scenarios: dict[Scenario, str] = {scenario: scenario for scenario in SCENARIOS}
    if all(stage.domain_il is not None for stage in counts.stages):
        scenarios["domain_il"] = "place"  # of classes in tasks: domain-IL if tasks are domains, which is unknown here
    for scenario, title in scenarios.items():
        A = accuracy_matrix(counts, scenario)
        pooled = pooled_accuracy(counts, scenario)
        named = {
            "final": final_accuracy(A),
            "average": average_accuracy(A),
            "final_pooled": float(pooled[-1]),
            "average_pooled": float(pooled.mean()),
            "forgetting": forgetting(A),
            "stability": stability(A),
            "plasticity": plasticity(A),
            "trade_off": trade_off(stability(A), plasticity(A)),
            "bwt": bwt(A),
            "ffm": ffm(A),
            "cfm": cfm(A),
            "cfm_pearl": cfm_pearl(A),
        }
        values |= {f"{title}.{name}": value for name, value in named.items()}
    if counts.domains:
        of_domains = domain_accuracy(counts)
        values |= {"domain_il.final": float(of_domains.mean()), "domain_il.worst": float(of_domains.min())}
    values["task_identification"] = float(task_identification(counts)[-1])
    if parameters is not None:
        values["parameters_million"] = parameters[-1] / 1e6
        values["efficiency"] = efficiency(values["class_il.final"], parameters[-1])
        if isolation_parameters is not None:
            values["growth"] = growth(parameters[-1], isolation_parameters[-1])
    return values
