"""Are 5 % of images of known classes refused, in every task and style, and are unknown classes found?

    python benchmarks/unknown.py            all streams, seeds 0 to 4; docs/results/unknown.md

Class statistics in one feature space, that of the pretrained DeiT-Tiny (nothing is trained); its features at 112 pixels
are computed once and kept under $PEARL_RUNS. The seed draws classes, their order, and which photos of a class are
learnt or tested; two fifths of the classes are never learnt. Rivals use the same features: a relative Mahalanobis
distance under a single threshold, and the distance to the k-th nearest training image, k the best of 1, 5 and 10. Data
is looked for under $PEARL_DATA.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import pearl
from pages import RESULTS, cell, table, write_page
from pearl.data.augment import View
from pearl.data.domains import seen_as
from pearl.data.images import read_all
from pearl.data.sources import Source
from pearl.evaluation.sureness import auroc
from pearl.lifecycle.runs import prepare
from pearl.lifecycle.saved import build_backbone
from pearl.methods.common.by_statistics import Statistics
from pearl.methods.common.class_statistics import ClassStatistics
from pearl.nn.intermediate_features import WithInner, inner_layers
from pearl.settings.config import load_config
from pearl.settings.parts import SOURCES
from pearl.settings.sections import Domain

RECIPES = {"CIFAR-100": "cpu-cifar100-deit_tiny", "Grocery": "cpu-grocery-deit_tiny"}
STYLES: list[Domain] = ["plain", "noisy", "inverted", "edges"]
TESTED = 20  # images per class at most, the same ones in every style
# data, styles, photos per class and style, tasks (one style each, if there are several), their classes
STREAMS: dict[str, tuple[str, int, int, int, int]] = {
    "CIFAR-100, 20 photos": ("CIFAR-100", 1, 20, 10, 6),
    "CIFAR-100, 6 photos": ("CIFAR-100", 1, 6, 10, 6),
    "Grocery, 16 photos": ("Grocery", 1, 16, 8, 6),
    "Grocery, 6 photos": ("Grocery", 1, 6, 8, 6),
    "CIFAR-100 in 4 styles, 20 photos": ("CIFAR-100", 4, 20, 4, 10),
    "Grocery in 4 styles, 12 photos": ("Grocery", 4, 12, 4, 10),
}
TRAINED = "digits, 140 photos, trained spaces"
COLUMNS = ("refused", "lowest", "median", "highest", "AUROC", "relative Mahalanobis", "nearest neighbours")
Features = dict[int, Tensor]  # of a class: (styles, images, p)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    options = parser.parse_args(arguments)
    rows: dict[str, list[dict[str, float]]] = {}
    for stream, (data, styles, *shape) in STREAMS.items():
        found = features(data, styles)
        rows[stream] = [row(found, styles, *shape, seed=seed) for seed in options.seeds]
        write(rows)
    rows[TRAINED] = [trained_row(seed) for seed in options.seeds]
    write(rows)


@torch.no_grad()
def features(data: str, styles: int) -> Features:
    """Return DeiT-Tiny's features of all classes, or of 20 of which every image is seen in several styles."""
    file = Path(os.environ.get("PEARL_RUNS", "runs")) / "unknown" / f"{data}-{styles}.pt"
    if not file.is_file():
        config = load_config(RECIPES[data])
        backbone = build_backbone(config).eval()
        network, view = WithInner(backbone, inner_layers(backbone)), View(config.images)
        photos = max(photos for name, number, photos, *_ in STREAMS.values() if (name, number) == (data, styles))
        made: Features = {}
        for c, images in enumerate(
            of_classes(SOURCES.build(config.data), photos * styles + TESTED, config.images.stored)
        ):
            if styles > 1 and len(made) == 20:
                break
            if len(images) < photos * styles + 8:
                continue
            looks = [
                torch.from_numpy(seen_as(style, images, np.arange(len(images)) + 1000 * c)) for style in STYLES[:styles]
            ]
            made[c] = torch.stack([torch.cat([network(view.test(x)) for x in look.split(64)]) for look in looks])
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(made, file)
    loaded: Features = torch.load(file)
    return loaded


def of_classes(source: Source, most: int, size: int) -> Iterator[np.ndarray]:
    """Return the images (N, S, S, 3) of each class, splits shuffled: Grocery's test photos are from other shops."""
    parts = [(part.images, row, label) for part in (source.train, source.test) for row, label in enumerate(part.labels)]
    order = np.random.default_rng(0).permutation(len(parts))
    for c in range(len(source.classes)):
        chosen = [parts[i] for i in order if parts[i][2] == c][:most]
        if isinstance(source.train.images, np.ndarray):
            yield np.stack([images[row] for images, row, _ in chosen])
        else:
            yield read_all([images[row] for images, row, _ in chosen], size)[1]


@torch.no_grad()
def row(found: Features, styles: int, photos: int, tasks: int, classes: int, *, seed: int) -> dict[str, float]:
    """Learn a stream of classes drawn by the seed, each task with `photos` per class; return results in percent."""
    draw = np.random.default_rng(seed)
    order = draw.permutation(sorted(found))
    drawn = {c: draw.permutation(found[c].shape[1]) for c in order.tolist()}

    def learnt(style: int, c: int) -> Tensor:  # other images in each style
        return found[c][style, drawn[c][style * photos : (style + 1) * photos]]

    def unseen(style: int, c: int) -> Tensor:  # the same images in every style
        return found[c][style, drawn[c][styles * photos :][:TESTED]]

    known = order[: classes * (tasks if styles == 1 else 1)].tolist()
    groups = [(t, known) if styles > 1 else (0, known[t * classes : (t + 1) * classes]) for t in range(tasks)]
    label = {c: i for i, c in enumerate(known)}
    class_statistics = ClassStatistics(Statistics(spaces=1))
    for style, own in groups:
        raw = torch.cat([learnt(style, c) for c in own])
        if not len(class_statistics):
            class_statistics.add_space(0, raw)
        class_statistics.observe(
            [class_statistics.spaces()[0](raw)], torch.tensor([label[c] for c in own]).repeat_interleave(photos)
        )
    tests = [torch.cat([unseen(style, c) for c in own]) for style, own in groups]
    strange = torch.cat([unseen(style, c) for style in range(styles) for c in order.tolist() if c not in label])
    bank = torch.cat([learnt(style, c) for style, own in groups for c in own])
    scores = [class_statistics.logits_and_scores([x])[1].numpy() for x in (*tests, strange)]
    least = class_statistics.scores().threshold(0.05)
    refused = [100 * float((part < least).mean()) for part in scores[:-1]]
    fits = [class_statistics.fits([x]).max(1).values.numpy() for x in (*tests, strange)]
    (space,) = class_statistics.spaces()

    def neighbours(k: int) -> float:
        near = [
            -torch.cdist(F.normalize(space(x)), F.normalize(space(bank))).kthvalue(k).values.numpy()
            for x in (*tests, strange)
        ]
        return auroc(np.concatenate(near[:-1]), near[-1])

    values = (
        float(np.mean(refused)),
        min(refused),
        float(np.median(refused)),
        max(refused),
        auroc(np.concatenate(scores[:-1]), scores[-1]),
        auroc(np.concatenate(fits[:-1]), fits[-1]),
        max(neighbours(k) for k in (1, 5, 10)),
    )
    return dict(zip(COLUMNS, values, strict=True))


def trained_row(seed: int) -> dict[str, float]:
    """Learn the recipe `digits` with three trained feature spaces, its images split by the seed; as `row`.

    Its unknown classes are those of the last two of five tasks, before they are learnt.
    """
    config = load_config("digits", [f"seed={seed}", f"data.seed={seed}"])
    data = prepare(config)
    tasks = data.stream.tasks
    tests = [task.test_images(data.test) for task in tasks]
    method = {"classifier": {"name": "statistics"}}
    with tempfile.TemporaryDirectory() as folder:
        for number, task in enumerate(tasks, 1):
            shown = task.train_images(data.train), task.train_labels, [*data.stream.classes]
            recipe = "digits" if number == 1 else None
            model = pearl.learn(Path(folder) / "model", shown, recipe=recipe, quiet=True, seed=seed, method=method)
            if number == 3:
                scores = [model.logits_and_scores(images)[1].numpy() for images in tests]
                found = auroc(np.concatenate(scores[:3]), np.concatenate(scores[3:]))
        least = model.threshold(0.05)
        refused = [100 * float((model.logits_and_scores(images)[1] < least).float().mean()) for images in tests]
    values = float(np.mean(refused)), min(refused), float(np.median(refused)), max(refused), found
    return dict(zip(COLUMNS, values, strict=False))


def write(rows: dict[str, list[dict[str, float]]]) -> None:
    """Write the rows of every seed, and a table."""
    (RESULTS / "unknown.json").write_text(json.dumps(rows, indent=1) + "\n")
    about = "`python benchmarks/unknown.py`; mean ± standard deviation over seeds, in percent."
    body = [[stream, *(cell((one.get(column) for one in of), 1) for column in COLUMNS)] for stream, of in rows.items()]
    write_page(RESULTS / "unknown.md", ["# Unknown classes", "", about, "", *table(["", *COLUMNS], body)])


if __name__ == "__main__":
    main(sys.argv[1:])
