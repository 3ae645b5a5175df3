"""Where a process stands, by an environment that may say anything."""

import pytest

from pearl.errors import ConfigError
from pearl.training.launch import ProcessRank, process_rank

ALL = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in (*ALL, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def test_as_torchrun_writes_it(monkeypatch):
    for name, value in ALL.items():
        monkeypatch.setenv(name, value)
    assert process_rank(2) == ProcessRank(1, 2, 2)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("text", ["x", "", "-1", "1.5", "9" * 30, "\x1b[31m", "²"])
def test_no_numbers(name, text, monkeypatch):
    for key, value in (ALL | {name: text}).items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ConfigError, match=f"the environment's {name}=.*unset it"):
        process_rank(2)


@pytest.mark.parametrize("change", [{"RANK": "2"}, {"WORLD_SIZE": "0"}, {"LOCAL_WORLD_SIZE": "0"}, {"WORLD_SIZE": "1"}])
def test_numbers_that_contradict_each_other(change, monkeypatch):
    for key, value in (ALL | change).items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ConfigError, match="the environment contradicts itself"):
        process_rank(2)


def test_slurm_that_says_odd_things(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "many")
    with pytest.raises(ConfigError, match="SLURM_STEP_NUM_TASKS='many'"):
        process_rank(2)
