"""The script that holds cheaper probes against the full one."""

import json

import pytest

import probes

TINY = ["backbone.width=4", "train.epochs=1", "engine.max_steps=1", "stream.per_class=4", "stream.test_per_class=2"]
TINY += ["stream.classes=4", "stream.tasks=2"]


def task(*pairs):
    return {f"layer {i}": list(pair) for i, pair in enumerate(pairs)}


def test_agreement_is_counted_in_parameters_and_in_order():
    full = {"layers": [task((1, 10), (2, 20), (3, 30)), task((1, 10), (1, 20), (1, 30))]}
    assert probes.agreement(full, full) == {"overlap": 1.0, "correlation": pytest.approx(1.0)}
    other = {"layers": [task((3, 10), (2, 20), (1, 30)), task((1, 10), (0, 20), (1, 30))]}
    overlaps = [(10 + 40 + 30) / (30 + 40 + 90), (10 + 0 + 30) / 60]
    assert probes.agreement(other, full) == {
        "overlap": pytest.approx(sum(overlaps) / 2),
        "correlation": pytest.approx(-1.0),  # of the second task no order is known
    }


def test_a_run_a_probe_and_none_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(probes, "STREAMS", {"digits": ["digits", *TINY]})
    command = ["--seeds", "0", "--probes", "targets", "--to", str(tmp_path / "found")]
    probes.main(command)
    rows = json.loads((tmp_path / "found" / "probes.json").read_text())
    assert rows.keys() == {"digits | full | 0", "digits | targets | 0"}  # what it is held against comes with it
    assert all(row["seconds"] > 0 and len(row["layers"]) == 1 for row in rows.values())
    text = (tmp_path / "found" / "probes.md").read_text()
    assert "| full | 1 |" in text and "| targets | 1 |" in text
    monkeypatch.setattr(probes, "execute", lambda *_, **__: pytest.fail("a finished row is run again"))
    probes.main(command)
    with pytest.raises(SystemExit):  # other runs do not go among those of docs/results
        probes.main(["--set", "train.epochs=2"])
