"""Regular expressions of users, for the names of a network's layers."""

import math
import re
from re import _parser  # type: ignore[attr-defined]  # what `re` itself parses with
from typing import Any

from pearl.errors import ConfigError

_LONGEST = 64  # characters of a layer's name, about
_MOST = 4 * (_LONGEST + 1) ** 3  # ways to match one; a blink


def compiled(text: str, where: str) -> re.Pattern[str]:
    """A regular expression that cannot take long, whatever name it is held against.

    Python's engine tries the ways in which a name may be shared out among the repeats of a pattern. Their number is
    that of ways for each part, multiplied; one repeat in another has more than there is time for.

    Raises:
        ConfigError: it is not valid, or has too many ways.
    """
    try:
        pattern = re.compile(text)
        ways = _ways(_parser.parse(text))
    except (re.error, RecursionError, OverflowError, MemoryError) as error:
        raise ConfigError(f"{where}={text!r}: not a valid regular expression ({error})") from None
    if ways > _MOST:
        raise ConfigError(
            f"{where}={text!r}: a regular expression that may take hours; leave out repeats in repeats, and use three "
            f"of * and + at most"
        )
    return pattern


def _ways(parsed: Any) -> float:
    """In how many ways a parsed pattern can match one name, at most."""
    return math.prod(_ways_of(str(kind), value) for kind, value in parsed)


def _ways_of(kind: str, value: Any) -> float:
    if kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        least, most, repeated = value
        once, times = _ways(repeated), min(int(most), _LONGEST)
        if once == 1:
            return max(1, times - least + 1)
        return math.inf if once > _LONGEST**2 else float(once) ** times + (least == 0)
    if kind == "BRANCH":
        return sum(map(_ways, value[1]))
    if kind == "GROUPREF_EXISTS":
        return sum(_ways(part) for part in value[1:] if part is not None)
    if kind in ("SUBPATTERN", "ASSERT", "ASSERT_NOT"):
        return _ways(value[-1])
    return _ways(value) if kind == "ATOMIC_GROUP" else 1
