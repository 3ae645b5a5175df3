"""Task inference: concatenated heads against class statistics, on the same trained runs.

    python benchmarks/telling_apart.py                         all streams, seeds 0, 1, 2; docs/results/telling_apart.md
    python benchmarks/telling_apart.py --streams digits --seeds 0

A run of PEARL is trained once per stream and seed; `refit` fits every other classifier, and a sub-network's features of
a batch are computed once for all of them. Rivals follow. Finished runs are skipped, so the command can be stopped and
started again. Data is looked for under $PEARL_DATA, runs lie under $PEARL_RUNS. Nothing was chosen on these streams'
test images: the constants of class statistics are from two other streams.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from pages import RESULTS, cell, table, write_page
from pearl.data.augment import View
from pearl.evaluation.evaluate import Ensemble
from pearl.evaluation.sureness import calibration_error, reliability
from pearl.lifecycle.refit import refit
from pearl.lifecycle.runs import Run, execute, prepare
from pearl.lifecycle.saved import load_method
from pearl.methods.common import subnetworks
from pearl.nn.intermediate_features import WithInner
from pearl.reports.progress import display
from pearl.settings.config import load_config
from real_images import METHODS

STREAMS = {
    "digits, 5 tasks of 2": ["digits"],
    "CIFAR, ResNet-18, 5 tasks of 4": ["cpu-cifar20-resnet18"],
    "CIFAR-100, DeiT-Tiny, 10 tasks of 10": ["cpu-cifar100-deit_tiny"],
    "CIFAR-100, DeiT-Tiny, 20 tasks of 5": ["cpu-cifar100-deit_tiny", "stream.tasks=20"],
    "Grocery, DeiT-Tiny, 9 tasks of 9": ["cpu-grocery-deit_tiny"],
    # all of it, once: a network of half the paper's width, rank 8, a third of the paper's epochs
    "all of CIFAR-100, ResNet-18, 5 tasks of 20": [
        *("cifar100-5t-resnet18", "backbone.width=32", "train.epochs=16", "train.schedule=cosine"),
        *("method.rank.name=fixed", "method.rank.r=8"),
    ],
}
LARGE = "all of CIFAR-100, ResNet-18, 5 tasks of 20"
CLASSIFIERS: dict[str, dict[str, Any] | None] = {
    "heads": None,
    "K = 1, final features": {"name": "statistics", "spaces": 1, "layers": "final"},
    "K = 1": {"name": "statistics", "spaces": 1},
    "K = 2": {"name": "statistics", "spaces": 2},
    "K = 3": {"name": "statistics", "spaces": 3},
    "K = 3, frozen covariance": {"name": "statistics", "spaces": 3, "covariance": "frozen"},
    "K = all": {"name": "statistics", "spaces": "all"},
}
# PEARL with other training, so each is a separate run; chosen on the two development streams.
COSINES = "K = 3, cosines, all linear layers"
TRAINED = {
    COSINES: [
        "method.classifier={name: statistics, spaces: 3, head: cosine}",
        *("method.targets=linear", "train.phases.adapt.lr=0.003"),
    ]
}
OF_CNNS = ("ncm", "fecam", "ranpac", "er_ace", "joint")
OF_VITS = (COSINES, "ncm", "fecam", "ranpac", "loranpac", "aper", "inflora", "coda_prompt")
TWO_PASSES = ("aper", "coda_prompt")  # of the original network, and of the adapted one
COLUMNS = {
    "class_il": "class-IL A_T",
    "average": "class-IL average",
    "task_il": "task-IL A_T",
    "calibration": "ECE",
    "auroc": "AUROC",
    "refused": "refused at 5 %",
    "passes": "passes",
    "kilobytes": "kept (kB)",
    "seconds": "training (s)",
}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", nargs="+", default=[*STREAMS], metavar="STREAM", help="by the start of its name")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="classifiers and rivals, by their names")
    options = parser.parse_args(arguments)
    file = RESULTS / "telling_apart.json"
    rows: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    chosen = [name for name in STREAMS if any(name.startswith(given) for given in options.streams)]
    pairs = [(stream, seed) for seed in options.seeds for stream in chosen if seed == 0 or stream != LARGE]
    subnetworks.WithInner = Remembering  # type: ignore[misc]
    for stream, seed in pairs:
        recipe, *rest = [*STREAMS[stream], f"seed={seed}"]
        trained = None
        for label, classifier in CLASSIFIERS.items():
            key = f"{stream} | {label} | {seed}"
            if key not in rows and (not options.only or label in options.only):
                trained = trained or execute(load_config(recipe, rest), show=display())
                rows[key] = row(trained if classifier is None else refit(trained.path, classifier))
                rows[key]["seconds"] = seconds(trained, rows[key]["passes"])
                write(file, rows)
        Remembering.known.clear()
    for stream, seed in pairs:
        recipe, *rest = [*STREAMS[stream], f"seed={seed}"]
        for rival in rivals(stream):
            key = f"{stream} | {rival} | {seed}"
            if key not in rows and (not options.only or rival in options.only):
                run = execute(load_config(recipe, [*rest, *(TRAINED | METHODS)[rival]]), show=display())
                rows[key] = row(run) | {"seconds": seconds(run)}
                rows[key]["passes"] = rows[key]["passes"] or 1 + (rival in TWO_PASSES)
                write(file, rows)


def rivals(stream: str) -> tuple[str, ...]:
    """Return the methods to compare with PEARL."""
    return () if stream == LARGE else OF_VITS if "DeiT" in stream else OF_CNNS


class Remembering(WithInner):
    """A sub-network whose features of a batch are computed once, for all classifiers."""

    known: ClassVar[dict[tuple[bytes, bytes], Tensor]] = {}

    def __init__(self, network: nn.Module, layers: Sequence[str]) -> None:
        super().__init__(network, layers)
        digest = hashlib.sha256(repr((layers, network)).encode())
        for tensor in network.state_dict().values():
            digest.update(_bytes(tensor))
        self._digest = digest.digest()

    def forward(self, x: Tensor) -> Tensor:
        """See `WithInner`."""
        batch = hashlib.sha256(_bytes(x) + bytes([torch.is_autocast_enabled("cpu")])).digest()
        if (self._digest, batch) not in self.known:
            self.known[self._digest, batch] = super().forward(x)
        return self.known[self._digest, batch]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def seconds(run: Run, tasks: int | None = None) -> float:
    """Return the training time of the first tasks, whose sub-networks are used; an upper bound, with other load."""
    return sum(sum(task["seconds"].values()) for task in run.manifests[:tasks])


@torch.no_grad()
def row(run: Run) -> dict[str, Any]:
    """Return the measurements of one run; accuracies in percent."""
    summary, data = run.summary, prepare(run.config)
    tasks = data.stream.tasks
    method = load_method(run.path, run.config)
    logits, labels = asked(run, data, method, range(len(tasks)))
    share = logits.softmax(1).numpy()
    diagram = reliability(share.max(1), share.argmax(1) == labels)
    results = {
        "class_il": summary["class_il.final"],
        "average": summary["class_il.average"],
        "task_il": summary["task_il.final"],
        "calibration": calibration_error(diagram),
        "passes": method.forward_passes() if hasattr(method, "sub_network") else None,
        "kilobytes": None if method.oracle else kept(method) / 1e3,
        "auroc": None,
        "run": run.path.name,
    }
    results["refused"] = None
    if (in_distribution_scores := in_distribution(run, data, method)) is not None:
        threshold = method.classifier.threshold(0.05)
        results["refused"] = 100 * float((np.concatenate(in_distribution_scores) < threshold).mean())
    half = len(tasks) // 2  # tasks that the model has learnt; classes of the others are unknown
    scores = in_distribution(run, data, load_method(run.path, run.config, half))
    if scores is not None:
        known = np.repeat([t < half for t in range(len(tasks))], [len(part) for part in scores])
        results["auroc"] = 100 * float(roc_auc_score(known, np.concatenate(scores)))
    return results


def kept(method: Any) -> int:
    """Return the bytes that a method stores of its tasks besides networks: statistics, or rehearsal images."""
    class_statistics = getattr(method, "class_statistics", None)
    if class_statistics is None and hasattr(method, "sub_network"):
        return 0
    named = (method if class_statistics is None else class_statistics).named_buffers()
    return sum(buffer.nbytes for name, buffer in named if not name.startswith(("backbone.", "network.")))


def in_distribution(run: Run, data: Any, method: Any) -> list[np.ndarray] | None:
    """Return in-distribution scores of the test images of each task, if the method has them."""
    scorer = Ensemble(method).scorer
    if scorer is None:
        return None
    view = View(run.config.images, channels_last=run.config.engine.channels_last)
    of_task = [torch.from_numpy(data.test[task.test]).split(256) for task in data.stream.tasks]
    return [np.concatenate([scorer(view.test(part))[1].numpy() for part in parts]) for parts in of_task]


def asked(run: Run, data: Any, method: Any, tasks: Sequence[int]) -> tuple[torch.Tensor, np.ndarray]:
    """Return logits (N, classes) of the tasks' test images, and their labels."""
    view = View(run.config.images, channels_last=run.config.engine.channels_last)
    ensemble, logits, labels = Ensemble(method), [], []
    for t in tasks:
        split = data.stream.tasks[t]
        images = torch.from_numpy(data.test[split.test])
        logits += [ensemble(view.test(part)).float() for part in images.split(256)]
        labels.append(split.test_labels)
    return torch.cat(logits), np.concatenate(labels)


def write(file: Path, rows: dict[str, Any]) -> None:
    """Write the rows, and a table per stream."""
    file.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    about = "`python benchmarks/telling_apart.py`; mean ± standard deviation over n seeds."
    lines = ["# Task inference", "", about]
    for stream in STREAMS:
        of_stream = [value for key, value in rows.items() if key.startswith(f"{stream} | ")]
        columns = [column for column in COLUMNS if any(one.get(column) is not None for one in of_stream)]
        body = []
        for label in (*CLASSIFIERS, *rivals(stream)):
            of = [value for key, value in sorted(rows.items()) if key.startswith(f"{stream} | {label} | ")]
            if of:
                exact = {column: column in ("passes", "kilobytes", "seconds") for column in columns}
                cells = [cell((one.get(c) for one in of), 1 - exact[c], spread=not exact[c]) for c in columns]
                body.append([label, str(len(of)), *cells])
        if body:
            lines += ["", f"## {stream}", "", *table(["", "n", *(COLUMNS[column] for column in columns)], body)]
    write_page(RESULTS / "telling_apart.md", lines)


if __name__ == "__main__":
    main(sys.argv[1:])
