"""Many runs at once, a process each: one that crashes, or is killed, takes no other with it. No torch.

A job is what `pearl run` is given. Where another differs from it in how tasks are told apart alone, it takes what that
one has trained (`pearl refit`). All there is to know of a job is in its run directory: whether it is done, who is at
work on it, and in events.jsonl how far it is. So the processes that work tell nothing to the one that started them,
several of those can meet at one run, and whoever is started again goes on.
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
from pearl.storage import files, locks
from pearl.storage.inside import remove_temporaries
from pearl.storage.locks import is_held
from pearl.storage.paths import find, runs_root
from pearl.sweeps.board import Board, Position, Status
from pearl.sweeps.executors import Executor, Process
from pearl.sweeps.workers import Place, executor_for
from pearl.training import launch

LOOK = 0.2  # seconds between two looks at the processes
LOOK_AT_LOCKS = 2.0  # the same, when all that is left is locked by others


@dataclass(frozen=True)
class Job:
    """One run: what `pearl run` is given. `name` is what it is called while it runs."""

    recipe: str
    overrides: tuple[str, ...] = ()
    smoke: bool = False
    name: str = field(default="", compare=False)

    @cached_property
    def config(self) -> RunConfig:
        """The configuration.

        Raises:
            ConfigError: with every problem of it.
        """
        return load_config(self.recipe, self.overrides, smoke=self.smoke)

    @property
    def run(self) -> Path:
        """The run directory, which its configuration names."""
        return runs_root() / self.config.id

    @property
    def title(self) -> str:
        """The name, or else recipe and overrides."""
        return self.name or " ".join([self.recipe, *self.overrides])

    @cached_property
    def source(self) -> Path | None:
        """The run whose sub-networks this one would train again, see `refit.source_of`."""
        from pearl.lifecycle.refit import source_of

        return source_of(self.config)

    @property
    def arguments(self) -> list[str]:
        """What follows `pearl` on the command line."""
        from pearl.lifecycle.refit import can_be_taken

        if self.source and can_be_taken(self.source):
            return ["refit", str(self.source), json.dumps(self.config.method["classifier"])]
        return ["run", self.recipe, *self.overrides, *["--smoke"] * self.smoke]


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    job: Job
    run: Path
    state: Literal["done", "failed", "skipped"]  # skipped: it was done already, or another process has done it
    error: str = ""  # one line, if it failed
    log: Path | None = None  # where all that it said is, if it was started
    seconds: float = 0.0


def failures(outcomes: Iterable[Outcome]) -> list[str]:
    """What to tell of those that failed, a line for each run and one at the end; nothing if none did."""
    failed = {outcome.run: outcome for outcome in outcomes if outcome.state == "failed"}.values()
    if not failed:
        return []
    logs = [f"; see {outcome.log}" if outcome.log else "" for outcome in failed]
    lines = [f"{outcome.job.title}: {outcome.error}{log}" for outcome, log in zip(failed, logs, strict=True)]
    return [*lines, f"{counted(len(failed), 'run')} failed; once mended, the same command runs them again"]


def run_jobs(
    jobs: Sequence[Job],
    *,
    workers: int | None = None,
    executor: Place = "local",
    device: str = "auto",
    per_gpu: int = 1,
    slurm: Mapping[str, Any] | None = None,
    folder: Path | None = None,
    manifest: Mapping[str, Any] | None = None,
    show: Board | None = None,
) -> list[Outcome]:
    """Run all jobs that are not done, `workers` at once, and say how each ended, in the order given.

    Jobs of the same configuration run once. One that fails is an `Outcome`, and the others go on. A run that another
    process is at work on is waited for, while others are run.

    Args:
        jobs: what to run.
        workers: how many at once; by default as many as the machine has room for (see `Local`), on SLURM all.
        executor: processes of this machine, or jobs of SLURM (`submitit-local`: the same without SLURM, to try it).
        device: auto, cpu or cuda.
        per_gpu: how many workers share a GPU, where `workers` is not given.
        slurm: options of sbatch, for `executor="slurm"`.
        folder: where the logs of the jobs are kept; by default in sweeps/ below the runs folder.
        manifest: what `folder`/sweep.json is to say beside the jobs; none is written if not given.
        show: is told how far all is.

    Raises:
        ConfigError: jobs that cannot be configured, every problem at once, or no such workers; nothing is started then.
        RunError: the folder cannot be written to.
        Interrupted: a signal to stop, such as Ctrl-C. All jobs have stored what they learnt, and the same call goes on.
    """
    check(jobs)
    folder = folder or runs_root() / "sweeps"
    unique: dict[Path, Job] = {}
    for job in jobs:
        unique.setdefault(job.run, job)
    place = executor_for(
        len(unique), folder, workers=workers, executor=executor, device=device, per_gpu=per_gpu, slurm=slurm
    )
    if manifest is not None:  # now that all is checked
        runs = [{"overrides": [*job.overrides], "run": job.run.name} for job in jobs]
        with suppress(Busy), locks.locked(folder):  # while another process holds it, that one writes the same
            remove_temporaries(folder)
            files.write_json(folder / "sweep.json", {"format": files.FORMAT, **manifest, "jobs": runs})
    options = ["--device", device] if device != "auto" else []
    board = show or Board()
    work = _Work(unique, place, folder / "logs", options, board)
    try:
        outcomes = work.go()
    finally:
        board.close()
    return [replace(outcomes[job.run], job=job) for job in jobs]


def check(jobs: Iterable[Job]) -> None:
    """See that all jobs can be configured, that their methods can learn on their networks, and their weights are there.

    Raises:
        ConfigError: a line for each problem, with the jobs that have it.
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


_BUILT: dict[str, tuple[str, ...]] = {}  # what was wrong, by method and network: a ViT takes most of a second


def _method_problems(config: RunConfig) -> tuple[str, ...]:
    """What is wrong with a method on its network, found by building both without memory for the weights."""
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
            pass  # a network that cannot be _BUILT so; the run will tell
    return _BUILT[key]


def _weight_problems(job: Job) -> tuple[str, ...]:
    """That a file of weights is not there, which a run needs when it begins."""
    weights, begun = job.config.backbone.get("weights"), (job.run / "reference" / files.MANIFEST).is_file()
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
    stored: list[str]  # what was stored of the run before
    position: Position
    began: float = field(default_factory=time.monotonic)


class _Work:
    """The jobs that wait, are at work, and have ended."""

    def __init__(
        self, jobs: Mapping[Path, Job], executor: Executor, logs: Path, options: Sequence[str], board: Board
    ) -> None:
        self.jobs, self.executor, self.logs, self.options, self.board = jobs, executor, logs, options, board
        self.waiting: list[Path] = []
        self.running: dict[int, _Running] = {}  # by worker
        self.outcomes: dict[Path, Outcome] = {}
        self.look_at_locks = 0.0  # when to
        self.asked: list[int] = []  # signals to stop, and of these
        self.told = 0  # so many have been passed on
        tasks = {run: job.config.stream.tasks for run, job in jobs.items()}
        self.status = Status({run: n if isinstance(n, int) else len(n) for run, n in tasks.items()})

    def go(self) -> dict[Path, Outcome]:
        for run in self.jobs:
            if not self._ended_already(run):
                self.waiting.append(run)
        self.status.begin({run: len(files.finished(run)) for run in self.waiting})
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
            finally:  # they store what they have learnt, whatever went wrong here
                self._stop()
        left = len(self.jobs) - len(self.outcomes)
        if left:
            raise Interrupted(
                f"interrupted; not done: {left} of {counted(len(self.jobs), 'run')}; what they have learnt is stored, "
                f"and the same command goes on"
            )
        return self.outcomes

    def _on_signal(self, number: int, _: object) -> None:
        """Note it. Jobs are told again, and then do not wait, if a person asks a second time; see `Stop`."""
        person = number in launch.OF_PERSONS
        if not self.asked or (person and not {*launch.OF_PERSONS}.isdisjoint(self.asked)):
            self.asked.append(number)

    def _stop(self) -> None:
        self.told = len(self.asked)
        if self.running:
            self.board.say(f"stopping: storing what was learnt by {counted(len(self.running), 'run')}")
        for one in self.running.values():
            one.process.stop()

    def _ended_already(self, run: Path) -> bool:
        """Whether there is nothing to do: it is done, or damaged."""
        try:
            if files.done(run):
                self._end(Outcome(self.jobs[run], run, "skipped"))
        except RunError as error:
            self._end(Outcome(self.jobs[run], run, "failed", one_line(str(error).splitlines())))
        return run in self.outcomes

    def _collect(self) -> None:
        """See who has ended."""
        for worker, one in [*self.running.items()]:
            code = one.process.poll()
            if code is None:
                continue
            del self.running[worker]
            run, seconds = one.job.run, time.monotonic() - one.began
            if code == launch.BUSY:
                self.waiting.append(run)
                continue
            with suppress(RunError):  # that its results are damaged it has said itself
                if files.done(run):
                    self._end(Outcome(one.job, run, "done", "", one.log, seconds))
                    continue
            progress = self.executor.again and code == launch.INTERRUPTED and stored(run) != one.stored
            if self.asked or progress:  # it has stored and stopped
                self.waiting.append(run)
                continue
            with one.log.open("rb") as file:
                file.seek(one.said)
                said = file.read().decode(errors="replace")
            self._end(Outcome(one.job, run, "failed", reason(code, said), one.log, seconds))

    def _start(self) -> None:
        """Give those who are free the next runs that nobody is at work on."""
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
                self._end(Outcome(job, run, "failed", one_line(str(error).splitlines())))
                free.append(worker)
                continue
            self.running[worker] = _Running(job, process, log, said, stored(run), Position(run / "events.jsonl"))
        self.look_at_locks = time.monotonic() + LOOK_AT_LOCKS

    def _end(self, outcome: Outcome) -> None:
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
    """Whether a process is at work on a run; asked without making its directory."""
    with suppress(OSError):  # whoever starts it will be told why it cannot be locked
        return is_held(run)
    return False


def stored(run: Path) -> list[str]:
    """What is stored of a run: finished tasks, and moments of the next."""
    return sorted(path.name for folder in ("tasks", "resume") for path in (run / folder).glob("*"))


def reason(code: int | str, said: str) -> str:
    """Why a job failed, in a line: its exit code, or why it has none, and its last words."""
    if isinstance(code, str):
        return code
    if code < 0:
        memory = "; perhaps memory was short: use fewer workers" * (code == -signal.SIGKILL)
        return f"ended by signal {-code} ({signal.strsignal(-code)}){memory}"
    if code == 0:
        return "ended well, but the run is not done; was its directory moved?"
    lines = [line for line in said.splitlines() if line.strip()]
    own = [line.removeprefix("pearl: ") for line in lines if line.startswith("pearl: ")]
    return one_line(own or lines[-1:] or [f"exit code {code} without a word"])


def one_line(lines: Sequence[str]) -> str:
    """The first of several lines, and how many more there are."""
    more = f" (and {counted(len(lines) - 1, 'more line')})" if len(lines) > 1 else ""
    return f"{lines[0]}{more}"
