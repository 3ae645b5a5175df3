"""Every fault of benchmarks/mutants.yaml still applies; whether the tests notice it takes `benchmarks/mutants.py`."""

import shutil
from pathlib import Path

import pytest

import mutants
from pearl.lifecycle.saved import __file__ as inside

PACKAGE = Path(inside).parents[1]


def test_every_fault_applies_once(tmp_path):
    faults = mutants.faults()
    assert len({fault.name for fault in faults}) == len(faults)
    for fault in faults:
        (tmp_path / fault.file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE / fault.file, tmp_path / fault.file)
        fault.apply(tmp_path)
        compile((tmp_path / fault.file).read_text(), fault.file, "exec")


def test_a_text_that_is_gone_is_named(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    for old in ("y = 1", "x = 1"):
        with pytest.raises(ValueError, match=r"^some fault: a\.py has \d times '. = 1'"):
            mutants.Fault("some fault", "a.py", old, "x = 2", "").apply(tmp_path)


def test_a_test_that_fails_anyway_notices_nothing(tmp_path):
    """A fault is noticed by a test that passes without it."""
    read = "from pearl.version import LOADED"
    for line, expected in ((f"{read}; assert LOADED", "killed"), (read, "survived"), ("assert 0", "not run: without")):
        file = tmp_path / f"test_{expected[0]}.py"
        file.write_text(f"def test_it():\n    {line}\n")
        fault = mutants.Fault("no time", "version.py", "time.time()", "0", str(file))
        assert mutants.outcome(fault).startswith(expected)
