"""User errors. Each message is one line: what is wrong, where, and how to fix it."""

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
    """Return a name on one line, with characters that a terminal would interpret escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def counted(number: int, what: str) -> str:
    """Return a number with its noun: 1 task, 2 tasks, 1,000 classes."""
    return f"{number:,} {what}{'' if number == 1 else 'es' if what.endswith('s') else 's'}"


LONGEST = 2000  # longest line of an error message, in characters


def shortened(line: str, length: int = LONGEST) -> str:
    """Cut the middle out of a line that is too long; its start (the error) and its end (the fix) stay."""
    half = length // 2
    return line if len(line) <= length else f"{line[:half]} [...] {line[-half:]}"


class Printable(io.TextIOBase):
    """A stream that writes printable characters in lines, since names may hold a terminal's control codes.

    Code that draws on a terminal itself writes to `below`.

    Args:
        stream: the stream to write to.
        name: its name in error messages.
        longest: longest line in characters; longer ones are shortened.
    """

    def __init__(self, stream: TextIO, name: str, *, longest: int | None = None) -> None:
        self.below, self.name, self.longest = stream, name, longest

    def write(self, text: str) -> int:
        """Write a text whose lines may have any characters.

        Raises:
            OutputError: it cannot be written.
            BrokenPipeError: its reader has closed it.
        """
        lines = map(printable, text.split("\n"))
        with self._full():
            self.below.write("\n".join(shortened(line, self.longest) if self.longest else line for line in lines))
        return len(text)

    def flush(self) -> None:
        """Flush the stream; raises what `write` raises."""
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
                f"{self.name}: cannot be written ({error.strerror}); stored results are complete; free space there, "
                f"or write elsewhere"
            ) from None

    def isatty(self) -> bool:
        """Return True if the stream is a terminal."""
        return self.below.isatty()

    def fileno(self) -> int:
        """Return the descriptor of the stream below."""
        return self.below.fileno()


class Drawn:
    """A stream for progress displays: a failed write, as on a full disk, does not end the work in progress."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, or ignore a failure; raises BrokenPipeError if its reader has closed it."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush the stream, or ignore a failure."""
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
    """Return the stream for output with terminal control codes, which escapes names itself."""
    return cast(TextIO, Drawn(stream.below if isinstance(stream, Printable) else stream))


def reason(error: BaseException) -> str:
    """Return the operating system's reason for an error."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def remedy(error: OSError, otherwise: str) -> str:
    """Return the fix for a file that cannot be written, by cause; `otherwise` is the general one."""
    known = {
        errno.EACCES: "change its permissions",
        errno.EPERM: "change its permissions",
        errno.ENOSPC: "free space there",
        errno.EDQUOT: "free space there",
        errno.ELOOP: "remove that link",
        errno.ENOTDIR: "remove the file where a folder is needed",
    }
    return f"{known[error.errno]}, or {otherwise}" if error.errno in known else otherwise


def short_of_memory(error: BaseException) -> bool:
    """Return True if the CPU's memory was too small. Python has a type for this error, torch only a message.

    safetensors raises an error that is not an Exception, for an object that was not made by Python.
    """
    words = ("can't allocate memory", "PyObject pointer is null")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


class PearlError(Exception):
    """Base of every user error. The command line prints it and exits with code 2."""


class ConfigError(PearlError):
    """A recipe, key or value is wrong. Lists every problem, not only the first."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class DataError(PearlError):
    """Images, labels or splits that cannot be used."""


class WeightsError(PearlError):
    """Weights that do not fit the network, or cannot be obtained."""


class TrainingError(PearlError):
    """Training cannot continue: the loss is not finite, or memory is short."""


class ReportError(PearlError):
    """A report cannot be made of these runs or cannot be written to its path."""


class OutputError(PearlError):
    """The output of a command cannot be written: its disk is full."""


class ExportError(PearlError):
    """A model that a format cannot represent, or an exported file whose output differs from the model's."""


class RunError(PearlError):
    """A run directory that is damaged, foreign, of another configuration or of a newer version."""


class Busy(RunError):
    """Another process is working on the same directory. When it has ended, the same command can continue."""


class Lost(RunError):
    """Another process that trains the same run has ended. Its own message has the reason."""


class Interrupted(BaseException):
    """The user stopped the program; finished work is stored.

    It is not an Exception, so that code that continues after errors does not continue after it. It is not a
    KeyboardInterrupt either, which the command line's library handles itself.
    """


def typed(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function to check its arguments against its annotations; containers are checked by their own type only.

    Raises:
        ConfigError: names the argument and the types it accepts.
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
    """Return the types that a value may have, without those of its elements, and the strings that it may be."""
    if get_origin(kind) is Literal:
        return [*get_args(kind)]
    if get_origin(kind) in (Union, UnionType):
        return [member for part in get_args(kind) for member in _members(part)]
    return [get_origin(kind) or kind]


def _fits(value: object, kind: Any) -> bool:
    """Return True if a value has one of an annotation's types; NumPy numbers are numbers, True is not."""
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
