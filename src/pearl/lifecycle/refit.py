"""Another classifier for a finished run: class statistics computed in its frozen sub-networks.

Nothing is trained. The result is the run of the other configuration, bit by bit: sub-networks do not depend on the
classifier, and statistics do not depend on when they are computed.
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pearl.data.batches import Task
from pearl.errors import ConfigError, RunError, counted
from pearl.lifecycle.runs import Run, execute
from pearl.lifecycle.saved import read_config
from pearl.methods.base import Method
from pearl.methods.common.subnetworks import SubNetworks
from pearl.settings.config import RunConfig, check_config
from pearl.storage.checkpoint import WEIGHTS, read_files
from pearl.storage.paths import runs_root
from pearl.storage.run_directory import RunDirectory
from pearl.storage.schemas import WeightFile
from pearl.storage.stored_task import read_manifest
from pearl.training.engine import Engine, Observer
from pearl.training.resume import Resume


def refit(
    source: Path,
    classifier: Mapping[str, Any] | str = "statistics",
    *,
    device: str = "auto",
    show: Observer | None = None,
) -> Run:
    """Create the run of `source` with another classifier: a name, or `{"name": "statistics", "spaces": 2}`.

    Raises:
        RunError: `source` is not a run, or has unfinished tasks.
        ConfigError: its method has no sub-networks, or the classifier's options are invalid.
    """
    if not isinstance(read_config(source), RunConfig):
        raise RunError(f"{source}: a model, which stores no images; give images of its classes with --data")
    run = Run.open(source)
    if not run.done:
        raise RunError(f"{source}: has unfinished tasks; finish it with: pearl resume {source}")
    config = refitted(run.config, classifier)
    precision = run.directory.environment["precision"]
    return execute(config, device=device, show=show, engine=partial(LoadingEngine, run), precision=precision)


def run_or_refit(config: RunConfig, *, show: Observer | None = None, minutes: float = 10.0) -> Run:
    """Run `execute`, or `refit` a run here with the same sub-networks."""
    source = source_of(config)
    if source and can_be_taken(source):
        return refit(source, config.method["classifier"], show=show)
    return execute(config, show=show, minutes=minutes)


def source_of(config: RunConfig) -> Path | None:
    """Return the path of the run that trains the same sub-networks with heads, whether it exists or not.

    It is found by configuration, whatever version trained it. None if this configuration trains sub-networks that
    differ from those with heads, or must train its own (`engine.reuse`).
    """
    classifier = config.method.get("classifier")
    if not isinstance(classifier, Mapping) or classifier["name"] == "heads" or not config.engine.reuse:
        return None
    with suppress(ConfigError):
        return runs_root() / refitted(config, "heads").id
    return None


def can_be_taken(run: Path) -> bool:
    """Return True if a run is finished and has its tensors; some are stored without them."""
    with suppress(RunError):
        directory = RunDirectory(run)
        parts = (directory.reference, *directory.finished)
        return directory.is_done and all((part / WEIGHTS).is_file() for part in parts)
    return False


def refitted(config: RunConfig, classifier: Mapping[str, Any] | str) -> RunConfig:
    """Return a run's configuration with another classifier and the same sub-networks.

    Raises:
        ConfigError: see `refit`.
    """
    if "classifier" not in config.method:
        raise ConfigError(f"method={config.method['name']} has no sub-networks for another classifier")
    before = config.method["classifier"]
    spec = {"name": classifier} if isinstance(classifier, str) else dict(classifier)
    if spec.get("name") == "statistics":
        same = {key: before[key] for key in ("spaces", "train")} if _trained(before) != "all" else {"train": "all"}
        spec = {"head": _head(before), **same, **spec}
    raw = config.model_dump(mode="json")
    changed = check_config({**raw, "method": {**raw["method"], "classifier": spec}}, RunConfig)
    if (head := _head(changed.method["classifier"])) != _head(before):
        raise ConfigError(
            f"classifier: needs sub-networks trained with a {head} head, this run has a {_head(before)} one; run "
            f"its recipe with this classifier instead"
        )
    if (other := _trained(changed.method["classifier"])) != _trained(before):
        raise ConfigError(
            f"classifier: with it the sub-networks of {_tasks(other)} would have been trained, this run has those of "
            f"{_tasks(_trained(before))}; run its recipe with this classifier instead"
        )
    return changed


def _trained(classifier: Mapping[str, Any]) -> int | Literal["all"]:
    """Return how many tasks get a sub-network with a classifier."""
    return classifier["spaces"] if classifier.get("train") == "spaces" else "all"


def _head(classifier: Mapping[str, Any]) -> str:
    """Return the head that sub-networks are trained with under a classifier; old configurations have no entry."""
    return classifier.get("head", "linear")


def _tasks(trained: int | Literal["all"]) -> str:
    return "all tasks" if trained == "all" else counted(trained, "task")


class LoadingEngine(Engine):
    """Trains nothing: a task's tensors come from a run that has learnt it, with its training time in seconds."""

    def __init__(self, source: Run, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parts = [source.directory.reference, *source.directory.finished]
        self.seconds = [manifest["seconds"] for manifest in source.manifests]

    def learn(self, method: Method, task: Task, resume: Resume | None = None) -> dict[str, float]:
        """Load a task's tensors; then compute the classifier's statistics of its images."""
        if not isinstance(method, SubNetworks):
            raise ConfigError(f"{type(method).__name__} has no sub-networks for another classifier")
        resume = resume or Resume()
        resume.begin(method, task.id)
        state = dict(method.state_dict())
        for folder in self.parts[0 if task.id == 0 else task.id + 1 : task.id + 2]:
            weights = read_files(folder, read_manifest(folder, WeightFile), {WEIGHTS})
            state |= {name: value for name, value in weights.items() if not name.startswith("class_statistics.")}
        method.load_state_dict(state, strict=True)
        self.to_device(method).requires_grad_(False)
        method.classifier.fit(task)
        task.close()
        method.eval()
        self.reused = [*self.seconds[task.id]]
        return self.seconds[task.id]
