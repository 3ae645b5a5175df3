"""Reference weights from a file or another run, checked by names and shapes."""

import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pearl.errors import WeightsError
from pearl.storage.checkpoint import load_state
from pearl.storage.files import open_regular
from pearl.storage.paths import find
from pearl.storage.run_directory import RunDirectory

_HEADS = ("head.", "head_dist.", "fc.", "classifier.")  # a classifier in the file is not used
_NAMED = 5  # number of tensors per problem in an error


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a weight file, or of the reference network in a run directory.

    A `.pth` is read with `weights_only=True`: code in it cannot run.

    Raises:
        WeightsError: the file is not a readable weight file.
    """
    if path.is_dir():
        directory = RunDirectory(path)
        directory.check_no_gap()
        learnt = load_state(path)
        if not directory.finished:
            raise WeightsError(f"{path}: no task is finished, so its network is untrained; resume the run first")
        if any(key.startswith(("networks.", "network.")) for key in learnt):
            raise WeightsError(f"{path}: its method has no reference network; give a run of pearl or finetune")
        return {key.removeprefix("backbone."): value for key, value in learnt.items() if key.startswith("backbone.")}
    try:
        with open_regular(path) as file, warnings.catch_warnings(action="ignore"):
            if path.suffix == ".safetensors":
                return load_file(path)
            state: Any = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WeightsError(f"{path}: not a readable weight file ({reason}); give an intact .safetensors file") from None
    except Exception as error:  # pickle's errors have no common base but Exception
        raise WeightsError(
            f"{path}: refused, not a file of plain tensors ({type(error).__name__}); give a .safetensors file"
        ) from None
    for key in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(
        isinstance(key, str) and isinstance(value, Tensor) and _is_plain(value) for key, value in state.items()
    ):
        raise WeightsError(f"{path}: is not a mapping of names to plain tensors; give a state_dict")
    return state


def _rounded(value: Tensor, wanted: Tensor) -> bool:
    """Return True if two tensors differ in precision only: files in half precision are common."""
    return value.is_floating_point() and wanted.is_floating_point()


def _is_plain(value: Tensor) -> bool:
    return value.layout is torch.strided and not value.is_quantized and value.device.type == "cpu"


def load_weights(net: Any, path: str) -> None:
    """Load a weight file or a run's reference into a backbone, strictly, and mark the backbone as pretrained.

    A classifier in the file is ignored; a ViT's position embedding for another image size is resampled (bicubic). A
    common prefix of all names (`module.`, `model.`) is removed.

    Raises:
        WeightsError: missing tensors, unexpected ones or wrong shapes, with the first names.
    """
    file = find(path, what="weights", error=WeightsError)
    wanted = net.state_dict()
    given = _without_prefix(read_weights(file), wanted)
    state = {key: value for key, value in given.items() if key in wanted or not key.startswith(_HEADS)}
    if "pos_embed" in state and "pos_embed" in wanted and state["pos_embed"].shape != wanted["pos_embed"].shape:
        prefix = 0 if getattr(net, "no_embed_class", False) else net.num_prefix_tokens
        from timm.layers import resample_abs_pos_embed  # slow to import, needed only here

        # another width, or not a square grid: reported below as a wrong shape
        with suppress(RuntimeError, AttributeError):
            state["pos_embed"] = resample_abs_pos_embed(
                state["pos_embed"], net.patch_embed.grid_size, num_prefix_tokens=prefix
            )
    for key in wanted:
        if key.endswith("num_batches_tracked"):  # old files lack these counters, which are unused
            state.setdefault(key, wanted[key])
    problems = _first(f"{key} is missing" for key in wanted if key not in state)
    problems += _first(f"{key} is not in the network" for key in state if key not in wanted)
    problems += _first(
        f"{key} is {tuple(state[key].shape)}, the network needs {tuple(wanted[key].shape)}"
        for key in wanted
        if key in state and state[key].shape != wanted[key].shape
    )
    problems += _first(
        f"{key} is {state[key].dtype}, the network needs {wanted[key].dtype}"
        for key in wanted
        if key in state and state[key].dtype != wanted[key].dtype and not _rounded(state[key], wanted[key])
    )
    if problems:
        raise WeightsError(
            f"{file}: weights of another network: {'; '.join(problems)}; choose the backbone they belong to"
        )
    net.load_state_dict(state)
    net.pretrained = True


def _without_prefix(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Remove the prefix that all names share, if the network has the remaining names."""
    bare = state
    while not wanted.keys() & bare.keys():
        prefixes = {key.partition(".")[0] for key in bare}
        if len(prefixes) != 1 or not all("." in key for key in bare):
            return state
        bare = {key.partition(".")[2]: value for key, value in bare.items()}
    return bare


def _first(problems: Iterable[str]) -> list[str]:
    """Return the first problems of a kind, and the number of others."""
    every = [*problems]
    return [*every[:_NAMED], *([f"and {len(every) - _NAMED} more of this kind"] if len(every) > _NAMED else [])]
