"""Does `discover` group images of unknown classes as their labels do?

    python benchmarks/discover.py             both data sets, seeds 0, 1, 2; docs/results/discover.md
    python benchmarks/discover.py --chosen-on print the rows of the classes that the method was chosen on

Class statistics in one feature space, that of the pretrained DeiT-Tiny (nothing is trained); its features at 112 pixels
are computed once and kept under $PEARL_RUNS. The method was chosen on a half of the classes, the same for all seeds;
the page has the results on the other half. Of these the seed draws the classes that are held back; the others are
learnt. k-means gets the true number of classes, and features of the pretrained network's last layer, of length 1. Data
is looked for under $PEARL_DATA.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.cluster import HDBSCAN, KMeans
from sklearn.metrics import adjusted_rand_score
from torch import Tensor

from pages import RESULTS, cell, table, write_page
from pearl.data.augment import View
from pearl.evaluation.grouping import group
from pearl.lifecycle.saved import build_backbone
from pearl.methods.common.by_statistics import Statistics
from pearl.methods.common.class_statistics import ClassStatistics
from pearl.methods.common.whitening import Whitening
from pearl.nn.intermediate_features import WithInner, inner_layers
from pearl.settings.config import load_config
from pearl.settings.parts import SOURCES
from unknown import RECIPES, of_classes

IMAGES, FEWEST = 26, 20  # per class: the most that are used, and the fewest of a class that is
LEARNT, PER_TASK = 16, 6  # images of a known class, and classes of a task
HELD_BACK = (5, 10)  # classes
WIDTH = 192  # of DeiT-Tiny's last layer
GROUPED = {  # all held-back images
    "groups": "groups found",
    "ari": "ARI",
    "alone": "in no group (%)",
    "white": "ARI of k-means, whitened",
    "plain": "ARI of k-means, plain",
    "density": "ARI of HDBSCAN, whitened",
}
FOUND = {  # images called unknown
    "found": "held-back images found (%)",
    "refused": "known images called unknown (%)",
    "groups_found": "groups found",
    "ari_found": "ARI",
    "plain_found": "ARI of k-means, plain",
}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--chosen-on", action="store_true")
    options = parser.parse_args(arguments)
    rows: dict[str, list[dict[str, float]]] = {}
    for data in RECIPES:
        made = features(data)
        order = np.random.default_rng(100).permutation(len(made))
        half = order[: len(made) // 2] if options.chosen_on else order[len(made) // 2 :]
        for held_back in HELD_BACK:
            name = f"{data}, {held_back} of {len(half)} classes held back"
            rows[name] = [row([made[c] for c in half], held_back, seed=seed) for seed in options.seeds]
            print(name, {key: round(float(np.mean([of[key] for of in rows[name]])), 2) for key in GROUPED | FOUND})
    if not options.chosen_on:
        write(rows)


@torch.no_grad()
def features(data: str) -> list[Tensor]:
    """Return DeiT-Tiny's features (n, p_raw) of up to `IMAGES` images of each class; the last layer's come last."""
    file = Path(os.environ.get("PEARL_RUNS", "runs")) / "discover" / f"{data}.pt"
    if not file.is_file():
        config = load_config(RECIPES[data])
        backbone = build_backbone(config).eval()
        network, view = WithInner(backbone, inner_layers(backbone)), View(config.images)
        made = [
            torch.cat([network(view.test(x)) for x in torch.from_numpy(images).split(64)])
            for images in of_classes(SOURCES.build(config.data), IMAGES, config.images.stored)
            if len(images) >= FEWEST
        ]
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(made, file)
    loaded: list[Tensor] = torch.load(file)
    return loaded


@torch.no_grad()
def row(made: Sequence[Tensor], held_back: int, *, seed: int) -> dict[str, float]:
    """Learn the classes that are not held back; group images of those that are, given as such or found unknown."""
    order = np.random.default_rng(seed).permutation(len(made))
    new, known = order[:held_back], order[held_back:]
    class_statistics = ClassStatistics(Statistics(spaces=1))
    for start in range(0, len(known), PER_TASK):
        own = known[start : start + PER_TASK]
        raw = torch.cat([made[c][:LEARNT] for c in own])
        if not len(class_statistics):
            class_statistics.add_space(0, raw)
        class_statistics.observe(
            [class_statistics.spaces()[0](raw)], torch.arange(start, start + len(own)).repeat_interleave(LEARNT)
        )
    white = Whitening(class_statistics)
    strange, true = joined(made, new, 0)
    mixed, _ = joined(made, known, LEARNT)
    whitened, plain = white([strange]).numpy(), F.normalize(strange[:, -WIDTH:]).numpy()
    labels = group(whitened)
    least = class_statistics.scores().threshold(0.05)
    seen, refused = (class_statistics.logits_and_scores([x])[1].numpy() < least for x in (strange, mixed))
    together = group(white([torch.cat([strange[seen], mixed[refused]])]).numpy())
    return {
        "groups": len({*labels} - {-1}),
        "ari": ari(true, labels),
        "alone": 100 * float((labels < 0).mean()),
        "white": ari(true, kmeans(whitened, held_back)),
        "plain": ari(true, kmeans(plain, held_back)),
        "density": ari(true, HDBSCAN(min_cluster_size=5, copy=True).fit_predict(whitened)),
        "found": 100 * float(seen.mean()),
        "refused": 100 * float(refused.mean()),
        "groups_found": len({*together} - {-1}),
        "ari_found": ari(true[seen], together[: seen.sum()]),
        "plain_found": ari(true[seen], kmeans(plain[seen], len({*true[seen]}))),
    }


def joined(made: Sequence[Tensor], classes: np.ndarray, start: int) -> tuple[Tensor, np.ndarray]:
    """Return the features (N, p_raw) of some classes, without the first images of each, and their labels (N,)."""
    parts = [made[c][start:] for c in classes]
    return torch.cat(parts), np.repeat(np.arange(len(parts)), [len(part) for part in parts])


def kmeans(rows: np.ndarray, count: int) -> np.ndarray:
    """Return the best of ten k-means clusterings (N,)."""
    results: np.ndarray = KMeans(count, n_init=10, random_state=0).fit_predict(rows)
    return results


def ari(true: np.ndarray, labels: np.ndarray) -> float:
    """Return the adjusted Rand index in percent; each image without a group, -1, counts as a group of its own."""
    alone = labels < 0
    return 100 * float(adjusted_rand_score(true, np.where(alone, labels.max() + alone.cumsum(), labels)))


def write(rows: dict[str, list[dict[str, float]]]) -> None:
    """Write the rows of every seed, and a table."""
    (RESULTS / "discover.json").write_text(json.dumps(rows, indent=1) + "\n")
    lines = ["# Groups of unknown images", "", "`python benchmarks/discover.py`; mean ± standard deviation over seeds."]
    for title, columns in (("All images of the held-back classes", GROUPED), ("Images called unknown at 5 %", FOUND)):
        body = [[name, *(cell((one[key] for one in of), 1) for key in columns)] for name, of in rows.items()]
        lines += ["", f"## {title}", "", *table(["", *columns.values()], body)]
    write_page(RESULTS / "discover.md", lines)


if __name__ == "__main__":
    main(sys.argv[1:])
