"""Classes out of files that a user named, and what goes wrong in such a file, in one line."""

import sys
import traceback
import types
from dataclasses import dataclass
from pathlib import Path

from pearl.errors import ConfigError


@dataclass(frozen=True)
class Code:
    """A class out of a file that the user named, the file as he named it, and its bytes."""

    part: type
    file: str
    source: bytes

    def place_of(self, error: BaseException) -> str:
        """Where in the file an error arose."""
        return _place_in(self.file, error)


def run_file(file: Path, source: bytes, name: str) -> types.ModuleType:
    """The module that a file's bytes make; these very bytes, so that its hash is that of what ran.

    Raises:
        ConfigError: it raises anything, or is no Python.
    """
    module = types.ModuleType(name)
    module.__file__ = str(file)
    sys.modules[name] = module  # where dataclasses and annotations look things up
    try:
        exec(compile(source, str(file), "exec"), module.__dict__)
    except BaseException as error:
        del sys.modules[name]
        if type(error) is KeyboardInterrupt:  # Ctrl-C
            raise
        raise ConfigError(f"{_place_in(str(file), error)}: {in_words(error)}; mend the file") from None
    return module


def _place_in(file: str, error: BaseException) -> str:
    """The line of a file in which an error arose, if one did."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    line = lines[-1] if lines else getattr(error, "lineno", None)  # a SyntaxError has its own
    return f"{file}, line {line}" if line else file


def in_words(error: BaseException) -> str:
    """A foreign error on one line."""
    try:
        text = error.msg if isinstance(error, SyntaxError) else str(error)
    except Exception:  # it is foreign code that says it
        text = ""
    return " ".join(f"{type(error).__name__}: {text}".split())
