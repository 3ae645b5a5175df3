"""What the bits of a result depend on beside its configuration: versions, the device, its threads, switches."""

import os
import platform
from collections.abc import Callable
from functools import cache, partial
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pearl.version import __version__

PACKAGES = ("torch", "torchvision", "timm", "lightning-fabric", "numpy", "safetensors")
# of the libraries that multiply: which instructions they use, how exact and in which order
_LIBRARIES = ("ATEN", "CUBLAS", "CUBLASLT", "CUDNN", "DNNL", "KMP", "MKL", "NCCL", "OMP", "ONEDNN", "OPENBLAS")
_SWITCHES = (*(f"{library}_" for library in _LIBRARIES), "NVIDIA_TF32", "PYTORCH_", "TORCH_")
# of torch.backends; where PyTorch has no such flag, it has nothing that this would switch
_PRECISION = ("", "mkldnn.", "mkldnn.conv.", "mkldnn.matmul.", "mkldnn.rnn.", "cudnn.", "cudnn.conv.", "cudnn.rnn.")
_FLAGS = (
    *(f"{of}fp32_precision" for of in (*_PRECISION, "cuda.matmul.")),
    *(f"mkldnn.{name}" for name in ("enabled", "deterministic", "allow_tf32")),
    *(f"cudnn.{name}" for name in ("enabled", "benchmark", "deterministic", "allow_tf32")),
    "cuda.matmul.allow_tf32",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_accumulation",
    *(f"cuda.{name}_sdp_enabled" for name in ("flash", "mem_efficient", "math", "cudnn")),
    *(f"cuda.preferred_{name}_library" for name in ("linalg", "blas")),
)


@cache
def versions() -> dict[str, Any]:
    """As they were when first asked, of pearl, Python and the packages that compute."""
    return {
        "pearl": __version__,
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
    }


def device_name(device: torch.device) -> str:
    """The GPU's or CPU's model."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    of_arm = [facts[key] for key in ("CPU implementer", "CPU part") if key in facts]
    return facts.get("model name") or " ".join([platform.machine(), *of_arm])


def machine(device: torch.device) -> dict[str, Any]:
    """All of it, as JSON: two machines that say the same give the same bits."""
    return {
        **versions(),
        "build": [torch.__config__.show(), torch.version.git_version, platform.platform(), np.__version__],
        "device": [device.type, device_name(device), torch.version.cuda, torch.backends.cudnn.version()],
        "cpu": [torch.backends.cpu.get_cpu_capability(), _capabilities()],
        "threads": torch.get_num_threads(),
        "switches": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SWITCHES)},
        "flags": [
            str(torch.get_default_dtype()),
            torch.are_deterministic_algorithms_enabled(),
            _said(torch.get_float32_matmul_precision),
            [_said(partial(_flag, name)) for name in _FLAGS],
        ],
    }


def _flag(name: str) -> Any:
    """One of `torch.backends`; some of them are functions that say it."""
    value = attrgetter(name)(torch.backends)
    return value() if callable(value) else value


def _said(ask: Callable[[], Any]) -> str:
    """What it says; PyTorch has not all of them, and refuses where its older and its newer switches were both used."""
    try:
        return str(ask())
    except (AttributeError, RuntimeError) as error:
        return type(error).__name__


def _capabilities() -> dict[str, Any]:
    return dict(torch.cpu.get_capabilities()) if hasattr(torch.cpu, "get_capabilities") else {}
