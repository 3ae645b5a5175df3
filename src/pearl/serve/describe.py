"""Description of a model and its tasks, as JSON for the page and for programs."""

from dataclasses import asdict
from typing import Any

from pearl.evaluation.metrics import mean_rank
from pearl.lifecycle.accuracy_estimate import Outcome, accuracy_of
from pearl.lifecycle.model import Prediction, StoredModel
from pearl.settings.registry import readable
from pearl.storage.run_directory import RunDirectory


def describe(model: StoredModel) -> dict[str, Any]:
    """A model with its classes and, oldest first, its tasks.

    `accuracy` of a task is the share of its images in percent, estimated when it was learnt (class-IL), and
    `mean_rank` as `metrics.mean_rank`; both are None if its manifest does not have them. `first_answer` is
    true of a task whose training has not ended.

    Raises:
        RunError: files are missing or damaged.
    """
    directory = RunDirectory(model.path)
    manifests = directory.manifests(len(model.tasks))
    learnt_at = directory.learnt_at
    tasks = [
        {
            "name": info.name,
            "classes": [*info.classes],
            "repeated_classes": [*info.also],
            "images": manifest.get("images"),
            "learnt_at": learnt_at.get(index),
            "mean_rank": mean_rank(manifest.get("layers", [])),
            "accuracy": accuracy_of(manifest.get("estimate")),
            "first_answer": bool(model.first_answer) and index == len(model.tasks) - 1,
        }
        for index, (info, (_, manifest)) in enumerate(zip(model.tasks, manifests, strict=True))
    ]
    return {
        "name": model.path.resolve().name,
        "method": readable(model.config.method["name"]),
        "backbone": model.config.backbone["name"],
        "image_size": model.config.images.size,
        "device": str(model.device),
        "finds_unknown": model.has_ood_scores,
        "classes": [*model.classes],
        "tasks": tasks,
        "accuracy": outcome_facts(model.outcome),
    }


def outcome_facts(outcome: Outcome | None) -> dict[str, Any] | None:
    """Return the estimated accuracy of a model after its newest task, in percent; see `Outcome`."""
    if outcome is None:
        return None
    mistakes = [{"true": true, "predicted": said, "images": count} for true, said, count in outcome.mistakes]
    return {**asdict(outcome), "mistakes": mistakes}


def ranked(prediction: Prediction, top: int) -> list[dict[str, Any]]:
    """Return the best `top` classes of an image in the shape of Hugging Face's image classification.

    Each has whether the image is `unknown`, and its `in_distribution` score, beside it; None without class statistics.
    """
    unknown = None if prediction.known is None else not prediction.known
    beside = {"unknown": unknown, "in_distribution": prediction.in_distribution}
    best = zip(prediction.classes, prediction.probabilities, prediction.tasks, strict=True)
    return [{"label": name, "score": score, "task": task, **beside} for name, score, task in [*best][:top]]
