"""Regular expressions of users: a search that would take hours is stopped."""

import re
import time

import pytest

from pearl.errors import ConfigError
from pearl.settings.patterns import compiled

NAMES = [f"blocks.{i}.{part}.weight" for i in range(12) for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]


@pytest.mark.parametrize(
    "text",
    [
        r"attn\.qkv",
        r"(layer|stages\.|blocks\.)\d+",
        r"blocks\.(\d|1[01])\..*(qkv|proj)",
        r"^blocks\.[0-3]\.(?!mlp).*\.weight$",
        ".*attn.*proj.*",
        r"(?P<a>b)?locks(\.\d+)?.{2,9}",
        "[a-z]+?x*+",
        "(?>ab|a)",
        "",
    ],
)
def test_patterns_that_people_write(text):
    pattern, plain = compiled(text, "method.targets"), re.compile(text)
    assert [pattern.search(name) for name in NAMES] == [bool(plain.search(name)) for name in NAMES]


@pytest.mark.parametrize("method", ["search", "fullmatch"])
def test_a_pattern_that_would_take_hours_ends_soon(method):
    pattern, started = compiled("((a|aa)+)+$", "method.targets"), time.process_time()
    with pytest.raises(ConfigError, match=r"^method\.targets=.*takes too long on 'a+c'; remove nested repeats"):
        getattr(pattern, method)("a" * 64 + "c")
    assert time.process_time() - started < 10


@pytest.mark.parametrize("text", ["(", "[", "*", "(?P<a", "a{5000000000}", "(" * 3000 + ")" * 3000])
def test_an_invalid_pattern_is_refused(text):
    with pytest.raises(ConfigError, match="not a valid regular expression"):
        compiled(text, "method.stages")
