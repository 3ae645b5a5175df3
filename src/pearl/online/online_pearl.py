"""PEARL without task boundaries: class statistics at once, and a new sub-network where the statistics are not enough.

Every image updates the statistics of its class in the feature spaces of all frozen networks, so that a class can be
predicted after its first image. The newest images stay in a window. When it has been renewed, the images in it are
predicted from statistics without themselves; classes that are confused are learnt by a new sub-network, with PEARL's
phases and rank rule. It is frozen, and its feature space serves from then on.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from pearl.data.batches import Task
from pearl.errors import ConfigError
from pearl.methods.base import Method
from pearl.methods.common.subnetworks import HeadsClassifier, SubNetworks
from pearl.nn.intermediate_features import Layers, WithInner, inner_layers
from pearl.nn.shared_blocks import features_of_all, shared_blocks
from pearl.online.frozen import frozen_network
from pearl.online.learner import Learner, Network, OnImages, Setup
from pearl.online.spaces import BARE, Spaces, StreamingSpace, joint_log_probabilities, left_out_scores
from pearl.online.streaming_statistics import discriminants
from pearl.online.unknown import Fits, left_out_fits
from pearl.online.window import Window, confused_classes
from pearl.settings.parts import METHODS
from pearl.settings.sections import Count


class OnlinePearl(Learner):
    """PEARL on a stream: streaming class statistics in frozen feature spaces, which grow where classes are confused.

    The first space is that of the pretrained backbone. A network without pretraining has random features. A first
    growth that still has all images in its window trains the network on all of them and replaces these features. The
    sub-networks are those of `method`: pearl, or another method with separate sub-networks.

    Options:
        window: number of the newest images that are stored.
        sub_networks: how many may be trained; each costs a forward pass per image, besides the backbone's.
        confused: the share of the window's images that may be confused with another of its classes.
        enough: images that a class needs in a later space to be compared there, or all of its images if it has fewer.
        layers: `auto` also uses intermediate features, `final` only the final ones.
        projection: maximum dimensions of a feature space; with null features are not projected.
        temperature: factor of discriminants before they become probabilities.
    """

    seen: Tensor  # () images so far
    grown_at: Tensor  # (sub-networks,) images seen when each was trained
    grown_for: Tensor  # (sub-networks,) confused classes in the window then
    checked_at: Tensor  # () images seen at the last decision, or at the last boundary if these are given

    def __init__(
        self,
        setup: Setup,
        *,
        window: Count = 1000,
        sub_networks: Annotated[int, Field(ge=0, strict=True)] = 2,
        confused: Annotated[float, Field(ge=0, lt=1)] = 0.05,
        enough: Count = 10,
        layers: Layers = "auto",
        projection: Count | None = 1024,
        temperature: Annotated[float, Field(gt=0)] = 0.2,
    ) -> None:
        super().__init__(setup)
        method: Method = METHODS.build(setup.config.method, setup.backbone)
        by_heads = isinstance(method.classifier, HeadsClassifier)
        if not isinstance(method, SubNetworks) or not method.separable or not by_heads:
            raise ConfigError(
                f"method={setup.config.method['name']}: the online learner pearl needs a method with separate "
                f"sub-networks and classifier=heads; choose pearl or isolation"
            )
        self.method = method
        setup.engine.to_device(method)
        self.sub_networks, self.confused, self.enough = sub_networks, confused, enough
        self.layers, self.projection, self.temperature = inner_layers(setup.backbone, layers), projection, temperature
        self.bare = frozen_network(setup, layers)
        self.spaces, self.window = Spaces(), Window(window)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("checked_at", torch.tensor(0))
        self.register_buffer("grown_at", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("grown_for", torch.zeros(0, dtype=torch.int64))
        self._networks: dict[int, OnImages] = {}  # merged on first use; not part of the state
        self._shared: int | None = None  # first blocks that all networks share
        self._discriminants: list[tuple[Tensor, Tensor]] = []  # means and precisions, until the next image
        self._fits: list[Fits] = []  # as well

    # ------------------------------------------------------------------------------------------------- learning

    @torch.no_grad()
    def observe(self, images: Tensor, labels: Tensor) -> None:
        """Update the statistics of all spaces and the window; then train a sub-network if it is time and necessary."""
        self.count(labels)
        self._discriminants.clear()
        self._fits.clear()
        raws = self._raws(images)
        if not self.spaces:
            self.spaces.append(StreamingSpace(0, BARE, raws[0], self.projection))
        features = [space(raw) for space, raw in zip(self.spaces, raws, strict=True)]
        labels = labels.to(self.setup.device)
        for space, x in zip(self.spaces, features, strict=True):
            space.statistics.update(x, labels)
        self.window.add(images, labels, torch.cat(features, dim=1))
        self.seen += len(labels)
        renewed = self.seen - self.checked_at + len(labels) > self.window.size  # another batch would push some out
        if renewed and not self.setup.boundaries:
            self.checked_at.copy_(self.seen)
            if len(self.grown_at) < self.sub_networks and len(classes := self.not_separated()):
                self.grow(classes)

    def boundary(self) -> None:
        """Train a sub-network on the classes since the last boundary, as the task-based method does."""
        new_classes = self.window.labels[int(self.checked_at - self.seen) :].unique()
        self.checked_at.copy_(self.seen)
        if len(self.grown_at) < self.sub_networks and len(new_classes) > 1:
            self.grow(new_classes)

    def not_separated(self) -> Tensor:
        """Return the classes of images in the window that the spaces confuse, each image left out of the statistics."""
        parts = self.window.features.split([len(space.statistics.scatter) for space in self.spaces], dim=1)
        labels = self.window.labels
        scores = [left_out_scores(space.statistics, x, labels) for space, x in zip(self.spaces, parts, strict=True)]
        counts = self.spaces[0].statistics.counts[labels]
        again = counts > 1  # an only image cannot be left out
        logp = self._joint([each[again] for each in scores])
        return confused_classes(logp, labels[again], self.confused) if again.any() else labels[:0]

    @torch.enable_grad()
    def grow(self, classes: Tensor) -> None:
        """Train a sub-network on the images of some classes in the window, and open its feature space."""
        t, window = len(self.grown_at), self.window
        confused = len(classes)
        # random features can be replaced while every image so far is in the window; later, some classes have no others
        random = t == 0 and not self.setup.backbone.pretrained and self.seen <= len(window)
        classes = window.labels.unique() if random else classes
        rows = torch.isin(window.labels, classes)
        class_index = torch.searchsorted(classes, window.labels[rows])
        header = t, f"growth {t + 1}", tuple(map(str, classes.tolist())), 0
        task = Task(*header, window.images[rows].numpy(), class_index.cpu().numpy(), self.setup.view, self.setup.device)
        self.setup.engine.learn(self.method, task, self.setup.resume)
        self.setup.resume.end()
        self.grown_at = torch.cat([self.grown_at, self.seen[None]])
        self.grown_for = torch.cat([self.grown_for, torch.tensor([confused])])
        self._forget_networks()
        if random:
            self.spaces, window.features = Spaces(), window.features[:, :0]
        with torch.no_grad():
            raw = torch.cat([self._network(t)(part) for part in window.images.split(256)])
            space = StreamingSpace(len(self.spaces), t, raw[rows], self.projection).to(self.setup.device)
            features = torch.cat([space(part) for part in raw.split(256)])
            space.statistics.update(features, window.labels)
        self.spaces.append(space)
        window.features = torch.cat([window.features, features], dim=1)

    # ------------------------------------------------------------------------------------------------ predicting

    def networks(self) -> dict[str, Network]:
        """Return the networks of all spaces; without a space yet, the backbone."""
        tasks = [int(space.task) for space in self.spaces] or [BARE]
        return {"backbone" if t == BARE else f"sub-network {t + 1}": self._network(t) for t in tasks}

    def _network(self, t: int) -> OnImages:
        if t == BARE:
            return self.bare
        if t not in self._networks:
            self._networks[t] = OnImages(WithInner(self.method.merged(t), self.layers), self.setup)
        return self._networks[t]

    def _forget_networks(self) -> None:
        self._networks.clear()
        self._shared = None

    def _raws(self, images: Tensor) -> list[Tensor]:
        """Return the raw features of every network; blocks that all of them share run once."""
        networks: Sequence[Any] = [*self.networks().values()]
        modules = [network.module for network in networks]
        if self._shared is None:
            self._shared = shared_blocks([module.network for module in modules])
        if not self._shared:
            return [network(images) for network in networks]
        return features_of_all(modules, self.setup.view.test(images.to(self.setup.device)), self._shared)

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """See `Learner.predict`."""
        return self.scores(self._raws(images))

    @torch.no_grad()
    def scores(self, features: Sequence[Tensor]) -> Tensor:
        """Return log P (B, classes seen) from the raw features of every network."""
        if not self._discriminants:
            self._discriminants = [(s.statistics.means, s.statistics.precision()) for s in self.spaces]
        made = zip(self.spaces, features, self._discriminants, strict=True)
        return self._joint([discriminants(space(raw), *of_space) for space, raw, of_space in made])

    finds_unknown = True

    @torch.no_grad()
    def describe(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Learner.describe`."""
        raws = self._raws(images)
        if not self._fits:
            self._fits.append(Fits([space.statistics for space in self.spaces]))
        features = [space(raw) for space, raw in zip(self.spaces, raws, strict=True)]
        return self.scores(raws), self._fits[0].scores(features, self._known()), self._fits[0].whitened(features)

    @torch.no_grad()
    def known_scores(self) -> Tensor:
        """See `Learner.known_scores`: those of the images in the window, as far as their classes have another image."""
        every = [space.statistics for space in self.spaces]
        parts = self.window.features.split([len(each.scatter) for each in every], dim=1) if every else []
        return left_out_fits(every, parts, self.window.labels, self._known()).cpu()

    def _joint(self, scores: Sequence[Tensor]) -> Tensor:
        return joint_log_probabilities(scores, self._known(), int(self.classes), self.temperature)

    def _known(self) -> list[Tensor]:
        """Return, for each space, a mask of the classes that are compared there.

        The mean of a few images is far from its class's: such a class would be the nearest one too rarely.
        """
        counts = [F.pad(space.statistics.counts, (0, int(self.classes)))[: int(self.classes)] for space in self.spaces]
        return [counts[0] > 0, *(later >= counts[0].clamp(1, self.enough) for later in counts[1:])]

    # ----------------------------------------------------------------------------------------------------- records

    def images_bytes(self) -> int:
        """Return the bytes of the window."""
        return self.window.bytes()

    def facts(self) -> dict[str, Any]:
        """Return when sub-networks were trained, and the ranks of their layers."""
        why = "a stage with {} classes had ended" if self.setup.boundaries else "{} classes were confused"
        counts = ["since " + why.format(int(n)) for n in self.grown_for]
        return {
            "grown_at": self.grown_at.tolist(),
            "reasons": counts,
            "sub_networks": [self.method.facts(t) for t in range(len(self.grown_at))],
        }

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        self._forget_networks()
        self._discriminants.clear()
        self._fits.clear()
        super()._load_from_state_dict(state_dict, prefix, *args)
