"""Another classifier for what a run has learnt: statistics are gathered anew in its frozen sub-networks.

Nothing is trained. The result is the run of the other configuration, bit by bit: sub-networks do not depend on how the
tasks are told apart, and statistics not on when they were gathered.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pearl.data.batches import Task
from pearl.errors import ConfigError, RunError
from pearl.lifecycle.runs import Run, execute
from pearl.methods.base import Method
from pearl.methods.common.subnetworks import SubNetworks
from pearl.settings.config import RunConfig, check_config, merge
from pearl.storage.checkpoint import read_part
from pearl.storage.files import finished, read_json
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
    run = Run.open(source)
    if not run.done:
        raise RunError(f"{source}: has tasks left to learn; finish it with: pearl resume {source}")
    config = refitted(run.config, classifier)
    precision = read_json(run.path / "environment.json")["precision"]
    made = {"engine": lambda *args, **kwargs: Taken(run, *args, **kwargs), "precision": precision}
    return execute(config, device=device, show=show, **made)


def refitted(config: RunConfig, classifier: Mapping[str, Any] | str) -> RunConfig:
    """A run's configuration with another classifier; every task's sub-network was trained.

    Raises:
        ConfigError: see `refit`.
    """
    if "classifier" not in config.method:
        raise ConfigError(f"method={config.method['name']} keeps no sub-networks that another classifier could ask")
    spec = {"name": classifier} if isinstance(classifier, str) else dict(classifier)
    if spec.get("name") == "chain":
        spec = {"train": "all", **spec}
    if spec.get("train", "all") != "all":
        raise ConfigError("classifier.train=spaces leaves sub-networks out that this run has trained; leave it at all")
    method = {key: value for key, value in config.method.items() if key != "classifier"}
    raw = merge(config.model_dump(mode="json"), {"method": {**method, "classifier": spec}})
    return check_config(raw, RunConfig)


class Taken(Engine):
    """Trains nothing: what a task learns is taken from a run that has learnt it."""

    def __init__(self, source: Run, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parts = [source.path / "reference", *finished(source.path)]

    def learn(self, method: Method, task: Task, replay: Replay | None = None) -> dict[str, float]:
        """Put a task's tensors in their places; then what the classifier notes of its images."""
        if not isinstance(method, SubNetworks):
            raise ConfigError(f"{type(method).__name__} keeps no sub-networks that another classifier could ask")
        replay = replay or Replay()
        replay.begin(method, task.id)
        state = dict(method.state_dict())
        for folder in self.parts[: 2 if task.id == 0 else 0] or [self.parts[task.id + 1]]:
            state |= {name: value for name, value in read_part(folder)[0].items() if not name.startswith("chain.")}
        method.load_state_dict(state, strict=True)
        self.place(method).requires_grad_(False)
        if method.chain is not None:
            method.observe(method.chain, task)
        task.close()
        method.eval()
        return {}
