"""A model for use without pearl: a torch.export program, an ONNX file, or PEFT adapters.

A program takes images and gives the logits of all classes seen, every sub-network merged. The adapters are one PEFT
LoRA per task beside the reference network. Whatever is written is written aside, loaded as its user will load it, and
compared with the model; only then does it get its name.
"""

import copy
import io
import json
import re
import shutil
import tempfile
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.export.graph_signature import InputKind

from pearl.checkpoint import snapshot
from pearl.config import ImagesConfig, ModelConfig, RunConfig
from pearl.data.augment import View
from pearl.data.cache import read_image
from pearl.data.sources import image_files
from pearl.errors import DataError, ExportError, PearlError
from pearl.files import folder_name
from pearl.methods.base import Method
from pearl.methods.pearl import Pearl
from pearl.model import Model
from pearl.nn import lowrank
from pearl.nn.lowrank import Fold
from pearl.paths import runs_root
from pearl.registry import BACKBONES, SOURCES, Spec, nearest
from pearl.version import __version__

FORMAT = 1  # of the metadata in what is written
FACTS = "pearl.json"  # name of the metadata in a program, and of the file that marks a folder as an export
HEAD = "pearl_head"  # of a PEFT base model; PEFT finds modules by the end of their name, and no backbone ends so
TOLERANCE = 1e-4  # of logits, times the largest logit where that is above 1
_CHECKED = 16  # images that a result is checked with
_ONNX_LIMIT = 2**31 - 2**26  # bytes of weights: a protocol buffer ends at 2 GiB, and the graph needs room


@dataclass(frozen=True)
class Learnt:
    """A method and what its images, classes and backbone are: all that an export needs.

    `tasks` are those that the method has learnt, each {"name": ..., "classes": [...]}; `backbone` is what the registry
    builds it from.
    """

    method: Method
    images: ImagesConfig
    tasks: Sequence[Mapping[str, Any]]
    backbone: Spec

    @property
    def facts(self) -> dict[str, Any]:
        """The metadata that goes with what is written: JSON."""
        size = self.images.size
        return {
            "format": FORMAT,
            "pearl": __version__,
            "classes": [name for task in self.tasks for name in task["classes"]],
            "tasks": [{"name": task["name"], "classes": list(task["classes"])} for task in self.tasks],
            "input": {
                "shape": ["batch", 3, size, size],
                "dtype": "float32",
                "values": "RGB in [0, 1]",
                "resize": self.images.stored,  # of the shorter side, before the centre crop of `size`
                "interpolation": "bicubic",
                "crop": "center",
            },
            "output": "logits (batch, classes), in the order of classes",
        }


# ------------------------------------------------------------------------------------------------------------ verbs


def export_directory(
    name: str,
    *,
    to: str,
    out: Path | None = None,
    images: Sequence[Path] | None = None,
    upto: int | None = None,
    method: str | None = None,
    force: bool = False,
) -> str:
    """Export a model or run, by its directory or a run's name; returns what to tell the user.

    `out` is named as the directory, in the current folder, if not given. `images` are files or folders to check the
    result with; if not given, a run's own test images are used where they are, else random ones. `upto`: only the
    first so many tasks. `method`: the file of a method of the user's own (see `Model.open`).

    Raises:
        PearlError: no such run, nothing learnt yet, a format that cannot hold it, a place that cannot be written.
    """
    if to not in _WRITERS:
        raise ExportError(f"--to: unknown format {to!r}; {nearest(to, _WRITERS)}")
    path = Path(name)
    if not path.exists() and (runs_root() / name).is_dir():
        path = runs_root() / name
    opened = Model.open(path, tasks=upto, method=method)
    tasks = [{"name": task.name, "classes": list(task.classes)} for task in opened.tasks]
    model = Learnt(opened.method, opened.config.images, tasks, opened.config.backbone)
    raw, origin = check_images(opened.config, images)
    return export(model, to, out or Path(path.resolve().name + _SUFFIX[to]), raw, origin=origin, force=force)


def export(
    model: Learnt, to: str, out: Path, raw: Tensor, *, origin: str = "the given images", force: bool = False
) -> str:
    """Write a model to `out` in a format, checked on images `raw` (n, H, W, 3) uint8; returns a line that says so.

    Raises:
        ExportError: the format cannot hold the model, the result disagrees with it, or `out` cannot be written or is
            there already. Nothing is left behind.
    """
    model.method.eval()
    heads = model.method.heads.sizes()  # none of methods that classify by statistics
    if heads and [len(task["classes"]) for task in model.tasks] != heads:
        raise ExportError("the classes of the tasks are not those that the heads were made for; restore classes.json")
    with _aside(out, force=force, folder=to == "peft") as place, torch.no_grad():
        difference = _WRITERS[to](model, place, raw)
        size = sum(file.stat().st_size for file in ([place] if place.is_file() else place.rglob("*")) if file.is_file())
    if difference is None:
        verdict = 'not verified, as peft is not installed: pip install "pearl[peft]"'
    else:
        verdict = f"logits differ from the model's by at most {difference:.1e} on {origin}"
    return f"wrote {out}: {size / 1e6:.1f} MB, {len(model.facts['classes'])} classes; {verdict}"


def check_images(config: ModelConfig, given: Sequence[Path] | None = None) -> tuple[Tensor, str]:
    """Images to check with, (n, H, W, 3) uint8 of one size, and where they are from. Downloads nothing.

    Raises:
        DataError: none of the given ones is an image, or one cannot be read.
    """
    if given:
        files = [file for path in given for file in (image_files(path) if path.is_dir() else [path])]
        if not files:
            raise DataError(f"--images: no image in {', '.join(map(str, given))}; give image files or folders of them")
        return _read(files, config.images.stored), f"{min(len(files), _CHECKED)} of the given images"
    try:
        if not isinstance(config, RunConfig):
            raise DataError("a model keeps no images")
        spec = config.data | ({"download": False} if "download" in config.data else {})
        images = SOURCES.build(spec).test.images
        raw = _read(images, config.images.stored)
        return raw, f"{len(raw)} of the run's test images"
    except PearlError:
        side = config.images.stored
        raw = torch.randint(256, (_CHECKED, side, side, 3), generator=torch.Generator().manual_seed(0))
        return raw.to(torch.uint8), f"{_CHECKED} random images, as no others are here (--images gives some)"


def _read(images: np.ndarray | Sequence[Path], size: int) -> Tensor:
    rows = np.unique(np.linspace(0, len(images) - 1, _CHECKED).round().astype(int))
    if isinstance(images, np.ndarray):
        return torch.from_numpy(images[rows].copy())
    return torch.from_numpy(np.stack([read_image(images[row], size) for row in rows]))


@contextmanager
def _aside(out: Path, *, force: bool, folder: bool) -> Iterator[Path]:
    """A new place beside `out`; what is there when the block ends without an error becomes `out`."""
    if out.exists() or out.is_symlink():
        if not force:
            raise ExportError(f"{out}: is there already; choose another -o, or replace it with --force")
        # --force must not be able to take a folder of something else away
        if out.is_symlink() or out.is_dir() != folder or (folder and not (out / FACTS).is_file()):
            raise ExportError(f"{out}: is not an earlier export of this kind; choose another -o, or move it away")
    try:
        beside = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise ExportError(f"{out}: cannot be written ({error.strerror}); choose another place with -o") from None
    try:
        yield beside / out.name
        if folder and out.exists():
            out.rename(beside / "old")
        (beside / out.name).replace(out)
    except OSError as error:
        raise ExportError(f"{out}: cannot be written ({error.strerror or error}); choose another -o") from None
    finally:
        if (beside / "old").exists() and not out.exists():
            (beside / "old").rename(out)
        shutil.rmtree(beside, ignore_errors=True)


# ------------------------------------------------------------------------------------------------- the whole network


class Network(nn.Module):
    """RGB images (B, 3, S, S) float32 in [0, 1] -> logits (B, classes seen)."""

    pixel_mean: Tensor  # as "mean", its name would meet that of the operation in an ONNX file
    pixel_std: Tensor

    def __init__(self, parts: Sequence[nn.Module], images: ImagesConfig) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.register_buffer("pixel_mean", torch.tensor(images.mean)[:, None, None])
        self.register_buffer("pixel_std", torch.tensor(images.std)[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        """Normalise, then the logits of every part side by side."""
        x = (images - self.pixel_mean) / self.pixel_std
        return torch.cat([part(x) for part in self.parts], dim=1)


def network(method: Method, images: ImagesConfig) -> Network:
    """A method as a plain network on the CPU, frozen, low-rank updates merged; weights are shared wherever they can be.

    The method stays as it is.
    """
    # What deepcopy finds in its memo it does not copy: the tensors of all copies are these, or those that replace them.
    tensors = [*method.parameters(), *method.buffers()]
    shared: dict[int, Any] = {id(tensor): _frozen(tensor, tensor) for tensor in tensors}
    if not isinstance(method, Pearl):
        return Network([copy.deepcopy(method, shared)], images).eval()
    named = dict(method.backbone.named_parameters()) | dict(method.backbone.named_buffers())
    parts = []
    for t, head in enumerate(method.heads):
        weights = method.weights(t) if t >= method.first_adapted else {}
        replaced = {id(named[name]): _frozen(weight, named[name]) for name, weight in weights.items()}
        parts.append(copy.deepcopy(nn.Sequential(method.backbone, head), shared | replaced))
    return Network(parts, images).eval()


def _frozen(tensor: Tensor, like: Tensor) -> Tensor:
    tensor = tensor.detach().cpu().contiguous()
    return nn.Parameter(tensor, requires_grad=False) if isinstance(like, nn.Parameter) else tensor


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Turn an error of a library into one line: on networks that it cannot follow, it raises nearly anything."""
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except (PearlError, OSError):
        raise
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ExportError(f"{what} ({reason}); choose another format with --to, or another backbone") from error


def _trace(net: Network, size: int) -> torch.export.ExportedProgram:
    """The network as a program for batches of any size, without what it does not use and where it came from."""
    with _refusing("torch cannot trace this network"):
        batch = {0: torch.export.Dim("batch")}
        program = torch.export.export(net, (torch.zeros(2, 3, size, size),), dynamic_shapes=(batch,), strict=False)
    inputs = program.graph_signature.input_specs
    nodes = list(program.graph.nodes)
    for node, spec in zip(nodes, list(inputs), strict=False):  # the inputs are the first nodes
        if not node.users and spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            program.graph.erase_node(node)
            inputs.remove(spec)
            program.state_dict.pop(spec.target)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    program.graph_module.recompile()
    program.example_inputs = None  # torch would pickle them
    return program


def write_torch(model: Learnt, place: Path, raw: Tensor) -> float:
    """Write one torch.export program; see `export`. `torch.export.load(FILE).module()(images)` gives the logits."""
    program = _trace(network(model.method, model.images), model.images.size)
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={FACTS: json.dumps(model.facts)})
    if pickled := pickles(buffer):
        raise ExportError(f"this torch ({torch.__version__}) pickles {pickled[0]} of a program; install a newer one")
    place.write_bytes(buffer.getvalue())
    with place.open("rb") as file:
        loaded = torch.export.load(file).module()
    return _check(model, loaded, raw)


def pickles(archive: Path | io.BytesIO) -> list[str]:
    """The members of a .pt2 archive that are pickles; an empty member is none."""
    found = []
    with zipfile.ZipFile(archive) as members:
        for member in members.infolist():
            if member.filename.endswith((".pt", ".pkl")) and member.file_size:
                found.append(member.filename)
            if member.filename.endswith(("weights_config.json", "constants_config.json")):
                entries = json.loads(members.read(member))["config"].items()
                found += [name for name, entry in entries if entry["use_pickle"]]
    return found


def write_onnx(model: Learnt, place: Path, raw: Tensor) -> float:
    """Write one ONNX file; see `export`. Its input is `images`, its output `logits`."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise ExportError(f'--to onnx needs {", ".join(missing)}, not installed: pip install "pearl[onnx]"')
    import onnxruntime

    net = network(model.method, model.images)
    stored = {tensor.data_ptr(): tensor.nbytes for tensor in [*net.parameters(), *net.buffers()]}
    if sum(stored.values()) > _ONNX_LIMIT:
        raise ExportError(f"{sum(stored.values()) / 1e9:.1f} GB of weights: an ONNX file ends at 2 GB; use --to torch")
    program = _trace(net, model.images.size)
    with _refusing("this network cannot be made an ONNX file"):
        made: Any = torch.onnx.export(
            program,
            dynamo=True,
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=({0: "batch"},),
            verbose=False,
            optimize=False,  # six times faster on ten ViTs; what runs the file optimises it anyway
        )
        made.model.metadata_props.update({key: json.dumps(value) for key, value in model.facts.items()})
        for node in made.model.graph:
            node.metadata_props.clear()  # how torch came by it: half of a small file
        made.save(place, external_data=False)
        session = onnxruntime.InferenceSession(place, providers=["CPUExecutionProvider"])
        return _check(model, lambda x: torch.from_numpy(session.run(["logits"], {"images": x.numpy()})[0]), raw)


def _check(model: Learnt, written: Callable[[Tensor], Tensor], raw: Tensor) -> float:
    """Compare a program with the model it was made from."""
    plain = model.images.model_copy(update={"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)})
    unnormalised = View(plain, channels_last=False).test(raw)
    return compare(_on_cpu(model.method), written, _seen(model, raw), unnormalised)


def _on_cpu(method: Method, task: int | None = None) -> Callable[[Tensor], Tensor]:
    return lambda x: method(x.to(method.device), task=task).cpu()


def _seen(model: Learnt, raw: Tensor) -> Tensor:
    return View(model.images, channels_last=False).test(raw)


def compare(
    model: Callable[[Tensor], Tensor], written: Callable[[Tensor], Tensor], x: Tensor, given: Tensor | None = None
) -> float:
    """The largest difference of logits on images `x`, the first alone and all together; `written` takes `given`.

    Raises:
        ExportError: it is above TOLERANCE, times the largest logit where that is above 1; or another class wins.
    """
    given = x if given is None else given
    times = -(-5 // len(x))  # a batch of five or more
    x, given = x.repeat(times, 1, 1, 1), given.repeat(times, 1, 1, 1)
    expected = model(x)
    worst = 0.0
    for count in (1, len(x)):
        found = written(given[:count].contiguous())
        difference = float((found - expected[:count]).abs().max()) if found.shape == expected[:count].shape else np.inf
        allowed = TOLERANCE * max(1.0, float(expected.abs().max()))
        same = difference <= allowed and torch.equal(found.argmax(1), expected[:count].argmax(1))
        if not same:  # also where something is not a number
            raise ExportError(
                f"the written model disagrees with the trained one: logits differ by {difference:.1e}, allowed are "
                f"{allowed:.1e}; nothing was kept, choose another format"
            )
        worst = max(worst, difference)
    return worst


# ----------------------------------------------------------------------------------------------------- PEFT adapters


def write_peft(model: Learnt, place: Path, raw: Tensor) -> float | None:
    """Write a folder of PEFT adapters; see `export`. OUT/README.md says how to load them.

    OUT/base/ holds the reference network, OUT/TASK/ a LoRA with the task's own norm layers, dense copies and head.
    """
    method = model.method
    if not isinstance(method, Pearl):
        raise ExportError(
            f"--to peft: {type(method).__name__.lower()} has no low-rank updates; export it --to torch or --to onnx"
        )
    _check_layers(method)
    folders = [folder_name(t, task["name"]) for t, task in enumerate(model.tasks)]
    base = _base_facts(model)
    (place / "base").mkdir(parents=True)
    (place / "base" / "backbone.safetensors").write_bytes(save(snapshot(method.backbone.state_dict())))
    _write_json(place / "base" / "backbone.json", base)
    for t, folder in enumerate(folders):
        tensors, settings = adapter(method, t)
        (place / folder).mkdir()
        (place / folder / "adapter_model.safetensors").write_bytes(save(tensors))
        _write_json(place / folder / "adapter_config.json", settings)
    facts = model.facts
    normalisation = {"mean": list(model.images.mean), "std": list(model.images.std)}
    facts["input"] |= {"values": "RGB in [0, 1], then normalised", **normalisation}
    facts["tasks"] = [{**task, "folder": folder} for task, folder in zip(facts["tasks"], folders, strict=True)]
    facts["output"] = "logits (batch, classes of the task)"
    _write_json(place / FACTS, facts)
    (place / "README.md").write_text(_readme(base, facts))
    if find_spec("peft") is None:
        return None
    x = _seen(model, raw)
    with _refusing("PEFT cannot load this network's adapters"):
        return max(compare(_on_cpu(method, t), _load_adapter(model, place, t), x) for t in range(len(folders)))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def _check_layers(method: Pearl) -> None:
    """PEFT's LoRA of a convolution knows neither groups nor dilation, and no other kinds of layer."""
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


def adapter(method: Pearl, t: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Task t as a PEFT LoRA: the tensors and the configuration of an adapter on `backbone` + HEAD."""
    low_rank: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = defaultdict(list)
    own: dict[str, dict[str, Tensor]] = {HEAD: dict(method.heads[t].state_dict())}
    if t >= method.first_adapted:
        weights = method.weights(t)
        for target in method.targets:
            if not target.dense:  # query and key of one fused layer are two updates of it
                low_rank[target.parameter.removesuffix(".weight")].append(_lora(method, t, target))
        dense = [target.parameter for target in method.targets if target.dense]
        for name in [*dense, *method.norms, *method.norm_statistics]:
            module = name.rpartition(".")[0]
            state = method.backbone.get_submodule(module).state_dict()
            own[f"backbone.{module}"] = {key: weights.get(f"{module}.{key}", value) for key, value in state.items()}

    tensors = {f"{name}.{key}": value for name, state in own.items() for key, value in state.items()}
    ranks: dict[str, int] = {}
    for name, updates in low_rank.items():
        a, b, bias = (list(part) for part in zip(*updates, strict=True))
        tensors[f"backbone.{name}.lora_A.weight"] = torch.cat(a)
        tensors[f"backbone.{name}.lora_B.weight"] = torch.cat(b, dim=1)
        if method.lora_bias:
            tensors[f"backbone.{name}.lora_B.bias"] = torch.stack(bias).sum(0)
        # PEFT takes a key for a regular expression that the end of a layer's name matches: "conv1" would be many
        ranks[f"^{re.escape(f'backbone.{name}')}$"] = len(torch.cat(a))
    settings = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": 1,  # of no layer: each has its own, and alpha = r, as the scale is in B already
        "lora_alpha": 1,
        "rank_pattern": ranks,
        "alpha_pattern": ranks,
        "lora_dropout": 0.0,
        "lora_bias": method.lora_bias and bool(ranks),
        "bias": "none",
        # the second is PEFT's own name for no layer at all, as the task that trained the reference has it
        "target_modules": [f"backbone.{name}" for name in low_rank] or "dummy-target-modules",
        "modules_to_save": list(own),
    }
    return snapshot({f"base_model.model.{name}": value for name, value in tensors.items()}), settings


def _lora(method: Pearl, t: int, target: lowrank.Target) -> tuple[Tensor, Tensor, Tensor]:
    """A, B and the bias of B that PEFT needs for one update, of the whole layer: other rows of a fused one are zero."""
    a, b = method.tensors[f"{t}.A.{target.label}"], method.tensors[f"{t}.B.{target.label}"]
    whole = method.backbone.get_parameter(target.parameter)
    scale = 2.0 if method.alpha == "2r" else method.alpha / a.shape[0]
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
    """An update B A of a weight in any fold as R filters (R, in, kh, kw) and their mix (out, R): PEFT's LoRA, exactly.

    Where an output has k rows in the folded matrix, each of the r rows of A becomes k filters, one for each of the
    places where it can stand: R = k r. More than `out` filters are never needed.
    """
    out, (r, columns) = shape[0], a.shape
    k = lowrank.matrix_shape(shape, fold)[0] // out
    placed = torch.einsum("ij,rn->rijn", torch.eye(k, device=a.device), a).reshape(r * k * k, columns)
    filters = lowrank.from_matrix(placed, (r * k, *shape[1:]), fold)
    mix = b.reshape(out, k, r).transpose(1, 2).reshape(out, r * k)
    if r * k > out:
        filters, mix = torch.einsum("or,r...->o...", mix, filters), torch.eye(out, device=a.device)
    return filters, mix


def _base_facts(model: Learnt) -> dict[str, Any]:
    """How to build the reference network, and its width."""
    size, dim = model.images.size, model.method.heads.dim
    name = model.backbone["name"]
    if not name.startswith("timm/"):
        # a state overwrites the weights that it began with
        spec = model.backbone | ({"weights": None} if "weights" in model.backbone else {})
        return {"format": FORMAT, "library": "pearl", "backbone": spec, "image_size": size, "dim": dim}
    arguments: dict[str, Any] = {"num_classes": 0}
    try:
        timm.create_model(name.removeprefix("timm/"), **arguments, img_size=size)
        arguments["img_size"] = size
    except TypeError:  # a CNN: takes any image size, and no such argument
        pass
    return {
        "format": FORMAT,
        "library": "timm",
        "version": timm.__version__,
        "model": name.removeprefix("timm/"),
        "arguments": arguments,
        "dim": dim,
    }


def _load_adapter(model: Learnt, place: Path, t: int) -> nn.Module:
    """Task t's sub-network as the README has it loaded."""
    from peft import PeftModel

    base = _base_facts(model)
    if base["library"] == "timm":
        backbone = timm.create_model(base["model"], **base["arguments"])
    else:
        backbone = BACKBONES.build(base["backbone"], base["image_size"])
    backbone.load_state_dict(load_file(place / "base" / "backbone.safetensors"))
    whole = nn.Sequential()
    whole.add_module("backbone", backbone)
    whole.add_module(HEAD, nn.Linear(base["dim"], len(model.tasks[t]["classes"])))
    folder = place / folder_name(t, model.tasks[t]["name"])
    return PeftModel.from_pretrained(whole, folder, torch_device="cpu").eval()


def _readme(base: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    if base["library"] == "timm":
        imports = "import timm"
        arguments = "".join(f", {key}={value}" for key, value in base["arguments"].items())
        build = f'timm.create_model("{base["model"]}"{arguments})'
    else:
        imports = "from pearl.registry import BACKBONES"
        build = f"BACKBONES.build({base['backbone']}, {base['image_size']})"
    folders = [task["folder"] for task in facts["tasks"]]
    given = facts["input"]
    shape = "(batch, 3, {2}, {3})".format(*given["shape"])
    return f"""# Adapters of {len(folders)} tasks

Written by pearl {facts["pearl"]}. `base/` holds the reference network; every other folder is a PEFT LoRA with one
task's own norm layers and head. `{FACTS}` lists the tasks, their folders and their classes.

```python
import json
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file
{imports}

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
side resized to {given["resize"]} pixels (bicubic), the centre cropped, divided by 255, less {given["mean"]}, divided by
{given["std"]}. The logits of all tasks side by side are the model's over all classes.

Load each task on a base of its own: heads differ in size, and PEFT copies the base's.
"""


_WRITERS: dict[str, Callable[[Learnt, Path, Tensor], float | None]] = {
    "torch": write_torch,
    "onnx": write_onnx,
    "peft": write_peft,
}
_SUFFIX = {"torch": ".pt2", "onnx": ".onnx", "peft": "-peft"}
