"""pearl export MODEL --to torch|onnx|peft"""

from pathlib import Path
from typing import Annotated

import typer

from pearl.cli.options import OwnMethod


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Directory of a model or run, or a run's name.")],
    to: Annotated[str, typer.Option(help="torch (one .pt2 program), onnx (one .onnx file) or peft (a LoRA per task).")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="File or folder to write; by default the model's name, in the current folder."
        ),
    ] = None,
    images: Annotated[
        list[Path] | None, typer.Option(help="Images, or folders of them, to check the result with.")
    ] = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="Export only this many tasks, from the first.")] = None,
    method: OwnMethod = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export at OUT.")] = False,
) -> None:
    """Export a model for use without pearl, after checking that the written file gives the same logits.

    \b
    pearl export shop --to torch
    pearl export shop --to onnx -o shop.onnx --images photos/
    pearl export runs/NAME --to peft -o adapters/
    """
    from pearl.export import export_directory

    typer.echo(export_directory(model, to=to, out=out, images=images, upto=tasks, method=method, force=force))
