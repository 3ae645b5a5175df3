"""Run the CPU-sized recipes with every method and write the table.

    python benchmarks/real_images.py                      all recipes, all methods, seed 0
    python benchmarks/real_images.py --recipes cpu-cifar20-resnet18 --methods pearl isolation --seeds 0 1
    python benchmarks/real_images.py --only-memory        measure only the memory of existing rows
    python benchmarks/real_images.py --only-table         write the tables again from existing rows

`python benchmarks/which_method.py` then copies new rows to `pearl list methods --long`.

Finished runs are skipped, so the command can be stopped and started again; rows of other methods and seeds are kept.
Data is searched under $PEARL_DATA. If a recipe cannot be run, a line reports it, the others continue, and the exit code
is 2.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from tempfile import TemporaryDirectory

import torch

import pearl
from pages import RESULTS, cell, table, write_page
from pearl.errors import PearlError, RunError
from pearl.evaluation.evaluate import Ensemble
from pearl.lifecycle.runs import Run, execute
from pearl.reports.progress import display
from pearl.settings import parts
from pearl.settings.config import load_config, recipe_names
from speed.timing import peak_above, ratios

RECIPES = ["cpu-cifar20-resnet18", "cpu-cifar100-deit_tiny", "cpu-grocery-deit_tiny"]
METHODS = {
    "pearl": [],
    "pearl, statistics": ["method.classifier=statistics"],
    "fixed rank 8": ["method.rank.name=fixed", "method.rank.r=8"],
    "joint, 6 epochs": ["method=joint", "train.phases.joint.epochs=6"],
    **{name: [f"method={name}"] for name in parts.METHODS.builtin if name != "pearl"},
    "ranpac": ["method=ranpac"],
    "lgcl": ["method=lgcl", "method.text_features=texts.npz"],  # a user's file, in $PEARL_DATA
    # Its 60 prompts outnumber the 49 patches of the CPU recipes; on held-out images, one prompt is better by 18 points.
    "evoprompt": ["method=evoprompt", "method.length=1"],
    # New and remembered images in separate passes, as in AGILE, TAMiL, OCDNet, TriRE and DER++.
    "er, separate passes": ["method=er", "method.passes=separate"],
    "aper, adapter": ["method=aper", "method.tuning=adapter"],
    # With the authors' 1000 images for each of up to 16 old classes, moving these takes longer than learning a task.
    "apr": ["method=apr", "method.drift_images=100"],
}
SHORT = ["engine.max_steps=3", "engine.precision=fp32", "engine.reuse=false", "stream.test_per_class=3"]
COLUMNS = {
    "class_il.final": "class-IL A_T",
    "class_il.average": "class-IL average",
    "class_il.forgetting": "forgetting",
    "task_il.final": "task-IL A_T",
    "task_identification": "task identified",
    "parameters_million": "parameters (M)",
    "growth": "of isolation",
}
ROUND = dict.fromkeys(COLUMNS, 2) | {
    "mean_rank": 1,
    "training_seconds": 0,
    "memory_mb": 0,
    "inference_cost": 1,
}  # printed digits


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=RECIPES, choices=recipe_names(), metavar="RECIPE")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="default: all that support the network")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--only-memory", action="store_true", help="of existing rows")
    parser.add_argument("--only-table", action="store_true", help="write the .md from the .json, run nothing")
    options = parser.parse_args(arguments)
    command = shlex.join(["python", "benchmarks/real_images.py", *arguments])
    failed = 0
    for recipe in options.recipes:
        try:
            if options.only_table or options.only_memory:
                if not (known := read(recipe)):
                    raise RunError(f"there is no {recipe}.json in docs/results; run it first")
                for each in known if options.only_memory else ():
                    if each["method"] in (options.methods or METHODS):
                        write(recipe, each | {"memory_mb": memory(recipe, METHODS[each["method"]])})
                write_table(recipe, read(recipe))
                continue
            for method in options.methods or fit_for(recipe):
                for seed in options.seeds:
                    run = execute(load_config(recipe, [*METHODS[method], f"seed={seed}"]), show=display())
                    write(recipe, row(method, run, memory(recipe, METHODS[method]), command))
        except PearlError as error:
            print(f"{recipe}: {'; '.join(str(error).splitlines())}", file=sys.stderr)
            failed = 2
    return failed


def memory(recipe: str, settings: Sequence[str]) -> int:
    """Return MB at the peak of a short run in float32, above those before it, in a separate process.

    It thus depends neither on the machine's precision nor on earlier runs.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        return alone.submit(_peak, recipe, [*settings, *SHORT]).result()


def _peak(recipe: str, settings: Sequence[str]) -> int:
    with TemporaryDirectory() as folder:
        os.environ["PEARL_RUNS"] = folder
        return round(peak_above(lambda: execute(load_config(recipe, settings))) / 1e6)


def fit_for(recipe: str) -> list[str]:
    """Return the methods that support a recipe's network."""
    on_vit = load_config(recipe).backbone["name"].startswith("timm/")
    names = {method: load_config(recipe, settings).method["name"] for method, settings in METHODS.items()}
    kinds = {method: parts.METHODS.load(name).backbones for method, name in names.items()}  # type: ignore[attr-defined]
    fit = {"any", "vit"} if on_vit else {"any", "residual", "convolutional"}
    return [method for method in METHODS if kinds[method] in fit]


@torch.no_grad()
def inference_cost(run: Run, batch: int = 32) -> float:
    """Return the time of all logits of a batch, in forward passes of the recipe's network; float32, median of 5."""
    model, config = pearl.load(run.path), run.config
    size = config.images.size
    shape = {key: value for key, value in config.backbone.items() if key not in ("pretrained", "weights")}
    plain = parts.BACKBONES.build(shape, size).eval()
    x = torch.randn(batch, 3, size, size)
    if config.engine.channels_last:
        plain, x = plain.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    work = {"method": partial(Ensemble(model.method), x), "plain": partial(plain, x)}
    return ratios(work, 5)["method / plain"][0]


def row(method: str, run: Run, memory_mb: int, command: str) -> dict:
    """Return the line of one run, with its origin."""
    summary, environment = run.summary, json.loads((run.path / "environment.json").read_text())
    return {
        "method": method,
        "seed": run.config.seed,
        **{key: round(summary[key], 4) for key in COLUMNS},
        "mean_rank": run.mean_rank,
        "training_seconds": round(sum(sum(m["seconds"].values()) for m in run.manifests)),
        "evaluation_seconds": round(sum(stage["evaluation_seconds"] for stage in run.results["stages"])),
        "memory_mb": memory_mb,
        "inference_cost": inference_cost(run),
        "run": run.path.name,
        "command": command,
        "environment": environment,
    }


def read(recipe: str) -> list[dict]:
    """Read the rows of earlier calls."""
    file = RESULTS / f"{recipe}.json"
    return json.loads(file.read_text()) if file.exists() else []


def write(recipe: str, new: dict) -> None:
    """Write docs/results/RECIPE.json with every row, replacing an earlier one by this, and .md with the table."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    rows = {(r["method"], r["seed"]): r for r in read(recipe)}
    rows[new["method"], new["seed"]] = new
    (RESULTS / f"{recipe}.json").write_text(json.dumps([*rows.values()], indent=1) + "\n")
    write_table(recipe, [*rows.values()])


def write_table(recipe: str, rows: list[dict]) -> None:
    """Write docs/results/RECIPE.md: a line per method, over its seeds, and the origin of the rows."""
    methods: dict[str, list[dict]] = {}
    made: dict[str, list[str]] = {}
    for r in rows:
        methods.setdefault(r["method"], []).append(r)
        made.setdefault(facts(r), []).append(f"{r['method']} seed {r['seed']}")
    head = ["method", "n", *COLUMNS.values(), "mean rank", "training (s)", "memory (MB)", "inference"]
    measures = (
        "Mean ± standard deviation over n seeds; accuracies in percent; memory at the peak of a run of "
        "three steps a phase in float32, above the memory before; inference in plain passes of the net."
    )
    body = []
    for method, of in methods.items():
        cells = (cell((r.get(key) for r in of), digits) for key, digits in ROUND.items())
        body.append([method, str(len(of)), *cells])
    notes = [f"- {', '.join(names)}: {how}" for how, names in made.items()]
    write_page(RESULTS / f"{recipe}.md", [f"# {recipe}", "", measures, "", *table(head, body), "", *notes])


def facts(r: dict) -> str:
    """Return the origin of a row; the command of the oldest rows is unknown."""
    env, command = r["environment"], f"`{r['command']}` on " if "command" in r else ""
    return (
        f"{command}{env['device']}, threads: {env['threads']}, {env['precision']}, Python {env['python']}, "
        f"torch {env['packages']['torch']}, timm {env['packages']['timm']}, commit {(env['commit'] or 'unknown')[:10]}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
