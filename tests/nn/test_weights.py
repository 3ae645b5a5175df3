"""Files given as weights, of whatever contents."""

import os
import warnings

import pytest
import torch
from safetensors.torch import save_file

from pearl.errors import WeightsError
from pearl.nn.resnet import resnet18

STATE = resnet18(8, width=2).state_dict()
KEY = "layer1.0.conv1.weight"
VALUE = STATE[KEY]


def given(tmp_path, content):
    """A network that starts from a file of this content."""
    with warnings.catch_warnings(action="ignore"):
        torch.save(content, tmp_path / "w.pt")
    return resnet18(8, width=2, weights=str(tmp_path / "w.pt"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({**STATE, 1: VALUE}, "is not a mapping of names to plain tensors"),
        ({**STATE, KEY: None}, "is not a mapping"),
        ({**STATE, KEY: VALUE.to_sparse()}, "is not a mapping"),
        ({**STATE, KEY: VALUE.to("meta")}, "is not a mapping"),
        ([VALUE], "is not a mapping"),
        (VALUE, "is not a mapping"),
        (7, "is not a mapping"),
        ({"model": {1: 2}}, "is not a mapping"),
        ({**STATE, KEY: VALUE.to(torch.complex64)}, f"{KEY} is torch.complex64, the network needs torch.float32"),
        ({**STATE, KEY: VALUE.long()}, f"{KEY} is torch.int64"),
        ({**STATE, KEY: VALUE.bool()}, f"{KEY} is torch.bool"),
        ({**STATE, KEY: torch.zeros(1).expand(10**9)}, rf"{KEY} is \(1000000000,\)"),
        ({**STATE, KEY: VALUE[:0]}, rf"{KEY} is \(0, 2, 3, 3\)"),
    ],
)
def test_odd_contents(content, words, tmp_path):
    with pytest.raises(WeightsError, match=words):
        given(tmp_path, content)


def test_half_precision_is_taken(tmp_path):
    net = given(tmp_path, {"state_dict": {**STATE, KEY: VALUE.half()}})
    assert torch.equal(net.state_dict()[KEY], VALUE.half().float())


@pytest.mark.parametrize("prefix", ["module.", "model.backbone."])
def test_a_prefix_of_all_names_is_taken_off(prefix, tmp_path):
    state = {f"{prefix}{key}": value + 1 for key, value in STATE.items()} | {f"{prefix}fc.weight": VALUE}
    assert torch.equal(given(tmp_path, state).state_dict()[KEY], VALUE + 1)
    with pytest.raises(WeightsError, match=r"conv1\.weight is missing"):
        given(tmp_path, {**state, "other.weight": VALUE})


def test_an_error_names_five_tensors(tmp_path):
    state = {key: value for key, value in STATE.items() if not key.startswith("layer")}
    with pytest.raises(WeightsError, match=r"is missing; and \d+ more of this kind; choose the backbone") as caught:
        given(tmp_path, state)
    assert str(caught.value).count("is missing") == 5


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_fifos_and_devices(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(WeightsError, match="neither a file nor a folder"):
        resnet18(8, width=2, weights=str(tmp_path / name))
    with pytest.raises(WeightsError, match="neither a file nor a folder"):
        resnet18(8, width=2, weights="/dev/zero")


def test_complex_numbers_in_safetensors(tmp_path):
    save_file({**STATE, KEY: VALUE.to(torch.complex64)}, tmp_path / "w.safetensors")
    with pytest.raises(WeightsError, match=r"is torch\.complex64"):
        resnet18(8, width=2, weights=str(tmp_path / "w.safetensors"))
