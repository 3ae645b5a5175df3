"""The one training loop. A method yields phases; the engine trains each of them on Lightning Fabric."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pearl.data.batches import Batch, Task, batch_bounds, fold
from pearl.errors import TrainingError
from pearl.methods.base import Method, Phase
from pearl.nn.fast.grouped import GroupedInFloat32, has_slow
from pearl.settings.config import ModelConfig, PhaseConfig
from pearl.training.graphs import GraphedStep, Recorder
from pearl.training.replay import Progress, Replay, Scene
from pearl.training.world import World, make_fabric


class Observer:
    """Is told what happens. This one does not care; progress displays and logs override what they need."""

    def event(self, kind: str, **facts: Any) -> None:
        """Something worth a line: a task, a phase or an epoch has begun or ended."""

    def step(self, done: int, total: int) -> None:
        """A training step of the current phase is done. Must not read tensors: that would wait for the device."""

    def close(self) -> None:
        """The run has ended, well or not."""


class Engine:
    """Trains phases with the settings of a recipe, on one device or, in a `world` of processes, each on its own."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: str = "auto",
        precision: Literal["auto", "fp32", "bf16"] | None = None,
        observer: Observer | None = None,
        world: World | None = None,
    ) -> None:
        self.config = config
        self.world = world or World()
        self.observer = observer or Observer()
        self.precision = precision or config.engine.precision
        if self.precision == "auto":
            self.precision = "bf16" if has_fast_bf16(make_fabric(device).device) else "fp32"
        kind = "bf16-mixed" if self.precision == "bf16" else "32-true"
        self.fabric = make_fabric(device, self.world.here, precision=kind)
        if self.world.size > 1:
            self.fabric.launch()
        graphs = config.engine.cuda_graphs and self.fabric.device.type == "cuda" and self.world.size == 1
        self.recorder: type[Recorder] | None = Recorder if graphs else None
        self.memory_format = torch.channels_last if config.engine.channels_last else torch.contiguous_format

    def place(self, method: Method) -> Method:
        """Move a method to the device, in the layout of the recipe."""
        return method.to(device=self.fabric.device).to(memory_format=self.memory_format)

    def kernels(self, *modules: nn.Module | None) -> Callable[[], AbstractContextManager[object]]:
        """What steps through these modules run under, so that none of their kernels is a slow one."""
        bf16_on_cpu = self.fabric.device.type == "cpu" and self.precision == "bf16"
        return GroupedInFloat32 if bf16_on_cpu and any(has_slow(module) for module in modules) else nullcontext

    def learn(self, method: Method, task: Task, replay: Replay | None = None) -> dict[str, float]:
        """Let a method learn one task; seconds per phase. With `replay`, from where an earlier attempt ended.

        Raises:
            TrainingError: the loss is not finite, or memory is short.
            Interrupted: the user asked to stop.
        """
        replay = replay or Replay()
        replay.begin(method, task.id)
        torch.manual_seed(fold(self.config.seed, task.id))
        seconds: dict[str, float] = {}
        for position, phase in enumerate(method.learn(task)):
            started = time.perf_counter()
            with mistakes_named(phase.name):
                self.train(method, task, phase, position, replay)
            seconds[phase.name] = time.perf_counter() - started
            # what a method draws between two phases does not depend on how many draws the first one took
            torch.manual_seed(fold(self.config.seed, task.id, position, "after"))
        if not method.oracle:
            task.close()
        method.eval()
        return seconds

    def train(self, method: Method, task: Task, phase: Phase, position: int, replay: Replay) -> None:
        """Train one phase. Randomness depends on seed, task, position of the phase, and epoch alone."""
        settings = self.config.train.phase(phase.name)
        phase.params = list(phase.params)
        recorder = self.recorder if phase.steady else None
        optimizer = make_optimizer(settings, phase.params, self.fabric.device, graphed=recorder is not None)
        module, fabric_optimizer = self.fabric.setup(_Step(phase, self.world), optimizer)
        method.train()
        if phase.extra is not None:
            phase.extra.train()
        per_epoch = len(batch_bounds(len(task), settings.batch_size))
        planned = settings.epochs * per_epoch
        steps = min(planned, self.config.engine.max_steps or planned)
        trained = sum(p.numel() for p in phase.params)
        kernels = self.kernels(method, phase.extra)

        def step(batch: Batch) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            with kernels():
                loss = module(batch)
            self.fabric.backward(loss)
            if phase.after_backward:
                phase.after_backward()
            if settings.clip is not None:
                self.fabric.clip_gradients(module, fabric_optimizer, max_norm=settings.clip, error_if_nonfinite=False)
            fabric_optimizer.step()
            return self.world.mean(loss.detach())

        if recorder:
            step = GraphedStep(step, recorder())
        at, scene = (task.id, position), Scene(method, phase, phase.params, optimizer)
        progress = replay.restore(at, scene)
        begun = {"images": len(task), "trained": trained, "done": progress.done}
        self.observer.event("phase", task=task.id, phase=phase.name, steps=steps, **begun)
        with replay.training():
            while progress.done < steps:
                started = time.perf_counter()
                epoch, skip = divmod(progress.done, per_epoch)
                seed = fold(self.config.seed, task.id, position, epoch)
                if not skip:
                    torch.manual_seed(self.world.own(seed))  # for dropout and whatever else a loss draws
                for batch in task.batches(settings.batch_size, seed, skip=skip):
                    set_rate(optimizer, learning_rate(settings, progress.done / planned))
                    progress.losses.append(step(batch))
                    if phase.after_step:
                        phase.after_step(batch)
                    progress.done += 1
                    self.observer.step(progress.done, steps)
                    if progress.done == steps:
                        break
                    if progress.done % per_epoch and replay.due():
                        replay.store(at, scene, progress, finished=False)
                facts = {"lr": learning_rate(settings, (progress.done - 1) / planned)}
                facts["loss"] = mean_loss(progress, task, phase, epoch, facts["lr"])
                seconds = round(time.perf_counter() - started, 3)
                self.observer.event("epoch", task=task.id, phase=phase.name, epoch=epoch + 1, **facts, seconds=seconds)
                progress.losses = []
                if progress.done < steps and replay.due():  # an epoch's end is stored after it is told
                    replay.store(at, scene, progress, finished=False)
            optimizer.zero_grad(set_to_none=True)  # what is frozen from now on keeps no gradient
            if begun["done"] != steps:
                replay.store(at, scene, progress, finished=True)


def mean_loss(progress: Progress, task: Task, phase: Phase, epoch: int, lr: float) -> float:
    """The mean of an epoch's losses, for which the host waits for the device, once an epoch.

    Raises:
        TrainingError: one of them is not finite.
    """
    values = torch.stack(progress.losses).float().tolist()
    for index, value in enumerate(values):
        if not math.isfinite(value):
            step = progress.done - len(values) + index
            raise TrainingError(
                f"loss became {value} in task {task.id + 1} ({task.name}), phase {phase.name}, epoch {epoch + 1}, "
                f"step {step + 1}, lr {lr:g}; tasks before it are kept; lower "
                f"train.phases.{phase.name}.lr or set train.phases.{phase.name}.clip=1"
            )
    return sum(values) / len(values)


@contextmanager
def mistakes_named(phase: str) -> Iterator[None]:
    """What PyTorch says of too little memory or too few images, in words that name the mend."""
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise TrainingError(f"out of memory in phase {phase}; lower train.phases.{phase}.batch_size") from None
    except ValueError as error:  # PyTorch's BatchNorm has no other word for it
        if "more than 1 value per channel" not in str(error):
            raise
        raise TrainingError(
            f"BatchNorm cannot train on a single image in phase {phase}; use train.batch_size=2 or more, "
            f"and at least 2 images per task"
        ) from None


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory was short: on a GPU by its type, on the CPU by the allocator's words alone."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def has_fast_bf16(device: torch.device) -> bool:
    """Whether bfloat16 is faster than float32 here: on recent GPUs, and on CPUs that compute in it.

    ResNet-18 trains 2.2 times faster with AMX and 1.8 times with AVX-512 BF16; emulated it is 6 times slower.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu" and hasattr(torch.cpu, "get_capabilities"):
        able = torch.cpu.get_capabilities()
        return bool(able.get("amx_bf16") or able.get("avx512_bf16"))
    return False


class _Step(nn.Module):
    """A phase as the module Fabric sets up: its parameters are the phase's, its forward is the phase's loss.

    With other ranks it is the loss on this one's share of the batch, weighted so that their mean is the batch's loss.
    """

    def __init__(self, phase: Phase, world: World) -> None:
        super().__init__()
        self.params = nn.ParameterList(phase.params)
        self.loss = phase.loss
        self.world = world

    def forward(self, batch: Batch) -> Tensor:
        batch = Batch(*batch)
        if self.world.size == 1:
            return self.loss(batch)
        mine, weight = self.world.share(batch)
        with self.world.shared_statistics(weight):
            return weight * self.loss(mine)


def make_optimizer(
    settings: PhaseConfig, params: Iterable[nn.Parameter], device: torch.device, *, graphed: bool = False
) -> torch.optim.Optimizer:
    """The optimizer of a phase; fused kernels where the device has them.

    One whose steps are `graphed` keeps what changes from step to step, the rate and Adam's count, on the device.
    """
    common: Mapping[str, Any] = {
        "lr": torch.tensor(settings.lr, device=device) if graphed else settings.lr,
        "weight_decay": settings.weight_decay,
        "fused": device.type in {"cuda", "cpu"},
    }
    if settings.optimizer == "sgd":
        return torch.optim.SGD(params, momentum=settings.momentum, **common)
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    return kind(params, betas=settings.betas, capturable=graphed and device.type == "cuda", **common)


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate; one that is a tensor stays where it is."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def learning_rate(settings: PhaseConfig, progress: float) -> float:
    """The rate at a point of a phase, `progress` from 0 (start) to 1 (end)."""
    if settings.schedule == "cosine":
        return settings.lr * (1 + math.cos(math.pi * progress)) / 2
    if settings.schedule == "multistep":
        return settings.lr * settings.gamma ** sum(progress >= milestone for milestone in settings.milestones)
    return settings.lr
