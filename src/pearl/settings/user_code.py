"""Classes from files that a user names, and one-line messages for errors in such files."""

import sys
import traceback
import types
from dataclasses import dataclass
from pathlib import Path

from pearl.errors import ConfigError


@dataclass(frozen=True)
class Code:
    """A class from a file of the user, the file as the user wrote it, and its bytes."""

    part: type
    file: str
    source: bytes

    def location_of(self, error: BaseException) -> str:
        """Return the line of the file in which an error arose."""
        return _location_in(self.file, error)


def run_file(file: Path, source: bytes, name: str) -> types.ModuleType:
    """Return the module made from a file's bytes; its hash is therefore that of the executed code.

    Raises:
        ConfigError: the file raises any exception, or is not Python.
    """
    module = types.ModuleType(name)
    module.__file__ = str(file)
    sys.modules[name] = module  # dataclasses and annotations look names up there
    try:
        exec(compile(source, str(file), "exec"), module.__dict__)
    except BaseException as error:
        del sys.modules[name]
        if type(error) is KeyboardInterrupt:  # Ctrl-C
            raise
        raise ConfigError(f"{_location_in(str(file), error)}: {in_words(error)}; fix the file") from None
    return module


def _location_in(file: str, error: BaseException) -> str:
    """Return the line of a file in which an error arose, if any."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    line = lines[-1] if lines else getattr(error, "lineno", None)  # a SyntaxError has its own
    return f"{file}, line {line}" if line else file


def in_words(error: BaseException) -> str:
    """Return an error of user code on one line."""
    try:
        text = error.msg if isinstance(error, SyntaxError) else str(error)
    except Exception:  # user code computes the message
        text = ""
    return " ".join(f"{type(error).__name__}: {text}".split())
