"""pearl serve MODEL"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from pearl.cli.options import Device, OwnMethod


def command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Directory of a model.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 8000,
    address: Annotated[
        str, typer.Option(help="Where to listen; with others than 127.0.0.1 (0.0.0.0: all), a token is needed.")
    ] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(envvar="PEARL_TOKEN", show_envvar=True, help="What every request has to carry."),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="A host name by which the server is called, as by a proxy; repeatable."),
    ] = None,
    unknown_rate: Annotated[
        float | None, typer.Option(metavar="SHARE", help="How strictly photos are called unknown, see `pearl predict`.")
    ] = None,
    method: OwnMethod = None,
    device: Device = "auto",
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Do not open the page.")] = False,
) -> None:
    """Open a page on which photos are named, corrected and taught; programs use the same server over HTTP.

    \b
    pearl serve shop
    pearl serve shop --address 0.0.0.0 --token "$(openssl rand -hex 16)"
    curl --data-binary @photo.jpg -H "Content-Type: image/jpeg" http://127.0.0.1:8000/v1/predict
    """
    from importlib.util import find_spec

    from pearl.errors import ConfigError

    missing = [package for package in ("fastapi", "uvicorn", "python_multipart") if find_spec(package) is None]
    if missing:
        raise ConfigError(f'serve needs {", ".join(missing)}, not installed: pip install "pearl[serve]"')
    from pearl.serve.serving import serve

    serve(
        model,
        address=address,
        port=port,
        token=token,
        names=name or [],
        device=device,
        method=method,
        unknown_rate="auto" if unknown_rate is None else unknown_rate,
        open_page=not no_browser and sys.stdout.isatty(),
        say=typer.echo,
    )
