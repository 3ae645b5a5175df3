"""Another classifier for what a run has learnt: statistics are gathered anew in its frozen sub-networks.

Nothing is trained. The result is the run of the other configuration, bit by bit: sub-networks do not depend on how the
tasks are told apart, and statistics not on when they were gathered.
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
from pearl.storage.files import MANIFEST, done, finished, read_json
from pearl.storage.paths import runs_root
from pearl.storage.shapes import Part
from pearl.training.engine import Engine, Observer
from pearl.training.replay import Replay


def refit(
    source: Path,
    classifier: Mapping[str, Any] | str = "chain",
    *,
    device: str = "auto",
    show: Observer | None = None,
) -> Run:
    """The run that `source` would have been with this classifier; `{"name": "chain", "spaces": 2}`, or a name.

    Raises:
        RunError: `source` is no run, or has tasks left to learn.
        ConfigError: its method keeps no sub-networks, or the classifier has options that are wrong.
    """
    if not isinstance(read_config(source), RunConfig):
        raise RunError(f"{source}: a model, whose images nobody kept; give images of its classes with --data")
    run = Run.open(source)
    if not run.done:
        raise RunError(f"{source}: has tasks left to learn; finish it with: pearl resume {source}")
    config = refitted(run.config, classifier)
    precision = read_json(run.path / "environment.json")["precision"]
    return execute(config, device=device, show=show, engine=partial(Taken, run), precision=precision)


def run_or_refit(config: RunConfig, *, show: Observer | None = None, minutes: float = 10.0) -> Run:
    """`execute`, or where another run here has trained the same sub-networks, `refit` of that."""
    source = source_of(config)
    if source and can_be_taken(source):
        return refit(source, config.method["classifier"], show=show)
    return execute(config, show=show, minutes=minutes)


def source_of(config: RunConfig) -> Path | None:
    """Where the run is, or would be, that trains the same sub-networks with heads.

    By configuration alone, whatever version trained it: it stands beside this one, which is to differ by nothing else.
    None if a run of this configuration trains sub-networks that heads would not have, or is to train its own
    (`engine.reuse`).
    """
    classifier = config.method.get("classifier")
    if not isinstance(classifier, Mapping) or classifier["name"] == "heads" or not config.engine.reuse:
        return None
    with suppress(ConfigError):
        return runs_root() / refitted(config, "heads").id
    return None


def can_be_taken(run: Path) -> bool:
    """Return True if a run is finished and has its tensors; of some no more is kept than what they said."""
    with suppress(RunError):
        return done(run) and all((part / WEIGHTS).is_file() for part in (run / "reference", *finished(run)))
    return False


def refitted(config: RunConfig, classifier: Mapping[str, Any] | str) -> RunConfig:
    """A run's configuration with another classifier, under which the same sub-networks are trained.

    Raises:
        ConfigError: see `refit`.
    """
    if "classifier" not in config.method:
        raise ConfigError(f"method={config.method['name']} keeps no sub-networks that another classifier could ask")
    before = config.method["classifier"]
    spec = {"name": classifier} if isinstance(classifier, str) else dict(classifier)
    if spec.get("name") == "chain":
        same = {key: before[key] for key in ("spaces", "train")} if _trained(before) != "all" else {"train": "all"}
        spec = {"head": _head(before), **same, **spec}
    raw = config.model_dump(mode="json")
    found = check_config({**raw, "method": {**raw["method"], "classifier": spec}}, RunConfig)
    if (head := _head(found.method["classifier"])) != _head(before):
        raise ConfigError(
            f"classifier: with it sub-networks would have been trained with a {head} head, this run's were with a "
            f"{_head(before)} one; run its recipe with this classifier instead"
        )
    if (other := _trained(found.method["classifier"])) != _trained(before):
        raise ConfigError(
            f"classifier: with it the sub-networks of {_tasks(other)} would have been trained, this run has those of "
            f"{_tasks(_trained(before))}; run its recipe with this classifier instead"
        )
    return found


def _trained(classifier: Mapping[str, Any]) -> int | Literal["all"]:
    """How many tasks get a sub-network under a classifier."""
    return classifier["spaces"] if classifier.get("train") == "spaces" else "all"


def _head(classifier: Mapping[str, Any]) -> str:
    """What sub-networks are trained with under a classifier; configurations of before do not say."""
    return classifier.get("head", "linear")


def _tasks(trained: int | Literal["all"]) -> str:
    return "all tasks" if trained == "all" else counted(trained, "task")


class Taken(Engine):
    """Trains nothing: what a task learns is taken from a run that has learnt it, in so many seconds."""

    def __init__(self, source: Run, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parts = [source.path / "reference", *finished(source.path)]
        self.seconds = [manifest["seconds"] for manifest in source.manifests]

    def learn(self, method: Method, task: Task, replay: Replay | None = None) -> dict[str, float]:
        """Put a task's tensors in their places; then what the classifier notes of its images."""
        if not isinstance(method, SubNetworks):
            raise ConfigError(f"{type(method).__name__} keeps no sub-networks that another classifier could ask")
        replay = replay or Replay()
        replay.begin(method, task.id)
        state = dict(method.state_dict())
        for folder in self.parts[0 if task.id == 0 else task.id + 1 : task.id + 2]:
            weights = read_files(folder, read_json(folder / MANIFEST, Part), {WEIGHTS})
            state |= {name: value for name, value in weights.items() if not name.startswith("chain.")}
        method.load_state_dict(state, strict=True)
        self.place(method).requires_grad_(False)
        if method.chain is not None:
            method.observe(method.chain, task)
        task.close()
        method.eval()
        self.reused = [*self.seconds[task.id]]
        return self.seconds[task.id]
