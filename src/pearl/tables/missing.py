"""Missing runs of a table: start them in parallel, and measure inference time on finished ones."""

import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pearl.errors import PearlError, RunError
from pearl.storage.paths import runs_root
from pearl.storage.run_directory import RunDirectory
from pearl.sweeps.jobs import Job, JobResult, one_line, run_jobs
from pearl.sweeps.live_status import LiveStatus
from pearl.tables.values import Filled

IMAGES = 32  # images per batch
PASSES = 5


def run_missing(
    filled: Filled,
    *,
    workers: int | None = None,
    device: str = "auto",
    per_gpu: int = 1,
    show: LiveStatus | None = None,
) -> list[JobResult]:
    """Run missing runs of cells, and return their outcomes. The same call resumes an interrupted one.

    Raises:
        ConfigError: invalid runs; none is started then.
        Interrupted: a stop signal, such as Ctrl-C.
    """
    jobs = [
        Job(one.request.recipe, one.request.overrides(one.seed), one.request.smoke, one.path.name)
        for one in filled.missing
    ]
    folder = runs_root() / "tables"  # for logs
    outcomes = run_jobs(jobs, workers=workers, device=device, per_gpu=per_gpu, folder=folder, show=show) if jobs else []
    for job in _unmeasured(filled, jobs):
        try:
            measure(job.run, device=device)
        except PearlError as error:
            outcomes.append(JobResult(job, job.run, "failed", one_line(str(error).splitlines())))
    return outcomes


def _unmeasured(filled: Filled, jobs: Sequence[Job]) -> list[Job]:
    """Return the finished runs whose inference time is needed and not measured."""
    timed = {column.id for column in filled.columns if column.metric == "inference_ms"}
    runs = {one.path for (_, id), cell in filled.cells.items() if id in timed for one in cell.missing}
    unmeasured = []
    for job in jobs:
        with suppress(RunError):  # damaged ones have failed before
            directory = RunDirectory(job.run)
            if job.run in runs and directory.is_done and not directory.inference_file.exists():
                unmeasured.append(job)
    return unmeasured


def measure(run: Path, *, device: str = "auto") -> float:
    """Measure milliseconds per image in class-IL: the median of several passes of a batch. Store it in the run.

    Raises:
        PearlError: the run cannot be opened, or its directory is not writable.
    """
    import numpy as np
    import torch

    from pearl.lifecycle.model import StoredModel

    model = StoredModel.open(run, device=device)
    side = model.config.images.stored
    pixels = np.random.default_rng(0).integers(0, 256, (IMAGES, side, side, 3), dtype=np.uint8)
    model.logits(pixels)  # creates the cached objects
    passes = []
    for _ in range(PASSES):
        started = time.perf_counter()
        model.logits(pixels).cpu()  # synchronises with the GPU
        passes.append(1000 * (time.perf_counter() - started) / IMAGES)
    facts = {"images": IMAGES, "passes": PASSES, "device": str(model.method.device), "threads": torch.get_num_threads()}
    milliseconds = statistics.median(passes)
    directory = RunDirectory(run)
    directory.write(directory.inference_file, {"milliseconds": milliseconds, **facts})
    return milliseconds
