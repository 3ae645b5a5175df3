"""Docstrings, comments and messages keep to the words of CONTRIBUTING.md: markers of the old style do not come back."""

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(file for folder in ("src", "benchmarks", "examples") for file in (ROOT / folder).rglob("*.py"))

#: What a text must not have, and what to write instead.
MARKERS = {
    r"\bmend(s|ed|ing)?\b": "fix",
    r"(?<!there )\b(is|are|was|were) no (?!longer\b|more than\b|less than\b)": "is not a, has no, or nothing is",
    r"\b(nobody|somebody|whoever)\b": "the user, the caller or the process; or the passive voice",
    r"\b(goes|gone|going) on\b": "continues, resumes",
    r"\bin the place of\b": "instead of",
    r"\bhalf[ -]learnt\b": "interrupted",
    r"\bstored moments?\b|\bmoments? of (training|a task|the task)\b": "checkpoint",
    r"\bkept phases?\b|\bphases? that (is|are|was|were) kept\b": "the phase cache, a cached phase",
    r"\b(heads|logits) side by side\b": "concatenated heads, concatenated logits",
    r"\bas it came\b": "frozen, unmodified, pretrained",
    r"\bstays? as (it|they) (is|was|are|were)\b": "is unchanged",
    r"\bby (its|their|his) own words\b|\bwithout a word\b": "silently, without output",
}
#: Names of parameters and variables that say nothing, and what to name instead.
RETIRED = {
    "place": "the path, device, rank or position",
    "places": "the paths, positions or digits",
    "found": "what was computed, read or matched",
    "own": "whose it is: of_task, of_class, class_index",
    "how": "the settings or arguments",
}
#: A docstring names the thing or begins with a verb. Titles that are questions are none of these.
HEADLESS = re.compile(r"(What|Whether|How|Whose|Who|Where|Of|As of)\b(?![^.:]*\?)")

Text = tuple[int, str, str]  # line, kind, words


def texts(file: Path) -> Iterator[Text]:
    """Yield the docstrings, comments and messages of a file, without names in backticks."""
    source = file.read_text(encoding="utf-8")
    docstrings: dict[int, ast.Constant] = {}
    pieces: set[int] = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                if node.body and isinstance(first := node.body[0], ast.Expr) and isinstance(first.value, ast.Constant):
                    docstrings[id(first.value)] = first.value
            case ast.JoinedStr():
                pieces |= {id(value) for value in node.values}
                parts = (value.value if isinstance(value, ast.Constant) else "X" for value in node.values)
                yield node.lineno, "message", "".join(map(str, parts))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in pieces:
            yield node.lineno, "docstring" if id(node) in docstrings else "message", node.value
    with file.open("rb") as lines:
        for token in tokenize.tokenize(lines.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], "comment", token.string.lstrip("#: ")


def faults(actual: Iterator[Text]) -> list[str]:
    """Return a line for each marker in texts."""
    problems = []
    for line, kind, text in actual:
        words = " ".join(re.sub(r"`[^`]*`", "X", text).split())
        if kind == "docstring" and HEADLESS.match(words):
            problems.append(f"{line}: begin with the thing or a verb: {words[:60]}")
        if kind != "message" or " " in words:
            for marker, instead in MARKERS.items():
                if hit := re.search(marker, words, re.IGNORECASE):
                    problems.append(f"{line}: write {instead}: {words[max(0, hit.start() - 30) : hit.end() + 30]}")
    return problems


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_words(file: Path) -> None:
    problems = faults(texts(file))
    assert not problems, "\n" + "\n".join(f"{file.relative_to(ROOT)}:{problem}" for problem in problems)


def retired(source: str) -> list[str]:
    """Return a line for each parameter or variable with a retired name; attributes may be stored in models."""
    problems = []
    for node in ast.walk(ast.parse(source)):
        name = node.arg if isinstance(node, ast.arg) else node.id if isinstance(node, ast.Name) else ""
        bound = isinstance(node, ast.arg) or isinstance(getattr(node, "ctx", None), ast.Store)
        if bound and name in RETIRED:
            problems.append(f"{node.lineno}: {name}: name {RETIRED[name]}")
    return problems


@pytest.mark.parametrize("file", sorted((ROOT / "src").rglob("*.py")), ids=lambda file: str(file.relative_to(ROOT)))
def test_names(file: Path) -> None:
    fields = ("lifecycle/accuracy_estimate.py", "storage/schemas.py")  # `how` is stored in manifests
    problems = [line for line in retired(file.read_text(encoding="utf-8")) if not str(file).endswith(fields)]
    assert not problems, "\n" + "\n".join(problems)


def test_retired_names_are_found() -> None:
    assert len(retired("def f(place, *, own=1):\n    for found in place: how = found\nx.own = place.found")) == 4


@pytest.mark.parametrize(
    ("source", "hits"),
    [
        ('"""What was said of N images."""', 1),
        ('"""Whether a model\n\nis whole."""', 1),
        ('"""Which method? A table."""', 0),
        ('def f():\n    """Of a class, the mean."""', 1),
        ("x = 1  # what a user can mend", 1),
        ('print(f"{x}: is no number; give one")', 1),
        ('print("there is no task")\nmend = "mend"', 0),
        ('"""Return `mend`, which is no longer used."""', 0),
        ('raise ValueError("a task is half "\n    "learnt")', 1),
    ],
)
def test_markers_are_found(source: str, hits: int, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(source)
    assert len(faults(texts(tmp_path / "a.py"))) == hits
