"""Check that a change changes no bit: digits, and a short run of every method, in float32 on one thread.

    python benchmarks/identity.py before.json                         # on the commit before
    python benchmarks/identity.py after.json --against before.json    # on the one after, on the same machine

The JSON has a digest of every tensor that each run stored, and the counts of correct predictions. Runs are named by
their configuration, so changed names are reported, too. Takes two minutes; exit code 1 if anything differs.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from safetensors.torch import load_file

import pearl
from pearl.settings.parts import METHODS

SHORT = {"engine": {"precision": "fp32", "max_steps": 6}, "stream": {"per_class": 20, "test_per_class": 5}}
CNN = {"backbone": {"name": "resnet18", "width": 8}}
VIT = {"backbone": {"name": "timm/test_vit"}, "images": {"size": 32, "augment": "resized_crop"}}
SEPARABLE = {"backbone": {"name": "bsc", "width": 8}}


def settings() -> dict[str, dict[str, Any]]:
    """Return the runs' settings, by name."""
    runs: dict[str, dict[str, Any]] = {"digits": {"engine": {"precision": "fp32"}}}
    for name in METHODS.builtin:
        network = VIT if METHODS.load(name).backbones == "vit" else CNN  # type: ignore[attr-defined]
        runs[name] = {**SHORT, **network, "method": name}
    runs["lgcl"]["method"] = {"name": "lgcl", "text_features": "texts.npz"}
    runs["sema"]["method"] = {"name": "sema", "adapt_start_layer": 3, "adapt_end_layer": 5}
    runs["convprompt"]["method"] = {"name": "convprompt", "blocks": 6}
    for name in ("pearl", "seqlora"):
        runs[f"{name} on a ViT"] = {**SHORT, **VIT, "method": name}
    return runs | {"pearl on BSC": {**SHORT, **SEPARABLE}}


def stored(run: Any) -> dict[str, Any]:
    """Return digests of all tensors of a run, its name and its counts."""
    digests = {}
    for file in sorted(run.path.rglob("*.safetensors")):
        for name, tensor in load_file(file).items():
            content = tensor.numpy().tobytes() + str((tensor.dtype, tuple(tensor.shape))).encode()
            digests[f"{file.parent.relative_to(run.path)}: {name}"] = hashlib.sha256(content).hexdigest()[:16]
    stages = [{key: stage[key] for key in ("total", "class_il", "task_il")} for stage in run.results["stages"]]
    return {"run": run.path.name, "tensors": digests, "stages": stages}


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a line for each changed run."""
    lines = [f"{name}: is missing now" for name in before.keys() - after.keys()]
    for name in before.keys() & after.keys():
        old, new = before[name], after[name]
        if old["run"] != new["run"]:
            lines.append(f"{name}: is named {new['run']}, was {old['run']}")
        keys = old["tensors"].keys() | new["tensors"].keys()
        other = [key for key in keys if old["tensors"].get(key) != new["tensors"].get(key)]
        if other:
            lines.append(f"{name}: {len(other)} of {len(keys)} tensors differ, such as {min(other)}")
        if old["stages"] != new["stages"]:
            lines.append(f"{name}: other counts")
    return sorted(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--only", nargs="*", help="names of runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measured = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"PEARL_RUNS": folder, "PEARL_DATA": folder, "PEARL_CACHE": "off"}
        # not real text features: only LGCL's use of them is compared
        texts = np.random.default_rng(0).standard_normal((10, 64))
        np.savez(Path(folder) / "texts.npz", names=[str(digit) for digit in range(10)], features=texts)
        for name, overrides in settings().items():
            if not arguments.only or name in arguments.only:
                measured[name] = stored(pearl.run("digits", quiet=True, **overrides))
                print(f"{name}: {len(measured[name]['tensors'])} tensors", flush=True)
    arguments.out.write_text(json.dumps(measured, indent=1) + "\n")
    if arguments.against:
        before = json.loads(arguments.against.read_text())
        lines = differences({name: before[name] for name in before.keys() & measured.keys()}, measured)
        print("\n".join(lines or [f"{len(measured)} runs, every bit as it was"]))
        sys.exit(bool(lines))


if __name__ == "__main__":
    main()
