"""A memory of images of past tasks, for methods that show them again. Not a method itself."""

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
    """Images drawn from the memory: network input, logit indices, tasks, and the logits they once had.

    Where its class was not known yet, a logit is the image's lowest; there are none unless the memory keeps them.
    """

    x: Tensor
    y: Tensor
    tasks: Tensor
    logits: Tensor | None


class Memory(nn.Module):
    """Up to `capacity` raw images with their labels and tasks, and their logits if asked.

    `reservoir` (Vitter, 1985): at any time every image offered so far is kept with the same probability. `balanced`:
    classes differ by one image at most, and each is a reservoir of its own images; an image of a smaller class takes
    the place of one of the largest, as in Chrysakis & Moens (ICML 2020). With fewer places than classes, the classes
    that came first stay.

    All draws are torch's global ones, which the engine seeds. The host knows how many images there are, so that no
    step of a `reservoir` waits for the device.
    """

    images: Tensor
    labels: Tensor
    tasks: Tensor
    logits: Tensor

    def __init__(self, capacity: int, policy: Policy = "reservoir", *, logits: bool = False) -> None:
        super().__init__()
        self.capacity, self.policy, self.keeps_logits = capacity, policy, logits
        self.offered = [0]  # images so far: all of them, or of each class if `balanced`
        for name in ("images", "labels", "tasks", "logits"):
            self.register_buffer(name, None)  # their sizes come with the first task, or from the file

    def __len__(self) -> int:
        """Images kept."""
        return min(sum(self.offered), self.capacity)

    def open(self, task: Task, classes: int) -> None:
        """Make room for images of a task, and for logits of the `classes` known from now on.

        Raises:
            DataError: its images have another size than those kept.
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
        """Keep what the policy takes of a batch of the task's images; `logits` as the network gave them."""
        chosen = self._reservoir(len(batch.y)) if self.policy == "reservoir" else self._balanced(batch.y.tolist())
        if not chosen:
            return
        places, rows = torch.tensor([*chosen]), torch.tensor([*chosen.values()])
        raw = task.images[batch.rows[rows].to(task.images.device)]
        self.images[places] = raw.to(self.images.device)
        self.labels[places] = batch.y[rows]
        self.tasks[places] = task.id
        if logits is not None:
            self.logits[places] = widened(logits[rows].float(), self.logits.shape[1])

    def fill(self, task: Task) -> None:
        """Offer all images of a task that has been learnt, for a memory that changes between tasks alone."""
        rows = torch.arange(len(task), device=task.device)
        self.offer(task, Batch(rows, task.labels, rows))

    def _reservoir(self, count: int) -> dict[int, int]:
        """Place -> row of the batch: image i goes to a random one of i + 1 places, if the memory has that many."""
        before, self.offered[0] = self.offered[0], self.offered[0] + count
        if not self.capacity:
            return {}
        order = torch.arange(before, before + count, dtype=torch.float64)
        places = torch.floor(torch.rand(count, dtype=torch.float64) * (order + 1))
        places = torch.where(order < self.capacity, order, places).long()
        return {place: row for row, place in enumerate(places.tolist()) if place < self.capacity}  # the last one stays

    def _balanced(self, labels: list[int]) -> dict[int, int]:
        """Place -> row of the batch."""
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
            # a class that was held back once never grows again, so that it stays a reservoir of all its images
            if held[label] + 1 < most:
                out = [place for place, other in enumerate(kept) if held[other] == most]
            elif torch.rand((), dtype=torch.float64).item() < held[label] / self.offered[label]:
                out = [place for place, other in enumerate(kept) if other == label]
            else:
                continue
            place = out[int(torch.randint(len(out), ()))]
            kept[place], chosen[place] = label, row
        return chosen

    def draw(self, count: int, view: View) -> Shown | None:
        """`count` different images at random (all, if there are fewer), augmented anew; None if there are none."""
        if not len(self):
            return None
        index = torch.randperm(len(self))[:count]
        raw = self.images[index].contiguous()
        draws = view.draw(len(index), (raw.shape[1], raw.shape[2]), torch.default_generator)
        x = view.train(raw, tuple(draw.to(raw.device) for draw in draws))
        return Shown(x, self.labels[index], self.tasks[index], self.logits[index] if self.keeps_logits else None)

    def facts(self) -> dict[str, Any]:
        """What to record of it after a task."""
        per_class = Counter(self.labels[: len(self)].tolist())
        return {"capacity": self.capacity, "images": len(self), "per_class": dict(sorted(per_class.items()))}

    def get_extra_state(self) -> Tensor:
        """The counters, for the state_dict."""
        return torch.tensor(self.offered)

    def set_extra_state(self, state: Tensor) -> None:
        """The reverse."""
        self.offered = state.tolist()

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        for name, own in list(self._buffers.items()):
            value = state_dict.get(prefix + name)
            if value is not None and (own is None or own.shape != value.shape):
                self.register_buffer(name, torch.empty_like(value))
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.logits is not None:
            self.logits = widened(self.logits, self.logits.shape[1])


def widened(logits: Tensor, classes: int) -> Tensor:
    """Logits (N, k) with columns for so many classes: each image's lowest known logit where one is not known.

    A class that nobody had heard of was no answer. Held to that, later classes stay below what an old image was given.
    Version 0.1 stored inf for a class that was not known.
    """
    lowest = F.pad(logits, (0, 1), value=torch.inf).amin(1, keepdim=True)
    lowest = lowest.masked_fill(lowest.isinf(), 0.0)  # of a place where no image is yet
    wide = F.pad(logits, (0, classes - logits.shape[1]), value=torch.inf)
    return torch.where(wide.isinf(), lowest, wide)
