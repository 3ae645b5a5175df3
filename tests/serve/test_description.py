"""The OpenAPI description is kept: bodies made from it, right and wrong, get answers that it lists, in its shapes."""

import base64
import json

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from photos import digit
from served import ended, png, served, taught

pytestmark = pytest.mark.slow

PICTURES = [base64.b64encode(png(digit(label)[20])).decode() for label in (0, 4, 6)]
NAMES = ["zero", "one", "first", "more"]
KNOWN = st.sampled_from(NAMES)
TEXTS = st.one_of(KNOWN, KNOWN, st.sampled_from(PICTURES), st.text(max_size=8))
ODD = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS | st.lists(TEXTS, max_size=2)
RIGHT = {
    "/v1/predict": {"inputs": PICTURES},
    "/v1/discover": {"inputs": PICTURES},
    "/v1/learn": {"images": [{"image": PICTURES[1], "label": "four"}], "task": "more", "fast": True},
    "/v1/rename": {"old": "four", "new": "vier"},
    "/v1/forget": {"class": "vier"},
    "/v1/undo": {},
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    return taught(tmp_path_factory.mktemp("shop"))


def resolved(value, whole):
    """A schema without references."""
    if isinstance(value, dict) and "$ref" in value:
        target = whole
        for part in value["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        return resolved(target, whole)
    if isinstance(value, dict):
        return {key: resolved(each, whole) for key, each in value.items()}
    return [resolved(each, whole) for each in value] if isinstance(value, list) else value


def fitting(schema):
    """Values of a schema, as far as these descriptions use JSON Schema."""
    if "anyOf" in schema:
        return st.one_of(*map(fitting, schema["anyOf"]))
    kind = schema.get("type")
    if kind == "object":
        needed = {*schema.get("required", ())}
        parts = {name: KNOWN if name == "old" else fitting(each) for name, each in schema["properties"].items()}
        return st.fixed_dictionaries(
            {name: parts[name] for name in parts if name in needed},
            optional={name: parts[name] for name in parts if name not in needed},
        )
    if kind == "array":
        return st.lists(fitting(schema["items"]), min_size=schema.get("minItems", 0), max_size=3)
    if kind == "integer":
        return st.integers(schema.get("minimum"), schema.get("maximum"))
    if kind == "string":
        shortest = schema.get("minLength", 0)
        return TEXTS.filter(lambda text: len(text) >= shortest)
    return {"boolean": st.booleans(), "null": st.none()}[kind]


def nearly(schema):
    """Values of a schema with one odd entry, or one too many, and odd ones alone."""
    changed = st.tuples(fitting(schema), st.sampled_from([*schema["properties"], "path"]), ODD)
    return changed.map(lambda parts: {**parts[0], parts[1]: parts[2]}) | ODD


def operations(client):
    """Address, schema of the body, and schema of each status' answer, of all that take JSON."""
    whole = client.get("/openapi.json").json()
    for path, methods in whole["paths"].items():
        body = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
        if body:
            answers = {
                status: resolved(answer["content"]["application/json"]["schema"], whole)
                for status, answer in methods["post"]["responses"].items()
            }
            yield path, resolved(body["schema"], whole), answers


def test_every_answer_is_one_that_the_description_lists(one, forks):
    with served(one) as client:
        every = {path: (schema, answers) for path, schema, answers in operations(client)}
        assert {*RIGHT} == {*every}
        seen = {path: set() for path in every}

        def check(path, body):
            answers = every[path][1]
            answer = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
            status = str(answer.status_code)
            assert status in answers, (path, body, answer.text)
            problems = [error.message for error in Draft202012Validator(answers[status]).iter_errors(answer.json())]
            assert problems == [], (path, body, answer.text)
            if answer.status_code >= 400:
                assert [*answer.json()] == ["error"] and "\n" not in answer.json()["error"]
            if answer.status_code == 202:
                ended(client, answer.json()["id"])
            seen[path].add(answer.status_code)

        for path, body in RIGHT.items():
            check(path, body)
        assert all(status < 300 for statuses in seen.values() for status in statuses), seen

        @seed(0)
        @settings(max_examples=60, deadline=None, database=None, suppress_health_check=[*HealthCheck])
        @given(st.data())
        def kept(data):
            path = data.draw(st.sampled_from([*every]))
            schema = every[path][0]
            body = data.draw(fitting(schema) | nearly(schema))
            if path == "/v1/learn" and isinstance(body, dict) and body.get("fast", False) is False:
                body["fast"] = True  # training takes seconds, and the answer is the same
            check(path, body)

        kept()
        assert all(any(status >= 400 for status in statuses) for statuses in seen.values()), seen
        assert client.get("/healthz").status_code == 200
        assert client.post("/v1/predict", json={"inputs": PICTURES[0]}).status_code == 200
