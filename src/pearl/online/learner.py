"""The interface of online learners: labelled images in, in the order of their arrival; predictions at any time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pearl.data.augment import View
from pearl.settings.config import ModelConfig
from pearl.training.engine import Engine
from pearl.training.resume import Resume

Network = Callable[[Tensor], Tensor]  # maps raw images (B, H, W, 3) uint8 to features (B, p)


@dataclass
class Setup:
    """The parts that a learner works with: settings, network, view of images, and the engine that trains phases."""

    config: ModelConfig
    backbone: nn.Module
    engine: Engine
    resume: Resume = field(default_factory=Resume)
    boundaries: bool = False  # whether `Learner.boundary` is called

    @property
    def view(self) -> View:
        """Return the conversion of raw images to network input."""
        return View(self.config.images, channels_last=self.config.engine.channels_last)

    @property
    def device(self) -> torch.device:
        """Return the device that networks run on."""
        return self.engine.fabric.device


class OnImages:
    """A network as a function from raw images (B, H, W, 3) uint8 to features (B, p)."""

    def __init__(self, module: nn.Module, setup: Setup) -> None:
        self.module, self.view, self.device = module, setup.view, setup.device

    def __call__(self, images: Tensor) -> Tensor:
        """See the class."""
        return self.module(self.view.test(images.to(self.device)))


class Resizable(nn.Module):
    """A module whose buffers have the sizes of the file that it is loaded from."""

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        for name, buffer in list(self._buffers.items()):
            value = state_dict.get(prefix + name)
            if value is not None and buffer is not None and buffer.shape != value.shape:
                setattr(self, name, buffer.new_empty(value.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)


class Learner(Resizable):
    """Base of all online learners. The state_dict holds everything learnt, so that a run can resume anywhere.

    A subclass has its options as keyword-only arguments, and defines `observe`, `networks` and `scores`. Random numbers
    come from torch's global generator, which the caller seeds before each call.
    """

    classes: Tensor  # (), the number of classes seen

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup = setup
        self.register_buffer("classes", torch.tensor(0))

    def observe(self, images: Tensor, labels: Tensor) -> None:
        """Learn from raw images (B, H, W, 3) uint8 with labels (B,) int64, numbered in order of first appearance."""
        raise NotImplementedError

    def boundary(self) -> None:
        """Use that a stage of the stream has ended, with `online.boundaries: given`; most learners ignore it."""

    def networks(self) -> dict[str, Network]:
        """Return the networks that a prediction needs, by key: the same key always means the same function."""
        raise NotImplementedError

    def scores(self, features: Sequence[Tensor]) -> Tensor:
        """Return scores (B, classes seen) from the features of every network, in order; the highest is predicted."""
        raise NotImplementedError

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Return scores (B, classes seen) of raw images (B, H, W, 3) uint8."""
        return self.scores([network(images) for network in self.networks().values()])

    finds_unknown = False  # whether it has the next two

    def describe(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores (B, classes seen), in-distribution scores (B,), and whitened features (B, p) of length 1.

        An in-distribution score is the higher, the likelier it is that an image is of a known class.
        """
        raise NotImplementedError

    def known_scores(self) -> Tensor:
        """Return in-distribution scores (n,) of learnt images, each as if it had not been learnt."""
        raise NotImplementedError

    def passes(self) -> int:
        """Return the forward passes that a prediction needs per image."""
        return len(self.networks())

    def images_bytes(self) -> int:
        """Return the bytes of stored images."""
        return 0

    def facts(self) -> dict[str, Any]:
        """Return records for the results, as JSON values."""
        return {}

    def count(self, labels: Tensor) -> int:
        """Add the classes that appear for the first time; return their number."""
        before = int(self.classes)
        self.classes.fill_(max(before, int(labels.max()) + 1))
        return int(self.classes) - before
