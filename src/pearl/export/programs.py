"""Export as one program, a torch.export or an ONNX file: images in, logits and in-distribution scores out."""

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
from pearl.export.trained import FACTS, TOLERANCE, Trained, compare, importing, on_cpu, refusing, seen
from pearl.methods.base import Method
from pearl.methods.common.by_statistics import StatisticsClassifier
from pearl.methods.common.calibration import Scores
from pearl.methods.common.subnetworks import SubNetworks
from pearl.nn.intermediate_features import WithInner
from pearl.settings.sections import ImagesConfig

_ONNX_LIMIT = 2**31 - 2**26  # bytes of weights: a protocol buffer is limited to 2 GiB, including the graph


class Network(nn.Module):
    """Maps RGB images (B, 3, S, S) float32 in [0, 1] to logits (B, classes seen)."""

    pixel_mean: Tensor  # the name "mean" would collide with the operation in an ONNX file
    pixel_std: Tensor
    outputs: tuple[str, ...] = ("logits",)

    def __init__(self, parts: Sequence[nn.Module], images: ImagesConfig) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.register_buffer("pixel_mean", torch.tensor(images.mean)[:, None, None])
        self.register_buffer("pixel_std", torch.tensor(images.std)[:, None, None])

    def forward(self, images: Tensor) -> Any:
        """Normalise, then concatenate the logits of every part."""
        x = self.normalised(images)
        return torch.cat([part(x) for part in self.parts], dim=1)

    def normalised(self, images: Tensor) -> Tensor:
        """Return normalised images, as a backbone takes them."""
        return (images - self.pixel_mean) / self.pixel_std


class ScoringNetwork(Network):
    """RGB images as above -> log P (B, classes seen), and in-distribution scores (B,) from 0 to 1.

    Such a score is the share of images of known classes that have no higher one: `method.shares`.
    """

    values: Tensor
    share: Tensor
    outputs = ("logits", "in_distribution")

    def __init__(self, scorer: nn.Module, scores: Scores, images: ImagesConfig) -> None:
        """`scorer` maps normalised images to log P and scores."""
        super().__init__([scorer], images)
        for name, values in zip(("values", "share"), scores.steps(), strict=True):
            self.register_buffer(name, values)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """See the class."""
        logp, scores = self.parts[0](self.normalised(images))
        below = scores.double()[:, None] >= self.values  # ONNX has no search in sorted values
        return logp, (below * self.share).sum(1).float()


class BySpaces(nn.Module):
    """Images as a backbone sees them -> log P and in-distribution scores, by the feature spaces of sub-networks."""

    def __init__(self, spaces: Sequence[nn.Module], scorer: nn.Module) -> None:
        super().__init__()
        self.spaces, self.scorer = nn.ModuleList(spaces), scorer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See the class."""
        scores: tuple[Tensor, Tensor] = self.scorer([space(x) for space in self.spaces])
        return scores


class ByMethod(nn.Module):
    """The log P and scores of a whole method."""

    def __init__(self, method: Method, scorer: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.method, self.scorer = method, scorer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See the class."""
        return self.scorer(x)


def network(method: Method, images: ImagesConfig) -> Network:
    """Return a method as a plain network on the CPU, frozen, with updates merged; weights are shared where possible.

    The method is not changed.
    """
    # deepcopy does not copy the objects in its memo: the tensors of all copies are these, or their replacements
    tensors = [*method.parameters(), *method.buffers()]
    shared: dict[int, Any] = {id(tensor): _frozen(tensor, tensor) for tensor in tensors}
    statistics = method.classifier.statistics if isinstance(method.classifier, StatisticsClassifier) else None
    if statistics is not None:
        if statistics.options.precision != "float32":
            raise ExportError(
                "its statistics are of features in bfloat16, and programs compute in float32; make a model with "
                "method.classifier.precision=float32"
            )
        statistics.ood_scorer()  # created here; not part of the program
    if not isinstance(method, SubNetworks) or not method.separable:
        whole = copy.deepcopy(method, shared)
        if statistics is None or (scorer := whole.classifier.ood_scorer()) is None:
            return Network([whole], images).eval()
        return ScoringNetwork(ByMethod(whole, scorer), statistics.scores(), images).eval()

    def part(t: int, *after: nn.Module) -> nn.Sequential:
        net, weights = method.sub_network(t)
        named = dict(net.named_parameters()) | dict(net.named_buffers())
        replaced = {id(named[name]): _frozen(weight, named[name]) for name, weight in weights.items()}
        return copy.deepcopy(nn.Sequential(net, *after), shared | replaced)

    if statistics is None:
        return Network([part(t, head) for t, head in enumerate(method.heads)], images).eval()
    spaces = [WithInner(part(t)[0], method.layers) for t in statistics.created_at]
    by_spaces = BySpaces(spaces, copy.deepcopy(statistics.ood_scorer()).cpu())
    return ScoringNetwork(by_spaces, statistics.scores(), images).eval()


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


def write_torch(model: Trained, path: Path, raw: Tensor) -> float:
    """Write one torch.export program; see `export`. `torch.export.load(FILE).module()(images)` returns the outputs."""
    program = _trace(network(model.method, model.images), model.images.size)
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={FACTS: json.dumps(model.facts)})
    if pickled := pickles(buffer):
        raise ExportError(f"this torch ({torch.__version__}) pickles {pickled[0]} of a program; install a newer one")
    path.write_bytes(buffer.getvalue())
    with path.open("rb") as file:
        loaded = torch.export.load(file).module()
    return _check(model, loaded, raw)


def pickles(archive: Path | io.BytesIO) -> list[str]:
    """Return the members of a .pt2 archive that are pickles; empty members are not."""
    pickled = []
    with zipfile.ZipFile(archive) as members:
        for member in members.infolist():
            if member.filename.endswith((".pt", ".pkl")) and member.file_size:
                pickled.append(member.filename)
            if member.filename.endswith(("weights_config.json", "constants_config.json")):
                entries = json.loads(members.read(member))["config"].items()
                pickled += [name for name, entry in entries if entry["use_pickle"]]
    return pickled


def write_onnx(model: Trained, path: Path, raw: Tensor) -> float:
    """Write one ONNX file; see `export`. Its input is `images`, its outputs are `Network.outputs`."""
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
            output_names=[*net.outputs],
            dynamic_shapes=({0: "batch"},),
            verbose=False,
            optimize=False,  # six times as fast for ten ViTs; the runtime optimises the file anyway
        )
        made.model.metadata_props.update({key: json.dumps(value) for key, value in model.facts.items()})
        for node in made.model.graph:
            node.metadata_props.clear()  # torch's source locations: half of a small file
        made.save(path, external_data=False)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

        def run(x: Tensor) -> Any:
            outputs = [torch.from_numpy(each) for each in session.run([*net.outputs], {"images": x.numpy()})]
            return outputs if len(outputs) > 1 else outputs[0]

        return _check(model, run, raw)


def _check(model: Trained, written: Callable[[Tensor], Any], raw: Tensor) -> float:
    """Compare a program with the model."""
    plain = model.images.model_copy(update={"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)})
    unnormalised = View(plain, channels_last=False).test(raw)
    scorer = model.method.classifier.ood_scorer()
    if scorer is None:
        return compare(on_cpu(model.method), written, seen(model, raw), unnormalised)
    scores = scorer(seen(model, raw).to(model.method.device))[1]
    slack = TOLERANCE * scores.abs().clamp(min=1)
    low, high = (model.method.classifier.shares(each).cpu() for each in (scores - slack, scores + slack))
    shares = written(unnormalised.contiguous())[1]
    if not ((shares >= low - 1e-6) & (shares <= high + 1e-6)).all():
        raise ExportError("the written model's in-distribution scores are not the trained one's; nothing was kept")
    return compare(on_cpu(model.method), lambda x: written(x)[0], seen(model, raw), unnormalised)
