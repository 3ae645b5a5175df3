"""What is read as YAML, and what is not."""

import pytest
import yaml

from pearl.errors import ConfigError
from pearl.yaml_io import parse_yaml


@pytest.mark.parametrize(
    "text",
    ["", "a: 1", "[1, 2.5, yes, null, text]", "a: {b: [1, {c: 2}]}", "x: &x [1]\ny: *x\nz: [*x, *x]", "- a: 1\n- a: 2"],
)
def test_it_is_what_yaml_says(text):
    assert parse_yaml(text) == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: 2\na: 3", "the key a twice"),
        ("x: {lr: 1, y: {lr: 2}, lr: 3}", "the key lr twice"),
        ("- {1: a, 1: b}", "the key 1 twice"),
        ("&a [*a]", "an alias contains itself"),
        ("a: &a {b: *a}", "an alias contains itself"),
        ("[" * 900 + "]" * 900, "nested too deeply"),
        ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("a: [", "did not find expected node content"),
        ("[" * 100_000, "nested too deeply"),  # which ended the process in libyaml's binding
        ("- " * 5_000 + "x", "nested too deeply"),
        ("{a: " * 65 + "1" + "}" * 65, "nested too deeply"),
        ("a: 10000000000000000000000", "a number of more than 64 bits"),
        (f"a: {'9' * 5000}", "Exceeds the limit"),
        ('a: ["x\\0"]', "a text with a NUL"),
        ("a: 2024-02-30", "day is out of range"),
        ("a: 2024-02-03", "a date, which settings cannot be; quote it"),
        ("a: !!binary aGk=", "a bytes, which settings cannot be"),
    ],
)
def test_what_nobody_means_is_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_yaml(text)


def test_a_small_text_that_stands_for_much_is_refused_at_once():
    """Nine lists of nine aliases each: 9^9 values in a kilobyte."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    with pytest.raises(ConfigError, match="aliases make it too large"):
        parse_yaml("\n".join(lines))
