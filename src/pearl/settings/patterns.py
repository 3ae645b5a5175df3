"""Regular expressions of users, for the names of a network's layers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import regex

from pearl.errors import ConfigError

_SECONDS = 0.5  # for one layer's name; a normal pattern takes microseconds


@dataclass(frozen=True)
class Pattern:
    """A regular expression whose search ends after a time limit.

    Nested repeats such as `((a|aa)+)+$` can take hours on a short name; the `regex` package has a time limit.
    """

    text: str
    where: str  # the option that contains it
    compiled: regex.Pattern[str]

    def search(self, name: str) -> bool:
        """Return True if the pattern occurs in a name.

        Raises:
            ConfigError: the search takes too long.
        """
        return self._matches(self.compiled.search, name)

    def fullmatch(self, name: str) -> bool:
        """Return True if the pattern matches the whole name.

        Raises:
            ConfigError: the search takes too long.
        """
        return self._matches(self.compiled.fullmatch, name)

    def _matches(self, method: Callable[..., Any], name: str) -> bool:
        try:
            return method(name, timeout=_SECONDS) is not None
        except TimeoutError:
            raise ConfigError(
                f"{self.where}={self.text!r}: this regular expression takes too long on {name!r}; remove nested repeats"
            ) from None


def compiled(text: str, where: str) -> Pattern:
    """Compile the regular expression of an option.

    Raises:
        ConfigError: it is not valid.
    """
    try:
        return Pattern(text, where, regex.compile(text))
    except (regex.error, RecursionError, OverflowError, MemoryError) as error:
        raise ConfigError(f"{where}={text!r}: not a valid regular expression ({error})") from None
