"""What the command line prints about names, recipes and runs, and tables of text. Reads files; trains nothing."""

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from pearl.errors import ConfigError, RunError, printable
from pearl.evaluation.metrics import accuracy_matrix
from pearl.settings.config import read_recipe, recipe_names
from pearl.settings.parts import BACKBONES, CLASSIFIERS, METHODS, RANK_RULES, SOURCES
from pearl.settings.registry import Registry, nearest
from pearl.storage.files import MANIFEST, finished, read_json
from pearl.storage.paths import runs_root
from pearl.storage.shapes import Reference, Results, Task

if TYPE_CHECKING:
    from pearl.lifecycle.model import Evaluation
    from pearl.lifecycle.runs import Run

_REGISTRIES: dict[str, Registry] = {
    "methods": METHODS,
    "backbones": BACKBONES,
    "data": SOURCES,
    "ranks": RANK_RULES,
    "classifiers": CLASSIFIERS,
}

_MEAN_RANK = "mean rank, weighted by (in + out)"
HEADLINES = {
    "class_il.final": "class-IL after the last task",
    "class_il.average": "class-IL, average over stages",
    "class_il.forgetting": "class-IL forgetting",
    "class_il.stability": "class-IL stability",
    "class_il.plasticity": "class-IL plasticity",
    "task_il.final": "task-IL after the last task",
    "task_identification": "task identified",
    "parameters_million": "parameters (million)",
    "growth": "parameters, share of isolation",
}
FOR_DOMAINS = {"domain_il.final": "domain-IL, where tasks are domains"}


def listing(what: str, *, long: bool = False) -> str:
    """The names of one kind, a line each; of methods, `long` says what they need."""
    if what == "recipes":
        rows = [(name, read_recipe(name).get("about", "")) for name in recipe_names()]
    elif what == "runs":
        rows = [(str(path), _run_state(path)) for path in sorted(runs_root().glob("*/")) if _is_run(path)]
        if not rows:
            return f"no runs under {runs_root()} yet; start one with: pearl run digits"
    else:
        rows = [(name, _first_line(_REGISTRIES[what], name)) for name in _REGISTRIES[what].names()]
        if long and what == "methods":
            rows = [(name, f"{line}\n{'':4}{_needs(name)}") for name, line in rows]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {line}".rstrip() for name, line in rows)


def page(name: str) -> str:
    """All about one name.

    Raises:
        ConfigError: nothing has this name.
    """
    if _is_run(Path(name)) or _is_run(runs_root() / name):
        from pearl.lifecycle.runs import Run

        path = Path(name) if _is_run(Path(name)) else runs_root() / name
        return run_page(Run.open(path))
    if name in recipe_names() or name.endswith((".yaml", ".yml")):
        return yaml.safe_dump(read_recipe(name), sort_keys=False, width=120).rstrip()
    for registry in _REGISTRIES.values():
        if name in registry.names() or ("/" in name and f"{name.split('/')[0]}/*" in registry.names()):
            return _part_page(registry, name)
    if (method := METHODS.admit(name)) != name:
        return _part_page(METHODS, method)
    names = [*recipe_names(), *(name for registry in _REGISTRIES.values() for name in registry.names())]
    raise ConfigError(f"nothing is called {name!r}; {nearest(name, names)}")


def run_page(run: "Run") -> str:
    """A run's results as text: accuracy per stage, headline metrics, the paper's figures beside them."""
    results = run.results
    lines = [f"run directory: {run.path}"]
    if not results["stages"]:
        return "\n".join([*lines, "no task finished yet"])
    summary = run.summary
    for scenario, title in (("class_il", "class-IL"), ("task_il", "task-IL")):
        matrix = accuracy_matrix(run.counts, scenario)  # type: ignore[arg-type]
        lines += ["", f"{title} accuracy (%) on each task (row) after each task (column)"]
        for t, row in enumerate(matrix):
            cells = "".join("       " if cell != cell else f"{cell:7.2f}" for cell in row)
            lines.append(f"  {results['tasks'][t]['name']:10.10}{cells}")
    lines.append("")
    expected = {} if run.config.method["name"] != "pearl" or run.config.smoke else run.config.expected
    rows = HEADLINES | {key: title for key, title in FOR_DOMAINS.items() if key in summary}
    rows |= {key: key for key in expected if key not in rows}
    width = max(map(len, [*rows.values(), _MEAN_RANK]))
    for key, title in rows.items():
        line = f"{title:{width}} {summary[key]:8.2f}"
        if key in expected:
            figure = expected[key]
            spread = f" +- {figure.std:g}" if figure.std is not None else ""
            line += f"   paper: {figure.mean:g}{spread} ({figure.where})"
        lines.append(line)
    if run.mean_rank is not None:
        lines.append(f"{_MEAN_RANK:{width}} {run.mean_rank:8.2f}")
    if not run.done:
        lines.append(f"unfinished: {len(results['stages'])} tasks; the same `pearl run` goes on")
    return "\n".join(lines)


def evaluation_page(evaluation: "Evaluation") -> str:
    """Accuracy per class and task, and the most frequent mistakes."""
    names, total = [printable(name) for name in evaluation.classes], evaluation.total
    width = max(map(len, [*names, *(printable(task.name) + 8 * " " for task in evaluation.tasks)]))
    lines = [f"{'':{width}}  images  class-IL  task-IL"]

    def line(name: str, rows: slice) -> str:
        count = total[rows].sum()
        if not count:
            return f"{name:{width}}       0         -        -"
        right = [100 * part[rows].sum() / count for part in (evaluation.class_il, evaluation.task_il)]
        return f"{name:{width}}  {count:6}  {right[0]:7.2f}%  {right[1]:6.2f}%"

    for task in evaluation.tasks:
        rows = slice(task.first_class, task.first_class + len(task.classes))
        lines.append(line(f"task {printable(task.name)}", rows))
        lines += [line(f"  {names[c]}", slice(c, c + 1)) for c in range(rows.start, rows.stop) if total[c]]
    lines.append(line("all", slice(None)))
    wrong = evaluation.confusion.copy()
    np.fill_diagonal(wrong, 0)
    mistakes = [divmod(int(i), len(names)) for i in wrong.ravel().argsort(kind="stable")[::-1][:10]]
    told = [f"  {names[a]} taken for {names[b]}: {wrong[a, b]}" for a, b in mistakes if wrong[a, b]]
    return "\n".join(
        [*lines, *(["", "most frequent mistakes:", *told] if told else []), *_sure(evaluation), *evaluation.notes]
    )


def _sure(evaluation: "Evaluation") -> list[str]:
    """How sure the answers are, beside how often they are right: ten lines at most."""
    diagram = evaluation.reliability
    lines = ["", f"how sure it is (calibration error {evaluation.calibration_error:.1f} points):"]
    for low, rows in ((0, diagram[:8]), (53, diagram[8:12]), (80, diagram[12:14]), (93, diagram[14:])):
        images, sure, right = rows.sum(0)
        if images:
            shares = f"{100 * sure / images:.0f} % sure, {100 * right / images:.0f} % right"
            lines.append(f"  from {low:2} %: {images:.0f} images, {shares}")
    return lines


def evaluation_json(evaluation: "Evaluation") -> str:
    """All counts; row of `confusion`: true class, column: predicted class."""
    counts = {key: getattr(evaluation, key).tolist() for key in ("total", "class_il", "task_il", "confusion")}
    tasks = [{"name": task.name, "classes": list(task.classes)} for task in evaluation.tasks]
    facts = {"tasks": tasks, "classes": list(evaluation.classes), **counts, "notes": evaluation.notes}
    facts |= {"reliability": evaluation.reliability.tolist(), "calibration_error": evaluation.calibration_error}
    return json.dumps(facts, indent=1)


def inspection(path: Path) -> tuple[dict[str, Any], str]:
    """What a model's files say and whether their checksums hold: as a mapping, and as text.

    Raises:
        RunError: not a model, or its configuration or reference cannot be read.
    """
    from pearl.lifecycle.saved import changed_code, read_config, verify

    config, reference, damaged = read_config(path), read_json(path / "reference" / MANIFEST, Reference), verify(path)
    if code := changed_code(path, config):
        damaged.append(code)
    manifests = []
    for folder in finished(path):
        try:
            manifests.append(read_json(folder / MANIFEST, Task))
        except RunError:  # one of `damaged`
            manifests.append({})
    keys = ("name", "classes", "images", "parameters", "bytes", "seconds", "layers")
    facts: dict[str, Any] = {
        "path": str(path),
        "method": config.method["name"],
        "backbone": config.backbone["name"],
        "image_size": config.images.size,
        "reference_bytes": reference.get("bytes", 0),
        "tasks": [
            {"folder": folder.name, **{key: manifest.get(key) for key in keys}}
            for folder, manifest in zip(finished(path), manifests, strict=True)
        ],
        "damaged": damaged,
    }
    lines = [
        f"{path}: {facts['method']} on {facts['backbone']} at {facts['image_size']} pixels, {len(manifests)} tasks",
        f"reference: {facts['reference_bytes']:,} bytes",
    ]
    before = 0
    for task in facts["tasks"]:
        lines.append("")
        if None in (task["name"], task["classes"], task["parameters"], task["bytes"]):
            lines.append(f"{task['folder']}: damaged, see below")
            continue
        names = ", ".join(map(printable, task["classes"]))
        lines.append(f"task {printable(task['name'])}: {len(task['classes'])} classes ({names})")
        lines.append(f"  {task['parameters'] - before:+,} parameters, {task['bytes']:,} bytes")
        before = task["parameters"]
        layers = task["layers"] or []
        width = max((len(layer["layer"]) for layer in layers), default=0)
        lines += [
            f"  {layer['layer']:{width}}  threshold {layer['threshold']:.4f}  "
            f"rank {layer['rank']} of {layer['full_rank']}"
            for layer in layers
        ]
    lines += ["", *map(printable, damaged)] if damaged else ["", "all checksums hold"]
    return facts, "\n".join(lines)


def inspection_json(facts: dict[str, Any]) -> str:
    """The mapping of `inspection`."""
    return json.dumps(facts, indent=1)


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file()


def _needs(method: str) -> str:
    """What a method asks of a backbone, of old data and of the test."""
    try:
        kind: Any = METHODS.load(method)
    except ConfigError:
        return "-"
    backbone = "a ViT" if kind.backbones == "vit" else "any backbone"
    old = "data of all tasks" if kind.oracle else "a memory of old images" if kind.rehearsal else "no old data"
    test = "made for task-IL" if kind.task_identity else "class-IL and task-IL"
    return f"{backbone}; {old}; {test}; phases {', '.join(kind.phases)}"


def _run_state(path: Path) -> str:
    file = path / "results.json"
    if not file.is_file():
        tasks = len(finished(path))
        return f"{tasks} tasks, see `pearl inspect`" if tasks else "no task finished yet"
    try:
        results = read_json(file, Results)
        if not results["stages"]:
            return "no task finished yet"
        stage = results["stages"][-1]
        accuracy = 100 * sum(stage["class_il"]) / sum(stage["total"])
    except (RunError, ZeroDivisionError):
        return "results.json is damaged"
    state = "done" if results.get("complete") else "unfinished"
    return f"{state}, {len(results['stages'])} tasks, class-IL {accuracy:.2f} %"


def _first_line(registry: Registry, name: str) -> str:
    if name.endswith("/*"):
        return "any network of timm by its name, such as timm/deit_tiny_patch16_224"
    try:
        part = registry.load(name)
    except ConfigError as error:  # an installed package's
        return str(error)
    return (inspect.getdoc(part) or "-").splitlines()[0]


def _part_page(registry: Registry, name: str) -> str:
    part = registry.load(name)
    fields = registry.options(name).model_fields
    lines = [f"{registry.kind} {name}", "", inspect.getdoc(getattr(part, "func", part)) or ""]
    if fields:
        lines += ["", "options:"]
        lines += [f"  {key} = {_default(field)}" for key, field in fields.items()]
    return "\n".join(lines)


def _default(field: Any) -> str:
    return "(needed)" if field.is_required() else json.dumps(field.default)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table of texts for a terminal."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table of texts in Markdown; the first row is its head."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    head, *body = (f"| {' | '.join(row)} |" for row in escaped)
    return "\n".join([head, f"|{' --- |' * len(rows[0])}", *body])
