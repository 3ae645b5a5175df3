"""YAML as people write it: each key once, plain values, and no document that is larger or deeper than it looks."""

from typing import Any

import yaml

from pearl.errors import ConfigError

LIMIT = 1_000_000  # values of a document, where an alias counts as what it stands for
DEPTH = 64  # of sections in sections; what is read is walked through in many places, each a call deeper
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast


def parse_yaml(text: str) -> Any:
    """The value of a document.

    Raises:
        ConfigError: not YAML; a key twice in one mapping, of which others keep the last without a word; aliases
            that stand for themselves or for more than a machine can hold; sections in sections without end; or a value
            that no setting has: a date, a NUL, a number of more than 64 bits. Its message has no subject, such as
            "not valid YAML (the key lr twice, line 3, column 1)": callers put the name of the document before it.
    """
    try:
        return _value(text)
    except (yaml.YAMLError, ValueError) as error:  # UnicodeEncodeError: bytes of the command line that are no text
        raise ConfigError(f"not valid YAML ({_reason(error, text)})") from None


def _reason(error: Exception, text: str) -> str:
    """What is wrong, on one line, and where in a text of several lines."""
    mark = getattr(error, "problem_mark", None)
    where = f", line {mark.line + 1}, column {mark.column + 1}" if mark and "\n" in text.strip() else ""
    return " ".join(str(getattr(error, "problem", None) or error).split()) + where


def _value(text: str) -> Any:
    _check_depth(text)
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _values(node, {}) > LIMIT:
            raise yaml.constructor.ConstructorError(None, None, "aliases make it too large", node.start_mark)
        value = loader.construct_document(node)
    except RecursionError:  # aliases
        raise yaml.constructor.ConstructorError(None, None, "nested too deeply") from None
    except (ValueError, OverflowError) as error:  # the 30th of February, a number of 5,000 digits
        raise yaml.constructor.ConstructorError(None, None, str(error)) from None
    finally:
        loader.dispose()
    _check_plain(value)
    return value


def _check_depth(text: str) -> None:
    """By events alone: to compose a document takes a call in a call for each section, without a check in C."""
    deep = yaml.constructor.ConstructorError(None, None, f"nested too deeply, more than {DEPTH} levels")
    depth = 0
    try:
        for event in yaml.parse(text, _Loader):
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if depth > DEPTH:
                raise deep
    except yaml.MarkedYAMLError as error:
        if "nesting" in (error.problem or ""):  # a scanner (libyaml from 0.2.6 on) reads ahead, and has its own limit
            raise deep from None
        raise


def _check_plain(value: Any) -> None:
    if isinstance(value, dict):
        for item in (*value, *value.values()):
            _check_plain(item)
    elif isinstance(value, list):
        for item in value:
            _check_plain(item)
    elif isinstance(value, str) and "\0" in value:
        raise yaml.constructor.ConstructorError(None, None, "a text with a NUL")
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise yaml.constructor.ConstructorError(None, None, "a number of more than 64 bits")
    elif not isinstance(value, str | int | float | None):
        raise yaml.constructor.ConstructorError(None, None, f"a {type(value).__name__}, which no setting is; quote it")


def _values(node: yaml.Node, known: dict[int, int | None]) -> int:
    """How many values a node stands for."""
    if id(node) in known:
        if (count := known[id(node)]) is None:
            raise yaml.constructor.ConstructorError(None, None, "an alias stands for itself", node.start_mark)
        return count
    known[id(node)] = None
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        keys = set()
        for key, value in node.value:
            if (name := (key.tag, str(key.value))) in keys:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value} twice", key.start_mark)
            keys.add(name)
            parts.append(value)
    elif isinstance(node, yaml.SequenceNode):
        parts = node.value
    count = known[id(node)] = 1 + sum(_values(part, known) for part in parts)
    return count
