"""What can go wrong by a user's hand. Each message is one line: what is wrong, where, and the mend."""

import errno
import functools
import inspect
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, ParamSpec, TextIO, TypeVar, Union, cast, get_args, get_origin

P = ParamSpec("P")
R = TypeVar("R")


def printable(text: str) -> str:
    """A name on one line of a terminal, whatever characters it has."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def counted(number: int, what: str) -> str:
    """A number with what it counts, as one says it: 1 task, 2 tasks, 1,000 classes."""
    return f"{number:,} {what}{'' if number == 1 else 'es' if what.endswith('s') else 's'}"


LONGEST = 2000  # characters of a line that says what is wrong


def shortened(line: str, length: int = LONGEST) -> str:
    """A line without its middle if it is too long to be read: what is wrong stands first, the mend last."""
    half = length // 2
    return line if len(line) <= length else f"{line[:half]} [...] {line[-half:]}"


class Printable(io.TextIOBase):
    """A stream on which only what can be printed arrives, in lines: names may hold what a terminal would act on.

    What draws on a terminal itself writes to what is `below`.

    Args:
        stream: where it is written.
        name: what an error calls it.
        longest: characters after which a line is shortened, such as one of standard error.
    """

    def __init__(self, stream: TextIO, name: str, *, longest: int | None = None) -> None:
        self.below, self.name, self.longest = stream, name, longest

    def write(self, text: str) -> int:
        """Write a text whose lines may have any characters.

        Raises:
            OutputError: it cannot be written.
            BrokenPipeError: nobody reads it any more.
        """
        lines = map(printable, text.split("\n"))
        with self._full():
            self.below.write("\n".join(shortened(line, self.longest) if self.longest else line for line in lines))
        return len(text)

    def flush(self) -> None:
        """Pass on; raises what `write` raises."""
        if not self.below.closed:
            with self._full():
                self.below.flush()

    @contextmanager
    def _full(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(
                f"{self.name}: cannot be written ({error.strerror}); what the command has stored is kept; free space "
                f"there, or write elsewhere"
            ) from None

    def isatty(self) -> bool:
        """Whether a person reads it."""
        return self.below.isatty()

    def fileno(self) -> int:
        """Of the file below."""
        return self.below.fileno()


class Drawn:
    """A stream for what shows progress. That it cannot be written, on a full disk, ends nothing that is in progress."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, if that can be done; raises BrokenPipeError if nobody reads it any more."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """The same."""
        self._try(self._stream.flush)

    def _try(self, write: Callable[[], object]) -> None:
        try:
            write()
        except BrokenPipeError:
            raise
        except OSError:
            pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def drawn_on(stream: TextIO) -> TextIO:
    """The stream for what draws with a terminal's own codes, and sees to names by itself."""
    return cast(TextIO, Drawn(stream.below if isinstance(stream, Printable) else stream))


def reason(error: BaseException) -> str:
    """Why the operating system refused something, in its own words."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def remedy(error: OSError, otherwise: str) -> str:
    """What a user can do about a file that cannot be written, by its cause; `otherwise` helps in any case."""
    known = {
        errno.EACCES: "change its permissions",
        errno.EPERM: "change its permissions",
        errno.ENOSPC: "free space there",
        errno.EDQUOT: "free space there",
        errno.ELOOP: "remove that link",
        errno.ENOTDIR: "remove what is in a folder's place",
    }
    return f"{known[error.errno]}, or {otherwise}" if error.errno in known else otherwise


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


class OutputError(PearlError):
    """What a command prints cannot be written: its disk is full."""


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
        check_types(function.__name__, kinds, given)
        return function(*args, **kwargs)

    return checked


def check_types(what: str, kinds: Mapping[str, Any], given: Mapping[str, object]) -> None:
    """See that values by name have their annotated types; of containers, the outer one.

    Raises:
        ConfigError: a line for each that has not.
    """
    problems = [
        f"{what}: {name} must be {_words(kind)}, not {type(given[name]).__name__}; see help"
        for name, kind in kinds.items()
        if name in given and not _fits(given[name], kind)
    ]
    if problems:
        raise ConfigError(*problems)


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
