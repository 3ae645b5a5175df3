"""What the bits of a result depend on beside its configuration: versions, the device, its threads, switches."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pearl.version import __version__

PACKAGES = ("torch", "torchvision", "timm", "lightning-fabric", "numpy", "safetensors")
# of the libraries that multiply: which instructions they use, how exact and in which order
_SWITCHES = ("ATEN_", "CUBLAS_", "CUDNN_", "DNNL_", "KMP_", "MKL_", "NVIDIA_TF32", "OMP_", "ONEDNN_", "TORCH_")


def versions() -> dict[str, Any]:
    """Of pearl, Python and the packages that compute."""
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
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def machine(device: torch.device) -> dict[str, Any]:
    """All of it, as JSON: two machines that say the same give the same bits."""
    cuda = torch.backends.cuda
    return {
        **versions(),
        "build": [torch.__config__.show(), torch.version.git_version, platform.platform(), np.__version__],
        "device": [device.type, device_name(device), torch.version.cuda, torch.backends.cudnn.version()],
        "cpu": [torch.backends.cpu.get_cpu_capability(), _capabilities()],
        "threads": torch.get_num_threads(),
        "switches": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SWITCHES)},
        "flags": [
            str(torch.get_default_dtype()),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.mkldnn.enabled,
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.allow_tf32,
            cuda.matmul.allow_tf32,
            cuda.matmul.allow_bf16_reduced_precision_reduction,
            [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()],
        ],
    }


def _capabilities() -> dict[str, Any]:
    return dict(torch.cpu.get_capabilities()) if hasattr(torch.cpu, "get_capabilities") else {}
