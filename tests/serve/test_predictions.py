"""Predictions over HTTP: the same as in Python, many at once, and one clear line for what cannot be used."""

import base64
import http.client
import io
import json
import os
import re
import shutil
import socket
import struct
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import pearl
from pearl.serve import guard, photos, predictor
from pearl.serve.serving import configured
from photos import digit, write_photos
from served import png, served, taught

pytestmark = pytest.mark.slow

FILES = [png(digit(label)[20]) for label in (0, 1, 7)]
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    return taught(tmp_path_factory.mktemp("shop"), "model")


@pytest.fixture(scope="module")
def client(shop):
    with served(shop / "model") as client:
        yield client


def encoded(file):
    return base64.b64encode(file).decode()


def test_every_form_of_request_gives_what_python_gives(client, shop):
    expected = pearl.load(shop / "model").predict([Image.open(io.BytesIO(file)) for file in FILES], top=2)
    form = [("images", ("a.png", file)) for file in FILES]
    many = [
        client.post("/v1/predict", files=form),
        client.post("/v1/predict", json={"inputs": [*map(encoded, FILES)], "parameters": {"top_k": 9}}),
    ]
    one = [
        client.post("/v1/predict?top_k=2", content=FILES[2], headers={"Content-Type": "image/png"}),
        client.post("/v1/predict", content=FILES[2]),
        client.post("/v1/predict", json={"inputs": encoded(FILES[2])}),
        client.post("/v1/predict", json={"inputs": f"data:image/png;base64,{encoded(FILES[2])}"}),
    ]
    for actual in [*(answer.json() for answer in many), *([*many[0].json()[:2], answer.json()] for answer in one)]:
        for classes, prediction in zip(actual, expected, strict=True):
            assert tuple(each["label"] for each in classes) == prediction.classes
            assert [each["score"] for each in classes] == pytest.approx(prediction.probabilities, abs=1e-4)
            assert {each["unknown"] for each in classes} == {not prediction.known}
            assert classes[0]["in_distribution"] == pytest.approx(prediction.in_distribution, abs=1e-2)
            assert classes[0]["task"] == "first"
    best = client.post("/v1/predict?top_k=1", content=FILES[0]).json()
    assert [each["label"] for each in best] == ["zero"]


def test_hugging_faces_client_reads_the_answers(client):
    from huggingface_hub import InferenceClient

    actual = InferenceClient().image_classification(FILES[1], model=f"{client.base_url}/v1/predict")
    assert [each.label for each in actual] == ["one", "zero"] and actual[0].score > 0.5


def bomb():
    """A PNG whose head claims 121 million pixels."""
    head = struct.pack(">IIBBBBB", 11000, 11000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    parts = (struct.pack(">I4s", len(d), kind) + d + struct.pack(">I", zlib.crc32(kind + d)) for kind, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


WRONG = {
    "no image": (422, "not an image", {"content": b"hello", "headers": {"Content-Type": "image/png"}}),
    "cut off": (422, "photo: ", {"content": FILES[0][:80], "headers": {"Content-Type": "image/png"}}),
    "empty": (422, "not an image", {"content": b""}),
    "a bomb": (422, "11000 x 11000 pixels are more than", {"content": bomb()}),
    "a text": (415, "send an image", {"content": b"hello", "headers": {"Content-Type": "text/plain"}}),
    "a path": (400, "never a path or an address", {"json": {"inputs": "/etc/passwd"}}),
    "another path": (400, "never a path or an address", {"json": {"inputs": "../abc/defg.png"}}),
    "an address": (400, "never a path or an address", {"json": {"inputs": ["http://127.0.0.1/secret.png"]}}),
    "no list": (400, "inputs", {"json": {"inputs": 3}}),
    "an empty list": (400, "inputs", {"json": {"inputs": []}}),
    "another key": (400, "image", {"json": {"inputs": encoded(FILES[0]), "image": ""}}),
    "top 0": (400, "parameters.top_k", {"json": {"inputs": encoded(FILES[0]), "parameters": {"top_k": 0}}}),
    "deep": (400, "body", {"content": b"[" * 100_000, "headers": JSON}),
    "no JSON": (400, "body", {"content": b"\xff{", "headers": JSON}),
    "no boundary": (400, "boundary", {"content": b"x", "headers": {"Content-Type": "multipart/form-data"}}),
    "half a form": (
        400,
        "no photo was sent",
        {"content": b"--b\r\nx", "headers": {"Content-Type": "multipart/form-data; boundary=b"}},
    ),
    "another field": (400, "'file' as a file is not expected", {"files": {"file": FILES[0]}}),
    "a field": (400, "'path' as a text is not expected", {"files": {"images": FILES[0]}, "data": {"path": "/etc"}}),
    "one of two": (422, "b.png: not an image", {"files": [("images", FILES[0]), ("images", ("b.png", b"x"))]}),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_used_is_said_in_one_line(client, case):
    status, words, how = WRONG[case]
    answer = client.post("/v1/predict", **how)
    assert answer.status_code == status, answer.text
    assert [*answer.json()] == ["error"]
    assert words in answer.json()["error"] and "\n" not in answer.json()["error"]


@pytest.mark.parametrize("top", ["0", "-1", "x", "1001", "²", "9" * 50])
def test_a_wrong_number_of_classes(client, top):
    answer = client.post(f"/v1/predict?top_k={top}", content=FILES[0])
    assert answer.status_code == 400 and "from 1 to 1000" in answer.json()["error"]


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/predict", 405), ("GET", "/static/../app.py", 404)])
def test_other_addresses(client, method, path, status):
    answer = client.request(method, path)
    assert answer.status_code == status and [*answer.json()] == ["error"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.just(encoded(FILES[0])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["inputs", "image", "label"]), inner),
    max_leaves=6,
)
KEYS = st.sampled_from(["inputs", "parameters", "images", "labels", "task", "fast", "allow_new_style"])


@settings(max_examples=40, deadline=None, suppress_health_check=[*HealthCheck])
@given(path=st.sampled_from(["/v1/predict", "/v1/learn"]), body=st.dictionaries(KEYS, VALUES) | VALUES)
def test_no_json_is_an_error_of_the_server(client, path, body):
    """Every body that is not valid gives 4xx and one line. None of these is a valid one to learn."""
    answer = client.post(path, content=json.dumps(body), headers=JSON)
    assert answer.status_code in ({200, 400, 422} if path == "/v1/predict" else {400, 422}), (body, answer.text)
    if answer.status_code != 200:
        assert [*answer.json()] == ["error"] and "\n" not in answer.json()["error"]


def test_requests_that_arrive_together_are_one_batch(client, monkeypatch):
    """While one batch is computed, others wait; they are the next batch, and each gets its own answer."""
    begun, go_on, sizes = threading.Event(), threading.Event(), []
    original = pearl.lifecycle.model.StoredModel.predict_pixels

    def slow(self, pixels, **how):
        sizes.append(len(pixels))
        begun.set()
        assert go_on.wait(30)
        return original(self, pixels, **how)

    monkeypatch.setattr("pearl.lifecycle.model.StoredModel.predict_pixels", slow)
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(client.post, "/v1/predict", content=FILES[0])
        assert begun.wait(30)
        others = [pool.submit(client.post, "/v1/predict?top_k=1", content=FILES[i % 2]) for i in range(8)]
        while "pearl_images_waiting 8" not in client.get("/metrics").text:
            pass
        go_on.set()
        assert [answer.result().json()[0]["label"] for answer in [first, *others]] == ["zero", *["zero", "one"] * 4]
        assert [len(answer.result().json()) for answer in [first, *others]] == [2, *[1] * 8]
    assert sizes == [1, 8]


def test_a_model_is_exchanged_whole(shop, tmp_path):
    """While threads predict, the model is exchanged to and fro: each answer is all of one of the two."""
    copy = shutil.copytree(shop / "model", tmp_path / "model")
    pearl.learn(copy, write_photos(tmp_path / "second", {"seven": 7}, 8), fast=True, quiet=True)
    models = [pearl.load(shop / "model"), pearl.load(copy)]
    pixels = np.stack([np.stack([digit(label)[20]] * 3, -1) for label in (0, 1, 7)])
    expected = [model.predict_pixels(pixels, top=9) for model in models]
    served_by = predictor.Predictor(models[0])
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(lambda: served_by.predict(pixels, 9).result(30)) for _ in range(200)]
        for number in range(40):
            served_by.exchange(models[number % 2])
        actual = [answer.result() for answer in asked]
    served_by.close()
    known = {tuple(one.classes for one in answer): answer for answer in expected}
    for answer in actual:
        alone = known[tuple(one.classes for one in answer)]
        for one, same in zip(answer, alone, strict=True):
            assert one.probabilities == pytest.approx(same.probabilities, abs=1e-4) and one.known == same.known
    assert {len(answer[0].classes) for answer in actual} == {2, 3}


def test_an_error_of_the_model_reaches_whoever_waits_and_no_one_else(client, monkeypatch):
    def fails(self, pixels, **how):
        raise pearl.PearlError("model: damaged; restore a copy\nmore")

    with monkeypatch.context() as patch:
        patch.setattr("pearl.lifecycle.model.StoredModel.predict_pixels", fails)
        answer = client.post("/v1/predict", content=FILES[0])
    assert (answer.status_code, answer.json()) == (500, {"error": "model: damaged; restore a copy"})
    assert client.post("/v1/predict", content=FILES[0]).status_code == 200


def test_too_many_photos(client, monkeypatch):
    monkeypatch.setattr(photos, "MOST", 2)
    form = [("images", (f"{i}.png", FILES[0])) for i in range(3)]
    answer = client.post("/v1/predict", files=form)
    assert answer.status_code == 400 and "Too many files" in answer.json()["error"]


def test_too_many_that_wait(client, monkeypatch):
    monkeypatch.setattr(predictor, "WAITING", -1)
    server_waits, go_on = threading.Event(), threading.Event()

    def slow(self, pixels, **how):
        server_waits.set()
        go_on.wait(30)
        return []

    monkeypatch.setattr("pearl.lifecycle.model.StoredModel.predict_pixels", slow)
    with ThreadPoolExecutor(2) as pool:
        pool.submit(client.post, "/v1/predict", content=FILES[0])
        assert server_waits.wait(30)
        waiting = pool.submit(client.post, "/v1/predict", content=FILES[0])
        while "pearl_images_waiting 1" not in client.get("/metrics").text:
            pass
        refused = client.post("/v1/predict", content=FILES[0])
        go_on.set()
        waiting.result()
    assert refused.status_code == 503 and refused.headers["retry-after"] == "5"


def test_a_body_that_is_too_long(client, monkeypatch):
    """By its own word, and by what arrives of one that does not say how long it is."""
    monkeypatch.setattr(guard, "LONGEST_BODY", 1000)

    def post(content):
        return client.post("/v1/predict", content=content())

    assert post(lambda: b"x" * 1001).status_code == 413
    answer = post(lambda: iter([b"x" * 600, b"x" * 600]))
    assert answer.status_code == 413 and "send fewer photos" in answer.json()["error"]
    monkeypatch.setattr(guard, "MEMORY", 500)
    assert post(lambda: b"x" * 600).status_code == 503
    monkeypatch.setattr(guard, "MEMORY", 1000)
    assert {client.post("/v1/predict", content=b"x" * 300).status_code for _ in range(9)} == {422}  # it is given back


def test_a_connection_stays_open_for_longer_than_clients_keep_it(client):
    """Both closed after 5 seconds: a request sent in that moment was reset, without an answer."""
    from httpx._config import DEFAULT_LIMITS

    assert configured(None).timeout_keep_alive > 60 > DEFAULT_LIMITS.keepalive_expiry
    plain = http.client.HTTPConnection("127.0.0.1", client.base_url.port, timeout=20)
    for pause in (5.5, 0):
        plain.request("GET", "/healthz")
        assert plain.getresponse().read()
        plain.auto_open = 0  # the second request is an error if the connection was closed
        time.sleep(pause)
    plain.close()


REFUSED = {
    "too long": (413, "send fewer photos", "/v1/predict", {"Content-Length": "{size}"}),
    "too long, in pieces": (413, "send fewer photos", "/v1/predict", {"Transfer-Encoding": "chunked"}),
    "another site": (403, "only the server's own page", "/v1/predict", {"Origin": "http://x"}),
    "no such address": (404, "Not Found", "/v1/nothing", {}),
    "another type": (415, "send an image", "/v1/predict", {"Content-Type": "text/html"}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_answer_arrives_although_the_body_is_not_read(case, client, monkeypatch):
    """A connection that is closed with bytes in it is reset, which takes the answer with it."""
    monkeypatch.setattr(guard, "LONGEST_BODY", 2**20 if case.startswith("too long") else 2**30)
    status, words, path, headers = REFUSED[case]
    size = 16 * 2**20  # more than the buffers of both ends hold
    chunked = "Transfer-Encoding" in headers
    headers = {"Host": f"127.0.0.1:{client.base_url.port}", "Content-Length": str(size)} | headers
    if chunked:
        del headers["Content-Length"]
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value.format(size=size)}" for name, value in headers.items())]
    with socket.create_connection(("127.0.0.1", client.base_url.port), timeout=20) as plain:
        plain.sendall("\r\n".join([*lines, "", ""]).encode())
        plain.sendall(f"{size:x}\r\n".encode() + bytes(size) + b"\r\n0\r\n\r\n" if chunked else bytes(size))
        answer = b""
        while part := plain.recv(65536):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()) and b"\r\nconnection: close" in head.lower()
    assert words in str(json.loads(body))


def test_what_is_refused_is_not_read_for_ever(client, monkeypatch):
    """A client that goes on sending slowly is left after `LINGER` seconds."""
    monkeypatch.setattr(guard, "LINGER", 0.3)
    with socket.create_connection(("127.0.0.1", client.base_url.port), timeout=20) as plain:
        head = f"POST /v1/nothing HTTP/1.1\r\nHost: 127.0.0.1:{client.base_url.port}\r\nContent-Length: 999\r\n\r\n"
        plain.sendall(head.encode())
        began = time.monotonic()
        while plain.recv(65536):
            pass
        assert 0.2 < time.monotonic() - began < 10


OPENED = []
WATCHED = threading.Event()


def _watch(kind, arguments):
    if WATCHED.is_set() and kind == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):
        OPENED.append(arguments[0])


def test_no_file_is_written_for_a_photo(client):
    """Also not for one of more than 1 MiB, which Starlette would write to a temporary file."""
    large = png(np.random.default_rng(0).integers(0, 255, (900, 900, 3), np.uint8))
    assert len(large) > 2**21
    sys.addaudithook(_watch)
    WATCHED.set()
    try:
        assert client.post("/v1/predict", files={"images": large}).status_code == 200
        assert client.post("/v1/predict", content=large).status_code == 200
        assert client.post("/v1/learn", files={"images": large}, data={"labels": ["a", "b"]}).status_code == 400
    finally:
        WATCHED.clear()
    assert OPENED == []


HOST = "not a name of this server"
ORIGIN = "only the server's own page"


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"Host": "evil.example"}, HOST),  # DNS rebinding
        ({"Host": "127.0.0.1.evil.example"}, HOST),
        ({"Host": "localhost.evil.example:80"}, HOST),
        ({"Host": ""}, HOST),
        ({"Host": "[::1"}, HOST),
        ({"Host": "127.0.0.1:99999"}, HOST),
        ({"Origin": "http://evil.example"}, ORIGIN),
        ({"Origin": "null"}, ORIGIN),
        ({"Origin": "http://["}, ORIGIN),
        ({"Origin": "http://127.0.0.1"}, ORIGIN),  # another port is another site
        ({"Origin": "http://localhost:{port}"}, ORIGIN),
        ({"Host": "localhost:{port}"}, None),
        ({"Host": "[::1]:{port}"}, None),
        ({"Origin": "http://127.0.0.1:{port}"}, None),
        ({"Origin": "https://127.0.0.1:{port}"}, None),  # through a proxy that ends TLS
    ],
)
def test_only_its_own_page_may_use_it(client, headers, words):
    headers = {name: value.format(port=client.base_url.port) for name, value in headers.items()}
    for method, path in (("POST", "/v1/predict"), ("GET", "/v1/model"), ("DELETE", "/v1/jobs/x"), ("GET", "/")):
        answer = client.request(method, path, content=FILES[0] if method == "POST" else None, headers=headers)
        assert (answer.status_code == 403) == (words is not None), answer.text
        assert words is None or words in answer.json()["error"]
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert "access-control-allow-origin" not in answer.headers


def test_a_token(shop):
    token = "correct horse battery"
    with served(shop / "model", token=token, names=["Shop.example"]) as client:
        assert client.get("/healthz").json() == {"status": "ok"}
        refused = [client.get(path) for path in ("/", "/v1/model", "/metrics", "/?token=wrong")]
        refused += [client.post("/v1/predict", content=b"x"), client.get("/v1/model", params={"token": token})]
        for value in ("Bearer x", token, "Bearer ä".encode()):
            refused.append(client.get("/v1/model", headers={"Authorization": value}))
        refused += [client.get("/v1/model", headers={"Cookie": f"pearl_token_{client.base_url.port}=wrong"})]
        assert {answer.status_code for answer in refused} == {401}
        assert client.get("/v1/model", headers={"Authorization": f"Bearer {token}"}).status_code == 200
        moved = client.get("/", params={"token": token})
        assert (moved.status_code, moved.headers["location"]) == (303, "/")
        assert {"HttpOnly", "SameSite=lax"} <= {part.strip() for part in moved.headers["set-cookie"].split(";")}
        assert client.get("/v1/model").status_code == 200  # by the cookie
        named = {"Host": "shop.example", "Authorization": f"Bearer {token}"}
        assert client.get("/v1/model", headers=named).status_code == 200


def test_metrics_can_be_read(shop):
    with served(shop / "model") as client:
        client.get("/nowhere")
        assert client.post("/v1/predict", content=FILES[0]).status_code == 200
        lines = client.get("/metrics").text.splitlines()
    kinds = dict(line.split()[2:] for line in lines if line.startswith("# TYPE"))
    values = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}
    assert {re.sub("(_bucket|_sum|_count)?({.*)?$", "", name) for name in values} == kinds.keys()
    assert values["pearl_classes"] == 2 and values["pearl_images_total"] >= values["pearl_batches_total"] > 0
    predicted = 'pearl_requests_total{path="/v1/predict",status="200"}'
    answered = [name for name in values if name.startswith('pearl_requests_total{path="/v1/predict"')]
    assert values[predicted] > 0
    assert values['pearl_request_seconds_count{path="/v1/predict"}'] == sum(values[name] for name in answered)
    assert not any("nowhere" in name for name in values)  # or anyone could make any number of them


def test_the_interface_is_described(client):
    description = client.get("/openapi.json").json()
    assert {*description["paths"]} >= {"/v1/predict", "/v1/learn", "/v1/model", "/v1/jobs/{job_id}/events", "/healthz"}
    assert {*description["paths"]["/v1/predict"]["post"]["requestBody"]["content"]} == {
        "image/*",
        "multipart/form-data",
        "application/json",
    }
    parts = description["components"]["schemas"]

    def references(value):
        if isinstance(value, dict):
            yield from [value["$ref"]] if "$ref" in value else []
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from references(inner)

    assert {name.rpartition("/")[2] for name in references(description)} <= {*parts}
    assert "POST /v1/learn" in client.get("/docs").text and "<script" not in client.get("/docs").text


def test_the_model_is_described(client):
    about = client.get("/v1/model").json()
    (task,) = about["tasks"]
    assert about["classes"] == ["one", "zero"] and about["name"] == "model" and about["finds_unknown"] is True
    assert task["name"] == "first" and task["images"] == 24 and task["accuracy"] > 90
    assert task["learnt_at"].startswith("20") and about["limits"]["photos"] == 1000
