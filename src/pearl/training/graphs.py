"""Training steps captured as CUDA graphs: with the paper's batch size 32, a GPU waits for kernel launches."""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from pearl.data.batches import Batch

Step = Callable[[Batch], Tensor]
# eager steps of one batch size before the capture; then optimizers and libraries have allocated their memory
WARM_UP = 3


class Recorder:
    """One CUDA graph. The capture and the steps before it run on a separate stream, as CUDA requires."""

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.stream = torch.cuda.Stream()

    def run(self, work: Callable[[], Tensor]) -> Tensor:
        """Run the function without capture."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = work()
        torch.cuda.current_stream().wait_stream(self.stream)
        return result

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Capture the function without running it; return the replay function and the result's tensors."""
        with torch.cuda.graph(self.graph, stream=self.stream):
            result = work()
        return self.graph.replay, result


class GraphedStep:
    """A step that is replayed for the first batch size that has repeated often enough; other batches run eagerly.

    The step must do the same device work for every batch of that size, and nothing else (`Phase.capturable`). A replay
    reads batch, learning rates and weights from their memory at capture.
    """

    def __init__(self, step: Step, recorder: Recorder) -> None:
        self.step, self.recorder = step, recorder
        self._met: Counter[torch.Size] = Counter()
        self._batch: Batch | None = None  # the captured step reads it

    def __call__(self, batch: Batch) -> Tensor:
        """Train on a batch and return its loss."""
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
