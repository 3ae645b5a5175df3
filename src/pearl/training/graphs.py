"""A training step recorded once as a CUDA graph and replayed: at the paper's batch of 32 a GPU waits for launches."""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from pearl.data.batches import Batch

Step = Callable[[Batch], Tensor]
WARM_UP = 3  # steps of one size before it is recorded; by then optimizers and libraries have allocated what they keep


class Recorder:
    """One CUDA graph. What is recorded and what comes before it run on a stream of their own, as CUDA demands."""

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.stream = torch.cuda.Stream()

    def run(self, work: Callable[[], Tensor]) -> Tensor:
        """Do the work, as it is."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = work()
        torch.cuda.current_stream().wait_stream(self.stream)
        return result

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Record the work without doing it; what does it, and where its result will be."""
        with torch.cuda.graph(self.graph, stream=self.stream):
            result = work()
        return self.graph.replay, result


class GraphedStep:
    """A step that is replayed for batches of the size that comes first so often; others run as they are.

    The step must do the same work on the device for every batch of that size, and nothing else (`Phase.steady`). It
    reads its batch, learning rates and weights from where they were when it was recorded.
    """

    def __init__(self, step: Step, recorder: Recorder) -> None:
        self.step, self.recorder = step, recorder
        self._met: Counter[torch.Size] = Counter()
        self._batch: Batch | None = None  # the recorded step reads it

    def __call__(self, batch: Batch) -> Tensor:
        """Train on a batch; its loss."""
        size = batch.x.shape
        self._met[size] += 1
        if self._batch is None and self._met[size] > WARM_UP:
            fixed = self._batch = Batch(*(torch.empty_like(tensor) for tensor in batch))
            self._replay, self._loss = self.recorder.record(lambda: self.step(fixed))
        if self._batch is None or self._batch.x.shape != size:
            return self.recorder.run(lambda: self.step(batch))
        for to, tensor in zip(self._batch, batch, strict=True):
            to.copy_(tensor)
        self._replay()
        return self._loss.clone()
