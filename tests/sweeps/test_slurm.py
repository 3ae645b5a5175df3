"""Runs under a SLURM of one node that is started for them: submit, warn, cancel, preempt, requeue, collect.

Needs root and Debian's slurm-wlm and munge. The daemons are children of the test process, and keep all they write in a
folder of their own. But for one run, a script stands for `pearl run`.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from fake_runs import Fake, states
from pearl.errors import ConfigError, Interrupted
from pearl.sweeps import slurm
from pearl.sweeps.jobs import Job, run_jobs
from pearl.sweeps.live_status import LiveStatus
from pearl.training import launch

pytestmark = pytest.mark.slow

pytest.importorskip("submitit")

DAEMONS = ("munged", "slurmctld", "slurmd")
CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthInfo=socket={folder}/munge/socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=20
NodeName={host} NodeAddr=127.0.0.1 CPUs=1
PartitionName=low Nodes=ALL Default=YES PriorityTier=1
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


@pytest.fixture(scope="module")
def cluster():
    """Configuration file of a SLURM that is at work."""
    missing = [name for name in DAEMONS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing or os.geteuid():
        pytest.skip(f"no {', '.join(missing)} here" if missing else "SLURM's daemons are started by root alone")
    folder, started = Path(tempfile.mkdtemp(prefix="slurm-")), []  # of a short name: a socket's is at most 107 long
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(mode=0o700)
    key = folder / "munge" / "key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    with socket.socket() as one, socket.socket() as other:
        for free in (one, other):
            free.bind(("127.0.0.1", 0))
        ports = [free.getsockname()[1] for free in (one, other)]
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(host=socket.gethostname().partition(".")[0], folder=folder, ports=ports))
    names = {name: f"--{name}-file={folder}/munge/{name}" for name in ("key", "pid", "seed", "log")}
    munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge/socket", *names.values()]
    env = os.environ | {"SLURM_CONF": str(config), "PATH": f"{os.environ['PATH']}:/usr/sbin"}

    def start(*command):
        with (folder / f"{command[0]}.log").open("wb") as log:
            how = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "env": env}
            started.append(subprocess.Popen(command, **how))

    def until(said, *command):
        deadline = time.monotonic() + 30
        while said not in subprocess.run(command, env=env, capture_output=True, text=True).stdout:
            assert time.monotonic() < deadline, "\n".join(log.read_text() for log in folder.glob("*.log"))
            time.sleep(0.05)

    try:
        start(*munged)
        until("SUCCESS", "sh", "-c", f"munge -n -S {folder}/munge/socket && echo SUCCESS")
        start("slurmctld", "-D", "-c")
        start("slurmd", "-D")
        until("idle", "sinfo", "--noheader", "--format=%T")
        yield config
        subprocess.run(["scancel", "--user=root"], env=env)
        until("0", "sh", "-c", "squeue --noheader | wc -l")
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(timeout=30)
        shutil.rmtree(folder)


@pytest.fixture
def fake(cluster, tmp_path, monkeypatch):
    """What stands for `pearl run`, also in the processes that SLURM starts."""
    monkeypatch.setenv("SLURM_CONF", str(cluster))
    monkeypatch.setattr(slurm, "ASK", 0.1)
    monkeypatch.setattr(slurm, "SOON", 0.1)
    made = Fake(tmp_path, monkeypatch)
    (tmp_path / "site").mkdir()
    code = f"from pearl.training import launch\nlaunch.COMMAND = {launch.COMMAND!r}\n"
    (tmp_path / "site" / "sitecustomize.py").write_text(code)
    given = [str(tmp_path / "site"), *(path for path in sys.path if path)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(given))
    return made


def ask(*command):
    """What a command of SLURM says."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


class Once(LiveStatus):
    """Does something with the first job's number once it is at work."""

    def __init__(self, fake, act):
        self.fake, self.act = fake, act
        self.deadline = time.monotonic() + 60

    def update(self, status):
        assert time.monotonic() < self.deadline, "the run waits, and nothing happens to it"
        if self.act and self.fake.lines("start"):
            act, self.act = self.act, None
            act(ask("squeue", "--noheader", "--states=RUNNING", "--name=pearl", "--format=%i"))


def ends():
    """How the jobs of all tests ended, the newest last."""
    while ask("squeue", "--noheader", "--states=RUNNING,COMPLETING", "--name=pearl", "--format=%i"):
        time.sleep(0.05)
    return ask("squeue", "--noheader", "--states=all", "--name=pearl", "--sort=i", "--format=%T").split()


def test_a_run_of_its_own_to_its_end(cluster, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", str(cluster))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    tiny = ("backbone={name: convnet, width: 2}", "engine.channels_last=false", "method=ncm", "stream.per_class=4")
    (outcome,) = run_jobs([Job("digits", (*tiny, "stream.test_per_class=2"))], executor="slurm")
    assert (outcome.state, outcome.error) == ("done", "")
    assert "class-IL after the last task" in outcome.log.read_text()


def test_a_preempted_run_is_trained_on_once(fake):
    """SLURM would requeue it (PreemptMode=REQUEUE) beside the job that the sweep submits for it."""

    def preempt(_):
        ask("sbatch", "--partition=high", "--output=/dev/null", "--wrap=sleep 1")

    made = fake.jobs("wait once")
    assert states(run_jobs(made, executor="slurm", show=Once(fake, preempt))) == ["done"]
    assert len(fake.lines("start")) == 2
    assert ends()[-2:] == ["PREEMPTED", "COMPLETED"]


def test_a_run_that_is_warned_is_submitted_again(fake):
    made = fake.jobs("wait once")
    board = Once(fake, lambda job: ask("scancel", "--signal=USR2", job))
    assert states(run_jobs(made, executor="slurm", show=board)) == ["done"]
    assert len(fake.lines("start")) == 2
    assert ends()[-2:] == ["COMPLETED", "COMPLETED"]


def test_scancel_of_a_job_cancels_its_run_and_no_other(fake):
    made = fake.jobs("wait", "well")
    outcomes = run_jobs(made, executor="slurm", show=Once(fake, lambda job: ask("scancel", job)))
    assert states(outcomes) == ["failed", "done"]
    assert outcomes[0].error == "cancelled; its state is stored"
    assert [path.name for path in (made[0].run / "resume").iterdir()] == ["000-00-00000001"]
    assert len(fake.lines("start")) == 2
    assert ends()[-2:] == ["CANCELLED", "COMPLETED"]


def test_a_job_that_waits_in_the_queue_can_be_cancelled(fake):
    blocks = ask("sbatch", "--parsable", "--partition=high", "--output=/dev/null", "--wrap=sleep 60")
    made = fake.jobs("well")

    def cancel():
        while not (job := ask("squeue", "--noheader", "--states=PENDING", "--name=pearl", "--format=%i")):
            time.sleep(0.05)
        ask("scancel", job)
        ask("scancel", blocks)

    thread = threading.Thread(target=cancel)
    thread.start()
    (outcome,) = run_jobs(made, executor="slurm")
    thread.join()
    assert (outcome.state, outcome.error) == ("failed", "cancelled; its state is stored")
    assert not fake.lines("start")


def test_a_job_that_slurm_requeues_all_the_same_is_waited_for(fake):
    """An operator may allow and order it."""

    def requeue(job):
        ask("scontrol", "update", f"job={job}", "requeue=1")
        ask("scontrol", "requeue", job)
        while ask("squeue", "--noheader", f"--jobs={job}", "--format=%T") != "PENDING":
            time.sleep(0.05)
        while ask("sinfo", "--noheader", "--format=%T") != "idle":  # SLURM waits two minutes for that
            time.sleep(0.05)
        # not within the second of the kill: a node refuses a job whose credential was revoked in that second
        ask("scontrol", "update", f"job={job}", "starttime=now+2")

    made = fake.jobs("wait once")
    before = len(ends())
    assert states(run_jobs(made, executor="slurm", show=Once(fake, requeue))) == ["done"]
    assert len(fake.lines("start")) == 2
    assert len(ends()) == before + 1


def test_a_sweep_that_is_stopped_cancels_its_jobs_and_goes_on(fake):
    made = fake.jobs("wait", "well")
    board = Once(fake, lambda _: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Interrupted, match="not done: 2 of 2 runs"):
        run_jobs(made, executor="slurm", show=board)
    assert [*(made[0].run / "resume").iterdir()], "it has stored what it has learnt"
    assert ends()[-2:] == ["CANCELLED", "CANCELLED"]
    fake.jobs("well", "well")
    assert states(run_jobs(made, executor="slurm")) == ["done", "done"]


def test_what_slurm_does_not_take_is_a_line(fake):
    (outcome,) = run_jobs(fake.jobs("well"), executor="slurm", slurm={"partition": "nowhere"})
    assert outcome.error.startswith("SLURM rejected the job: ") and "invalid partition" in outcome.error


def test_that_slurm_requeues_is_not_for_the_user_to_ask(fake):
    with pytest.raises(ConfigError, match="--slurm requeue: pearl resubmits preempted jobs itself"):
        run_jobs(fake.jobs("well"), executor="slurm", slurm={"requeue": True})
