"""User-written YAML: unique keys, plain values, and limits on size and depth."""

from typing import Any

import yaml

from pearl.errors import ConfigError

LIMIT = 1_000_000  # values of a document, with aliases expanded
DEPTH = 64  # nesting depth of sections; many functions recurse into them
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast


def parse_yaml(text: str) -> Any:
    """Parse a document.

    Raises:
        ConfigError: not YAML; a repeated key in a mapping; aliases that are recursive or expand beyond the limit;
            nesting beyond the limit; or an unsupported value: a date, a NUL, a number of more than 64 bits. The message
            has no subject, such as "not valid YAML (the key lr twice, line 3, column 1)": callers put the name of the
            document before it.
    """
    try:
        return _value(text)
    except (yaml.YAMLError, ValueError) as error:  # UnicodeEncodeError: bytes of the command line that are not text
        raise ConfigError(f"not valid YAML ({_reason(error, text)})") from None


def _reason(error: Exception, text: str) -> str:
    """Return the error on one line, with its position in a text of several lines."""
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
    """Check the depth by events only: composing a document recurses for each section, without a check in C."""
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
        raise yaml.constructor.ConstructorError(
            None, None, f"a {type(value).__name__}, which settings cannot be; quote it"
        )


def _values(node: yaml.Node, known: dict[int, int | None]) -> int:
    """Return the number of values in a node, with aliases expanded."""
    if id(node) in known:
        if (count := known[id(node)]) is None:
            raise yaml.constructor.ConstructorError(None, None, "an alias contains itself", node.start_mark)
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
