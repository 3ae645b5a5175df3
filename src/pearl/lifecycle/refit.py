"""Another classifier in the frozen sub-networks of a finished run or model. Nothing is trained.

The result is the run or model of the other configuration, bit by bit: sub-networks do not depend on the classifier, and
statistics do not depend on when they are computed. A run reads its images by its recipe; a model needs them again. The
old directory is unchanged, and the new one is created atomically.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from pearl.data.augment import View
from pearl.data.batches import Task
from pearl.data.decoding import Decoding
from pearl.data.inputs import Inputs, check_aliases, given
from pearl.data.sources import some
from pearl.errors import ConfigError, DataError, RunError, counted, printable
from pearl.lifecycle.copying import check_target, check_whole, copy_beside, copy_part, made_aside
from pearl.lifecycle.learning import decode, facts_of
from pearl.lifecycle.runs import Run, execute
from pearl.lifecycle.saved import check_method, load_method, read_config
from pearl.methods.base import Method
from pearl.methods.common.subnetworks import SubNetworkClassifier, SubNetworks
from pearl.settings.config import ModelConfig, RunConfig, check_config
from pearl.settings.registry import nearest
from pearl.storage.checkpoint import WEIGHTS, changed, read_files, read_part, remove_replaced, snapshot, write_part
from pearl.storage.paths import runs_root
from pearl.storage.run_directory import RunDirectory
from pearl.storage.schemas import WeightFile
from pearl.storage.stored_task import StoredTask, read_manifest
from pearl.training.engine import Engine, Observer
from pearl.training.resume import Resume

C = TypeVar("C", bound=ModelConfig)
OWN = ("format", "sha256", "bytes", "tensors")  # manifest keys that `write_part` writes


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
    before = config.method.get("classifier", {"name": "heads"})
    spec = {"name": classifier} if isinstance(classifier, str) else dict(classifier)
    if spec.get("name") == "statistics":
        same = {key: before[key] for key in ("spaces", "train")} if _trained(before) != "all" else {"train": "all"}
        spec = {"head": _head(before), **same, **spec}
    changed = _with_classifier(config, spec)
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


def _with_classifier(config: C, spec: Mapping[str, Any]) -> C:
    """Return a configuration with another classifier."""
    if "classifier" not in config.method:
        raise ConfigError(f"method={config.method['name']} has no sub-networks for another classifier")
    raw = config.model_dump(mode="json")
    return check_config({**raw, "method": {**raw["method"], "classifier": spec}}, type(config))


def _classifier_of(method: Method) -> SubNetworkClassifier:
    """Return the classifier of a method with sub-networks."""
    if not isinstance(method, SubNetworks):
        raise ConfigError(f"{type(method).__name__} has no sub-networks for another classifier")
    return method.classifier


def _trained(classifier: Mapping[str, Any]) -> int | Literal["all"]:
    """Return how many tasks get a sub-network with a classifier."""
    return classifier["spaces"] if classifier.get("train") == "spaces" else "all"


def _head(classifier: Mapping[str, Any]) -> str:
    """Return the head that sub-networks are trained with under a classifier; heads have no such option."""
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
        classifier, resume = _classifier_of(method), resume or Resume()
        resume.begin(method, task.id)
        state = dict(method.state_dict())
        for folder in self.parts[0 if task.id == 0 else task.id + 1 : task.id + 2]:
            weights = read_files(folder, read_manifest(folder, WeightFile), {WEIGHTS})
            state |= {name: value for name, value in weights.items() if not name.startswith("class_statistics.")}
        method.load_state_dict(state, strict=True)
        self.to_device(method).requires_grad_(False)
        classifier.fit(task)
        task.close()
        method.eval()
        self.reused = [*self.seconds[task.id]]
        return self.seconds[task.id]


def refit_model(
    path: Path,
    data: Sequence[Path],
    to: Path,
    classifier: Mapping[str, Any] | str = "statistics",
    *,
    aliases: Mapping[str, str] | None = None,
    method: str | None = None,
    device: str = "auto",
    show: Observer | None = None,
) -> None:
    """Create the model `to` from the one at `path` and images of all its classes, in folders like those of `learn`.

    Raises:
        RunError: `path` is not a model, or damaged; or `to` exists.
        ConfigError: it has class statistics, or its method does not support them.
        DataError: a class has no images, an unknown class has some, or images are unreadable.
    """
    show = show or Observer()
    before = read_config(path)
    check_method(path, before, method)
    config = _model_config(path, before, classifier)
    check_target(to, path)
    check_whole(path)
    infos = RunDirectory(path).tasks
    if not infos:
        raise RunError(f"{path}: no task is finished; learn one first")
    files = _files(data, config.images.stored, dict(aliases or {}), infos)
    try:
        engine = Engine(config, device=device, observer=show)
        made = load_method(path, config, to_device=engine.to_device).requires_grad_(False)
        model_classifier = _classifier_of(made)
        with made_aside(to) as aside:
            copy_part(RunDirectory(path).reference, RunDirectory(aside).reference)
            for t, info in enumerate(infos):
                named = [files[name] for name in info.classes]
                labels = np.repeat(np.arange(len(named)), [len(each) for each in named])
                images = tuple(file for each in named for file in each)
                part = Inputs(None, info.name, info.classes, images, labels, decoding=Decoding.of(config.images))
                pixels = decode(part, config.images.stored, show)
                view = View(config.images, channels_last=config.engine.channels_last)
                header = t, info.name, info.classes, info.first_class
                task = Task(*header, pixels, labels + info.first_class, view, engine.device)
                known = snapshot(made.state_dict())
                model_classifier.fit(task)
                added = changed(known, made.state_dict())
                tensors, manifest = read_part(info.folder)
                facts = {key: value for key, value in manifest.items() if key not in OWN}
                facts |= {**made.facts(t), "refitted": facts_of(pixels, labels)}
                folder, features = aside / info.folder.relative_to(path), model_classifier.features_of_images()
                write_part(folder, {**tensors, **added}, facts, made.file_of, features=features)
            copy_beside(path, aside, config)
            if not config.engine.earlier_states:
                remove_replaced(aside)
    finally:
        show.close()


def _model_config(path: Path, config: ModelConfig, classifier: Mapping[str, Any] | str) -> ModelConfig:
    """Return the configuration of a model with another classifier."""
    if isinstance(config, RunConfig):
        raise RunError(f"{path}: a run, whose recipe defines its images; refit it without --data")
    if config.method.get("classifier", {}).get("name") == "statistics":
        raise ConfigError(f"{path}: already has class statistics")
    spec = {"name": classifier} if isinstance(classifier, str) else dict(classifier)
    if spec.get("name") != "statistics":
        raise ConfigError(
            "a model is refitted to class statistics; give classifier=statistics, or {name: statistics, spaces: 2}"
        )
    if spec.get("head", "linear") != "linear":
        raise ConfigError(f"{path}: was trained with linear heads; remove classifier.head")
    return _with_classifier(config, spec)


def _files(
    data: Sequence[Path], size: int, aliases: dict[str, str], infos: Sequence[StoredTask]
) -> dict[str, list[Path]]:
    """Return the images of each class; aliases may be for folders in any of `data`."""
    known = [name for info in infos for name in info.classes]
    files: dict[str, list[Path]] = {name: [] for name in known}
    parts = [given(root, size, part="train") for root in data]
    check_aliases(aliases, parts)
    for root, part in zip(data, parts, strict=True):
        if not isinstance(part.images, tuple):
            raise DataError(f"{root}: class statistics need files; give folders, or a .csv of paths and labels")
        named = part.renamed(aliases)
        if strange := [name for name in named.classes if name not in files]:
            raise DataError(
                f"{root}: {printable(strange[0])!r} is not a class of the model ({nearest(strange[0], known)}); "
                f"give its class with --alias, or remove its folder"
            )
        for image, label in zip(part.images, named.labels.tolist(), strict=True):
            files[named.classes[label]].append(image)
    if missing := [name for name, images in files.items() if not images]:
        raise DataError(
            f"no images of {some((repr(printable(name)) for name in missing), 5)}: a class without statistics could "
            f"never be predicted; give images of every class, with a --data for each folder, or keep the model"
        )
    return files
