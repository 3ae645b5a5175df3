"""Export as PEFT adapters: one LoRA per task on the reference network."""

import inspect
import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from pearl.errors import ExportError, counted
from pearl.export.trained import FACTS, FORMAT, Trained, compare, importing, on_cpu, refusing, seen
from pearl.methods.common.subnetworks import HeadsClassifier
from pearl.methods.pearl import Pearl
from pearl.nn import lowrank, networks
from pearl.nn.lowrank import Fold
from pearl.settings.parts import BACKBONES
from pearl.storage.checkpoint import snapshot
from pearl.storage.stored_task import folder_name

# name of a PEFT base model's module; PEFT matches the end of module names, and no backbone's ends so
HEAD = "pearl_head"


def write_peft(model: Trained, out: Path, raw: Tensor) -> float | None:
    """Write a folder of PEFT adapters; see `export`. OUT/README.md documents how to load them.

    OUT/base/ holds the reference network, OUT/TASK/ a LoRA with the task's own norm layers, dense copies and head.
    """
    method = model.method
    if not isinstance(method, Pearl):
        raise ExportError(
            f"--to peft: {type(method).__name__.lower()} has no low-rank updates; export it --to torch or --to onnx"
        )
    if not isinstance(method.classifier, HeadsClassifier):
        raise ExportError(
            "--to peft: stores heads, but this model uses class statistics; export it --to torch or --to onnx"
        )
    peft_model = _peft_model()
    _check_layers(method, model.images.size)
    folders = [folder_name(t, task["name"]) for t, task in enumerate(model.tasks)]
    _, base = _base(model)
    (out / "base").mkdir(parents=True)
    if model.backbone["name"] in BACKBONES.builtin:
        (out / "networks.py").write_bytes(Path(networks.__file__).read_bytes())
    (out / "base" / "backbone.safetensors").write_bytes(save(snapshot(method.backbone.state_dict())))
    _write_json(out / "base" / "backbone.json", base)
    for t, folder in enumerate(folders):
        tensors, settings = adapter(method, t)
        (out / folder).mkdir()
        (out / folder / "adapter_model.safetensors").write_bytes(save(tensors))
        _write_json(out / folder / "adapter_config.json", settings)
    facts = model.facts
    normalisation = {"mean": list(model.images.mean), "std": list(model.images.std)}
    facts["input"] |= {"values": "RGB in [0, 1], then normalised", **normalisation}
    facts["tasks"] = [{**task, "folder": folder} for task, folder in zip(facts["tasks"], folders, strict=True)]
    facts["output"] = "logits (batch, classes of the task)"
    _write_json(out / FACTS, facts)
    (out / "README.md").write_text(_readme(base, facts))
    if peft_model is None:
        return None
    x, load = seen(model, raw), partial(_load_adapter, peft_model, model, out)
    with refusing("PEFT cannot load this network's adapters"):
        return max(compare(on_cpu(method, t), load(t), x) for t in range(len(folders)))


def _peft_model() -> Any:
    """Return the class that loads adapters; None if PEFT is not installed."""
    if find_spec("peft") is None:
        return None
    with importing("peft"):
        from peft import PeftModel
    return PeftModel


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def _check_layers(method: Pearl, size: int) -> None:
    """Check layers: PEFT's LoRA replaces called layers, and supports no groups or dilation of convolutions."""
    called = _called(method.backbone, torch.zeros(1, 3, size, size, device=method.device))
    for target in method.targets:
        name = target.parameter.removesuffix(".weight")
        layer: Any = method.backbone.get_submodule(name)
        plain = type(layer) is nn.Linear or (
            type(layer) is nn.Conv2d
            and layer.groups == 1
            and set(layer.dilation) == {1}
            and layer.padding_mode == "zeros"
        )
        if not plain and not target.dense:
            raise ExportError(f"--to peft: PEFT has no exact LoRA for {name}, {layer}; export it --to torch or onnx")
        if layer not in called:
            raise ExportError(
                f"--to peft: the network uses the weight of {name} without calling the layer, which PEFT cannot "
                f"replace; export it --to torch or onnx"
            )


def _called(network: nn.Module, x: Tensor) -> set[nn.Module]:
    """Return the layers that a network calls. EVA-02 uses the weights of query, key and value without calling them."""
    called: set[nn.Module] = set()
    hooks = [layer.register_forward_hook(lambda layer, *_: called.add(layer)) for layer in network.modules()]
    try:
        network(x)
    finally:
        for hook in hooks:
            hook.remove()
    return called


def adapter(method: Pearl, t: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return task t as a PEFT LoRA: the tensors and configuration of an adapter for `backbone` + HEAD."""
    low_rank: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = defaultdict(list)
    saved: dict[str, dict[str, Tensor]] = {HEAD: dict(method.heads[t].state_dict())}
    if t >= method.first_adapted:
        weights = method.weights(t)
        for target in method.targets:
            # query and key of a fused layer are two updates; one of rank 0 is omitted
            if not target.dense and len(method.tensors[f"{t}.A.{target.label}"]):
                low_rank[target.parameter.removesuffix(".weight")].append(_lora(method, t, target))
        dense = [target.parameter for target in method.targets if target.dense]
        for name in [*dense, *method.norms, *method.norm_statistics]:
            module = name.rpartition(".")[0]
            state = method.backbone.get_submodule(module).state_dict()
            saved[f"backbone.{module}"] = {key: weights.get(f"{module}.{key}", value) for key, value in state.items()}

    tensors = {f"{name}.{key}": value for name, state in saved.items() for key, value in state.items()}
    ranks: dict[str, int] = {}
    for name, updates in low_rank.items():
        a, b, bias = (list(part) for part in zip(*updates, strict=True))
        tensors[f"backbone.{name}.lora_A.weight"] = torch.cat(a)
        tensors[f"backbone.{name}.lora_B.weight"] = torch.cat(b, dim=1)
        if method.lora_bias:
            tensors[f"backbone.{name}.lora_B.bias"] = torch.stack(bias).sum(0)
        # PEFT matches keys as regular expressions with the end of layer names: "conv1" would match many
        ranks[f"^{re.escape(f'backbone.{name}')}$"] = len(torch.cat(a))
    settings = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": 1,  # of no layer: each has its own pattern, and alpha = r, as B includes the scale
        "lora_alpha": 1,
        "rank_pattern": ranks,
        "alpha_pattern": ranks,
        "lora_dropout": 0.0,
        "lora_bias": method.lora_bias and bool(ranks),
        "bias": "none",
        # the second is PEFT's name for no layer, as for the task that trained the reference
        "target_modules": [f"backbone.{name}" for name in low_rank] or "dummy-target-modules",
        "modules_to_save": list(saved),
    }
    return snapshot({f"base_model.model.{name}": value for name, value in tensors.items()}), settings


def _lora(method: Pearl, t: int, target: lowrank.Target) -> tuple[Tensor, Tensor, Tensor]:
    """Return A, B and the bias of B for one update of the whole layer: other rows of a fused one are zero."""
    a, b = method.tensors[f"{t}.A.{target.label}"], method.tensors[f"{t}.B.{target.label}"]
    whole = method.backbone.get_parameter(target.parameter)
    scale = method.scale(len(a))
    bias = b.new_zeros(target.shape[0])
    if f"{t}.a.{target.label}" in method.tensors:  # B (A x + a) + b
        bias = scale * (b @ method.tensors[f"{t}.a.{target.label}"] + method.tensors[f"{t}.b.{target.label}"])
    filters, mix = unfolded(a, scale * b, target.shape, method.fold)
    if whole.ndim == 4:
        mix = mix[:, :, None, None]
    return (
        filters,
        target.add(mix.new_zeros(whole.shape[0], *mix.shape[1:]), mix),
        target.add(bias.new_zeros(len(whole)), bias),
    )


def unfolded(a: Tensor, b: Tensor, shape: Sequence[int], fold: Fold) -> tuple[Tensor, Tensor]:
    """Return an update B A, with any 2-D view, as R filters (R, in, kh, kw) and their mix (out, R): PEFT's LoRA,
    exactly.

    If an output has k rows in the 2-D view, each of the r rows of A becomes k filters, one per position: R = k r. At
    most `out` filters are needed.
    """
    out, (r, columns) = shape[0], a.shape
    k = lowrank.matrix_shape(shape, fold)[0] // out
    placed = torch.einsum("ij,rn->rijn", torch.eye(k, device=a.device), a).reshape(r * k * k, columns)
    filters = lowrank.from_matrix(placed, (r * k, *shape[1:]), fold)
    mix = b.reshape(out, k, r).transpose(1, 2).reshape(out, r * k)
    if r * k > out:
        filters, mix = torch.einsum("or,r...->o...", mix, filters), torch.eye(out, device=a.device)
    return filters, mix


def _base(model: Trained) -> tuple[Callable[..., nn.Module], dict[str, Any]]:
    """Return code and a description that build the reference network: a library call, and the feature dimension."""
    size, name = model.images.size, model.backbone["name"]
    facts: dict[str, Any] = {"format": FORMAT, "dim": model.method.heads.dim}
    # the initial weights are overwritten by a state
    options = {key: value for key, value in model.backbone.items() if key not in ("name", "weights")}
    if name in BACKBONES.builtin:  # their file is part of the export
        network = type(model.method.backbone)
        if "image_size" in inspect.signature(network).parameters:
            options["image_size"] = size
        return network, facts | {"library": "networks", "call": network.__name__, "arguments": [], "options": options}
    if not name.startswith("timm/"):  # from an installed package
        make: Any = BACKBONES.load(name)
        options |= {"weights": None} if "weights" in model.backbone else {}
        facts |= {"library": make.__module__, "call": make.__qualname__}
        return make, facts | {"arguments": [size], "options": options}
    name, options = name.removeprefix("timm/"), {"num_classes": 0}
    try:
        timm.create_model(name, **options, img_size=size)
        options["img_size"] = size
    except TypeError:  # a CNN: accepts any image size, and has no such argument
        pass
    facts |= {"library": "timm", "version": timm.__version__, "call": "create_model"}
    return timm.create_model, facts | {"arguments": [name], "options": options}


def _load_adapter(peft_model: Any, model: Trained, out: Path, t: int) -> nn.Module:
    """Load task t's sub-network as the README does."""
    make, base = _base(model)
    backbone = make(*base["arguments"], **base["options"])
    backbone.load_state_dict(load_file(out / "base" / "backbone.safetensors"))
    whole = nn.Sequential()
    whole.add_module("backbone", backbone)
    whole.add_module(HEAD, nn.Linear(base["dim"], len(model.tasks[t]["classes"])))
    folder = out / folder_name(t, model.tasks[t]["name"])
    return peft_model.from_pretrained(whole, folder, torch_device="cpu").eval()


def _readme(base: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    given = [*map(repr, base["arguments"]), *(f"{key}={value!r}" for key, value in base["options"].items())]
    build = f"{base['library']}.{base['call']}({', '.join(given)})"
    folders = [task["folder"] for task in facts["tasks"]]
    images = facts["input"]
    shape = "(batch, 3, {2}, {3})".format(*images["shape"])
    return f"""### Adapters of {counted(len(folders), "task")}

Written by pearl {facts["pearl"]}. `base/` holds the reference network; every other folder is a PEFT LoRA with one
task's own norm layers and head. `{FACTS}` lists the tasks, their folders and their classes. In this folder:

```python
import inspect
import json
from pathlib import Path

import {base["library"]}
import torch
from peft import PeftModel
from safetensors.torch import load_file

TASKS = {{task["folder"]: task["classes"] for task in json.loads(Path("{FACTS}").read_text())["tasks"]}}


def load(folder):
    backbone = {build}
    backbone.load_state_dict(load_file("base/backbone.safetensors"))
    base = torch.nn.Sequential()
    base.add_module("backbone", backbone)
    base.add_module("{HEAD}", torch.nn.Linear({base["dim"]}, len(TASKS[folder])))
    return PeftModel.from_pretrained(base, folder).eval()


model = load("{folders[-1]}")
```

`model(images)` gives the logits of that task's classes. Images are float32 {shape}: RGB, the shorter
side resized to {images["resize"]} pixels (bicubic), the centre cropped, divided by 255, less {images["mean"]},
divided by {images["std"]}. The logits of all tasks side by side are the model's over all classes.

Load each task on a base of its own: heads differ in size, and PEFT copies the base's.
"""
