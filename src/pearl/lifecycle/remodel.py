"""Class statistics for a model without them, computed in its frozen sub-networks from given images.

The model is unchanged; the result is another directory, created atomically. With the same images, it equals a model
with this classifier from the start.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pearl.data.augment import View
from pearl.data.batches import Task
from pearl.data.decoding import Decoding
from pearl.data.inputs import Inputs, check_aliases, given
from pearl.data.sources import some
from pearl.errors import ConfigError, DataError, RunError, printable
from pearl.lifecycle.copying import check_place, check_whole, copy_beside, copy_part, made_aside
from pearl.lifecycle.learning import decode, facts_of
from pearl.lifecycle.saved import check_method, load_method, read_config
from pearl.methods.common.subnetworks import SubNetworks
from pearl.settings.config import ModelConfig, RunConfig, check_config
from pearl.settings.registry import nearest
from pearl.storage.checkpoint import changed, read_part, remove_replaced, snapshot, write_part
from pearl.storage.run_directory import RunDirectory
from pearl.storage.stored_task import StoredTask
from pearl.training.engine import Engine, Observer

OWN = ("format", "sha256", "bytes", "tensors")  # manifest keys that `write_part` writes


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
    config = _with(path, before, classifier)
    check_place(to, path)
    check_whole(path)
    infos = RunDirectory(path).tasks
    if not infos:
        raise RunError(f"{path}: no task is finished; learn one first")
    files = _files(data, config.images.stored, dict(aliases or {}), infos)
    try:
        engine = Engine(config, device=device, observer=show)
        made = load_method(path, config, to_device=engine.to_device).requires_grad_(False)
        if not isinstance(made, SubNetworks):
            raise ConfigError(f"method={config.method['name']} has no sub-networks for class statistics")
        with made_aside(to) as aside:
            copy_part(RunDirectory(path).reference, RunDirectory(aside).reference)
            for t, info in enumerate(infos):
                named = [files[name] for name in info.classes]
                labels = np.repeat(np.arange(len(named)), [len(each) for each in named])
                images = tuple(file for each in named for file in each)
                part = Inputs(None, info.name, info.classes, images, labels, decoding=Decoding.of(config.images))
                pixels = decode(part, config.images.stored, show)
                view = View(config.images, channels_last=config.engine.channels_last)
                engine_device = engine.device
                task = Task(
                    t, info.name, info.classes, info.first_class, pixels, labels + info.first_class, view, engine_device
                )
                known = snapshot(made.state_dict())
                made.classifier.fit(task)
                added = changed(known, made.state_dict())
                tensors, manifest = read_part(info.folder)
                facts = {key: value for key, value in manifest.items() if key not in OWN}
                facts |= {**made.facts(t), "refitted": facts_of(pixels, labels)}
                folder, features = aside / info.folder.relative_to(path), made.features_of_images()
                write_part(folder, {**tensors, **added}, facts, made.file_of, features=features)
            copy_beside(path, aside, config)
            if not config.engine.earlier_states:
                remove_replaced(aside)
    finally:
        show.close()


def _with(path: Path, config: ModelConfig, classifier: Mapping[str, Any] | str) -> ModelConfig:
    """Return the configuration of a model with another classifier."""
    if isinstance(config, RunConfig):
        raise RunError(f"{path}: a run, whose recipe defines its images; refit it without --data")
    if "classifier" not in config.method:
        raise ConfigError(f"method={config.method['name']} has no sub-networks for another classifier")
    if config.method["classifier"]["name"] == "statistics":
        raise ConfigError(f"{path}: already has class statistics")
    spec = {"name": classifier} if isinstance(classifier, str) else dict(classifier)
    if spec.get("name") != "statistics":
        raise ConfigError(
            "a model is refitted to class statistics; give classifier=statistics, or {name: statistics, spaces: 2}"
        )
    if spec.get("head", "linear") != "linear":
        raise ConfigError(f"{path}: was trained with linear heads; remove classifier.head")
    raw = config.model_dump(mode="json")
    return check_config({**raw, "method": {**raw["method"], "classifier": spec}}, ModelConfig)


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
