"""The tensors of class statistics: what a model's file stores of the images that were learnt.

A class mean is a row of `task.t.means.v`: a class of task t, in feature space v. `class_statistics` computes and uses
these tensors.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pearl.methods.common.calibration import Known
from pearl.methods.common.feature_spaces import misfit
from pearl.methods.common.scatter import shrinkage, unpack
from pearl.nn.task_modules import TaskTensors

UNCALIBRATED = 0.2  # temperature before two tasks allow its measurement
COUNTED = ("images", "freedom", "samples")  # of a space: images, less their prototypes; views of images


class StoredStatistics(nn.Module):
    """Feature spaces, prototypes (a class in one task) and a temperature, all in buffers.

    A space belongs to the task at whose end it was created, and has the prototypes of that task and later ones.

    `tensors` of feature space v, `space.v.NAME`; p_raw is the width of its network's features, p that of the space:
        created_at: () the task; mean, std: (p_raw,) of raw features; projection: (32,) checksum of a random projection;
        projected_mean, projected_std: (p,) of projected features.
        scatter, moment: (p(p+1)/2,) within prototypes and of all images; sum: (p,); images, freedom, samples: ()
        images, images less prototypes, and views of images.
    Of task t with k classes, `task.t.NAME`:
        classes, counts: (k,) logit indices and images; means.v: (k, p) class means in space v.
        location, spread: () of the fits of its images; levels: (spaces, 4), see `calibration`.
        scores: (101,) percentiles of in-distribution scores of `measured` () images, each left out; score_shift: ().
        losses: (40,) of these images at each temperature of the grid.
    Of all tasks: temperature, ().
    """

    # suffixes of the names of tensors that a task replaces
    running = ("/scatter", "/moment", "/sum", "/images", "/freedom", "/samples")

    def __init__(self) -> None:
        super().__init__()
        self.tensors = TaskTensors(buffers=True)

    def __len__(self) -> int:
        """Return the number of tasks observed."""
        return sum(name.endswith("/classes") for name, _ in self.tensors.named_buffers())

    @property
    def created_at(self) -> list[int]:
        """Return the task at whose end each feature space was created."""
        count = sum(name.endswith("/created_at") for name, _ in self.tensors.named_buffers())
        return [int(self.tensors[f"space.{v}.created_at"]) for v in range(count)]

    @property
    def task_of(self) -> Tensor:
        """Return the task of each prototype (prototypes,)."""
        sizes = [len(self.tensors[f"task.{t}.classes"]) for t in range(len(self))]
        return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes, dtype=torch.long))

    @property
    def class_of(self) -> Tensor:
        """Return the class, a logit index, of each prototype (prototypes,)."""
        parts = [self.tensors[f"task.{t}.classes"].cpu() for t in range(len(self))]
        return torch.cat([torch.empty(0, dtype=torch.long), *parts])

    @property
    def temperature(self) -> float:
        """Return the factor of scores before they become probabilities."""
        return float(self.tensors["temperature"]) if self.calibrated else UNCALIBRATED

    @property
    def calibrated(self) -> bool:
        """Return True if the temperature was measured, which takes two tasks."""
        return "temperature" in self.tensors

    def _means(self, v: int) -> list[Tensor]:
        return [self.tensors[f"task.{t}.means.{v}"] for t in range(self.created_at[v], len(self))]

    def known(self, v: int) -> Known:
        """Return the moments of all images in space v, float64."""
        names = ("scatter", "moment", "sum", *COUNTED)
        scatter, moment, total, images, freedom, samples = (self.tensors[f"space.{v}.{name}"] for name in names)
        p, centre = len(total), total / images
        around = unpack(moment, p) - images * torch.outer(centre, centre)
        return Known(unpack(scatter, p), around, centre, int(freedom), int(images), float(samples / images))

    def covariance(self, v: int) -> tuple[Tensor, float]:
        """Return the covariance within prototypes of space v, float64 (p, p), and its shrinkage."""
        p = len(self.tensors[f"space.{v}.projected_mean"])
        images, freedom, samples = (int(self.tensors[f"space.{v}.{name}"]) for name in COUNTED)
        share = shrinkage(p, freedom, samples / max(1, images))
        return unpack(self.tensors[f"space.{v}.scatter"], p) / max(1, freedom), share

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        start = f"{prefix}tensors."
        if wrong := misfit({k.removeprefix(start): v for k, v in state_dict.items() if k.startswith(start)}):
            raise ValueError(f"class statistics: {wrong} is missing, or does not fit the others")
        super()._load_from_state_dict(state_dict, prefix, *args)
