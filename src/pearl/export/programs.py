"""Export as one program, a torch.export or an ONNX file: images in, logits of all classes seen out."""

import copy
import io
import json
import zipfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind

from pearl.data.augment import View
from pearl.errors import ExportError
from pearl.export.trained import FACTS, Trained, compare, importing, on_cpu, refusing, seen
from pearl.methods.base import Method
from pearl.methods.common.subnetworks import SubNetworks
from pearl.nn.inner import WithInner
from pearl.settings.sections import ImagesConfig

_ONNX_LIMIT = 2**31 - 2**26  # bytes of weights: a protocol buffer is limited to 2 GiB, including the graph


class Network(nn.Module):
    """Maps RGB images (B, 3, S, S) float32 in [0, 1] to logits (B, classes seen)."""

    pixel_mean: Tensor  # the name "mean" would collide with the operation in an ONNX file
    pixel_std: Tensor

    def __init__(self, parts: Sequence[nn.Module], images: ImagesConfig) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.register_buffer("pixel_mean", torch.tensor(images.mean)[:, None, None])
        self.register_buffer("pixel_std", torch.tensor(images.std)[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        """Normalise, then concatenate the logits of every part."""
        x = (images - self.pixel_mean) / self.pixel_std
        return torch.cat([part(x) for part in self.parts], dim=1)


class Chained(nn.Module):
    """Maps images (B, 3, S, S), normalised for the backbone, to log P (B, classes seen) by class statistics."""

    def __init__(self, spaces: Sequence[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.spaces, self.head = nn.ModuleList(spaces), head

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return self.head([space(x) for space in self.spaces])


def network(method: Method, images: ImagesConfig) -> Network:
    """Return a method as a plain network on the CPU, frozen, with updates merged; weights are shared where possible.

    The method is not changed.
    """
    # deepcopy does not copy the objects in its memo: the tensors of all copies are these, or their replacements
    tensors = [*method.parameters(), *method.buffers()]
    shared: dict[int, Any] = {id(tensor): _frozen(tensor, tensor) for tensor in tensors}
    if isinstance(method, SubNetworks) and method.chain is not None:
        method.chain.head()  # created here; not part of the program
    if not isinstance(method, SubNetworks) or not method.separable:
        return Network([copy.deepcopy(method, shared)], images).eval()

    def part(t: int, *after: nn.Module) -> nn.Sequential:
        net, weights = method.sub_network(t)
        named = dict(net.named_parameters()) | dict(net.named_buffers())
        replaced = {id(named[name]): _frozen(weight, named[name]) for name, weight in weights.items()}
        return copy.deepcopy(nn.Sequential(net, *after), shared | replaced)

    if method.chain is None:
        return Network([part(t, head) for t, head in enumerate(method.heads)], images).eval()
    spaces = [WithInner(part(t)[0], method.layers) for t in method.chain.births]
    return Network([Chained(spaces, copy.deepcopy(method.chain.head()).cpu())], images).eval()


def _frozen(tensor: Tensor, like: Tensor) -> Tensor:
    tensor = tensor.detach().cpu().contiguous()
    return nn.Parameter(tensor, requires_grad=False) if isinstance(like, nn.Parameter) else tensor


def _trace(net: Network, size: int) -> torch.export.ExportedProgram:
    """Trace the network for batches of any size, without unused nodes and source paths."""
    with refusing("torch cannot trace this network"):
        batch = {0: torch.export.Dim("batch")}
        program = torch.export.export(net, (torch.zeros(2, 3, size, size),), dynamic_shapes=(batch,), strict=False)
    inputs = program.graph_signature.input_specs
    nodes = list(program.graph.nodes)
    for node, spec in zip(nodes, list(inputs), strict=False):  # inputs are the first nodes
        if not node.users and spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            program.graph.erase_node(node)
            inputs.remove(spec)
            # buffers outside the state_dict, such as timm's relative-position tables, count as constants
            (program.constants if spec.persistent is False else program.state_dict).pop(spec.target)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    program.graph_module.recompile()
    program.example_inputs = None  # torch would pickle them
    return program


def write_torch(model: Trained, place: Path, raw: Tensor) -> float:
    """Write a torch.export program; see `export`. `torch.export.load(FILE).module()(images)` returns the logits."""
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
    """Return the members of a .pt2 archive that are pickles; empty members are not."""
    found = []
    with zipfile.ZipFile(archive) as members:
        for member in members.infolist():
            if member.filename.endswith((".pt", ".pkl")) and member.file_size:
                found.append(member.filename)
            if member.filename.endswith(("weights_config.json", "constants_config.json")):
                entries = json.loads(members.read(member))["config"].items()
                found += [name for name, entry in entries if entry["use_pickle"]]
    return found


def write_onnx(model: Trained, place: Path, raw: Tensor) -> float:
    """Write an ONNX file; see `export`. Its input is `images`, its output `logits`."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise ExportError(f'--to onnx needs {", ".join(missing)}, not installed: pip install "pearl[onnx]"')
    with importing("onnx"):
        import onnx  # noqa: F401 - torch imports it and the next, and says less
        import onnxruntime
        import onnxscript  # noqa: F401

    net = network(model.method, model.images)
    stored = {tensor.data_ptr(): tensor.nbytes for tensor in [*net.parameters(), *net.buffers()]}
    if sum(stored.values()) > _ONNX_LIMIT:
        raise ExportError(f"{sum(stored.values()) / 1e9:.1f} GB of weights: an ONNX file ends at 2 GB; use --to torch")
    program = _trace(net, model.images.size)
    with refusing("this network cannot be converted to ONNX"):
        made: Any = torch.onnx.export(
            program,
            dynamo=True,
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=({0: "batch"},),
            verbose=False,
            optimize=False,  # six times as fast for ten ViTs; the runtime optimises the file anyway
        )
        made.model.metadata_props.update({key: json.dumps(value) for key, value in model.facts.items()})
        for node in made.model.graph:
            node.metadata_props.clear()  # torch's source locations: half of a small file
        made.save(place, external_data=False)
        session = onnxruntime.InferenceSession(place, providers=["CPUExecutionProvider"])
        return _check(model, lambda x: torch.from_numpy(session.run(["logits"], {"images": x.numpy()})[0]), raw)


def _check(model: Trained, written: Callable[[Tensor], Tensor], raw: Tensor) -> float:
    """Compare a program with the model."""
    plain = model.images.model_copy(update={"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)})
    unnormalised = View(plain, channels_last=False).test(raw)
    return compare(on_cpu(model.method), written, seen(model, raw), unnormalised)
