"""Loading of the method in a model's or run's files."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pearl.data import copies
from pearl.data.batches import fold
from pearl.errors import ConfigError, RunError, counted, short_of_memory
from pearl.lifecycle.certificate import Check, certificate_checks
from pearl.methods.base import Method
from pearl.nn.plain_vit import plain_vit
from pearl.settings.config import ModelConfig, RunConfig, check_config
from pearl.settings.parts import BACKBONES, METHODS
from pearl.settings.registry import readable
from pearl.storage.checkpoint import load_state, read_part, sha256
from pearl.storage.files import FORMAT, read_json
from pearl.storage.run_directory import RunDirectory
from pearl.storage.schemas import Classes, Part, Reference, Task
from pearl.storage.stored_task import StoredTask, read_manifest


def read_config(path: Path) -> ModelConfig:
    """Read the configuration of a model or run directory.

    Raises:
        RunError: the directory is neither, or its configuration is unreadable.
    """
    directory = RunDirectory(path)
    raw = directory.config
    try:
        kind = RunConfig if "recipe" in raw else ModelConfig
        return check_config(raw, kind)
    except (ValueError, TypeError, AttributeError, KeyError, ConfigError) as error:
        reason = " ".join(str(error).split())
        raise RunError(
            f"{directory.config_file}: cannot be read ({reason}); restore it, or run into a new directory"
        ) from None


def check_method(path: Path, config: ModelConfig, named: str | None) -> None:
    """Check that the method may run: `named` is the user's name for it (see `Registry.admit`), or None.

    Only methods from files must be named: the user of a received model may not have read its code.

    Raises:
        ConfigError: it is not named, or another one is.
    """
    name, copy = str(config.method["name"]), RunDirectory(path).code_file
    wanted = f"--method {shlex.quote(str(copy))}:{readable(name)}"
    if named not in (None, name):
        if "@" not in name:
            raise ConfigError(f"{path}: its method is {name}, not {readable(str(named))}; leave out --method")
        if wrong := changed_code(path, config):
            raise ConfigError(f"{path}: its method is from another file, and {wrong}")
        raise ConfigError(
            f"{path}: its method is another class or version of the file; use the stored copy, {wanted}, or start "
            f"again with the current file"
        )
    if METHODS.closed(name):
        if wrong := changed_code(path, config):
            raise ConfigError(f"{path}: its method {readable(name)} is from a file, and {wrong}")
        raise ConfigError(
            f"{path}: its method {readable(name)} is code stored with it, which runs only if you name it; read "
            f"{copy}, and if you trust it add {wanted}"
        )


def resume_command(path: Path, config: ModelConfig) -> str:
    """Return the command that resumes an interrupted run or task."""
    name = str(config.method["name"])
    method = f" --method {shlex.quote(str(RunDirectory(path).code_file))}:{readable(name)}" if "@" in name else ""
    return f"pearl resume {shlex.quote(str(path))}{method}"


def changed_code(path: Path, config: ModelConfig) -> str | None:
    """Return the problem of the copy of a method's file; None if it is intact, or there is none."""
    _, _, digest = str(config.method["name"]).partition("@")
    file = RunDirectory(path).code_file
    if not digest or (file.is_file() and sha256(file.read_bytes()).startswith(digest)):
        return None
    state = "has changed" if file.is_file() else "is missing"
    return f"{file} {state}; restore the file whose SHA-256 begins with {digest}"


def config_bytes(config: ModelConfig) -> bytes:
    """Return the bytes that `read_config` parses."""
    return f"format: {FORMAT}\n{config.to_yaml()}".encode()


def learnt_images(tasks: Sequence[StoredTask]) -> dict[bytes, str]:
    """Return the class of each learnt image, by the hash of its pixels; older tasks have none.

    Raises:
        RunError: a manifest is damaged.
    """
    found: dict[bytes, str] = {}
    for task in tasks:
        try:
            found |= copies.read(task.manifest.get("image_hashes", {}))
        except ValueError:
            raise RunError(f"{task.file}: its image_hashes are damaged; restore it from a copy") from None
    return found


def verify(path: Path) -> list[str]:
    """Return a line for each problem of a model's files; computes every checksum."""
    return [line for state, line in file_checks(path) if state == "wrong"]


def verification(path: Path) -> list[Check]:
    """Return a line for each check of a model: its files, and the certificates of what it has forgotten.

    Raises:
        RunError: neither a model nor a run, or a change is not complete.
    """
    read_config(path)
    checks = file_checks(path)
    try:
        return checks + certificate_checks(path)
    except RunError as error:
        return checks + [Check("wrong", str(error))] * (str(error) not in [line for _, line in checks])


def file_checks(path: Path) -> list[Check]:
    """Return a line for each file of tensors of a model, about its checksum, and one about the list of tasks."""
    directory = RunDirectory(path)
    checks: list[Check] = []
    replaced: set[str] = set()
    for folder in directory.online_states:
        try:
            read_part(folder)
            checks.append(Check("ok", f"{folder.relative_to(path)}: its checksums are those of its manifest"))
        except RunError as error:
            checks.append(Check("wrong", str(error)))
    for folder in (*reversed(directory.usable), directory.reference):
        try:
            _, manifest = read_part(folder, Reference if folder == directory.reference else Task, replaced)
            checks[:0] = [
                Check("ok", f"{(folder / name).relative_to(path)}: sha256 {digest[:16]}, as its manifest says")
                for name, digest in manifest["sha256"].items()
                if (folder / name).exists()
            ]
        except RunError as error:
            checks.insert(0, Check("wrong", str(error)))
        with suppress(RunError):
            replaced |= set(read_manifest(folder, Part)["tensors"])
    try:
        directory.check_no_gap()
        if tasks := directory.tasks:
            read_json(directory.classes_file, Classes)  # the one file that all else does without
            classes = counted(sum(len(task.classes) for task in tasks), "class")
            checks.append(Check("ok", f"classes.json: {classes} in {counted(len(tasks), 'task')}, as in the manifests"))
    except RunError as error:
        if (found := Check("wrong", str(error))) not in checks:
            checks.append(found)
    return checks


def build_backbone(config: ModelConfig, *, structure_only: bool = False, without_timm: bool = False) -> nn.Module:
    """Return the backbone of a run.

    `structure_only` skips reference weights that a state will overwrite. `without_timm` then uses pearl's form of a
    plain ViT, whose import takes no seconds.
    """
    spec = dict(config.backbone)
    given = bool(spec.get("pretrained") or spec.get("weights"))
    if structure_only or config.smoke:
        spec |= {key: False if key == "pretrained" else None for key in ("pretrained", "weights") if key in spec}
    if not structure_only:
        torch.manual_seed(fold(config.seed, "backbone"))
    library, _, model = str(spec["name"]).partition("/")
    backbone = plain_vit(model, config.images.size) if structure_only and without_timm and library == "timm" else None
    if backbone is None:
        backbone = BACKBONES.build(spec, config.images.size)
    if given:
        backbone.pretrained = True
    return backbone


def build_method(config: ModelConfig, *, structure_only: bool = False, without_timm: bool = False) -> Method:
    """Return the method of a run, before its first task; for the options see `build_backbone`.

    Raises:
        ConfigError: options that this backbone does not support.
    """
    backbone = build_backbone(config, structure_only=structure_only, without_timm=without_timm)
    return METHODS.build(config.method, backbone)


def isolation_size(method: Method, classes: list[int]) -> int:
    """Return the parameters of complete isolation: a backbone and a head with bias per task."""
    backbone = sum(p.numel() for p in method.backbone.parameters())
    return sum(backbone + (method.heads.dim + 1) * count for count in classes)


def load_method(
    path: Path,
    config: ModelConfig,
    tasks: int | None = None,
    *,
    place: Callable[[Method], Method] = lambda method: method,
    to_ask: bool = False,
    without_timm: bool = False,
) -> Method:
    """Return a method after its first `tasks` tasks (default: all finished ones).

    `place` moves it to a device and memory format. With `to_ask`, only for predictions, unneeded tensors may be
    missing. For `without_timm` see `build_backbone`.

    Raises:
        RunError: files missing, damaged, or not of this configuration.
    """
    with _OwnDraws():
        method = build_method(config, structure_only=True, without_timm=to_ask or without_timm)
    method = place(method)
    needed = method.classifier.needed if to_ask else None
    try:
        state = load_state(path, tasks, file_of=method.file_of, needed=needed)
        # copying into existing tensors would accept any dtype
        wrong = [
            f"{key} is {state[key].dtype}, not {value.dtype}"
            for key, value in method.state_dict().items()
            if key in state and state[key].dtype != value.dtype
        ]
        if wrong:
            raise RuntimeError("; ".join(wrong))
        with _OwnDraws():  # tensors that grow to the state's size are random at first
            method.load_state_dict(state, strict=True)
    except (RuntimeError, IndexError, TypeError, ValueError, KeyError) as error:
        if short_of_memory(error):
            raise
        raise RunError(f"{path}: state does not fit its configuration ({' '.join(str(error).split())})") from None
    return place(method).eval()  # again, for tensors created by the state


class _OwnDraws(TorchDispatchMode):
    """Context in which random numbers on the CPU come from a generator of this thread.

    PyTorch's global generator belongs to the whole process. Creating a network for loading would consume numbers that
    another thread trains with.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell PyTorch not to import its compiler for this context, which takes two seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        device = next((arg.device for arg in args if isinstance(arg, Tensor)), given.get("device"))
        if device is None or device.type == "cpu":
            if "generator" in func.overloadpacket.overloads():  # torch.randn and similar functions
                func = func.overloadpacket.generator
            takes = any(argument.name == "generator" for argument in func._schema.arguments)
            if takes and given.get("generator") is None:  # a caller's own generator stays: random features need it
                given["generator"] = self.generator
        return func(*args, **given)
