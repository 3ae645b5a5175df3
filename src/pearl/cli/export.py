"""pearl export MODEL --to torch|onnx|peft"""

from pathlib import Path
from typing import Annotated

import typer


def command(
    model: Annotated[str, typer.Argument(help="A run directory, or its name as `pearl list runs` shows it.")],
    to: Annotated[str, typer.Option(help="torch (one .pt2 program), onnx (one .onnx file) or peft (a LoRA per task).")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File or folder to write; by default named as the run, here.")
    ] = None,
    images: Annotated[
        list[Path] | None, typer.Option(help="Images, or folders of them, to check the result with.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what an earlier export left at OUT.")] = False,
) -> None:
    """Write a run's model for use without pearl, once the written file gives the same logits.

    \b
    pearl export runs/NAME --to torch
    pearl export runs/NAME --to onnx -o model.onnx --images photos/
    pearl export runs/NAME --to peft -o adapters/
    """
    from pearl.export import export_run

    typer.echo(export_run(model, to=to, out=out, images=images, force=force))
