import os
import sys
from pathlib import Path

# the processes that tests start must not fight for two cores
os.environ.setdefault("OMP_NUM_THREADS", "2")

import pytest

sys.path.insert(0, str(Path(__file__).parent))

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's data or runs."""
    monkeypatch.setenv("PEARL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("PEARL_RUNS", str(tmp_path / "runs"))
