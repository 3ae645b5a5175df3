"""Options that several verbs share."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from pearl.errors import ConfigError, printable


def _minutes(value: float) -> float:
    if not value >= 0:  # not a number: neither
        raise ConfigError(f"--store-every {value:g}: give minutes, 0 or more (0 stores after every step)")
    return value


Log = Annotated[
    list[str] | None,
    typer.Option(metavar="KIND", help="Write training curves: tensorboard, csv or wandb; repeatable."),
]
Nested = Annotated[bool, typer.Option("--nested", help="Classes are the innermost folders, at any depth.")]


def recipes(incomplete: str) -> list[str]:
    """Complete the names of recipes, for shells."""
    from pearl.settings.config import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


def begun(what: str, quiet: bool) -> None:
    """Print on a terminal that a command has started: importing torch takes seconds, and training runs for minutes.

    --quiet leaves this one line. Nothing is printed in scripts' and schedulers' logs.
    """
    if sys.stderr.isatty():
        message = "running without progress display (--quiet)" if quiet else "one moment ..."
        typer.echo(f"pearl {printable(what)}: {message}", err=True)


StoreEvery = Annotated[float, typer.Option(callback=_minutes, help="Minutes between two checkpoints of training.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would change; change nothing.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Tasks = Annotated[int | None, typer.Option(min=1, help="Use only this many tasks, from the first.")]
OwnMethod = Annotated[
    str | None, typer.Option(metavar="FILE.py:CLASS", help="The file of a method of your own, if it has one.")
]
UnknownRate = Annotated[
    float,
    typer.Option(metavar="SHARE", help="Call images unknown at a threshold that rejects this share of known images."),
]
Alias = Annotated[
    list[str] | None, typer.Option(metavar="FOLDER=CLASS", help="A folder of images of a class with another name.")
]


@contextmanager
def one_line(given: Any = None) -> Iterator[None]:
    """Turn an error of the command line's syntax, which typer prints as four lines, into one line with the fix.

    Typer's versions have these errors in different modules; all have `format_message`. `given` is the context of
    errors that have none.
    """
    try:
        yield
    except Exception as error:
        if not hasattr(error, "format_message") or type(error).__name__ == "NoArgsIsHelpError":
            raise
        context = getattr(error, "ctx", None) or given
        words = " ".join(error.format_message().split()).replace(". Did you mean", "; did you mean").rstrip(".?")
        verb = f"{context.info_name}: " if context is not None and context.parent is not None else ""
        path = "pearl" if context is None else context.command_path
        raise ConfigError(f"{verb}{words[:1].lower()}{words[1:]}; see: {path} --help") from None


class Verbs(TyperGroup):
    """The command `pearl`, whose errors are one line each."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse options before the verb.

        Raises:
            ConfigError: an unknown option.
        """
        with one_line():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Parse and run the verb.

        Raises:
            ConfigError: an unknown verb, or options and arguments that it does not take.
        """
        with one_line():
            return super().invoke(ctx)


class Verb(TyperCommand):
    """A verb that refuses an option given twice, unless it is a list; otherwise the last of two folders would win."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments as the parent class does.

        Raises:
            ConfigError: an option is unknown, has no value, or takes one value and is given again.
        """
        with one_line(ctx):
            *_, order = self.make_parser(ctx).parse_args(args=[*args])
        options = [one for one in order if isinstance(one, TyperOption) and not (one.multiple or one.is_flag)]
        for one, times in Counter(options).items():
            if times > 1 and not ctx.resilient_parsing:  # a shell's completion gets no error
                raise ConfigError(f"{one.opts[0]}: given {times} times; keep one value")
        return super().parse_args(ctx, args)


def aliases_of(alias: list[str] | None) -> dict[str, str]:
    """Return the class of each aliased folder."""
    given = [(folder, name) for folder, _, name in (one.partition("=") for one in alias or [])]
    aliases = dict(given)
    if len(aliases) < len({*given}):
        twice = next(folder for folder, name in given if aliases[folder] != name)
        raise ConfigError(f"--alias {printable(twice)}: given for two classes; keep one")
    if not all(folder and name for folder, name in aliases.items()):
        raise ConfigError(f"--alias {' '.join(alias or [])}: give each as FOLDER=CLASS")
    return aliases
