"""What runs of a table said, without their weights, carried to another machine."""

import tables
from pearl.lifecycle.runs import execute
from pearl.reports import records
from pearl.settings.config import load_config
from test_probe_runs import TINY


def test_runs_without_weights_say_the_same_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "KEPT", tmp_path / "runs.tar.xz")
    monkeypatch.setenv("PEARL_RUNS", str(tmp_path / "here"))
    run = execute(load_config("digits", TINY))
    tables.keep([run.path])
    kept = tables.KEPT.read_bytes()

    monkeypatch.setenv("PEARL_RUNS", str(tmp_path / "there"))
    tables.lay_out()
    thin = tmp_path / "there" / run.path.name
    there, here = records.read(thin), records.read(run.path)
    assert there.complete and there.summary == here.summary
    assert [(task.manifest, task.bytes) for task in there.learnt] == [
        (task.manifest, task.bytes) for task in here.learnt
    ]
    assert not [*thin.rglob("*.safetensors")] and (thin / "environment.json").is_file()

    (thin / "results.json").write_text("{}")  # what is there stays
    tables.lay_out()
    assert (thin / "results.json").read_text() == "{}"
    (thin / "results.json").write_bytes((run.path / "results.json").read_bytes())
    tables.keep([])  # what was kept stays too, in the same bytes
    assert tables.KEPT.read_bytes() == kept


def test_a_stored_run_has_the_name_of_its_settings_today(tmp_path, monkeypatch):
    """A new option changes the names of runs: their stored configurations lack it and get its default."""
    monkeypatch.setattr(tables, "KEPT", tmp_path / "runs.tar.xz")
    monkeypatch.setenv("PEARL_RUNS", str(tmp_path / "here"))
    run = execute(load_config("digits", TINY))
    settings = (run.path / "config.yaml").read_text()
    assert "\n  nesterov: false" in settings
    (run.path / "config.yaml").write_text(settings.replace("\n  nesterov: false", ""))
    run.path.rename(run.path.with_name("older"))
    tables.keep([run.path.with_name("older")])

    monkeypatch.setenv("PEARL_RUNS", str(tmp_path / "there"))
    assert tables.lay_out() == {run.path.name}
    assert [path.name for path in (tmp_path / "there").iterdir()] == [run.path.name]
