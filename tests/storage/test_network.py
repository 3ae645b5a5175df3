"""Who has no internet is told so in seconds. Nothing here leaves this machine."""

import socket
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from pearl.data.sources import cifar100, imagenet_r
from pearl.errors import DataError, WeightsError
from pearl.nn.timm import timm_backbone
from pearl.storage import network


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urllib.request, "getproxies", dict)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[list[str]]:
    """A network whose names nobody answers for, as behind a firewall; the hosts that were looked for."""
    asked, end = [], threading.Event()

    def wait(host: str, *_: object, **__: object) -> None:
        asked.append(host)
        end.wait(60)
        raise OSError("the test is over")

    monkeypatch.setattr(socket, "getaddrinfo", wait)
    monkeypatch.setattr(network, "SECONDS", 0.1)
    monkeypatch.setenv("PEARL_DATA", str(tmp_path))
    yield asked
    end.set()


def test_a_host_that_answers_is_reached() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = f"http://127.0.0.1:{server.getsockname()[1]}/file"
        network.reach(address)
    with pytest.raises(OSError, match="refused"):
        network.reach(address)


def test_a_name_that_nobody_answers_for_is_given_up(silent: list[str]) -> None:
    with pytest.raises(TimeoutError, match=r"example\.org does not respond within 0\.1 seconds"):
        network.reach("https://example.org/file")


def test_a_proxy_is_left_to_answer(silent: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urllib.request, "getproxies", lambda: {"https": "http://localhost:1"})
    network.reach("https://example.org/file")
    assert silent == []


def test_downloads_that_cannot_come_end_in_a_line(silent: list[str]) -> None:
    """Each would wait a minute for its name; a host is waited for once."""
    for source, name in ((cifar100, "CIFAR-100"), (imagenet_r, "ImageNet-R")):
        with pytest.raises(DataError, match=rf"{name} cannot be obtained .*does not respond within"):
            source()
    with pytest.raises(WeightsError, match=r"cannot be downloaded .*give a local file"):
        timm_backbone("deit_tiny_patch16_224", 32, pretrained=True)
    assert len(silent) == len({*silent}) == 3


def test_all_is_as_before(silent: list[str]) -> None:
    before = urllib.request._opener, socket.getdefaulttimeout()
    with network.short_waits(), pytest.raises(TimeoutError):
        urllib.request.urlopen("https://example.org")
    assert (urllib.request._opener, socket.getdefaulttimeout()) == before
    from huggingface_hub import constants

    offline = constants.HF_HUB_OFFLINE
    with network.hub():
        assert constants.HF_HUB_OFFLINE
    assert offline == constants.HF_HUB_OFFLINE
