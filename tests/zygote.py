"""Processes of pearl in a tenth of the time: forks of one that has imported everything, not new interpreters.

A process that starts pearl spends seconds on imports. Most tests that need one need that it is a process - it is
killed, its exit code is read, two of them meet - and not that it imports. `Process` and `run` are what those use of
`subprocess`; `child` takes the place of `launch.child` (fixture `forks`), in forks too. Tests of starting itself start
interpreters.
"""

import atexit
import fcntl
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path

PLACE, SESSION = "PEARL_TEST_ZYGOTE", "PEARL_TEST_SESSION"  # its socket, and the process with which it ends
_STARTED = []
_USED = ("pearl.cli", "pearl.lifecycle.runs", "pearl.lifecycle.learning", "pearl.export", "pearl.reports.page")
_USED += ("pearl.reports.progress", "sklearn.datasets", "sklearn.model_selection", "torch._dynamo", "matplotlib.figure")


class Process:
    """What `subprocess.Popen([sys.executable, *program, *arguments])` would start; by default `-m pearl`.

    A program is `-m` and a module, `-c` and code, or a file.
    """

    def __init__(
        self,
        arguments,
        *,
        program=("-m", "pearl"),
        env=None,
        cwd=None,
        stdin=None,
        stdout=None,
        stderr=None,
        text=False,
        group=False,
    ):
        self._text, self.returncode = text, None
        ours, theirs = zip(*(_ends(*each) for each in ((stdin, "r"), (stdout, "w"), (stderr, "w"))), strict=True)
        self.stdin, self.stdout, self.stderr = (
            None if fd is None else os.fdopen(fd, ("w" if i == 0 else "r") + ("" if text else "b"))
            for i, fd in enumerate(ours)
        )
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(folder())
        own = {key: os.environ[key] for key in (PLACE, SESSION)}
        given = (os.fsdecode(os.fspath(argument)) for argument in arguments)
        asked = {"program": [*map(str, program)], "arguments": [*given], "group": group}
        asked["path"] = [path for path in sys.path if path]
        asked |= {"env": {**(os.environ if env is None else env), **own}, "cwd": os.fspath(cwd or Path.cwd())}
        given = [fd if fd is not None else standard for standard, fd in enumerate(theirs)]
        message = json.dumps(asked).encode()
        socket.send_fds(self._line, [len(message).to_bytes(4, "big")], given)
        self._line.sendall(message)
        for (_, how), fd in zip(((stdin, "r"), (stdout, "w"), (stderr, "w")), theirs, strict=True):
            if fd is not None and how and fd not in (_fileno(stdin), _fileno(stdout), _fileno(stderr)):
                os.close(fd)
        self.pid = int(self._read())

    def _read(self):
        said = b""
        while not said.endswith(b"\n") and (more := self._line.recv(1)):  # the exit code may be there with the pid
            said += more
        return said or b"-9\n"  # the zygote is gone

    def poll(self):
        """The exit code, once there is one."""
        if self.returncode is None:
            with selectors.DefaultSelector() as waiting:
                waiting.register(self._line, selectors.EVENT_READ)
                if waiting.select(0):
                    self.wait()
        return self.returncode

    def wait(self, timeout=None):
        """The exit code."""
        if self.returncode is None:
            self._line.settimeout(timeout)
            try:
                self.returncode = int(self._read())
            except TimeoutError:
                raise subprocess.TimeoutExpired("pearl", timeout) from None
            self._line.close()
        return self.returncode

    def communicate(self, input=None):
        """What it said on stdout and stderr, of which one at most is long."""
        if self.stdin:
            if input:
                self.stdin.write(input)
            self.stdin.close()
        said = []
        for stream in (self.stdout, self.stderr):
            said.append(stream.read() if stream else None)
            if stream:
                stream.close()
        self.wait()
        return tuple(said)

    def send_signal(self, number):
        """As long as it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self):
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream:
                stream.close()
        self.wait()


def _fileno(what):
    return what.fileno() if hasattr(what, "fileno") else what if isinstance(what, int) and what >= 0 else None


def _ends(what, how):
    """Our end of a pipe, if one is asked for, and the descriptor that the process gets."""
    if what == subprocess.PIPE:
        read, write = os.pipe()
        return (write, read) if how == "r" else (read, write)
    if what == subprocess.DEVNULL:
        return None, os.open(os.devnull, os.O_RDWR)
    return None, _fileno(what)


def run(arguments, *, input=None, **how):
    """As `subprocess.run` with `capture_output`; stdout and stderr go through files, so that both may be long."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        how = {"stdout": out, "stderr": err, "stdin": subprocess.PIPE} | how
        text = how.pop("text", False)
        process = Process(arguments, **how)
        process.communicate(input)
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode() if text else file.read())
    return subprocess.CompletedProcess(["pearl", *arguments], process.returncode, *said)


def child(arguments, environment, out=None, *, module="pearl"):
    """In the place of `launch.child`."""
    env = {**os.environ, **environment, "PEARL_WATCHED": "1"}
    return Process(
        arguments, program=("-m", module), env=env, stdin=subprocess.PIPE, stdout=out, stderr=out, group=True
    )


def folder():
    """The socket of the zygote, which the first who asks starts; all test processes of a session share it."""
    path = Path(os.environ[PLACE])
    if not path.exists():
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                command = [sys.executable, __file__, path, os.environ[SESSION]]
                quiet = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}  # torch's C++ reads it once
                server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=quiet)
                server.stdout.readline()  # it listens
                _STARTED.append(server)
    return os.fspath(path)


# ---------------------------------------------------------------------------------------------------------- the server


def serve(path, session):
    """Fork for whoever asks, and tell how each fork ended, as long as a process lives."""
    for module in _USED:
        __import__(module)
    listener, lines = socket.socket(socket.AF_UNIX), {}
    listener.bind(path)
    listener.listen(64)
    print("listening", flush=True)
    while True:
        listener.settimeout(0.01 if lines else 1.0)
        try:
            line, _ = listener.accept()
        except TimeoutError:
            if not Path(f"/proc/{session}").exists() and not lines:
                return
        else:
            size, fds, _, _ = socket.recv_fds(line, 4, 3)
            asked = json.loads(_all(line, int.from_bytes(size, "big")))
            pid = os.fork()
            if not pid:
                for open_one in (listener, line, *lines.values()):
                    open_one.close()
                _enter(asked, fds)
            for fd in fds:
                os.close(fd)
            lines[pid] = line
            line.sendall(b"%d\n" % pid)
        while lines and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            line = lines.pop(ended[0])
            with suppress(OSError):  # whoever asked is gone
                line.sendall(b"%d\n" % os.waitstatus_to_exitcode(ended[1]))
            line.close()


def _all(line, size):
    said = b""
    while len(said) < size:
        said += line.recv(size - len(said))
    return said


def _enter(asked, fds):
    """Become the process that was asked for."""
    code = 1
    try:
        for standard, fd in enumerate(fds):
            os.dup2(fd, standard)
            os.close(fd)
        if asked["group"]:
            os.setpgid(0, 0)
        os.environ.clear()
        os.environ.update(asked["env"])
        os.chdir(asked["cwd"])
        kind = os.environ.get("PYTHONIOENCODING")
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(fd, how, encoding=kind or "utf-8", errors=errors, buffering=-1 if how == "r" else 1)
            for fd, how, errors in ((0, "r", "strict"), (1, "w", "strict"), (2, "w", "backslashreplace"))
        )
        signal.signal(signal.SIGINT, signal.default_int_handler)

        from pearl.training import launch

        launch.child = child
        *how, what = asked["program"]
        sys.argv = [what, *asked["arguments"]]
        sys.path[:] = [str(Path.cwd() if how else Path(what).parent), *asked["path"]]
        if how == ["-c"]:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
        elif how == ["-m"]:
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(what, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            atexit._run_exitfuncs()
            sys.stdout.flush()
        finally:
            os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
