"""The one training loop. A method yields phases; the engine trains each of them on Lightning Fabric."""

import atexit
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from pearl.data.batches import Batch, Task, derive_seed
from pearl.errors import ConfigError, TrainingError, short_of_memory
from pearl.methods.base import Method, Phase
from pearl.nn.fast.convolutions import FastConvolutions, has_slow
from pearl.nn.layout import placed
from pearl.nn.precision import computes_bf16
from pearl.settings.config import ModelConfig
from pearl.training.fingerprint import digest
from pearl.training.graphs import GraphedStep, Recorder
from pearl.training.machine import machine
from pearl.training.optimizers import Course, Optimizers, learning_rate, make_optimizers, set_rate, take_over
from pearl.training.phase_cache import PhaseCache
from pearl.training.phase_training import PhaseModule, Training, mean_loss
from pearl.training.resume import Progress, Resume, Scene
from pearl.training.world import World, kind_of, leave, make_fabric

if TYPE_CHECKING:
    from lightning_fabric import Fabric


class Observer:
    """Receives training events. The base class ignores them; progress displays and logs override some."""

    def event(self, kind: str, **facts: Any) -> None:
        """Called for events worth a line: a task, phase or epoch has started or ended."""

    def step(self, done: int, total: int) -> None:
        """Called after a training step of the current phase. Must not read tensors, which would wait for the device."""

    def close(self) -> None:
        """Called when the run has ended, successfully or not."""


class Engine:
    """Trains phases with the settings of a recipe, on one device, or on one per process of a `world`."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: str = "auto",
        precision: Literal["auto", "fp32", "bf16"] | None = None,
        observer: Observer | None = None,
        world: World | None = None,
        phase_cache: PhaseCache | None = None,
    ) -> None:
        self.config = config
        self.phase_cache = phase_cache
        self.reused: list[str] = []  # phases of the last task, by the names that `learn` returns
        self.world = world or World()
        self.observer = observer or Observer()
        self.precision = precision or config.engine.precision
        if self.precision == "auto":
            self.precision = "bf16" if has_fast_bf16(kind_of(device)) else "fp32"
        if self.precision == "bf16" and not computes_bf16(kind_of(device)):
            raise ConfigError("engine.precision=bf16: this CPU does not support it; use engine.precision=fp32")
        self._kind = kind_of(device)
        if self.world.size > 1:
            self.fabric.launch()
            atexit.register(leave)
        on_gpu = self.device.type == "cuda"  # a GPU that is not there is an error now, not when training starts
        graphs = config.engine.cuda_graphs and on_gpu and self.world.size == 1
        self._handed: Optimizers = []  # those of the phase before, for the next one
        self.recorder: type[Recorder] | None = Recorder if graphs else None
        self.memory_format = torch.channels_last if config.engine.channels_last else torch.contiguous_format

    @cached_property
    def fabric(self) -> "Fabric":
        """Return Lightning Fabric, made when something is trained: its import takes two seconds."""
        kind = "bf16-mixed" if self.precision == "bf16" else "32-true"
        return make_fabric(self._kind, self.world.here, precision=kind)

    @cached_property
    def device(self) -> torch.device:
        """Return the device of this process."""
        return torch.device("cpu") if self.world.size == 1 and self._kind == "cpu" else self.fabric.device

    def to_device(self, method: Method) -> Method:
        """Move a method to the device, in the memory format of the recipe."""
        return placed(method, self.device, channels_last=self.config.engine.channels_last)

    def kernels(self, *modules: nn.Module | None) -> Callable[[], AbstractContextManager[object]]:
        """Return the context for steps through these modules that avoids slow kernels."""
        if self.device.type != "cpu" or not all(getattr(module, "fast", True) for module in modules):
            return nullcontext
        bf16 = self.precision == "bf16"
        return FastConvolutions if any(has_slow(module, bf16=bf16) for module in modules) else nullcontext

    def learn(self, method: Method, task: Task, resume: Resume | None = None) -> dict[str, float]:
        """Train a method on one task. With `resume`, continue an earlier attempt.

        Returns the seconds of each phase; repeated names become "NAME 2", "NAME 3", ... For a phase in `reused` they
        are those of the run that trained it.

        Raises:
            TrainingError: the loss is not finite, or memory is short.
            Interrupted: the user stopped the run.
        """
        resume = resume or Resume()
        resume.begin(method, task.id)
        torch.manual_seed(derive_seed(self.config.seed, task.seed_part))
        seconds: dict[str, float] = {}
        times: Counter[str] = Counter()
        self._handed, self.reused = [], []
        for position, phase in enumerate(method.learn(task)):
            if not isinstance(phase, Phase):
                kind = type(phase).__name__
                raise TrainingError(f"{type(method).__name__}.learn yields {kind}; let it yield a Phase")
            with mistakes_named(phase.name):
                self.train(method, task, phase, position, resume)
            times[phase.name] += 1
            again = f" {times[phase.name]}" if times[phase.name] > 1 else ""
            seconds[phase.name + again] = phase.seconds
            self.reused += [phase.name + again] * phase.reused
            # random numbers between two phases do not depend on how many the first phase drew
            torch.manual_seed(derive_seed(self.config.seed, task.seed_part, position, "after"))
        if not method.oracle:
            task.close()
        method.eval()
        return seconds

    def train(self, method: Method, task: Task, phase: Phase, position: int, resume: Resume) -> None:
        """Train one phase. Randomness depends only on seed, task, position of the phase, and epoch."""
        handed, self._handed = self._handed, []
        training = self._prepared(method, task, phase, position, handed)
        step: Callable[[Batch], Tensor] = partial(self.train_step, training)
        if self.recorder and phase.capturable:
            step = GraphedStep(step, self.recorder())
        scene, steps = Scene(method, phase, training.optimizers), training.course.steps
        with ExitStack() as stack:
            stack.enter_context(self._tensor_float32())
            key = "" if handed else self._key(training)
            progress = resume.restore(training.at, scene, key)
            stored = progress.done
            if self.phase_cache and key and not stored:
                claim = self.phase_cache.claimed(key, phase.depends_on, steps, self.world, self._note(task))
                progress = stack.enter_context(claim) or progress
            self._announce(training, progress, stored)
            stack.enter_context(resume.training())
            training.began = time.perf_counter() - progress.seconds
            while progress.done < steps:
                for _ in self._train_epoch(training, step, progress):
                    if resume.due():
                        progress.seconds = time.perf_counter() - training.began
                        resume.store(training.at, scene, progress, finished=False)
                if progress.done < steps and resume.due():  # an epoch's end is stored after it is reported
                    resume.store(training.at, scene, progress, finished=False)
            for parameter in phase.trained:
                parameter.grad = None  # parameters that are frozen from now on keep no gradient
            if self.phase_cache and progress.key and not progress.reused and self.world.first:
                self.phase_cache.keep(phase.name, phase.depends_on, progress, self._note(task))
            if stored != steps:
                resume.store(training.at, scene, progress, finished=True)
        phase.seconds = progress.seconds

    def _train_epoch(self, training: Training, step: Callable[[Batch], Tensor], progress: Progress) -> Iterator[None]:
        """Train an epoch, or the rest of it, and report it; yield between two of its steps."""
        task, phase, course, settings = training.task, training.phase, training.course, training.settings
        started = time.perf_counter()
        epoch, skip = divmod(progress.done, course.per_epoch)
        seed = derive_seed(self.config.seed, task.seed_part, training.position, epoch)
        if not skip:
            torch.manual_seed(self.world.rank_seed(seed))  # for dropout and other random numbers of a loss
        for batch in training.data.batches(settings.batch_size, seed, skip=skip):
            set_rate(training.optimizers, learning_rate(settings, course, progress.done))
            progress.losses.append(step(batch))
            progress.done += 1
            phase.done = progress.done
            if phase.after_step:
                phase.after_step(batch)
            self.observer.step(progress.done, course.steps)
            if progress.done == course.steps:
                break
            if progress.done % course.per_epoch:
                yield
        lr = learning_rate(settings, course, progress.done - 1)
        facts = {"epoch": epoch + 1, "lr": lr, "loss": mean_loss(progress, task, phase, epoch, lr)}
        now = time.perf_counter()
        facts["seconds"], progress.seconds = round(now - started, 3), now - training.began
        self.observer.event("epoch", task=task.id, phase=phase.name, **facts)
        progress.losses = []
        progress.epochs.append(facts)

    def train_step(self, training: Training, batch: Batch) -> Tensor:
        """Change the phase's parameters by one batch; return its loss, the mean over all processes."""
        phase, clip = training.phase, training.settings.clip
        loss = self.forward_backward_step(training, batch)
        if clip is not None:
            self.fabric.clip_gradients(training.module, training.wrapped[0], max_norm=clip, error_if_nonfinite=False)
        before = [parameter.detach().clone() for parameter in phase.trained] if phase.project else []
        for optimizer in training.wrapped:
            optimizer.step()
        if phase.project:
            with torch.no_grad():
                phase.project(before)
        return self.world.mean(loss.detach())

    def forward_backward_step(self, training: Training, batch: Batch) -> Tensor:
        """Compute the loss of a batch and its gradients; return the loss."""
        for optimizer in training.optimizers:
            optimizer.zero_grad(set_to_none=True)
        with training.kernels():
            loss = training.module(batch)
        self.fabric.backward(loss)
        if training.phase.after_backward:
            training.phase.after_backward()
        return loss

    def _prepared(self, method: Method, task: Task, phase: Phase, position: int, handed: Optimizers) -> Training:
        """Return the state of training a phase; `handed` are optimizers from the phase before."""
        settings, data = self.config.train.phase(phase.name), phase.data or task
        changes = settings.images.model_dump(exclude_unset=True)
        if changes and isinstance(data, Task):
            data = data.viewed(data.view.with_changes(changes))
        course = Course.of(settings, len(data), self.config.engine.max_steps)
        graphed = self.recorder is not None and phase.capturable
        optimizers = make_optimizers(settings, phase.groups, self.device, graphed=graphed)
        take_over(optimizers, handed)
        self._handed = optimizers if phase.keep_optimizer else []
        module, *wrapped = self.fabric.setup(PhaseModule(phase, self.world), *optimizers)
        kernels = self.kernels(method, phase.extra)
        method.train()
        if phase.extra is not None:
            phase.extra.train()
        return Training(method, task, phase, position, data, settings, course, optimizers, module, wrapped, kernels)

    def _announce(self, training: Training, progress: Progress, stored: int) -> None:
        """Report the start of a phase to the phase and the observer; `stored` steps were made before."""
        task, phase, course = training.task, training.phase, training.course
        phase.done, phase.planned, phase.reused = progress.done, course.steps, progress.reused
        phase.per_epoch = course.per_epoch
        trained = sum(parameter.numel() for parameter in phase.trained)
        begun = {"images": len(training.data), "trained": trained, "done": stored}
        again = {"reused": progress.seconds} if progress.reused else {}
        self.observer.event("phase", task=task.id, phase=phase.name, steps=course.steps, **begun, **again)
        if progress.done > stored:  # the phase was trained before; the rest of the run does not see this
            for facts in progress.epochs:
                self.observer.event("epoch", task=task.id, phase=phase.name, **facts)
            self.observer.step(progress.done, course.steps)

    def _key(self, training: Training) -> str:
        """Return the digest of a phase, see `fingerprint.digest`; empty if it is not to be cached."""
        method, phase = training.method, training.phase
        if not (self.phase_cache and phase.depends_on and type(self) is Engine):
            return ""
        facts = {
            "position": [self.config.seed, training.task.seed_part, training.position],
            "settings": training.settings.model_dump(mode="json"),
            "course": asdict(training.course),
            "precision": self.precision,
            "channels_last": self.config.engine.channels_last,
            "graphs": self.recorder is not None,
            "kernels": self.kernels(method, phase.extra) is FastConvolutions,
            "machines": self.world.gather(machine(self.device)),
        }
        return self.world.same(digest(phase, training.task, facts) if self.world.first else "")

    @contextmanager
    def _tensor_float32(self) -> Iterator[None]:
        """With bfloat16 on a GPU, use TensorFloat-32 for products that remain float32, such as merged updates.

        It is eight times as precise as the bfloat16 of merged weights, and saves a seventh of a step. A user's own
        setting is kept.
        """
        if self.device.type != "cuda" or self.precision != "bf16":
            yield
            return
        backends: Any = torch.backends
        libraries = (backends.cuda.matmul, backends.mkldnn.matmul)  # PyTorch has one switch for both
        if any(library.fp32_precision != "none" for library in libraries):
            yield
            return
        torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision("highest")
            for library in libraries:
                library.fp32_precision = "none"

    def _note(self, task: Task) -> Callable[[str], None]:
        return lambda text: self.observer.event("note", task=task.id, text=text)


@contextmanager
def mistakes_named(phase: str) -> Iterator[None]:
    """Turn PyTorch's errors for too little memory or too few images into messages with a fix."""
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise TrainingError(f"out of memory in phase {phase}; lower train.phases.{phase}.batch_size") from None
    except ValueError as error:  # PyTorch's BatchNorm has no special error type for it
        if "more than 1 value per channel" not in str(error):
            raise
        raise TrainingError(
            f"BatchNorm cannot train on a single image in phase {phase}; use train.batch_size=2 or more, "
            f"and at least 2 images per task"
        ) from None


def is_out_of_memory(error: Exception) -> bool:
    """Return True if memory was exhausted: by the error's type on a GPU, by the allocator's message on the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or short_of_memory(error)


def has_fast_bf16(device: str) -> bool:
    """Return True if bfloat16 is faster than float32: on recent GPUs, and on CPUs by a timed product.

    ResNet-18 trains 2.2 times faster with AMX and 1.8 times with an AMD's AVX-512 BF16. The instruction set is not
    enough: an Intel Xeon with AVX-512 BF16 and without AMX takes twice as long as in float32. A CPU is therefore timed
    once.
    """
    if device == "cuda":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    able = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    if not computes_bf16(device) or not (able.get("amx_bf16") or able.get("avx512_bf16")):
        return False
    return _product_seconds(torch.bfloat16) < 0.8 * _product_seconds(torch.float32)


@cache
def _product_seconds(dtype: torch.dtype) -> float:
    """Return the CPU time in seconds of a product of two 512 x 512 matrices, the shortest of ten."""
    matrix, seconds = torch.ones(512, 512, dtype=dtype), []
    for _ in range(10):
        started = time.process_time()
        matrix @ matrix
        seconds.append(time.process_time() - started)
    return min(seconds)
