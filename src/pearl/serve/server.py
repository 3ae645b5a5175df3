"""A model in memory with what answers from it: shared by all addresses of the application."""

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pearl.data.decoding import Decoding
from pearl.data.inputs import in_order
from pearl.data.sources import some
from pearl.errors import Busy
from pearl.lifecycle.changing import complete_interrupted
from pearl.lifecycle.model import StoredModel
from pearl.lifecycle.undo import discard_first_answer
from pearl.names import class_name
from pearl.serve import photos
from pearl.serve.describe import describe, outcome_facts
from pearl.serve.learning_jobs import Teacher
from pearl.serve.predictor import Predictor
from pearl.serve.prometheus import Metrics


class Server:
    """A model with its predictor, its teacher and its counters."""

    def __init__(self, path: Path, *, device: str, method: str | None, unknown_rate: float | Literal["auto"]) -> None:
        self.path, self.method, self.unknown_rate = path, method, unknown_rate
        self.open = lambda: StoredModel.open(path, device=device, method=method)
        complete_interrupted(path)  # of a server that was killed in the middle of one
        with suppress(Busy):  # another process learns, and its first answer is used
            discard_first_answer(path)
        model = self.open()
        self.metrics = Metrics()
        self.predictor = Predictor(model, unknown_rate)
        self.decoder = photos.Decoder(model.config.images.stored, Decoding.of(model.config.images))
        self.teacher = Teacher(path, device, method, self.reload, self.restore)
        self.about = describe(model)

    def reload(self) -> dict[str, Any] | None:
        """Exchange the model for the one that is stored now; return its estimated accuracy."""
        grown = self.open()
        self.predictor.exchange(grown)
        self.about = describe(grown)
        return outcome_facts(grown.outcome)

    def restore(self) -> None:
        """Discard the first answer of a lesson that was cancelled or has failed, and load the model from before."""
        discard_first_answer(self.path)
        self.reload()

    def task_name(self, labels: Collection[str]) -> str:
        """Return an unused task name from the classes: the same for the same photos until they are learnt."""
        learnt = {task["name"] for task in self.about["tasks"] if not task["first_answer"]}
        name, taken = some(in_order({*labels}), 3), learnt
        names = (name if number == 1 else f"{name} ({number})" for number in range(1, len(taken) + 2))
        return next(one for one in names if class_name(one) not in taken)

    def close(self) -> None:
        """Stop the job, the predictor and the decoder."""
        self.teacher.close()
        self.predictor.close()
        self.decoder.close()

    def counters(self) -> dict[str, float]:
        """Return the numbers that only grow."""
        ended = {f'pearl_jobs_total{{state="{state}"}}': float(n) for state, n in self.teacher.ended.items()}
        predictor = self.predictor
        return {
            "pearl_images_total": predictor.images,
            "pearl_batches_total": predictor.batches,
            "pearl_prediction_seconds_total": predictor.seconds,
            **ended,
        }

    def gauges(self) -> dict[str, float]:
        """Return the current numbers."""
        sizes = {f"pearl_{what}": float(len(self.about[what])) for what in ("classes", "tasks")}
        return {"pearl_images_waiting": self.predictor.waiting, "pearl_learning": bool(self.teacher.current), **sizes}
