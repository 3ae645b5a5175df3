"""Choosing ranks against an SVD of the same task vectors, in speed and results.

    python benchmarks/speed/ranks.py              ResNet-18 of width 64 and a ViT-B's keys; on a CPU, minutes
    python benchmarks/speed/ranks.py --nets resnet18:16 vit:192

Peers: `torch.linalg.svd` in float64, the only one as exact as ours, and in float32, both thin with vectors;
`torch.linalg.svdvals` in float64. Task vectors are random with falling spectra; tests/test_ranks.py compares the ranks
of trained ones with an SVD. Goal: a quarter of the time of an SVD.
"""

import argparse
from pathlib import Path

import torch
from timing import Row, ratios, show
from torch import Tensor

from pearl.nn.lowrank import matrix_shape
from pearl.nn.rank_rules import ROUNDING, PaperRule
from pearl.nn.resnet import resnet18


def layers(net: str, width: int) -> list[tuple[int, int]]:
    """Return the shapes of the 2-D views that ranks are chosen for."""
    if net == "vit":
        return [(width, width)] * 12
    return [matrix_shape(p.shape, "spatial") for p in resnet18(32, width=width).parameters() if p.ndim == 4]


def weights(shape: tuple[int, int], device: str) -> tuple[Tensor, Tensor]:
    """Return a reference (m, n), and a simulated fine-tuned one: a falling spectrum, a threshold near 0.3."""
    m, n = shape
    r = min(m, n)
    moved = (torch.randn(m, r) * torch.arange(1, r + 1) ** -0.7) @ torch.randn(r, n)
    reference = torch.randn(m, n)
    return reference.to(device), (reference + moved * reference.norm() / moved.norm()).to(device)


def by_svd(reference: Tensor, tuned: Tensor, share: float) -> int:
    """Return the rank by float64 singular values."""
    energy = torch.linalg.svdvals(tuned.double() - reference.double()).square()
    return 1 + int((energy.cumsum(0) / energy.sum() < share - ROUNDING).sum())


def choosing(net: str, width: int, repeats: int, device: str) -> list[Row]:
    """Measure all layers of a network, then the largest."""
    torch.manual_seed(0)
    shapes = layers(net, width)
    pairs = [weights(shape, device) for shape in shapes]
    rule, rows = PaperRule(), []
    choices = [rule.choose(*pair) for pair in pairs]
    agree = sum(by_svd(*pair, choice.threshold) == choice.rank for pair, choice in zip(pairs, choices, strict=True))
    for label, some in (("all layers", pairs), ("largest", [max(pairs, key=lambda pair: pair[0].numel())])):
        work = {
            "ours": lambda some=some: [rule.choose(*pair) for pair in some],
            "svdvals64": lambda some=some: [torch.linalg.svdvals((b - a).double()) for a, b in some],
            "svd32": lambda some=some: [torch.linalg.svd(b - a, full_matrices=False) for a, b in some],
            "svd64": lambda some=some: [torch.linalg.svd((b - a).double(), full_matrices=False) for a, b in some],
        }
        rows.append({"net": f"{net}:{width}", "layers": label, **ratios(work, repeats, device)})
        times = rows[-1]["milliseconds"]
        rows[-1]["times faster"] = {
            peer: round(times[peer] / times["ours"], 2) for peer in ("svd64", "svd32", "svdvals64")
        }
    rows[0]["same rank as the float64 SVD"] = f"{agree} of {len(pairs)} layers"
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", default=["resnet18:64", "vit:768"], help="resnet18:WIDTH or vit:WIDTH")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    rows: list[Row] = []
    for word in options.nets:
        net, _, width = word.partition(":")
        rows += choosing(net, int(width), options.repeats, options.device)
    show("choosing ranks: [median, lowest, highest] of the time of a float64 SVD", rows, options.out)


if __name__ == "__main__":
    main()
