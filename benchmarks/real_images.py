"""Run the CPU-sized recipes with every method and write the table.

    python benchmarks/real_images.py                      all recipes, all methods, seed 0
    python benchmarks/real_images.py --recipes cpu-cifar20-resnet18 --methods pearl isolation --seeds 0 1

Finished runs are skipped, so the command can be stopped and started again. Data is looked for under $PEARL_DATA.
"""

import argparse
import json
from pathlib import Path

from pearl.config import load_config
from pearl.progress import display
from pearl.runs import Run, execute

RECIPES = ["cpu-cifar20-resnet18", "cpu-cifar100-deit_tiny", "cpu-grocery-deit_tiny"]
METHODS = {
    "pearl": [],
    "isolation": ["method=isolation"],
    "fixed rank 8": ["method.rank.name=fixed", "method.rank.r=8"],
    "finetune": ["method=finetune"],
    "joint": ["method=joint"],
}
COLUMNS = {
    "class_il.final": "class-IL A_T",
    "class_il.average": "class-IL average",
    "class_il.forgetting": "forgetting",
    "task_il.final": "task-IL A_T",
    "task_identification": "task identified",
    "parameters_million": "parameters (M)",
    "growth": "of isolation",
}
RESULTS = Path(__file__).parents[1] / "docs" / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    options = parser.parse_args()
    for recipe in options.recipes:
        rows = []
        for method in options.methods:
            for seed in options.seeds:
                run = execute(load_config(recipe, [*METHODS[method], f"seed={seed}"]), show=display())
                rows.append(row(method, run))
                write(recipe, rows)


def row(method: str, run: Run) -> dict:
    """One run's line of the table, with what is needed to trace it."""
    summary, environment = run.summary, json.loads((run.path / "environment.json").read_text())
    return {
        "method": method,
        "seed": run.config.seed,
        **{key: round(summary[key], 4) for key in COLUMNS},
        "mean_rank": run.mean_rank,
        "training_seconds": round(sum(sum(m["seconds"].values()) for m in run.manifests)),
        "evaluation_seconds": round(sum(stage["evaluation_seconds"] for stage in run.results["stages"])),
        "run": run.path.name,
        "environment": environment,
    }


def write(recipe: str, rows: list[dict]) -> None:
    """docs/results/RECIPE.json with everything, .md with the table."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{recipe}.json").write_text(json.dumps(rows, indent=1) + "\n")
    head = ["method", "seed", *COLUMNS.values(), "mean rank", "training (s)"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for r in rows:
        rank = "-" if r["mean_rank"] is None else f"{r['mean_rank']:.1f}"
        cells = [r["method"], r["seed"], *(f"{r[key]:.2f}" for key in COLUMNS), rank, r["training_seconds"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    env = rows[0]["environment"]
    facts = (
        f"`python benchmarks/real_images.py --recipes {recipe}` on {env['device']}, {env['threads']} threads, "
        f"{env['precision']}, Python {env['python']}, torch {env['packages']['torch']}, "
        f"timm {env['packages']['timm']}, commit {(env['commit'] or '')[:10]}. Accuracies in percent."
    )
    (RESULTS / f"{recipe}.md").write_text(f"# {recipe}\n\n{facts}\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
