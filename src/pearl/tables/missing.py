"""Runs that a table waits for: run them, several at once, and measure what is measured on a finished run."""

import statistics
import time
from pathlib import Path

from pearl import files
from pearl.board import Board
from pearl.files import FORMAT, write_json
from pearl.jobs import Job, Outcome, run_jobs
from pearl.paths import runs_root
from pearl.tables.values import INFERENCE, Filled

IMAGES = 32  # at a time
PASSES = 5


def run_missing(
    filled: Filled, *, workers: int | None = None, device: str = "auto", per_gpu: int = 1, show: Board | None = None
) -> list[Outcome]:
    """Run what cells wait for, and say how each ended. The same call goes on where one was stopped.

    Raises:
        ConfigError: runs that cannot be configured; nothing is started then.
        Interrupted: Ctrl-C or SIGTERM.
    """
    jobs = [
        Job(one.request.recipe, one.request.overrides(one.seed), one.request.smoke, one.path.name)
        for one in filled.missing
    ]
    folder = runs_root() / "tables"  # for logs
    outcomes = run_jobs(jobs, workers=workers, device=device, per_gpu=per_gpu, folder=folder, show=show) if jobs else []
    for run in _unmeasured(filled):
        measure(run, device=device)
    return outcomes


def _unmeasured(filled: Filled) -> list[Path]:
    """Finished runs whose time of answering is asked for, and not known."""
    timed = {column.id for column in filled.columns if column.metric == "inference_ms"}
    runs = {one.path: None for (_, id), cell in filled.cells.items() if id in timed for one in cell.missing}
    return [run for run in runs if files.done(run) and not (run / INFERENCE).exists()]


def measure(run: Path, *, device: str = "auto") -> float:
    """Milliseconds per image in class-IL: the median of several passes of a batch. Written into the run.

    Raises:
        PearlError: the run cannot be opened, or its directory not written to.
    """
    import numpy as np
    import torch

    from pearl.model import Model

    model = Model.open(run, device=device)
    side = model.config.images.stored
    pixels = np.random.default_rng(0).integers(0, 256, (IMAGES, side, side, 3), dtype=np.uint8)
    model.logits(pixels)  # makes what is kept from one question to the next
    passes = []
    for _ in range(PASSES):
        started = time.perf_counter()
        model.logits(pixels).cpu()  # waits for a GPU
        passes.append(1000 * (time.perf_counter() - started) / IMAGES)
    facts = {"images": IMAGES, "passes": PASSES, "device": str(model.method.device), "threads": torch.get_num_threads()}
    milliseconds = statistics.median(passes)
    write_json(run / INFERENCE, {"format": FORMAT, "milliseconds": milliseconds, **facts})
    return milliseconds
