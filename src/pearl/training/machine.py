"""The environment that affects a result's bits in addition to its configuration: versions, device, flags."""

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
# environment variables of math libraries: instruction set, precision, order of sums
_LIBRARIES = ("ATEN", "CUBLAS", "CUBLASLT", "CUDNN", "DNNL", "KMP", "MKL", "NCCL", "OMP", "ONEDNN", "OPENBLAS")
_SWITCHES = (*(f"{library}_" for library in _LIBRARIES), "NVIDIA_TF32", "PYTORCH_", "TORCH_")
# of torch.backends; where PyTorch has no such flag, there is nothing to switch
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
    """Return versions, at the first call, of pearl, Python and the packages that compute."""
    return {
        "pearl": __version__,
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
    }


def device_name(device: torch.device) -> str:
    """Return the GPU's or CPU's model."""
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
    """Return all of it, as JSON: machines with equal values give equal bits."""
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
    """Return one flag of `torch.backends`; some are functions."""
    value = attrgetter(name)(torch.backends)
    return value() if callable(value) else value


def _said(ask: Callable[[], Any]) -> str:
    """Return a flag's value; PyTorch lacks some, and refuses if its older and newer switches were both used."""
    try:
        return str(ask())
    except (AttributeError, RuntimeError) as error:
        return type(error).__name__


def _capabilities() -> dict[str, Any]:
    return dict(torch.cpu.get_capabilities()) if hasattr(torch.cpu, "get_capabilities") else {}
