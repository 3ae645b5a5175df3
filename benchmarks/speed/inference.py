"""All sub-networks of PEARL against as many plain forward passes of the same network.

    python benchmarks/speed/inference.py                                test sets, then few images; on a CPU, minutes
    python benchmarks/speed/inference.py --part few --nets resnet18 timm/vit_base_patch16_224 --tasks 20 --device cuda

The peer runs the same network, precision and layout on the same images. Goals: test sets, merging included, at most
0.9 of it for a ResNet-18 and 1.02 for a ViT; on a GPU, 20 sub-networks on one image within 2 of ONE plain pass, which
is 0.1 of 20.
"""

import argparse
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from timing import Row, ratios, show
from torch import Tensor, nn

from pearl.evaluation.evaluate import Ensemble
from pearl.methods.pearl import Pearl
from pearl.nn.bsconv import bsc
from pearl.nn.lowrank import matrix_shape
from pearl.nn.rank_rules import Choice
from pearl.nn.resnet import resnet18
from pearl.nn.timm import timm_backbone
from pearl.training.engine import has_fast_bf16


def learnt(name: str, size: int, tasks: int, device: str, channels_last: bool, width: int) -> Pearl:
    """Return a method as after this many tasks, with an eighth of every rank."""
    torch.manual_seed(0)
    makers: dict[str, Callable[[], nn.Module]] = {
        "resnet18": lambda: resnet18(size, width=width),
        "bsc": lambda: bsc(size),
    }
    net = makers.get(name, lambda: timm_backbone(name[5:], size))()
    method = Pearl(net, reference="given").to(device)
    if channels_last:
        method.to(memory_format=torch.channels_last)
    shapes = {target.label: min(matrix_shape(target.shape, "spatial")) for target in method.targets}
    choices = {label: Choice(max(1, full // 8), full, 0.1) for label, full in shapes.items()}
    for t in range(tasks):
        method.heads.grow(10).to(device)
        method.start_updates(t, net, choices)
    return method.requires_grad_(False).eval()


def passes(method: Pearl, x: Tensor, batches: int) -> dict[str, Callable[[], object]]:
    """Run batches of a test set through each sub-network, merged once for all of them, as in a stage."""

    def evaluate(fast: bool) -> None:
        method.fast = fast
        for expert in method.experts():
            for _ in range(batches):
                expert.forward(x)

    def plain() -> None:
        for head in method.heads:
            for _ in range(batches):
                head(method.backbone(x))

    return {"ours": lambda: evaluate(True), "not folded": lambda: evaluate(False), "plain passes": plain}


@torch.no_grad()
def test_sets(method: Pearl, x: Tensor, batches: int, cast: AbstractContextManager[object], repeats: int) -> Row:
    """Measure whole test sets, in one precision."""
    with cast:
        return against(passes(method, x, batches), method, x, repeats, batches)


def against(work: Mapping[str, Callable[[], object]], method: Pearl, x: Tensor, repeats: int, batches: int) -> Row:
    """Return the ratios to the last one."""
    facts = {"tasks": len(method.heads), "batch": len(x), "batches": batches}
    return facts | ratios(work, repeats, x.device.type)


@torch.no_grad()
def few_images(method: Pearl, x: Tensor, repeats: int) -> Row:
    """Measure `Model.predict`, and the same with merging for every call."""
    method.fast = True
    ensemble = Ensemble(method)
    work: dict[str, Callable[[], object]] = {
        "ours": lambda: ensemble(x),
        "merged each time": lambda: [expert.forward(x) for expert in method.experts()],
        "plain passes": passes(method, x, 1)["plain passes"],
    }
    return against(work, method, x, repeats, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["test", "few"], nargs="+", default=["test", "few"])
    parser.add_argument("--nets", nargs="+", default=["resnet18", "timm/deit_tiny_patch16_224"])
    parser.add_argument("--width", type=int, default=64, help="of the ResNet-18")
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 224], help="of the images, a net each")
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 32], help="of test sets, a net each")
    parser.add_argument("--batches", type=int, default=2, help="of a test set")
    parser.add_argument("--few", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=("fp32", "bf16"),
        help="of test sets, by default both where bfloat16 is fast; few images are answered in float32",
    )
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    precisions = options.precision or ["fp32", *["bf16"] * has_fast_bf16(options.device)]
    rows: list[Row] = []
    for name, size, batch in zip(options.nets, options.sizes, options.batch, strict=True):
        last = name == "resnet18"
        method = learnt(name, size, options.tasks, options.device, last, options.width)

        def images(count: int, size: int = size, last: bool = last) -> Tensor:
            x = torch.randn(count, 3, size, size, device=options.device)
            return x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)

        label = {"net": name, "size": size}
        for precision in precisions if "test" in options.part else []:
            cast = torch.autocast(options.device, torch.bfloat16, enabled=precision == "bf16")
            results = test_sets(method, images(batch), options.batches, cast, options.repeats)
            rows.append(label | {"part": "test sets", "precision": precision} | results)
        if "few" in options.part:
            rows += [
                label | {"part": "few images"} | few_images(method, images(n), options.repeats) for n in options.few
            ]
    show("sub-networks: [median, lowest, highest] of the peer's time", rows, options.out)


if __name__ == "__main__":
    main()
