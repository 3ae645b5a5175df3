"""Candidates for a cheaper training step on a GPU, and the gradients of a compiled one.

    python benchmarks/speed/step.py --gradients                    any device: errors of a step's gradients
    python benchmarks/speed/step.py --out step.json                a GPU: milliseconds per step of each candidate
    python benchmarks/speed/step.py --nets bsc --out bsc.json

A step of each phase of PEARL (batches of 32, rank 8) is captured as a CUDA graph, as the engine does it, and replayed.
Candidates: BatchNorm without the counters that nothing reads; one cast of all weights to bfloat16 instead of one per
layer; both; the loss compiled by Inductor; and several seeds side by side in one process, a stream for each.

Gradients are compared with those in float64, tensor by tensor: the norm of the difference relative to the norm. Where
the compiled step is as far from float64 as the eager one, their difference is rounding.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from timing import Row, show
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pearl.data.batches import Batch, Task
from pearl.methods.base import Phase
from pearl.methods.pearl import Pearl
from pearl.nn.rank_rules import FixedRule
from pearl.settings.parts import BACKBONES
from pearl.training.engine import Engine
from pearl.training.graphs import WARM_UP
from pearl.training.optimizers import make_optimizers
from training import BATCH, NETWORKS, RANK, config, make_task

Loss = Callable[[Batch], Tensor]
PHASES = ("reference", "probe", "adapt")
STREAMS = (1, 2, 4, 8)


class Cast(torch.autograd.Function):
    """float32 tensors -> bfloat16, by one launch for all; and their gradients back."""

    @staticmethod
    def forward(_: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        return copied(weights, torch.bfloat16)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return copied(gradients, torch.float32)


def copied(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the tensors in another type."""
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, list(tensors))
    return tuple(copies)


def phases(engine: Engine, seed: int = 0, *, double: bool = False) -> Iterator[tuple[Pearl, Task, Phase]]:
    """Yield each phase of a first and a second task, untrained."""
    torch.manual_seed(seed)
    settings = engine.config
    backbone = BACKBONES.build(settings.backbone, settings.images.size)
    method = engine.place(Pearl(backbone, rank=FixedRule(r=RANK), init="svd", reference="first_task"))
    assert isinstance(method, Pearl)
    if double:
        method.double()
    for task in (make_task(settings, index, engine.device.type) for index in (0, 1)):
        for phase in method.learn(task):
            method.train()
            if double:
                method.double()  # its new modules
            yield method, task, phase


def plain(_: Pearl, phase: Phase) -> Loss:
    """The loss as it is."""
    return phase.loss


def layers_of(method: Pearl, phase: Phase) -> list[nn.Module]:
    """Return all modules that a phase may call."""
    return [*method.modules(), *(phase.extra.modules() if phase.extra else ())]


def without_counters(method: Pearl, phase: Phase) -> Loss:
    """BatchNorm does not count its batches."""
    return inside(phase.loss, partial(uncounted, [m for m in layers_of(method, phase) if isinstance(m, _BatchNorm)]))


def one_cast(method: Pearl, phase: Phase) -> Loss:
    """All trained weights of convolutions and linear layers are cast at once; heads compute in float32."""
    trained = {id(parameter) for parameter in phase.trained}
    layers = [m for m in layers_of(method, phase) if type(m) in (nn.Conv2d, nn.Linear) and id(m.weight) in trained]
    return inside(phase.loss, partial(cast_at_once, layers)) if layers else phase.loss


def both(method: Pearl, phase: Phase) -> Loss:
    """Neither counters nor separate casts."""
    first = replace(phase, loss=without_counters(method, phase))
    return one_cast(method, first)


def inside(loss: Loss, context: Callable[[], AbstractContextManager[None]]) -> Loss:
    """Return the loss, computed within a context."""

    def computed(batch: Batch) -> Tensor:
        with context():
            return loss(batch)

    return computed


@contextmanager
def uncounted(norms: Sequence[_BatchNorm]) -> Iterator[None]:
    """BatchNorm layers without counters."""
    counters = [norm.num_batches_tracked for norm in norms]
    for norm in norms:
        norm.num_batches_tracked = None
    try:
        yield
    finally:
        for norm, counter in zip(norms, counters, strict=True):
            norm.num_batches_tracked = counter


@contextmanager
def cast_at_once(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Layers whose weights are bfloat16."""
    weights = [layer._parameters.pop("weight") for layer in layers]
    for layer, half in zip(layers, Cast.apply(*weights), strict=True):
        layer.weight = half
    try:
        yield
    finally:
        for layer, weight in zip(layers, weights, strict=True):
            del layer.weight
            layer._parameters["weight"] = weight


def compiled(_: Pearl, phase: Phase) -> Loss:
    """The loss by Inductor."""
    return torch.compile(phase.loss)


CANDIDATES = {
    "as it is": plain,
    "no counters": without_counters,
    "one cast": one_cast,
    "neither": both,
    "compiled": compiled,
}


def step(engine: Engine, task: Task, phase: Phase, loss: Loss) -> Callable[[], None]:
    """Return a whole step, captured on a GPU."""
    batch = next(task.batches(BATCH, 0))
    (optimizer,) = make_optimizers(engine.config.train, phase.groups, engine.device, graphed=True)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        with engine.fabric.autocast():
            value = loss(batch)
        value.backward()
        optimizer.step()

    if engine.device.type != "cuda":
        return run
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            run()
    with torch.cuda.graph(graph, stream=stream):
        run()

    def replay() -> None:
        with torch.cuda.stream(stream):
            graph.replay()

    return replay


def milliseconds(steps: Sequence[Callable[[], None]], repeats: int, count: int) -> float:
    """Return the time of one step of one of these, running side by side: the median of some repeats."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    taken = []
    for _ in range(repeats + 1):
        wait()
        started = time.perf_counter()
        for _ in range(count):
            for one in steps:
                one()
        wait()
        taken.append((time.perf_counter() - started) / count / len(steps))
    return round(1e3 * median(taken[1:]), 3)


def timed(network: str, engine: Engine, repeats: int, count: int) -> Iterator[Row]:
    """Yield the milliseconds of every candidate, phase by phase, and of several seeds at once."""
    for name, candidate in CANDIDATES.items():
        for method, task, phase in phases(engine):
            if phase.name in PHASES:
                one = step(engine, task, phase, candidate(method, phase))
                yield {
                    "network": network,
                    "phase": phase.name,
                    "step": name,
                    "milliseconds": milliseconds([one], repeats, count),
                }
            torch.compiler.reset()
    for many in STREAMS:
        several = [
            step(engine, task, phase, phase.loss)
            for seed in range(many)
            for _, task, phase in [next(phases(engine, seed))]
        ]
        took = milliseconds(several, repeats, count)
        yield {"network": network, "phase": "reference", "step": f"{many} seeds in one process", "milliseconds": took}


def gradients(network: str, engine: Engine) -> Iterator[Row]:
    """Yield how far the gradients of an eager and of a compiled step are from those in float64."""
    found: dict[str, dict[str, list[Tensor]]] = {}
    for name in ("float64", "eager", "compiled"):
        for method, task, phase in phases(engine, double=name == "float64"):
            if phase.name not in PHASES:
                continue
            batch = next(task.batches(BATCH, 0))
            if name == "float64":
                if phase.extra is not None:
                    phase.extra.double()
                batch = Batch(batch.x.double(), *batch[1:])
                phase.loss(batch).backward()
            else:
                loss = compiled(method, phase) if name == "compiled" else phase.loss
                with engine.fabric.autocast():
                    value = loss(batch)
                value.backward()
            found.setdefault(phase.name, {})[name] = [p.grad.double() for p in phase.trained if p.grad is not None]
            torch.compiler.reset()
    for phase_name, of in found.items():
        row: Row = {"network": network, "phase": phase_name, "precision": engine.precision}
        error = partial(far, of["float64"])
        for name in ("eager", "compiled"):
            row[f"{name} from float64: median, largest"] = error(of[name])
        row["compiled from eager: median, largest"] = far(of["eager"], of["compiled"])
        yield row


def far(one: list[Tensor], other: list[Tensor]) -> list[float]:
    """Return the median and the largest relative distance over tensors."""
    each = [float((b - a).norm() / a.norm().clamp(min=1e-30)) for a, b in zip(one, other, strict=True)]
    return [round(median(each), 4), round(max(each), 4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", default=["resnet18"], choices=list(NETWORKS))
    parser.add_argument("--gradients", action="store_true", help="compare gradients instead of times")
    parser.add_argument("--precision", default="bf16", choices=("fp32", "bf16"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="per repeat")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    rows: list[Row] = []
    for network in options.nets:
        settings = config(network, NETWORKS[network], precision=options.precision)
        engine = Engine(settings, device="cuda" if torch.cuda.is_available() else "cpu")
        if options.gradients:
            found = gradients(network, engine)
        else:
            found = timed(network, engine, options.repeats, options.steps)
        for row in found:
            rows.append(row)
            show("a training step", rows[-1:], None)
    show("a training step", rows, options.out)


if __name__ == "__main__":
    main()
