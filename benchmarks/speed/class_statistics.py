"""Class statistics over 20 tasks against a plain pass of the network: three sub-networks serve all tasks.

    python benchmarks/speed/class_statistics.py      one image, eight, and a batch of a test set; a
    minute

Goal: at most K + 0.3 plain passes with K feature spaces, for any number of tasks. The statistics are random.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from inference import learnt
from timing import Row, ratios, show

from pearl.evaluation.evaluate import Ensemble
from pearl.methods.common.by_statistics import Statistics
from pearl.methods.common.class_statistics import ClassStatistics
from pearl.methods.pearl import Pearl
from pearl.nn.intermediate_features import inner_layers


@torch.no_grad()
def observed(method: Pearl, spaces: int, classes: int, size: int) -> Pearl:
    """Return the method with class statistics in this many feature spaces, of random features for every task."""
    method.class_statistics = ClassStatistics(Statistics(spaces=spaces))
    method.layers = inner_layers(method.backbone)
    raw = [part.float() for part in method.spaces(range(spaces))(torch.randn(32, 3, size, size))]
    for t in range(len(method.heads)):
        if t < spaces:
            method.class_statistics.add_space(t, raw[t])
        features = [torch.randn(4 * classes, 512) for _ in method.class_statistics.created_at]
        method.class_statistics.observe(features, torch.arange(t * classes, (t + 1) * classes).repeat(4))
    return method.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--classes", type=int, default=5, help="of a task")
    parser.add_argument("--spaces", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    rows: list[Row] = []
    for name, size, batches in (("resnet18", 32, (1, 8, 128)), ("timm/deit_tiny_patch16_224", 224, (1, 8, 32))):
        method = learnt(name, size, options.tasks, "cpu", name == "resnet18", 64)
        method = observed(method, options.spaces, options.classes, size)
        ensemble = Ensemble(method)
        for batch in batches:
            x = torch.randn(batch, 3, size, size)
            x = x.contiguous(memory_format=torch.channels_last) if name == "resnet18" else x
            with torch.no_grad():
                work = {"ours": partial(ensemble, x), "a plain pass": partial(method.backbone, x)}
                facts = {"net": name, "tasks": options.tasks, "spaces": options.spaces, "batch": batch}
                rows.append(facts | ratios(work, options.repeats))
    show("class statistics: [median, lowest, highest] of a plain pass's time", rows, options.out)


if __name__ == "__main__":
    main()
