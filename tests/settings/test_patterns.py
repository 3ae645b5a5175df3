"""Regular expressions of users: those that would take hours are refused before they are held against anything."""

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
    assert [bool(pattern.search(name)) for name in NAMES] == [bool(plain.search(name)) for name in NAMES]


@pytest.mark.parametrize(
    "text",
    ["(a+)+$", "(.*)*x", r"(\w+\.?)+!", "((a|aa)+)+$", ".*" * 12 + "!", "(a|aa){30}", "(?:a?){40}", "(?=(b+)+)x"],
)
def test_patterns_without_end(text):
    with pytest.raises(ConfigError, match=r"^method\.targets=.*may take hours; leave out repeats in repeats"):
        compiled(text, "method.targets")


def test_the_worst_that_is_let_through_is_a_blink():
    pattern = compiled(".*.*.*!", "method.targets")
    started = time.process_time()
    assert not any(pattern.search("a" * 64) for _ in range(10))
    assert time.process_time() - started < 5


@pytest.mark.parametrize("text", ["(", "[", "*", "(?P<a", "a{5000000000}", "(" * 3000 + ")" * 3000, "(?<=.*)x"])
def test_what_is_none(text):
    with pytest.raises(ConfigError, match="not a valid regular expression"):
        compiled(text, "method.stages")
