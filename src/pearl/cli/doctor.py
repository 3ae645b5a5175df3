"""pearl doctor"""

import typer


def command() -> None:
    """Check this machine: versions, devices, precision, folders, available data."""
    from pearl.reports.doctor import report

    text, healthy = report()
    typer.echo(text)
    if not healthy:
        raise typer.Exit(1)
