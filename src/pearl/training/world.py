"""Several processes that train one model, each on its share of every batch. A single process has no overhead.

After each step weights, optimizer and statistics are equal on all ranks: gradients are those of the whole batch, batch
statistics are taken over all ranks, and the code of a method between two phases depends on nothing else. Only the first
rank writes and evaluates; the others read its files, in a folder that all can access.
"""

import logging
import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pearl.data.batches import Batch, derive_seed
from pearl.errors import ConfigError, counted
from pearl.nn.precision import full
from pearl.training.heartbeat import beating, joined_in_time
from pearl.training.launch import ProcessRank, process_rank

if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

Value = TypeVar("Value")

FOREVER = timedelta(weeks=4)  # ranks wait while one decodes or evaluates; heartbeats show that it is running


class World:
    """A group of processes. Methods that communicate must be called by all ranks in the same order."""

    def __init__(self, here: ProcessRank | None = None, address: str = "127.0.0.1") -> None:
        self.here = here
        self.address = address  # the first rank's machine
        self.rank, self.size = (here.rank, here.world) if here else (0, 1)

    @classmethod
    def join(cls, device: str, devices: int) -> "World":
        """Connect to the other processes.

        Raises:
            ConfigError: there are no other processes, or not enough devices.
        """
        here = process_rank(devices)
        if here is None:
            if devices > 1:
                raise ConfigError(f"devices={devices} needs as many processes; use pearl run --devices, or torchrun")
            return cls()
        fabric = make_fabric(device, here)
        with joined_in_time(here.world):
            fabric.launch()
        environment: Any = fabric.strategy.cluster_environment  # type: ignore[attr-defined]  # DDP has one
        return cls(here, environment.main_address)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """End all ranks if one of their machines is lost within the context, see `heartbeat`.

        Raises:
            RunError: a rank cannot reach the first one.
        """
        if self.size == 1:
            yield
            return
        with beating(self.rank, self.gather(socket.gethostname()), self.address, self.same):
            yield

    @property
    def first(self) -> bool:
        """Return True for the rank that writes, evaluates and prints."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait for all ranks."""
        self.any()

    def any(self, *flags: bool) -> list[bool]:
        """Return, for each flag, whether it is set on any rank."""
        if self.size == 1:
            return [*flags]
        tensor = torch.tensor([0, *flags], dtype=torch.int32)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return [bool(flag) for flag in tensor[1:].tolist()]

    def same(self, value: Value) -> Value:
        """Return the first rank's value."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def gather(self, value: Value) -> list[Value]:
        """Return every rank's value, in order."""
        if self.size == 1:
            return [value]
        boxes: list[Any] = [None] * self.size
        dist.all_gather_object(boxes, value)
        return boxes

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over the ranks."""
        if self.size == 1:
            return value
        total = value.clone()
        dist.all_reduce(total)
        return total / self.size

    @contextmanager
    def first_on_each_machine(self) -> Iterator[None]:
        """Run on one rank of each machine first, then on the others, which find the cached result."""
        turn = self.rank % self.here.local_world if self.here else 0
        if turn:
            self.wait()
        yield
        if not turn:
            self.wait()

    def rank_seed(self, seed: int) -> int:
        """Return a seed for random numbers that should differ between ranks, such as dropout."""
        return derive_seed(seed, self.rank) if self.rank else seed

    def share(self, batch: Batch) -> tuple[Batch, float]:
        """Return this rank's part of a batch, and its weight: the weighted means' mean over ranks is the batch's mean.

        A rank without a share gets one image with weight 0.
        """
        count = len(batch.y)
        start, stop = (count * rank // self.size for rank in (self.rank, self.rank + 1))
        weight = self.size * (stop - start) / count
        if not weight:
            start, stop = 0, 1
        return Batch(*(part[start:stop] for part in batch)), weight

    def shared_statistics(self, weight: float) -> AbstractContextManager[object]:
        """Make BatchNorm use the images of all ranks within the context, except those of weight 0."""
        return SharedStatistics(bool(weight)) if self.size > 1 else nullcontext()


def lost(error: BaseException) -> bool:
    """Return True if another process has ended."""
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def kind_of(device: str) -> str:
    """Return the kind of `device`: cpu or cuda.

    Raises:
        ConfigError: it is neither.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device {device!r} cannot be used here; use auto, cpu or cuda")
    # not Fabric's choice: it prefers Apple's GPUs, which have no float64 for the rank rule
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def make_fabric(device: str, here: ProcessRank | None = None, **options: Any) -> "Fabric":
    """Return Lightning Fabric for one device, or one of several per process.

    Raises:
        ConfigError: this machine has no such device, or too few.
    """
    from lightning_fabric import Fabric

    accelerator = kind_of(device)
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # the precision is recorded in environment.json
    warnings.filterwarnings("ignore", message="The `srun` command is available")  # SLURM's presence is not a mistake
    try:
        if here is None:
            return Fabric(accelerator=accelerator, devices=1, **options)
        return Fabric(
            accelerator=accelerator,
            devices=enough(accelerator, here.local_world),
            num_nodes=here.nodes,
            strategy=_strategy(accelerator, here),
            **options,
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"device {device!r} cannot be used here ({error}); use auto or cpu") from None


def enough(accelerator: str, devices: int) -> int:
    """Return this many devices of a kind.

    Raises:
        ConfigError: the machine has fewer.
    """
    if accelerator == "cuda" and torch.cuda.is_available() and devices > torch.cuda.device_count():
        seen = counted(torch.cuda.device_count(), "GPU")
        raise ConfigError(f"--devices {devices}: {seen} can be seen here; give fewer, or --device cpu")
    return devices


def _strategy(accelerator: str, here: ProcessRank) -> "DDPStrategy":
    from lightning_fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
    from lightning_fabric.strategies import DDPStrategy

    # warnings of DDP: 1x1 weights in channels_last have two layouts at once; the option below is not always needed
    warnings.filterwarnings("ignore", message="Grad strides do not match|find_unused_parameters=True was specified")
    return DDPStrategy(
        cluster_environment=SLURMEnvironment(auto_requeue=False) if here.slurm else TorchElasticEnvironment(),
        process_group_backend="cpu:gloo,cuda:nccl" if accelerator == "cuda" else "gloo",
        timeout=FOREVER,
        # a loss may not use all parameters; and constant buckets make a resumed run add in the same order
        find_unused_parameters=True,
    )


class SharedStatistics(TorchFunctionMode):
    """Batch statistics over all ranks in every layer: layers are not replaced, since weights are arguments.

    Equivalent to SyncBatchNorm, on every device, also if the running statistics are in a method's state.
    """

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Replace F.batch_norm in training; call all other functions."""
        kwargs = kwargs or {}
        if function is F.batch_norm and kwargs.get("training"):
            return self.batch_norm(*args, **kwargs)
        return function(*args, **kwargs)

    def batch_norm(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
    ) -> Tensor:
        """Normalise x (B, C, ...) by the mean and variance of each channel over all ranks."""
        with torch.autocast(x.device.type, enabled=False):
            y = full(x)
            own_var, own_mean = (part.double() for part in torch.var_mean(y, [0, *range(2, x.ndim)], correction=0))
            n = own_mean.new_full((1,), self.counts * x.numel() / x.shape[1])
            # in float64, the variance can be computed from the mean of squares
            sums = _Sum.apply(torch.cat([n * own_mean, n * (own_var + own_mean * own_mean), n]))
            total = sums[-1]
            mean, square = (sums[:-1] / total).chunk(2)
            var = (square - mean * mean).clamp(min=0)
            if running_mean is not None and running_var is not None:
                with torch.no_grad():
                    unbiased = var * total / (total - 1).clamp(min=1)
                    running_mean.lerp_(mean.to(running_mean.dtype), momentum)
                    running_var.lerp_(unbiased.to(running_var.dtype), momentum)
            shape = (-1, *[1] * (x.ndim - 2))
            y = (y - mean.to(y).view(shape)) * torch.rsqrt(var + eps).to(y).view(shape)
            if weight is not None and bias is not None:
                y = y * weight.view(shape) + bias.view(shape)
            return y.to(x.dtype)


class _Sum(torch.autograd.Function):
    """The sum over ranks, also in backward, since every rank's loss depends on every rank's images."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0].clone()
        dist.all_reduce(gradient)
        return gradient


def leave() -> None:
    """Leave the process group, since a thread of it that outlives the interpreter would abort a finished run."""
    if dist.is_available() and dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()
