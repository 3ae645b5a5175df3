"""Model card: a README.md in the format of the Hugging Face Hub.

No figure stands in it without its condition, which is why it has no `model-index`: that header has no place for one.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from pearl.errors import counted, printable
from pearl.lifecycle.model import StoredModel
from pearl.settings.config import RunConfig
from pearl.settings.registry import readable
from pearl.storage.run_directory import RunDirectory
from pearl.storage.tabular import rows_as_markdown
from pearl.version import __version__

LOAD = {
    "model": """```python
from huggingface_hub import snapshot_download

import pearl

model = pearl.load(snapshot_download("{repo}", local_dir="{name}"))
model.predict("photo.jpg")[0].name
model.learn("more_classes")
```""",
    "torch": """```python
import torch

program = torch.export.load("{file}").module()
logits = program(images)
```""",
    "onnx": """```python
import onnxruntime

session = onnxruntime.InferenceSession("{file}")
logits = session.run(["logits"], {{"images": images}})[0]
```""",
}
INPUT = (
    "`images` are float32 RGB (batch, 3, {size}, {size}) from 0 to 1: the shorter side resized to {resize} pixels "
    "(bicubic), the centre cropped. Class names are in the metadata of the file."
)
HOW = {
    "left out": "cross-validated on {}: each left out of the class statistics",
    "held out": "measured on {} held out of training",
}


def card(model: StoredModel, load: str, *, export: bool = True) -> str:
    """Return the card of a model; `load` is the part about loading it, as Markdown.

    Raises:
        RunError: files are missing or damaged.
    """
    name = printable(model.path.resolve().name)
    config = model.config
    size = {"size": config.images.size, "resize": config.images.stored}
    sections = [
        f"---\n{yaml.safe_dump(_header(model), sort_keys=False, allow_unicode=True)}---",
        f"# {name}",
        f"An image classifier of {counted(len(model.classes), 'class')}, learnt in {counted(len(model.tasks), 'task')} "
        f"by the method {readable(config.method['name'])} on {config.backbone['name']} with pearl {__version__}.",
        *([f"**Note:** {model.first_answer}."] if model.first_answer else []),
        "## Classes",
        _table(["task", "new classes", "more images of", "images", "learnt on"], _tasks(model)),
        "## Accuracy",
        *_accuracy(model),
        *_unknown(model),
        "## Loading",
        load,
        *([INPUT.format(**size)] if export and load.startswith("```") else []),
        "## Licence",
        _licence(model)[1],
    ]
    return "\n\n".join(sections) + "\n"


def load_section(kind: str, *, file: str = "", repo: str = "", name: str = "") -> str:
    """Return the part about loading a model directory ("model"), a torch program or an ONNX file."""
    return LOAD[kind].format(file=file, repo=repo, name=name)


def _header(model: StoredModel) -> dict[str, Any]:
    known, _ = _licence(model)
    base = _pretrained(model)
    return {
        "library_name": "pearl",
        "pipeline_tag": "image-classification",
        **({"license": known} if known else {}),
        **({"base_model": base.hf_hub_id} if base is not None and base.hf_hub_id else {}),
        "tags": ["continual-learning", "class-incremental-learning", "lora", "pearl"],
    }


def _pretrained(model: StoredModel) -> Any:
    """Return timm's facts about the pretrained weights; None if there are none, or they came from a file."""
    backbone = model.config.backbone
    kind, _, name = str(backbone["name"]).partition("/")
    if kind != "timm" or not backbone.get("pretrained") or backbone.get("weights"):
        return None
    import timm

    return timm.models.get_pretrained_cfg(name, allow_unregistered=True)


def _licence(model: StoredModel) -> tuple[str, str]:
    """Return the licence of the weights in the Hub's notation, empty if it is not known, and a sentence about it."""
    facts, backbone = _pretrained(model), model.config.backbone
    owner = "The owner of the model chooses the licence of what was learnt from the images."
    if facts is not None and facts.license:
        return str(facts.license), (
            f"The pretrained weights ({backbone['name']}) have the licence {facts.license}. {owner}"
        )
    if facts is not None:
        return "", f"timm states no licence for the pretrained weights ({backbone['name']}); see their page. {owner}"
    if backbone.get("weights"):
        file = printable(Path(str(backbone["weights"])).name)
        return "", f"The network started from the file {file}, whose licence is not recorded. {owner}"
    return "", f"The network was trained from random weights. {owner}"


def _tasks(model: StoredModel) -> Iterator[list[str]]:
    learnt_at = RunDirectory(model.path).learnt_at
    for index, task in enumerate(model.tasks):
        images = "not recorded" if task.images is None else f"{task.images:,}"
        yield [task.name, ", ".join(task.classes), ", ".join(task.also), images, learnt_at.get(index, "")[:10]]


def _accuracy(model: StoredModel) -> Iterator[str]:
    """Yield a table of figures with their conditions, and what they do not cover."""
    rows = [*_of_run(model), *_estimated(model)]
    if not rows:
        yield "Not measured."
        return
    yield _table(["figure", "value", "condition"], rows)
    yield "The figures hold for images like those that were learnt: other cameras and places can give far lower ones."


def _of_run(model: StoredModel) -> Iterator[list[str]]:
    """Yield the test accuracy of a run after the model's newest task."""
    stages = RunDirectory(model.path).results["stages"] if isinstance(model.config, RunConfig) else []
    count = len(model.tasks)
    if not isinstance(model.config, RunConfig) or len(stages) < count:
        return
    stage = stages[count - 1]
    images, data = sum(stage["total"]), model.config.data["name"]
    for key, words in (("class_il", "among all classes (class-IL)"), ("task_il", "with the task given (task-IL)")):
        share = f"{100 * sum(stage[key]) / max(images, 1):.1f} %"
        tests = f"{counted(images, 'test image')} of {data}"
        yield [f"accuracy {words}", share, f"{tests}, after {counted(count, 'task')}, seed {model.config.seed}"]


def _estimated(model: StoredModel) -> Iterator[list[str]]:
    """Yield the estimate that learning the newest task ended with."""
    outcome = model.outcome
    if outcome is None:
        return
    conditions = HOW[outcome.how].format(counted(outcome.images, "image"))
    if outcome.spared is not None:
        conditions += f", and corrected, since the network was trained on all but {outcome.spared:,} of them"
    task = f"task {model.tasks[-1].name}"
    if outcome.new is not None:
        yield [f"accuracy on {task}, among all classes (class-IL)", f"{outcome.new:.1f} %", conditions]
    if outcome.new_in_task is not None:
        yield [f"accuracy on {task}, among its own (task-IL)", f"{outcome.new_in_task:.1f} %", conditions]
    if outcome.old_then is not None:
        then = "each estimated when it was learnt, among the classes known by then"
        yield ["accuracy on earlier classes, then", f"{outcome.old_then:.1f} %", then]
    if outcome.old_now is not None:
        yield ["accuracy on earlier classes, now", f"{outcome.old_now:.1f} %", "estimated from class statistics"]
    yield ["calibration error", f"{outcome.calibration_error:.1f} points", f"of the probabilities, {conditions}"]


def _unknown(model: StoredModel) -> Iterator[str]:
    """Yield the expected share of known images that are called unknown."""
    if expected := model.tasks[-1].manifest.get("refused"):
        low, high = expected
        yield "## Unknown images"
        yield _table(
            ["figure", "value", "condition"],
            [
                [
                    "images of known classes that are called unknown",
                    f"{100 * low:.0f} to {100 * high:.0f} %",
                    "expected in nine of ten cases at a rate of 5 %, for images like those that were learnt",
                ]
            ],
        )


def _table(head: list[str], rows: Any) -> str:
    def cell(text: str) -> str:
        return printable(text).replace("\\", "\\\\").replace("<", "&lt;")

    return rows_as_markdown([head, *([cell(text) for text in row] for row in rows)])
