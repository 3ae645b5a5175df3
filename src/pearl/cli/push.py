"""pearl push MODEL USER/NAME"""

from pathlib import Path
from typing import Annotated

import typer

from pearl.cli.options import OwnMethod, begun


def command(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Directory of a model or run, or what `pearl export` wrote.")
    ],
    repository: Annotated[str, typer.Argument(metavar="USER/NAME", help="Repository of the Hugging Face Hub.")],
    private: Annotated[bool, typer.Option("--private", help="Create the repository as a private one.")] = False,
    method: OwnMethod = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the files; upload nothing.")] = False,
) -> None:
    """Upload a model or an export to the Hugging Face Hub, with a model card. Needs the extra `hub` and a token.

    Images, logs and unfinished tasks are never uploaded.

    \b
    pearl push shop anna/shop --private
    pearl push shop.onnx anna/shop-onnx
    """
    begun(f"push {model}", quiet=False)
    from pearl.export.push import push

    typer.echo(push(model, repository, private=private, method=method, dry_run=dry_run))
