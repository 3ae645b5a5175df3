"""Many runs in parallel, each in its own process, so that a crash affects one run only. No torch.

A job has the arguments of `pearl run`. If two jobs differ only in the classifier, one uses the sub-networks of the
other (`pearl refit`). The state of a job is in its run directory: whether it is done, which process works on it, and in
events.jsonl its progress. Worker processes therefore need not report to their parent, several parents may share a run,
and a restarted parent continues.
"""

import json
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pearl.errors import Busy, ConfigError, Interrupted, PearlError, RunError, WeightsError, counted
from pearl.settings.config import RunConfig, load_config
from pearl.storage import locks
from pearl.storage.files import FORMAT, write_json
from pearl.storage.inside import remove_temporaries
from pearl.storage.locks import is_held
from pearl.storage.paths import find, runs_root
from pearl.storage.run_directory import RunDirectory
from pearl.sweeps.executors import Executor, Process
from pearl.sweeps.live_status import LiveStatus, Position, Status
from pearl.sweeps.workers import ExecutorName, executor_for
from pearl.training import launch

LOOK = 0.2  # seconds between two polls of the processes
LOOK_AT_LOCKS = 2.0  # the same, if all remaining runs are locked by others


@dataclass(frozen=True)
class Job:
    """A run, as arguments of `pearl run`. `name` is its title during the sweep."""

    recipe: str
    overrides: tuple[str, ...] = ()
    smoke: bool = False
    name: str = field(default="", compare=False)

    @cached_property
    def config(self) -> RunConfig:
        """Return the configuration.

        Raises:
            ConfigError: lists every problem.
        """
        return load_config(self.recipe, self.overrides, smoke=self.smoke)

    @property
    def run(self) -> Path:
        """Return the run directory, whose name follows from the configuration."""
        return runs_root() / self.config.id

    @property
    def title(self) -> str:
        """Return the name, or recipe and overrides."""
        return self.name or " ".join([self.recipe, *self.overrides])

    @cached_property
    def source(self) -> Path | None:
        """Return the run with the same sub-networks that this one would train again, see `refit.source_of`."""
        from pearl.lifecycle.refit import source_of

        return source_of(self.config)

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of `pearl`."""
        from pearl.lifecycle.refit import can_be_taken

        if self.source and can_be_taken(self.source):
            return ["refit", str(self.source), json.dumps(self.config.method["classifier"])]
        return ["run", self.recipe, *self.overrides, *["--smoke"] * self.smoke]


@dataclass(frozen=True)
class JobResult:
    """The result of a job."""

    job: Job
    run: Path
    state: Literal["done", "failed", "skipped"]  # skipped: it was done before, or another process finished it
    error: str = ""  # one line, if it failed
    log: Path | None = None  # the log with its output, if it was started
    seconds: float = 0.0


def failures(outcomes: Iterable[JobResult]) -> list[str]:
    """Return a message for failed jobs, a line for each and one at the end; empty if none failed."""
    failed = {outcome.run: outcome for outcome in outcomes if outcome.state == "failed"}.values()
    if not failed:
        return []
    logs = [f"; see {outcome.log}" if outcome.log else "" for outcome in failed]
    lines = [f"{outcome.job.title}: {outcome.error}{log}" for outcome, log in zip(failed, logs, strict=True)]
    return [*lines, f"{counted(len(failed), 'run')} failed; fix the errors and run the same command again"]


def run_jobs(
    jobs: Sequence[Job],
    *,
    workers: int | None = None,
    executor: ExecutorName = "local",
    device: str = "auto",
    per_gpu: int = 1,
    slurm: Mapping[str, Any] | None = None,
    folder: Path | None = None,
    manifest: Mapping[str, Any] | None = None,
    show: LiveStatus | None = None,
) -> list[JobResult]:
    """Run all unfinished jobs, `workers` in parallel, and return their outcomes in the given order.

    Jobs of the same configuration run once. A failed job is an `JobResult`; the others continue. While another process
    works on a run, other runs go first.

    Args:
        jobs: jobs to run.
        workers: parallel jobs; by default as many as the machine supports (see `Local`), on SLURM all.
        executor: processes of this machine, or jobs of SLURM (`submitit-local`: the same without SLURM, for tests).
        device: auto, cpu or cuda.
        per_gpu: workers per GPU, if `workers` is not given.
        slurm: options of sbatch, for `executor="slurm"`.
        folder: folder of the jobs' logs; by default in sweeps/ below the runs folder.
        manifest: entries of `folder`/sweep.json in addition to the jobs; not written if None.
        show: receives progress.

    Raises:
        ConfigError: invalid jobs, with every problem, or invalid workers; no job is started then.
        RunError: the folder cannot be written to.
        Interrupted: a stop signal, such as Ctrl-C. All jobs have stored their state, and the same call resumes them.
    """
    check(jobs)
    folder = folder or runs_root() / "sweeps"
    unique: dict[Path, Job] = {}
    for job in jobs:
        unique.setdefault(job.run, job)
    runner = executor_for(
        len(unique), folder, workers=workers, executor=executor, device=device, per_gpu=per_gpu, slurm=slurm
    )
    if manifest is not None:  # after all checks
        runs = [{"overrides": [*job.overrides], "run": job.run.name} for job in jobs]
        with suppress(Busy), locks.locked(folder):  # another process that holds it writes the same
            remove_temporaries(folder)
            write_json(folder / "sweep.json", {"format": FORMAT, **manifest, "jobs": runs})
    options = ["--device", device] if device != "auto" else []
    board = show or LiveStatus()
    work = _Queue(unique, runner, folder / "logs", options, board)
    try:
        outcomes = work.go()
    finally:
        board.close()
    return [replace(outcomes[job.run], job=job) for job in jobs]


def check(jobs: Iterable[Job]) -> None:
    """Check the jobs' configurations, that methods support their networks, and that weights exist.

    Raises:
        ConfigError: has a line per problem, with its jobs.
    """
    jobs = list(jobs)
    having: dict[str, list[Job]] = {}
    for job in jobs:
        try:
            problems = (*_method_problems(job.config), *_weight_problems(job))
        except ConfigError as error:
            problems = error.problems
        for problem in problems:
            having.setdefault(problem, []).append(job)
    lines = []
    for problem, those in having.items():
        more = f" and {len(those) - 1} more" if len(those) > 1 else ""
        lines.append(problem if len(those) == len(jobs) else f"{problem} (in {those[0].title}{more})")
    if lines:
        raise ConfigError(*lines)


_BUILT: dict[str, tuple[str, ...]] = {}  # problems by method and network: a ViT takes almost a second


def _method_problems(config: RunConfig) -> tuple[str, ...]:
    """Return a method's problems with its network, found by building both without memory for the weights."""
    import torch

    from pearl.lifecycle.saved import build_method

    key = repr((config.method, config.backbone, config.images.size))
    if key not in _BUILT:
        _BUILT[key] = ()
        try:
            with torch.device("meta"):
                build_method(config, structure_only=True)
        except PearlError as error:
            _BUILT[key] = (f"method {config.method['name']} on {config.backbone['name']}: {error}",)
        except (NotImplementedError, RuntimeError):
            pass  # a network that cannot be built this way; the run will report problems
    return _BUILT[key]


def _weight_problems(job: Job) -> tuple[str, ...]:
    """Yield missing weight files that runs need at their start."""
    weights, begun = job.config.backbone.get("weights"), RunDirectory(job.run).reference_manifest.is_file()
    try:
        if weights and not begun and not job.smoke:
            find(str(weights), what="weights", error=WeightsError)
    except WeightsError as error:
        return (str(error),)
    return ()


@dataclass
class _Running:
    job: Job
    process: Process
    log: Path
    said: int  # size of the log before
    stored: list[str]  # stored state of the run before
    position: Position
    began: float = field(default_factory=time.monotonic)


class _Queue:
    """Waiting, running and ended jobs."""

    def __init__(
        self, jobs: Mapping[Path, Job], executor: Executor, logs: Path, options: Sequence[str], board: LiveStatus
    ) -> None:
        self.jobs, self.executor, self.logs, self.options, self.board = jobs, executor, logs, options, board
        self.waiting: list[Path] = []
        self.running: dict[int, _Running] = {}  # by worker
        self.outcomes: dict[Path, JobResult] = {}
        self.look_at_locks = 0.0  # time of the next attempt
        self.asked: list[int] = []  # stop signals received,
        self.told = 0  # and forwarded
        tasks = {run: job.config.stream.tasks for run, job in jobs.items()}
        self.status = Status({run: n if isinstance(n, int) else len(n) for run, n in tasks.items()})

    def go(self) -> dict[Path, JobResult]:
        for run in self.jobs:
            if not self._ended_already(run):
                self.waiting.append(run)
        self.status.begin({run: len(RunDirectory(run).finished) for run in self.waiting})
        with launch.handled(self._on_signal):
            try:
                while self.running or (self.waiting and not self.asked):
                    self._collect()
                    if not self.asked:
                        self._start()
                    elif self.told < len(self.asked):
                        self._stop()
                    self._show()
                    if self.running or self.waiting:
                        time.sleep(LOOK)
            finally:  # they store their state, whatever failed here
                self._stop()
        left = len(self.jobs) - len(self.outcomes)
        if left:
            raise Interrupted(
                f"interrupted; not done: {left} of {counted(len(self.jobs), 'run')}; their state is stored; run the "
                f"same command to continue"
            )
        return self.outcomes

    def _on_signal(self, number: int, _: object) -> None:
        """Record a signal. A second one from a user makes jobs stop without waiting; see `Stop`."""
        person = number in launch.OF_PERSONS
        if not self.asked or (person and not {*launch.OF_PERSONS}.isdisjoint(self.asked)):
            self.asked.append(number)

    def _stop(self) -> None:
        self.told = len(self.asked)
        if self.running:
            self.board.say(f"stopping: storing the state of {counted(len(self.running), 'run')}")
        for one in self.running.values():
            one.process.stop()

    def _ended_already(self, run: Path) -> bool:
        """Return True if there is nothing to run: the run is done, or damaged."""
        try:
            if RunDirectory(run).is_done:
                self._end(JobResult(self.jobs[run], run, "skipped"))
        except RunError as error:
            self._end(JobResult(self.jobs[run], run, "failed", one_line(str(error).splitlines())))
        return run in self.outcomes

    def _collect(self) -> None:
        """Collect ended jobs."""
        for worker, one in [*self.running.items()]:
            code = one.process.poll()
            if code is None:
                continue
            del self.running[worker]
            run, seconds = one.job.run, time.monotonic() - one.began
            if code == launch.BUSY:
                self.waiting.append(run)
                continue
            with suppress(RunError):  # it has reported the damage itself
                if RunDirectory(run).is_done:
                    self._end(JobResult(one.job, run, "done", "", one.log, seconds))
                    continue
            progress = self.executor.again and code == launch.INTERRUPTED and stored(run) != one.stored
            if self.asked or progress:  # it has stored its state and stopped
                self.waiting.append(run)
                continue
            with one.log.open("rb") as file:
                file.seek(one.said)
                said = file.read().decode(errors="replace")
            self._end(JobResult(one.job, run, "failed", reason(code, said), one.log, seconds))

    def _start(self) -> None:
        """Start the next runs that are not locked, on free workers."""
        free = [worker for worker in range(self.executor.workers) if worker not in self.running]
        if not free or time.monotonic() < self.look_at_locks:
            return
        for run in [*self.waiting]:
            if not free:
                return
            source = self.jobs[run].source
            if locked(run) or (source in self.jobs and source not in self.outcomes):
                continue
            self.waiting.remove(run)
            if self._ended_already(run):
                continue
            job, worker = self.jobs[run], free.pop(0)
            log = self.logs / f"{run.name}.log"
            try:
                log.parent.mkdir(parents=True, exist_ok=True)
                said = log.stat().st_size if log.exists() else 0
                process = self.executor.start(worker, [*job.arguments, *self.options], log)
            except (OSError, RunError) as error:
                self._end(JobResult(job, run, "failed", one_line(str(error).splitlines())))
                free.append(worker)
                continue
            position = Position(RunDirectory(run).events_file)
            self.running[worker] = _Running(job, process, log, said, stored(run), position)
        self.look_at_locks = time.monotonic() + LOOK_AT_LOCKS

    def _end(self, outcome: JobResult) -> None:
        self.outcomes[outcome.run] = outcome
        self.status.ended(outcome.run, outcome.state)
        if outcome.state == "done":
            self.board.say(f"done: {outcome.job.title}, {outcome.seconds:.0f} s")
        elif outcome.state == "failed":
            self.board.say(f"failed: {outcome.job.title}: {outcome.error}")

    def _show(self) -> None:
        for one in self.running.values():
            one.position.read()
        self.status.running = [
            (one.job.title, one.position, time.monotonic() - one.began) for one in self.running.values()
        ]
        self.board.update(self.status)


def locked(run: Path) -> bool:
    """Return True if a process works on a run; does not create its directory."""
    with suppress(OSError):  # starting the run will report why it cannot be locked
        return is_held(run)
    return False


def stored(run: Path) -> list[str]:
    """Return the stored state of a run: finished tasks, and checkpoints of the next."""
    directory = RunDirectory(run)
    return sorted(
        path.name for folder in (directory.tasks_folder, directory.resume_folder) for path in folder.glob("*")
    )


def reason(code: int | str, said: str) -> str:
    """Return one line about a failed job: its exit code, or why it has none, and its last output."""
    if isinstance(code, str):
        return code
    if code < 0:
        memory = "; possibly out of memory: use fewer workers" * (code == -signal.SIGKILL)
        return f"ended by signal {-code} ({signal.strsignal(-code)}){memory}"
    if code == 0:
        return "exited normally, but the run is not done; was its directory moved?"
    lines = [line for line in said.splitlines() if line.strip()]
    messages = [line.removeprefix("pearl: ") for line in lines if line.startswith("pearl: ")]
    return one_line(messages or lines[-1:] or [f"exit code {code} without output"])


def one_line(lines: Sequence[str]) -> str:
    """Return the first of several lines, and the number of others."""
    more = f" (and {counted(len(lines) - 1, 'more line')})" if len(lines) > 1 else ""
    return f"{lines[0]}{more}"
