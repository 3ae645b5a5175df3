"""Curves of runs for TensorBoard, from the same files as the report. Needs the extra `tensorboard`."""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from pearl.errors import ReportError
from pearl.evaluation import metrics
from pearl.reports.records import SCENARIOS, Record, read_all


def write(runs: Sequence[str | Path], folder: Path) -> Path:
    """Write a folder per run into `folder`: loss and learning rate per epoch, accuracy per stage, ranks per task.

    Raises:
        RunError: a run is unreadable.
        ReportError: TensorBoard is not installed, or the folder cannot be written or holds these runs already.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ReportError("TensorBoard is not installed; install it with: pip install 'pearl[tensorboard]'") from None
    records = read_all(runs)
    folders = [folder / record.name for record in records]
    for target in folders:
        if target.exists():  # TensorBoard would draw both, one over the other
            raise ReportError(f"{target}: exists; move it away, or choose another folder")
    try:
        for record, target in zip(records, folders, strict=True):
            with SummaryWriter(str(target)) as writer:
                _scalars(record, writer)
    except OSError as error:
        raise ReportError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from None
    return folder


def _scalars(record: Record, writer: Any) -> None:
    seen: Counter[str] = Counter()
    for epoch in record.epochs:
        phase, when = epoch["phase"], datetime.fromisoformat(epoch["time"]).timestamp()
        seen[phase] += 1  # all tasks in sequence, as in the report
        writer.add_scalar(f"loss/{phase}", epoch["loss"], seen[phase], walltime=when)
        writer.add_scalar(f"lr/{phase}", epoch["lr"], seen[phase], walltime=when)
    if record.counts:
        for scenario in SCENARIOS:
            accuracy = metrics.stage_accuracy(metrics.accuracy_matrix(record.counts, scenario))
            for stage, value in enumerate(accuracy.tolist(), start=1):
                writer.add_scalar(f"mean_accuracy_percent/{scenario}", value, stage)
    for stage, size in enumerate(record.parameters, start=1):
        writer.add_scalar("parameters", size, stage)
    for task, layers in enumerate(record.layers, start=1):
        for name, layer in layers.items():
            writer.add_scalar(f"rank/{name}", layer["rank"], task)
            writer.add_scalar(f"threshold/{name}", layer["threshold"], task)
        if layers:
            writer.add_histogram("ranks", np.array([layer["rank"] for layer in layers.values()]), task)
