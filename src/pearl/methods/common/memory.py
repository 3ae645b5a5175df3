"""A memory of images of past tasks, for rehearsal methods. Not a method itself."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pearl.data.augment import View
from pearl.data.batches import Batch, Task
from pearl.errors import DataError

Policy = Literal["reservoir", "balanced"]


class Shown(NamedTuple):
    """Images drawn from the memory: network input, logit indices, tasks, and stored logits.

    Logits of classes that were not known yet are the image's lowest. The logits are empty unless the memory stores
    them.
    """

    x: Tensor
    y: Tensor
    tasks: Tensor
    logits: Tensor | None


class Memory(nn.Module):
    """Up to `capacity` raw images with labels and tasks, and optionally logits.

    `reservoir` (Vitter, 1985): every image offered so far has the same probability of being stored. `balanced`: classes
    differ by one image at most, and each is a reservoir of its own images; an image of a smaller class replaces one of
    the largest, as in Chrysakis & Moens (ICML 2020). With fewer places than classes, the first classes stay.

    Random draws use torch's global generator, which the engine seeds. The count of images is on the host, so that a
    `reservoir` never waits for the device.
    """

    images: Tensor
    labels: Tensor
    tasks: Tensor
    logits: Tensor

    def __init__(self, capacity: int, policy: Policy = "reservoir", *, logits: bool = False) -> None:
        super().__init__()
        self.capacity, self.policy, self.keeps_logits = capacity, policy, logits
        self.offered = [0]  # images offered so far: in total, or per class if `balanced`
        for name in ("images", "labels", "tasks", "logits"):
            self.register_buffer(name, None)  # their sizes are set by the first task or the file

    def __len__(self) -> int:
        """Return the number of stored images."""
        return min(sum(self.offered), self.capacity)

    def open(self, task: Task, classes: int) -> None:
        """Allocate space for images of a task, and for logits of the `classes` known from now on.

        Raises:
            DataError: its images differ in size from the stored ones.
        """
        shape = tuple(task.images.shape[1:])
        if self.images is None:
            self.images = torch.zeros(self.capacity, *shape, dtype=torch.uint8, device=task.device)
            self.labels = torch.zeros(self.capacity, dtype=torch.int64, device=task.device)
            self.tasks = torch.zeros_like(self.labels)
            if self.keeps_logits:
                self.logits = torch.zeros(self.capacity, 0, device=task.device)
        if tuple(self.images.shape[1:]) != shape:
            height, width = self.images.shape[1:3]
            raise DataError(
                f"images of task {task.id + 1} ({task.name}) are {shape[0]}x{shape[1]}, those in memory "
                f"{height}x{width}; give images of one size"
            )
        if self.keeps_logits:
            self.logits = widened(self.logits, classes)

    @torch.no_grad()
    def offer(self, task: Task, batch: Batch, logits: Tensor | None = None) -> None:
        """Store the images of a batch that the policy selects; `logits` are the network's output for them."""
        chosen = self._reservoir(len(batch.y)) if self.policy == "reservoir" else self._balanced(batch.y.tolist())
        if not chosen:
            return
        slots, rows = torch.tensor([*chosen]), torch.tensor([*chosen.values()])
        raw = task.images[batch.rows[rows].to(task.images.device)]
        self.images[slots] = raw.to(self.images.device)
        self.labels[slots] = batch.y[rows]
        self.tasks[slots] = task.id
        if logits is not None:
            self.logits[slots] = widened(logits[rows].float(), self.logits.shape[1])

    def fill(self, task: Task) -> None:
        """Offer all images of a finished task, for a memory that changes only between tasks."""
        rows = torch.arange(len(task), device=task.device)
        self.offer(task, Batch(rows, task.labels, rows))

    def _reservoir(self, count: int) -> dict[int, int]:
        """Map places to rows of the batch: image i gets a random one of i + 1 places, if it is below the capacity."""
        before, self.offered[0] = self.offered[0], self.offered[0] + count
        if not self.capacity:
            return {}
        order = torch.arange(before, before + count, dtype=torch.float64)
        slots = torch.floor(torch.rand(count, dtype=torch.float64) * (order + 1))
        slots = torch.where(order < self.capacity, order, slots).long()
        # the last one is stored
        return {slot: row for row, slot in enumerate(slots.tolist()) if slot < self.capacity}

    def _balanced(self, labels: list[int]) -> dict[int, int]:
        """Map places to rows of the batch."""
        if not self.capacity:
            return {}
        kept = self.labels[: len(self)].tolist()
        self.offered += [0] * (max(labels) + 1 - len(self.offered))
        chosen = {}
        for row, label in enumerate(labels):
            self.offered[label] += 1
            if len(kept) < self.capacity:
                chosen[len(kept)] = row
                kept.append(label)
                continue
            held = Counter(kept)
            most = max(held.values())
            # a class that was once limited never grows again, so that it remains a reservoir of all its images
            if held[label] + 1 < most:
                out = [slot for slot, other in enumerate(kept) if held[other] == most]
            elif torch.rand((), dtype=torch.float64).item() < held[label] / self.offered[label]:
                out = [slot for slot, other in enumerate(kept) if other == label]
            else:
                continue
            slot = out[int(torch.randint(len(out), ()))]
            kept[slot], chosen[slot] = label, row
        return chosen

    def draw(self, count: int, view: View) -> Shown | None:
        """Draw up to `count` different random images, augmented; None if the memory is empty."""
        if not len(self):
            return None
        index = torch.randperm(len(self))[:count]
        raw = self.images[index].contiguous()
        draws = view.draw(len(index), (raw.shape[1], raw.shape[2]), torch.default_generator)
        x = view.train(raw, tuple(draw.to(raw.device) for draw in draws))
        return Shown(x, self.labels[index], self.tasks[index], self.logits[index] if self.keeps_logits else None)

    def facts(self) -> dict[str, Any]:
        """Return records for a finished task."""
        per_class = Counter(self.labels[: len(self)].tolist())
        return {"capacity": self.capacity, "images": len(self), "per_class": dict(sorted(per_class.items()))}

    def get_extra_state(self) -> Tensor:
        """Return the counters, for the state_dict."""
        return torch.tensor(self.offered)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the counters."""
        self.offered = state.tolist()

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        for name, buffer in list(self._buffers.items()):
            value = state_dict.get(prefix + name)
            if value is not None and (buffer is None or buffer.shape != value.shape):
                self.register_buffer(name, torch.empty_like(value))
        super()._load_from_state_dict(state_dict, prefix, *args)


def widened(logits: Tensor, classes: int) -> Tensor:
    """Extend logits (N, k) to all classes: unknown ones get each image's lowest known logit.

    Classes unknown at that time could not be predicted. With this target, later classes stay below an old image's
    logits.
    """
    lowest = F.pad(logits, (0, 1), value=torch.inf).amin(1, keepdim=True)
    lowest = lowest.masked_fill(lowest.isinf(), 0.0)  # of an empty slot
    wide = F.pad(logits, (0, classes - logits.shape[1]), value=torch.inf)
    return torch.where(wide.isinf(), lowest, wide)
