"""What can go wrong by a user's hand. Each message is one line: what is wrong, where, and the mend."""

import functools
import inspect
import io
from collections.abc import Callable
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, ParamSpec, TextIO, TypeVar, Union, get_args, get_origin

P = ParamSpec("P")
R = TypeVar("R")


def printable(text: str) -> str:
    """A name on one line of a terminal, whatever characters it has."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def counted(number: int, what: str) -> str:
    """A number with what it counts, as one says it: 1 task, 2 tasks, 1,000 classes."""
    return f"{number:,} {what}{'' if number == 1 else 'es' if what.endswith('s') else 's'}"


def shortened(line: str, length: int = 2000) -> str:
    """A line without its middle if it is too long to be read: what is wrong stands first, the mend last."""
    half = length // 2
    return line if len(line) <= length else f"{line[:half]} [...] {line[-half:]}"


class Printable(io.TextIOBase):
    """A stream on which only what can be printed arrives, in lines: names may hold what a terminal would act on.

    What draws on a terminal itself writes to what is `below`.
    """

    def __init__(self, stream: TextIO) -> None:
        self.below = stream

    def write(self, text: str) -> int:
        """Write a text whose lines may have any characters."""
        self.below.write("\n".join(map(printable, text.split("\n"))))
        return len(text)

    def flush(self) -> None:
        """Pass on."""
        if not self.below.closed:
            self.below.flush()

    def isatty(self) -> bool:
        """Whether a person reads it."""
        return self.below.isatty()

    def fileno(self) -> int:
        """Of the file below."""
        return self.below.fileno()


def drawn_on(stream: TextIO) -> TextIO:
    """The stream for what draws with a terminal's own codes, and sees to names by itself."""
    return stream.below if isinstance(stream, Printable) else stream


def short_of_memory(error: BaseException) -> bool:
    """Whether the CPU's memory was too small: Python says it by a type of error, torch in words alone.

    So does safetensors, by an error that is no Exception, for an object that Python did not make.
    """
    words = ("can't allocate memory", "PyObject pointer is null")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


class PearlError(Exception):
    """Base of every error that a user can cause and mend. The command line prints it and exits with code 2."""


class ConfigError(PearlError):
    """A recipe, key or value is wrong. Holds every problem found, not only the first."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class DataError(PearlError):
    """Images, labels or splits that cannot be used."""


class WeightsError(PearlError):
    """Weights that do not fit the network, or cannot be had."""


class TrainingError(PearlError):
    """Training cannot go on: the loss is not finite, memory is short."""


class ReportError(PearlError):
    """A report that cannot be made of these runs, or not be written there."""


class ExportError(PearlError):
    """A model that a format cannot hold, or a file that does not agree with the model it was made from."""


class RunError(PearlError):
    """A run directory that is damaged, foreign, of another configuration or of a newer version."""


class Busy(RunError):
    """Another process is at work on the same directory. Once that has ended, the same command goes on."""


class Lost(RunError):
    """Another process that trains the same run has ended. Its own words say why."""


class Interrupted(BaseException):
    """The user asked to stop; what was learnt is stored. No error: who goes on after errors must not go on after it.

    No KeyboardInterrupt either, which the command line's library answers by itself.
    """


def typed(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose arguments have to be of the types that it is annotated with; of containers, the outer one.

    Raises:
        ConfigError: naming the argument, and what it may be.
    """
    signature = inspect.signature(function)
    kinds = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD and parameter.annotation is not parameter.empty
    }

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        given = signature.bind(*args, **kwargs).arguments
        problems = [
            f"{function.__name__}: {name} must be {_words(kind)}, not {type(given[name]).__name__}; see help"
            for name, kind in kinds.items()
            if name in given and not _fits(given[name], kind)
        ]
        if problems:
            raise ConfigError(*problems)
        return function(*args, **kwargs)

    return checked


def _members(kind: Any) -> list[Any]:
    """The types of which a value may have any, without what is in them; and words that it may be."""
    if get_origin(kind) is Literal:
        return [*get_args(kind)]
    if get_origin(kind) in (Union, UnionType):
        return [member for part in get_args(kind) for member in _members(part)]
    return [get_origin(kind) or kind]


def _fits(value: object, kind: Any) -> bool:
    """Whether a value has one of an annotation's types; NumPy's numbers are numbers, True is none."""
    wider = {int: Integral, float: Real}
    plain = [member for member in _members(kind) if not (isinstance(value, bool) and member in wider)]
    if isinstance(value, str) and value in (member for member in plain if isinstance(member, str)):
        return True
    return Any in plain or isinstance(value, tuple(wider.get(one, one) for one in plain if not isinstance(one, str)))


def _words(kind: Any) -> str:
    members = [repr(member) if isinstance(member, str) else member.__name__ for member in _members(kind)]
    names = dict.fromkeys("None" if name == "NoneType" else name for name in members)
    *rest, last = names
    return f"{', '.join(rest)} or {last}" if rest else last
