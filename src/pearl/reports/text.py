"""Output of the command line about names, recipes and runs, and text tables. Reads files; trains nothing."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pearl.errors import ConfigError, RunError, counted, printable
from pearl.evaluation.metrics import accuracy_matrix
from pearl.reports.measured import HOW, lines_of, old_data
from pearl.reports.settings import REGISTRIES, SECTIONS, part_page, section_page
from pearl.reports.streams import online_page, online_state, stream_lines, stream_of
from pearl.settings.config import OnlineRunConfig, read_recipe, recipe_names
from pearl.settings.declared import declared
from pearl.settings.parts import METHODS
from pearl.settings.registry import nearest
from pearl.storage.paths import runs_root
from pearl.storage.run_directory import RunDirectory, find_run
from pearl.storage.stored_task import read_manifest, stored_bytes
from pearl.storage.tabular import aligned

if TYPE_CHECKING:
    from pearl.lifecycle.model import Evaluation
    from pearl.lifecycle.runs import Run

_MEAN_RANK = "mean rank, weighted by (in + out)"
HEADLINES = {
    "class_il.final": "class-IL after the last task, mean over tasks",
    "class_il.average": "class-IL, mean over tasks, average over stages",
    "class_il.forgetting": "class-IL forgetting",
    "class_il.stability": "class-IL stability",
    "class_il.plasticity": "class-IL plasticity",
    "task_il.final": "task-IL after the last task, mean over tasks",
    "domain_il.final": "domain-IL, mean over domains",
    "domain_il.worst": "domain-IL, the worst domain",
    "place.final": "correct class in any task, by position",
    "task_identification": "task identified",
    "parameters_million": "parameters (million)",
    "growth": "parameters, share of isolation",
}


def names_of(what: str) -> dict[str, str]:
    """Return the names of one kind of parts, or of recipes, with a line about each."""
    if what == "recipes":
        return {name: read_recipe(name).get("about", "") for name in recipe_names()}
    return REGISTRIES[what].lines()


def listing(what: str, *, long: bool = False) -> str:
    """Return the names of one kind, one per line; for methods, `long` adds requirements and measurements."""
    if what == "runs":
        runs = [RunDirectory(path) for path in sorted(runs_root().glob("*/"))]
        rows = [(str(run.path), _run_state(run)) for run in runs if run.config_file.is_file()]
        if not rows:
            return f"no runs under {runs_root()} yet; start one with: pearl run digits"
    else:
        rows = [*names_of(what).items()]
        if long and what == "methods":
            rows = [(name, "\n    ".join([line, _needs(name), *lines_of(name)])) for name, line in rows]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {line}".rstrip() for name, line in rows]
    return "\n".join([*lines, "", HOW] if long and what == "methods" else lines)


def page(name: str) -> str:
    """Return all details of a name.

    Raises:
        ConfigError: nothing has this name.
    """
    if (directory := find_run(name)).config_file.is_file():
        from pearl.lifecycle.runs import Run

        run = Run.open(directory.path)
        if isinstance(run.config, OnlineRunConfig):
            from pearl.online.stream_run import OnlineRun

            return online_page(OnlineRun(directory.path, run.config))
        return run_page(run)
    if name in recipe_names() or name.endswith((".yaml", ".yml")):
        return yaml.safe_dump(read_recipe(name), sort_keys=False, width=120).rstrip()
    if name in SECTIONS:
        return section_page(name)
    for registry in REGISTRIES.values():
        if name in registry.names() or ("/" in name and f"{name.split('/')[0]}/*" in registry.names()):
            return part_page(registry, name)
    if (method := METHODS.admit(name)) != name:
        return part_page(METHODS, method)
    names = [*recipe_names(), *(name for registry in REGISTRIES.values() for name in registry.names())]
    raise ConfigError(f"unknown name {name!r}; {nearest(name, names)}")


def run_page(run: "Run") -> str:
    """Return a run's results as text: accuracy per stage, main metrics, and the paper's figures."""
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
    rows = HEADLINES | {key: key for key in expected if key not in HEADLINES}
    width = max(map(len, [*rows.values(), _MEAN_RANK]))
    for key, title in rows.items():
        if key not in summary:  # from other streams
            continue
        line = f"{title:{width}} {summary[key]:8.2f}"
        if key in expected:
            figure = expected[key]
            spread = f" +- {figure.std:g}" if figure.std is not None else ""
            line += f"   paper: {figure.mean:g}{spread} ({figure.where})"
        lines.append(line)
    if run.mean_rank is not None:
        lines.append(f"{_MEAN_RANK:{width}} {run.mean_rank:8.2f}")
    if not run.done:
        lines.append(f"unfinished: {counted(len(results['stages']), 'task')}; the same `pearl run` resumes it")
    return "\n".join(lines)


def evaluation_page(evaluation: "Evaluation") -> str:
    """Return accuracy per class and task, the most frequent mistakes, calibration, and unknown detection."""
    told = [f"  {printable(true)} taken for {printable(said)}: {count}" for true, said, count in evaluation.mistakes()]
    return "\n".join(
        [
            repr(evaluation),
            *(["", "most frequent mistakes:", *told] if told else []),
            *_sure(evaluation),
            *_unknown(evaluation),
            *map(printable, evaluation.notes),
        ]
    )


def _sure(evaluation: "Evaluation") -> list[str]:
    """Return confidence against accuracy: at most ten lines."""
    diagram = evaluation.reliability
    lines = ["", f"confidence (calibration error {evaluation.calibration_error:.1f} points):"]
    for low, rows in ((0, diagram[:8]), (53, diagram[8:12]), (80, diagram[12:14]), (93, diagram[14:])):
        images, sure, right = rows.sum(0)
        if images:
            shares = f"{100 * sure / images:.0f} % confident, {100 * right / images:.0f} % correct"
            lines.append(f"  from {low:2} %: {counted(int(images), 'image')}, {shares}")
    return lines


def _unknown(evaluation: "Evaluation") -> list[str]:
    """Return the accuracy on images with the highest in-distribution scores, and the detection of unknown classes."""
    if not evaluation.coverage:
        return []
    coverage = {f"{share} %": f"{value:.1f}" for share, value in evaluation.coverage.items()}
    table = [["  share, highest scores first", *coverage], ["  correct (%)", *coverage.values()]]
    lines = ["", "accuracy on the images with the highest in-distribution scores:", aligned(table, numbers=True)]
    unknown, refused = ~evaluation.is_known, evaluation.refused
    counts = [f"{refused[part].sum()} of {counted(part.sum(), 'image')}" for part in (evaluation.is_known, unknown)]
    lines += ["", f"unknown, at --unknown-rate {evaluation.unknown_rate:g}: {counts[0]} of known classes"]
    if unknown.any():
        lines[-1] += f", {counts[1]} of unknown classes"
        lines.append(f"  known against unknown classes: AUROC {evaluation.auroc:.1f} % (by chance 50)")
    return lines


def evaluation_json(evaluation: "Evaluation") -> str:
    """Return all counts; rows of `confusion` are true classes, columns predicted ones. Accuracies are in percent."""
    counts = {key: getattr(evaluation, key).tolist() for key in ("total", "class_il", "task_il", "confusion")}
    tasks = [{"name": task.name, "classes": list(task.classes)} for task in evaluation.tasks]
    facts = {"tasks": tasks, "classes": list(evaluation.classes), **counts, "notes": evaluation.notes}
    facts |= {"reliability": evaluation.reliability.tolist(), "calibration_error": evaluation.calibration_error}
    facts |= {"accuracy": evaluation.accuracy, "task_accuracy": evaluation.task_accuracy}
    if evaluation.coverage:
        unknown, refused = ~evaluation.is_known, evaluation.refused
        facts["coverage"] = evaluation.coverage
        facts["unknown"] = {
            "rate": evaluation.unknown_rate,
            "known": {"images": int((~unknown).sum()), "refused": int(refused[~unknown].sum())},
            "unknown_classes": {
                "classes": evaluation.unknown_classes,
                "images": int(unknown.sum()),
                "refused": int(refused[unknown].sum()),
            },
            "auroc": evaluation.auroc if unknown.any() else None,
        }
    return json.dumps(facts, indent=1)


def expected_unknown(shares: Sequence[float]) -> list[str]:
    """Return a line on how many images of known classes `predict` calls unknown: shares from and to, or none."""
    if len(shares) != 2:
        return []
    low, high = (100 * share for share in shares)
    return [f"of images of known classes, about 5 % ({low:.1f} to {high:.1f} %) will be called unknown"]


def inspection(path: Path) -> tuple[dict[str, Any], str]:
    """Return the contents of a model's files and their damage: as a mapping, and as text.

    Raises:
        RunError: not a model, or its configuration or reference cannot be read.
    """
    from pearl.lifecycle.saved import changed_code, read_config, verify

    directory = RunDirectory(path)
    config, reference, damaged = read_config(path), directory.start, verify(path)
    if code := changed_code(path, config):
        damaged.append(code)
    manifests = []
    for folder in directory.finished:
        try:
            manifest = read_manifest(folder)
            manifests.append({**manifest, "bytes": stored_bytes(folder, manifest)})
        except RunError:  # one entry of `damaged`
            manifests.append({})
    keys = (
        "name",
        "classes",
        "images",
        "parameters",
        "nonzero",
        "bytes",
        "seconds",
        "reused",
        "spaces",
        "temperature",
        "refused",
        "layers",
    )
    facts: dict[str, Any] = {
        "path": str(path),
        "method": config.method["name"],
        "backbone": config.backbone["name"],
        "image_size": config.images.size,
        "reference_bytes": reference.get("bytes", 0),
        "tasks": [
            {"folder": folder.name, **{key: manifest.get(key) for key in keys}}
            for folder, manifest in zip(directory.finished, manifests, strict=True)
        ],
        "interrupted": _interrupted_task(directory, damaged),
        "damaged": damaged,
    }
    lines = [
        f"{path}: {facts['method']} on {facts['backbone']} at {facts['image_size']} pixels, "
        f"{counted(len(manifests), 'task')}",
        f"reference: {reference.get('parameters', 0):,} parameters, {facts['reference_bytes']:,} bytes",
    ]
    if stream := stream_of(directory):
        facts["stream"] = stream
        lines += ["", *stream_lines(stream)]
    if manifests and (asked := manifests[-1].get("spaces")):
        of = f"of {'task' if len(asked) == 1 else 'tasks'} {', '.join(str(t + 1) for t in asked)}"
        temperature = manifests[-1].get("temperature") or 0.0
        lines.append(f"class statistics in the sub-networks {of}, at temperature {temperature:.3f}")
        lines += expected_unknown(manifests[-1].get("refused", []))
    before = reference.get("parameters", 0)
    for task, manifest in zip(facts["tasks"], manifests, strict=True):
        lines.append("")
        if None in (task["name"], task["classes"], task["parameters"], task["bytes"]):
            lines.append(f"{task['folder']}: damaged, see below")
            continue
        names = ", ".join(map(printable, task["classes"]))
        others = "known classes again" if manifest.get("also") else "no classes left"
        shown = f"{counted(len(task['classes']), 'class')} ({names})" if names else others
        lines.append(f"task {printable(task['name'])}: {shown}")
        of_all = f" ({task['nonzero']:,} of all are not 0)" if task["nonzero"] is not None else ""
        lines.append(f"  {task['parameters'] - before:+,} parameters{of_all}, {task['bytes']:,} bytes")
        before = task["parameters"]
        layers = task["layers"] or []
        width = max((len(layer["layer"]) for layer in layers), default=0)
        lines += [
            f"  {layer['layer']:{width}}  threshold {layer['threshold']:.4f}  "
            f"rank {layer['rank']} of {layer['full_rank']}"
            for layer in layers
        ]
    if unfinished := facts["interrupted"]:
        state = "its first answer is in use, without training" if unfinished["first_answer"] else "interrupted"
        lines += ["", f"task {printable(unfinished['task'])}: {state}; {unfinished['fix']}"]
    lines += ["", *map(printable, damaged)] if damaged else ["", "all checksums hold"]
    return facts, "\n".join(lines)


def _interrupted_task(directory: RunDirectory, damaged: list[str]) -> dict[str, Any] | None:
    """Return a model's interrupted task and the fix; a damaged record of it is one more line of `damaged`."""
    try:
        known = directory.interrupted_task
    except RunError as error:
        damaged.append(f"{error}, or start the task again with --discard")
        return None
    if not known:
        return None
    again = (
        f"pearl resume {shlex.quote(str(directory.path))}"
        if known["data"]
        else "the same pearl.learn, with the same images"
    )
    fix = f"resume with: {again}; or discard it with --discard"
    checkpoints = [checkpoint.name for checkpoint in directory.checkpoints]
    first = directory.first_answer is not None
    return {"task": known["name"], "checkpoints": checkpoints, "first_answer": first, "fix": fix}


def inspection_json(facts: dict[str, Any]) -> str:
    """Return the mapping of `inspection`."""
    return json.dumps(facts, indent=1)


def _needs(method: str) -> str:
    """Return a method's requirements for backbone, old data and test."""
    try:
        kind: Any = METHODS.load(method)
    except ConfigError:
        return "-"
    known = {"convolutional": "convnet, resnet18 or bsc", "residual": "resnet18 or bsc", "vit": "a ViT"}
    backbone = known.get(kind.backbones, "any backbone")
    test = "made for task-IL" if kind.task_identity else "class-IL and task-IL"
    return f"{backbone}; {old_data(kind)}; {test}; phases {', '.join(declared(kind))}"


def _run_state(run: RunDirectory) -> str:
    if run.online_folder.is_dir():
        return online_state(run)
    if not run.results_file.is_file():
        tasks = len(run.finished)
        return f"{counted(tasks, 'task')}, see `pearl inspect`" if tasks else "no task finished yet"
    try:
        stages = run.results["stages"]
        if not stages:
            return "no task finished yet"
        accuracy = 100 * sum(stages[-1]["class_il"]) / sum(stages[-1]["total"])
    except (RunError, ZeroDivisionError):
        return f"{run.results_file.name} is damaged"
    state = "done" if run.is_done else "unfinished"
    return f"{state}, {counted(len(stages), 'task')}, class-IL {accuracy:.2f} % pooled over images"


def duration(seconds: float) -> str:
    """Return a duration in seconds as text."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"
