"""Several processes learn what one does, end equal, and survive each other's deaths."""

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

import zygote
from pearl.data.batches import Batch
from pearl.errors import ConfigError
from pearl.lifecycle.runs import execute
from pearl.settings.config import load_config
from pearl.training import launch
from pearl.training.launch import ProcessRank, process_rank
from pearl.training.world import World, make_fabric
from reliability import contents
from zoo import ZOO, shared_out

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
        reason="this torch has no gloo",
    ),
]


@pytest.fixture(scope="module")
def actual(tmp_path_factory):
    """See two_ranks.py: its own process, since ranks must be forked before torch has threads."""
    out = tmp_path_factory.mktemp("ranks") / "found.pkl"
    script = Path(__file__).with_name("two_ranks.py")
    done = zygote.run([out], program=[script], text=True)
    assert done.returncode == 0, done.stderr
    return pickle.loads(out.read_bytes())


def environment(**more):
    return os.environ | {"OMP_NUM_THREADS": "1"} | {key: str(value) for key, value in more.items()}


# ---------------------------------------------------------------------------------------------------- the same steps


@pytest.mark.parametrize("method", ["pearl", "finetune"])
def test_two_processes_follow_one(actual, method):
    """A ViT, batches of 9 in parts of 4 and 5; benchmarks/speed/ddp.py does so with DeiT-Tiny over 50 steps."""
    one, *several = *actual[f"{method} one"], *actual[method]
    for rank in several:
        torch.testing.assert_close(rank["losses"], one["losses"], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(rank["logits"], one["logits"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["Pearl", "Finetune"])
def test_batch_statistics_are_those_of_the_whole_batch(actual, method):
    one, first, second = *actual[f"resnet {method} one"], *actual[f"resnet {method}"]
    torch.testing.assert_close(first["losses"], one["losses"], rtol=1e-9, atol=1e-9)
    assert any("running_var" in name for name in first["state"])
    for name, value in first["state"].items():
        assert torch.equal(value, second["state"][name]), f"{name} differs between the ranks"
        torch.testing.assert_close(value, one["state"][name], rtol=1e-9, atol=1e-9, msg=name)


def test_a_rank_without_images_takes_part(actual):
    (one,), several = actual["leftover one"], actual["leftover"]
    for rank in several:
        torch.testing.assert_close(rank["losses"], one["losses"], rtol=1e-9, atol=1e-9)
        for name, value in rank["state"].items():
            torch.testing.assert_close(value, one["state"][name], rtol=1e-9, atol=1e-9, msg=name)
            assert torch.equal(value, several[0]["state"][name]), name


def test_a_resumed_task_ends_with_the_same_bits(actual):
    """With dropout, whose draws are each rank's own, and a signal that reached the second rank alone."""
    whole, cut = actual["dropout"], actual["dropout cut"]
    assert cut[0]["cuts"] == cut[1]["cuts"] >= 2
    for name, value in whole[0]["state"].items():
        for other in (whole[1], *cut):
            assert torch.equal(other["state"][name], value), name
    assert torch.equal(whole[0]["state"]["backbone.unused"], torch.ones(3)), "what no loss reaches does not move"


def test_ranks_take_the_same_phase(actual):
    """On all of them or on none; what fewer or more have trained is another one."""
    for rank, alone in zip(actual["kept"], actual["kept alone"], strict=True):
        first, again = rank
        assert [first["reused"], again["reused"]] == [[[], []], [["reference"], ["probe"]]]
        assert alone[0]["reused"] == [[], []]
        for name, value in alone[0]["state"].items():
            assert torch.equal(again["state"][name], value), name
    assert actual["kept one"][0][0]["reused"] == [[], []]


@pytest.mark.parametrize("name", [name for name, make in ZOO.items() if shared_out(make())])
def test_every_method_that_can_be_shared_out_learns_in_several_processes(actual, name):
    (first, second), (one,) = actual["zoo"], actual["zoo one"]
    assert first[name]["state"].keys() == second[name]["state"].keys() == one[name]["state"].keys()
    for key, value in first[name]["state"].items():
        assert torch.equal(value, second[name]["state"][key]), f"{key} differs between the ranks"
    logits = first[name]["logits"]  # of distances to means in float32
    near = 1e-11 if logits.dtype == torch.float64 else 1e-6  # without a share of a gradient 4e-4 and more
    torch.testing.assert_close(logits, one[name]["logits"], rtol=near, atol=near)


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("er", "stores images, which each process would draw"),
        ("hide", "needs whole batches, of which each"),
        ("ssre", "needs whole batches, of which each"),
    ],
)
def test_what_cannot_be_shared_out_is_for_one_process(method, why, monkeypatch):
    monkeypatch.setattr(World, "join", lambda *_: World(ProcessRank(0, 2, 2)))
    monkeypatch.setattr(World, "watched", lambda _: nullcontext())  # there is no other process
    with pytest.raises(ConfigError, match=f"--devices 2: method={method} {why}"):
        execute(load_config("digits", [f"method={method}"]), devices=2)


def test_what_ranks_tell_each_other(actual):
    first, second = actual["draws"]
    assert first.pop("draw") != second.pop("draw")
    assert first.pop("share") + second.pop("share") == [0, 1, 2, 3, 4]
    assert first == second == {"any": [True, False], "same": "of 0", "gather": [0, 1]}


@pytest.mark.parametrize(("count", "world"), [(1, 1), (1, 3), (2, 3), (7, 3), (8, 2)])
def test_shares_weighted_are_the_mean(count, world):
    values = torch.rand(count)
    parts = [World(ProcessRank(rank, world, world)).share(Batch(values, values, values)) for rank in range(world)]
    assert sum(weight * part.y.mean() for part, weight in parts) / world == pytest.approx(float(values.mean()))
    assert torch.cat([part.y for part, weight in parts if weight]).tolist() == values.tolist()


# -------------------------------------------------------------------------------------------------- the command line


RUN = ["run", "digits", "backbone={name: convnet, width: 2}", "engine.channels_last=false"]
RUN += ["stream.classes=4", "stream.tasks=2", "stream.per_class=8", "stream.test_per_class=2", "train.batch_size=8"]
RUN += ["train.epochs=5", "train.phases.probe.epochs=5", "--devices", "2", "--device", "cpu", "--store-every", "0.001"]


def end(runs, task, harm, **more):
    """`pearl run` on two devices, harmed once a moment of a task is stored: exit code, and what it then said."""
    runs.mkdir(exist_ok=True)
    command, env = [*RUN, "--quiet"], environment(PEARL_RUNS=runs, **more)
    with zygote.Process(command, env=env, cwd=runs, stderr=subprocess.PIPE, text=True) as process:
        while not list(runs.glob(f"*/resume/{task:03d}-*/manifest.json")):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        harm(process)
        said = process.stderr.read()
    return process.returncode, said


def kill_second(process, kind=signal.SIGKILL):
    """The rank that does not hold the run's directory. All are forks of one process; these are in their own folder."""
    here = Path(f"/proc/{process.pid}/cwd").readlink()
    parent = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1]
    forks = map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
    (run,) = here.iterdir()
    others = {process.pid, json.loads((run / ".holder.json").read_text())["pid"]}
    (second,) = {pid for pid in forks if Path(f"/proc/{pid}/cwd").readlink() == here} - others
    os.kill(second, kind)


def test_it_survives_signals_and_deaths_and_every_way_to_start_gives_the_same_bits(tmp_path):
    code, said = end(tmp_path / "cut", 0, lambda process: process.send_signal(signal.SIGINT))
    assert code == 130, said
    assert said.startswith("pearl: interrupted in phase reference after ")
    assert said.endswith(" --devices 2\n")
    assert said.count("\n") == 1
    (run,) = (tmp_path / "cut").iterdir()
    assert len(list((run / "resume").iterdir())) == 1

    code, said = end(tmp_path / "cut", 1, kill_second)
    assert (
        said
        == "pearl: process 2 of 2 was killed (SIGKILL); stored steps are complete; run the same command to continue\n"
    )
    assert code == 128 + signal.SIGKILL

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "pearl"]  # new interpreters
    done = subprocess.run([*torchrun, *RUN], env=environment(PEARL_RUNS=tmp_path / "cut"), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.count(b"class-IL after the last task") == 1
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    resumed = [(event["phase"], event["done"] > 0) for event in events if event["event"] == "phase"]
    assert resumed[:2] == [("reference", False), ("reference", True)]
    assert resumed[2:4] == [("probe", False), ("probe", True)]

    slurm = {"SLURM_NTASKS": 2, "SLURM_NTASKS_PER_NODE": 2, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_NUM_NODES": 1}
    slurm |= {"SLURM_NNODES": 1, "SLURM_NODEID": 0, "SLURM_NODELIST": "127.0.0.1", "SLURM_JOB_ID": os.getpid()}
    tasks = [
        zygote.Process(
            RUN,
            env=environment(PEARL_RUNS=tmp_path / "whole", SLURM_PROCID=rank, SLURM_LOCALID=rank, **slurm),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for task in tasks:
        said = task.communicate()[1]
        assert task.returncode == 0, said
    assert contents(run) == contents(tmp_path / "whole" / run.name)
    assert json.loads((run / "environment.json").read_text())["processes"] == 2


def test_a_process_that_hangs_ends_the_others(tmp_path):
    """As a machine that is lost: nothing comes from it, and its connections stay open."""
    stop = partial(kill_second, kind=signal.SIGSTOP)
    code, said = end(tmp_path / "runs", 0, stop, PEARL_SILENCE=3)
    lost = f"{socket.gethostname()} (process 2 of 2)"
    assert (
        said
        == f"pearl: no sign of life from {lost} for 3 s; stored steps are complete; run the same command to continue\n"
    )
    assert code == launch.UNREACHABLE


@pytest.mark.parametrize(
    ("codes", "said", "code", "words"),
    [
        ({0: 0, 1: 0}, b"", 0, ""),
        ({0: 2, 1: launch.LOST}, b"", 2, ""),
        ({1: 2, 0: 2}, b"pearl: the same\n", 2, ""),
        ({0: 130, 1: 130}, b"", 130, ""),
        ({1: 2, 0: launch.LOST}, b"pearl: too few images\n", 2, "pearl: process 2 of 2: too few images"),
        ({0: launch.LOST, 1: -9}, b"", 137, "pearl: process 2 of 2 was killed (SIGKILL)"),
        ({0: -11, 1: launch.LOST}, b"", 139, "pearl: process 1 of 2 was killed (SIGSEGV)"),
        ({1: 1, 0: launch.LOST}, b"Traceback\nKeyError: 3\n", 1, "Traceback\nKeyError: 3\npearl: process 2 of 2: Key"),
        ({0: launch.LOST, 1: launch.LOST}, b"", launch.LOST, "pearl: the processes lost each other"),
    ],
)
def test_one_line_says_why_it_ended(codes, said, code, words, tmp_path):
    (tmp_path / "said").write_bytes(said)
    with (tmp_path / "said").open("rb") as file:
        actual, line = launch._verdict(codes, [file, file])
    assert actual == code
    assert line.startswith(words)
    assert bool(line) == bool(words)


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("devices", "env", "expected"),
    [
        (1, {}, None),
        (2, {}, None),
        (1, {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}, None),  # four runs of one device each
        (
            2,
            {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "3"},
            ProcessRank(3, 4, 2, True),
        ),
        (2, {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, ProcessRank(3, 4, 2)),
        (1, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, ProcessRank(1, 2, 1)),
        (1, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, None),
    ],
)
def test_where_a_process_stands(devices, env, expected, monkeypatch):
    for name in ("RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert process_rank(devices) == expected


def test_a_wrong_number_of_devices_is_one_line(monkeypatch):
    with pytest.raises(ConfigError, match="--devices 0: give 1 or more"):
        process_rank(0)
    with pytest.raises(ConfigError, match="devices=2 needs as many processes; use pearl run --devices, or torchrun"):
        World.join("cpu", 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="--devices 4: 2 GPUs can be seen here; give fewer, or --device cpu"):
        make_fabric("cuda", ProcessRank(0, 4, 4))
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="--devices 2: 4 processes started on this machine"):
        process_rank(2)
