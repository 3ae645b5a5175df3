"""The state of an online learner on disk, while images arrive.

DIRECTORY/reference/         the state before the first image, as in every run
DIRECTORY/online/IMAGES/     after so many images: tensors that differ from it, and a manifest; the newest is kept
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pearl.data.batches import derive_seed
from pearl.errors import RunError
from pearl.lifecycle.saved import build_backbone, config_bytes
from pearl.lifecycle.session import Session, environment
from pearl.nn.layout import placed
from pearl.online.learner import Learner, Setup
from pearl.settings.config import OnlineModelConfig, OnlineRunConfig
from pearl.settings.parts import LEARNERS
from pearl.storage.checkpoint import changed, read_part, snapshot, write_part
from pearl.storage.files import write_file
from pearl.storage.inside import remove_tree
from pearl.storage.run_directory import RunDirectory
from pearl.training.engine import Engine
from pearl.training.resume import Resume


def build_learner(config: OnlineRunConfig | OnlineModelConfig, engine: Engine, resume: Resume | None = None) -> Learner:
    """Return the learner before the first image.

    Raises:
        ConfigError: options that this backbone or method does not support.
    """
    backbone = placed(build_backbone(config), engine.fabric.device, channels_last=config.engine.channels_last)
    torch.manual_seed(derive_seed(config.seed, "learner"))
    given = config.online.boundaries == "given"
    return LEARNERS.build(config.online.learner, Setup(config, backbone, engine, resume or Resume(), given))


def begin(work: Session, learner: Learner) -> None:
    """Write the files of a directory's start; the manifest of the state before the first image is the last one."""
    directory, within = work.directory, work.path
    write_file(directory.config_file, config_bytes(work.config), within=within)
    directory.write(directory.environment_file, environment(work.engine))
    directory.list_classes()
    facts = {"parameters": sum(parameter.numel() for parameter in learner.parameters())}
    write_part(directory.reference, snapshot(learner.state_dict()), facts, within=within)


def store(path: Path, learner: Learner, start: Mapping[str, Tensor], seen: int, facts: Mapping[str, Any]) -> None:
    """Store the state after `seen` images, then remove older ones."""
    directory = RunDirectory(path)
    older, folder = directory.online_states, directory.online_folder / f"{seen:09d}"
    write_part(folder, changed(start, learner.state_dict()), {"seen": seen, **facts}, within=path)
    for other in older:
        if other != folder:
            remove_tree(other, path)


def restore(path: Path, learner: Learner, start: Mapping[str, Tensor]) -> dict[str, Any]:
    """Load the newest intact state into a learner, and return its manifest; {} without one."""
    for folder in reversed(RunDirectory(path).online_states):
        with suppress(RunError):  # incomplete or damaged: an older one leads to the same bits
            tensors, manifest = read_part(folder)
            learner.load_state_dict({**start, **tensors}, strict=True)
            return manifest
    return {}
