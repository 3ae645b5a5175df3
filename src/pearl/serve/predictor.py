"""One loaded model for all requests: those that arrive together are predicted together, by one thread."""

import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import Literal

import numpy as np

from pearl.lifecycle.model import BATCH, Prediction, StoredModel

Request = tuple[np.ndarray, int, Future[list[Prediction]]]  # pixels, how many classes, where the results go
WAITING = 4096  # images that may wait; at 20 images a second they would wait for 3 minutes


class Overloaded(Exception):
    """Too many images wait already."""


class Predictor:
    """A thread that predicts, and the model that it uses. The model is exchanged between two batches, never within one.

    Args:
        model: a model that is opened; its weights are read here.
        unknown_rate: as of `Model.predict`.

    Attributes:
        images: number of predicted images.
        batches: number of forward batches.
        seconds: total time of these batches.
    """

    def __init__(self, model: StoredModel, unknown_rate: float | Literal["auto"] = "auto") -> None:
        self.model, self.unknown_rate = warm(model, unknown_rate), unknown_rate
        self.images = self.batches = 0
        self.seconds = 0.0
        self._requests: deque[Request] = deque()
        self._waiting, self._open, self._changed = 0, True, threading.Condition()
        self._thread = threading.Thread(target=self._work, name="predictor", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Return the number of images that wait for a prediction."""
        return self._waiting

    def predict(self, pixels: np.ndarray, top: int) -> "Future[list[Prediction]]":
        """Queue raw pixels (N, S, S, 3) uint8 for prediction; each result has the best `top` classes.

        Raises:
            Overloaded: too many images wait.
        """
        future: Future[list[Prediction]] = Future()
        with self._changed:
            if self._waiting and self._waiting + len(pixels) > WAITING:
                raise Overloaded
            self._waiting += len(pixels)
            self._requests.append((pixels, top, future))
            self._changed.notify()
        return future

    def exchange(self, model: StoredModel) -> None:
        """Predict with another model from the next batch on; it is loaded completely before."""
        self.model = warm(model, self.unknown_rate)

    def close(self) -> None:
        """End the thread after its current batch."""
        with self._changed:
            self._open = False
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while batch := self._next():
            with self._changed:
                self._waiting -= sum(len(pixels) for pixels, _, _ in batch)
            batch = [one for one in batch if one[2].set_running_or_notify_cancel()]  # not of clients that have gone
            try:
                if batch:
                    self._answer(batch)
            except BaseException as error:  # waiting requests get the error, and the thread continues
                for _, _, future in batch:
                    if not future.done():
                        future.set_exception(error)

    def _answer(self, batch: list[Request]) -> None:
        began = time.perf_counter()
        pixels = np.concatenate([pixels for pixels, _, _ in batch])
        top = max(top for _, top, _ in batch)
        predictions = self.model.predict_pixels(pixels, top=top, unknown_rate=self.unknown_rate)
        self.images, self.batches = self.images + len(predictions), self.batches + 1
        self.seconds += time.perf_counter() - began
        start = 0
        for pixels, _, future in batch:
            future.set_result(predictions[start : start + len(pixels)])
            start += len(pixels)

    def _next(self) -> list[Request]:
        """Return all waiting requests, up to a batch's size but at least one; nothing after closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._requests or not self._open)
            batch: list[Request] = []
            size = 0
            while self._open and self._requests and (not batch or size + len(self._requests[0][0]) <= BATCH):
                batch.append(self._requests.popleft())
                size += len(batch[-1][0])
            return batch


def warm(model: StoredModel, unknown_rate: float | Literal["auto"]) -> StoredModel:
    """Return a model after its first prediction, which reads its weights."""
    size = model.config.images.stored
    model.predict_pixels(np.zeros((1, size, size, 3), np.uint8), unknown_rate=unknown_rate)
    return model
