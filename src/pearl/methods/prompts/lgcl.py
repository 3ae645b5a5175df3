"""LGCL: Introducing Language Guidance in Prompt-based Continual Learning (Khan et al., ICCV 2023), on DualPrompt.

Keys of tasks and features of images are trained towards text features of their classes' names, and away from those of
earlier classes. Prediction is unchanged.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pearl.data.batches import Batch, Task
from pearl.errors import ConfigError
from pearl.methods.base import Phase
from pearl.methods.common.draws import ImageDraws
from pearl.methods.prompts.dualprompt import Blocks, DualPrompt, Length, NotNegative, on_cifar
from pearl.methods.prompts.text_features import TextFeatures
from pearl.nn.precision import full
from pearl.nn.task_modules import TaskTensors


class Lgcl(DualPrompt):
    """DualPrompt whose keys and features are trained towards text features of class names.

    Settings are DualPrompt's, but expert prefixes have 20 keys on CIFAR-100, too; the published numbers used the port's
    mixed halves (see there). The authors' text features are those of CLIP ViT-L/14 for "A photo of {name}."; a task has
    one sentence with its class names joined by " or ". With any encoder:

        names = ["apple", "bear", ..., "apple or bear"]  # of all classes; of tasks as well, or not
        numpy.savez("texts.npz", names=names, features=encode([f"A photo of {name}." for name in names]))

    A task whose names joined by " or " are not in the file has the mean of its classes' unit features. Features of
    another width than the ViT's are projected by random orthonormal directions, drawn once and stored. Classes of later
    tasks are not used before their task.

    Options:
        text_features: an .npz file with `names` (N,) and `features` (N, width). Required.
        task_weight: weight of the loss between keys and their task's text; `auto` is 0.3, and 0.323 on CIFAR-100.
        class_weight: weight of the loss between features and their class's text, from the second task on; `auto` is
            0.7, and 0.137.
        others: see dualprompt.
    """

    phases = ("lgcl",)

    def __init__(
        self,
        backbone: nn.Module,
        *,
        text_features: str | None = None,
        task_weight: Annotated[NotNegative | Literal["auto"], on_cifar(0.323, 0.3)] = "auto",
        class_weight: Annotated[NotNegative | Literal["auto"], on_cifar(0.137, 0.7)] = "auto",
        g_prompt_layer_idx: Blocks = (0, 1),
        g_prompt_length: Length = 5,
        e_prompt_layer_idx: Blocks = (2, 3, 4),
        length: Length = 20,
        pull: NotNegative = 1.0,
    ) -> None:
        if text_features is None:
            raise ConfigError(
                "method.text_features: missing; give an .npz file with `names` and `features` of all classes "
                "(`pearl show lgcl` has an example), or choose method=dualprompt"
            )
        super().__init__(
            backbone,
            g_prompt_layer_idx=g_prompt_layer_idx,
            g_prompt_length=g_prompt_length,
            e_prompt_layer_idx=e_prompt_layer_idx,
            length=length,
            pull=pull,
        )
        self.text_features = text_features
        self.task_weight = 0.3 if task_weight == "auto" else task_weight
        self.class_weight = 0.7 if class_weight == "auto" else class_weight
        self.texts = TaskTensors(buffers=True)  # "t.classes" (k, dim), "t.task" (dim,), unit; "directions" (width, dim)

    def learn(self, task: Task) -> Iterator[Phase]:
        """Read the text features of the task's classes; then train as DualPrompt."""
        texts = TextFeatures(self.text_features, option="method.text_features")
        classes = F.normalize(torch.stack([rows.mean(0) for rows in texts.of(task.classes)]), dim=1)
        sentence = " or ".join(task.classes)
        whole = texts.of([sentence])[0].mean(0) if sentence in texts else classes.mean(0)
        self.texts.add(f"{task.id}.classes", self.fitted(classes))
        self.texts.add(f"{task.id}.task", self.fitted(whole[None])[0])
        for phase in super().learn(task):
            self.draws = ImageDraws(task)  # after all random draws of DualPrompt
            yield phase

    def fitted(self, texts: Tensor) -> Tensor:
        """Return text features (n, width) as unit vectors (n, dim)."""
        width, texts = texts.shape[1], texts.to(self.g_prompt)
        drawn = "directions" in self.texts
        before = len(self.texts["directions"]) if drawn else self.dim if len(self.texts) else width
        if width != before:
            raise ConfigError(
                f"{self.text_features}: features of width {width}; those of earlier tasks have {before}; use the "
                f"same encoder"
            )
        if width != self.dim:
            if not drawn:
                directions = torch.linalg.qr(torch.randn(max(width, self.dim), min(width, self.dim))).Q
                self.texts.add("directions", (directions if width > self.dim else directions.T).to(texts))
            texts = texts @ self.texts["directions"]
        return F.normalize(texts, dim=1)

    def guidance(self, task: Task, batch: Batch, features: Tensor, step: int) -> Tensor:
        """Return the two language losses: of the task and, from the second task on, of the class."""
        with torch.autocast(features.device.type, enabled=False):
            key = F.normalize(self.keys[task.id].weight[0], dim=0)
            task_loss = 1 - key @ self.texts[f"{task.id}.task"]
            if not task.id:
                return self.task_weight * task_loss
            earlier = torch.stack([self.texts[f"{t}.task"] for t in range(task.id)])
            known = torch.cat([self.texts[f"{t}.classes"] for t in range(task.id)])
            other = (earlier @ key)[self.draws.below(len(earlier), step, batch.rows)]
            of_task = (task_loss + other).mean()
            features = F.normalize(full(features), dim=1)
            texts = self.texts[f"{task.id}.classes"][batch.y - task.first_class]
            pushed = known[self.draws.below(len(known), step, batch.rows)]
            of_class = (1 - (features * texts).sum(1) + (features * pushed).sum(1)).mean()
            return self.task_weight * of_task + self.class_weight * of_class
