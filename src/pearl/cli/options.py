"""Options that several verbs have."""

import sys
from collections import Counter
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from pearl.errors import ConfigError, printable


def _minutes(value: float) -> float:
    if not value >= 0:  # not a number is neither
        raise ConfigError(f"--store-every {value:g}: give minutes, 0 or more; 0 stores after every step")
    return value


Log = Annotated[
    list[str] | None,
    typer.Option(metavar="KIND", help="Curves while it learns: tensorboard, csv or wandb; may be given several times."),
]
Nested = Annotated[bool, typer.Option("--nested", help="Classes are the innermost folders, at any depth.")]


def recipes(incomplete: str) -> list[str]:
    """The recipes that begin so, for shells."""
    from pearl.settings.config import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


def begun(what: str, quiet: bool) -> None:
    """Say on a terminal that something begins: importing torch takes seconds, and training without progress minutes.

    This is the one line that --quiet leaves. Where no person waits, in a script's or a scheduler's log, there is none.
    """
    if sys.stderr.isatty():
        how = "at work; shows no progress (--quiet)" if quiet else "one moment ..."
        typer.echo(f"pearl {printable(what)}: {how}", err=True)


StoreEvery = Annotated[float, typer.Option(callback=_minutes, help="Minutes between two stored moments of training.")]
Alias = Annotated[
    list[str] | None, typer.Option(metavar="FOLDER=CLASS", help="A folder that shows a class of another name.")
]


class Verb(TyperCommand):
    """A verb whose options are given once, but for lists: of two folders the last would be learnt, without a word."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As of its parent.

        Raises:
            ConfigError: an option that takes one value is given again.
        """
        *_, order = self.make_parser(ctx).parse_args(args=[*args])
        options = [one for one in order if isinstance(one, TyperOption) and not (one.multiple or one.is_flag)]
        for one, times in Counter(options).items():
            if times > 1 and not ctx.resilient_parsing:  # a shell's completion is told nothing
                raise ConfigError(f"{one.opts[0]}: given {times} times, and takes one value; leave out the others")
        return super().parse_args(ctx, args)


def aliases_of(alias: list[str] | None) -> dict[str, str]:
    """Classes by the folders that show them."""
    given = [(folder, name) for folder, _, name in (one.partition("=") for one in alias or [])]
    aliases = dict(given)
    if len(aliases) < len({*given}):
        twice = next(folder for folder, name in given if aliases[folder] != name)
        raise ConfigError(f"--alias {printable(twice)}: given for two classes; choose one")
    if not all(folder and name for folder, name in aliases.items()):
        raise ConfigError(f"--alias {' '.join(alias or [])}: give each as FOLDER=CLASS")
    return aliases
