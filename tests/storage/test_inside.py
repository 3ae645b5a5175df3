"""Files are written and removed below a folder and nowhere else, whatever links somebody has put there."""

import errno
import os
from pathlib import Path

import pytest

from pearl.errors import RunError
from pearl.storage import inside
from pearl.storage.aside import MARKER, WORDS, beside
from pearl.storage.checkpoint import write_part
from pearl.storage.files import check_writable, write_file, write_json
from pearl.storage.inside import (
    check_no_links,
    open_to_append,
    opened_folder,
    remove_temporaries,
    remove_tree,
    replace_file,
)


@pytest.fixture
def outside(tmp_path):
    """A folder of the user's, of which nothing may change."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "diary.txt").write_text("dear diary")
    yield tmp_path / "home"
    assert {file.name: file.read_text() for file in (tmp_path / "home").iterdir()} == {"diary.txt": "dear diary"}


def test_temporary_names_are_not_guessed(tmp_path, outside):
    """Version 0.1 wrote through `.NAME.PID.tmp`, for which a link could wait under every number of a process."""
    run = tmp_path / "run"
    run.mkdir()
    for pid in range(1, 2000):
        (run / f".report.html.{pid}.tmp").symlink_to(outside / "diary.txt")
    (run / f".report.html.{os.getpid()}.tmp").unlink(missing_ok=True)
    (run / f".report.html.{os.getpid()}.tmp").symlink_to(outside / "diary.txt")
    (run / "report.html").symlink_to(outside / "diary.txt")
    write_file(run / "report.html", b"a page", within=run)
    assert (run / "report.html").read_bytes() == b"a page" and not (run / "report.html").is_symlink()


def test_a_name_that_was_guessed_is_refused(tmp_path, outside, monkeypatch):
    monkeypatch.setattr(inside.secrets, "token_hex", lambda _: "0" * 32)
    (tmp_path / f".a.{'0' * 32}.tmp").symlink_to(outside / "diary.txt")
    with pytest.raises(RunError, match="cannot be written"):
        write_file(tmp_path / "a", b"new")


@pytest.mark.parametrize("link", ["tasks", "tasks/000-first"])
def test_no_folder_on_the_way_leads_outside(link, tmp_path, outside):
    run = tmp_path / "run"
    (run / link).parent.mkdir(parents=True)
    (run / link).symlink_to(outside, target_is_directory=True)
    task = run / "tasks" / "000-first"
    with pytest.raises(RunError, match=r"leads outside of .*run; replace the link by its target"):
        write_part(task, {}, {}, within=run)
    with pytest.raises(RunError, match="leads outside"):
        write_json(task / "manifest.json", {}, within=run)
    remove_tree(task, run)
    remove_tree(run / link, run)
    assert (run / link).is_symlink()


def test_a_link_that_comes_between_the_check_and_the_step_is_not_followed(tmp_path, outside, monkeypatch):
    """The folder is a folder when it is looked at, and a link when it is opened."""
    run = tmp_path / "run"
    (run / "tasks").mkdir(parents=True)
    usual = os.path.realpath

    def exchange(path, **how):
        actual = usual(path, **how)
        if Path(path) == run / "tasks":
            (run / "tasks").rmdir()
            (run / "tasks").symlink_to(outside, target_is_directory=True)
        return actual

    monkeypatch.setattr(os.path, "realpath", exchange)
    with pytest.raises(OSError):
        replace_file(run / "tasks" / "a", b"new", run)


def test_links_that_stay_inside_are_followed(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "tasks").symlink_to("there")
    (tmp_path / "events.jsonl").symlink_to("there/old.jsonl")
    replace_file(tmp_path / "tasks" / "a", b"new", tmp_path)
    with open_to_append(tmp_path / "events.jsonl", tmp_path) as file:
        file.write(b"line")
    assert {file.name: file.read_bytes() for file in (tmp_path / "there").iterdir()} == {
        "a": b"new",
        "old.jsonl": b"line",
    }


def test_nothing_is_appended_to_what_lies_outside(tmp_path, outside):
    run = tmp_path / "run"
    run.mkdir()
    (run / "events.jsonl").symlink_to(outside / "diary.txt")
    (run / "log").symlink_to(outside / "diary.txt")
    with pytest.raises(RunError, match="leads outside"):
        open_to_append(run / "events.jsonl", run)
    with pytest.raises(OSError):
        open_to_append(run / "log")
    with pytest.raises(RunError, match="is a link, which is never followed for writing"):
        check_no_links(run)


def test_folders_are_made_and_only_temporaries_removed(tmp_path, outside):
    replace_file(tmp_path / "a" / "b" / "c", b"x", tmp_path / "a")
    left = tmp_path / "a" / "b" / f".c.{'0' * 32}.tmp"
    for file in (left, tmp_path / "a" / "mine.tmp"):
        file.touch()
    (tmp_path / "a" / "linked").symlink_to(outside, target_is_directory=True)
    remove_temporaries(tmp_path / "a")
    assert {entry.name for entry in (tmp_path / "a").rglob("*")} == {"b", "c", "mine.tmp", "linked"}


def test_no_descriptor_is_left_open(tmp_path):
    before = len(os.listdir("/dev/fd"))  # noqa: PTH208
    replace_file(tmp_path / "a" / "b" / "c", b"x", tmp_path)
    with opened_folder(tmp_path / "a" / "b", tmp_path), pytest.raises(OSError), opened_folder(tmp_path / "nowhere"):
        pass
    check_writable(tmp_path)
    assert len(os.listdir("/dev/fd")) == before  # noqa: PTH208


# -------------------------------------------------------------------------------------------------- folders beside


def test_a_folder_beside_is_new_and_goes(tmp_path):
    with beside(tmp_path / "model") as first:
        assert first.parent == tmp_path and (first / MARKER).read_bytes() == WORDS
        (first / "half").mkdir()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [".model.copy", ".model.new", f".model.{'0' * 32}.new"])
def test_folders_of_others_stay(name, tmp_path, outside):
    """Whatever they are called: what lacks the marker was not made here, and a link is not followed."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "photo.jpg").touch()
    linked = tmp_path / f".model.{'1' * 32}.new"
    linked.symlink_to(outside, target_is_directory=True)
    with beside(tmp_path / "model"):
        pass
    assert (tmp_path / name / "photo.jpg").exists() and linked.is_symlink()


def test_a_link_to_a_folder_with_a_marker_stays(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / MARKER).write_bytes(WORDS)
    (tmp_path / f".model.{'1' * 32}.new").symlink_to(tmp_path / "kept", target_is_directory=True)
    forged = tmp_path / f".model.{'2' * 32}.new"  # its marker is a link
    forged.mkdir()
    (forged / MARKER).symlink_to(tmp_path / "kept" / MARKER)
    with beside(tmp_path / "model"):
        pass
    assert [folder.name for folder in (tmp_path / "kept").iterdir()] == [MARKER] and forged.exists()


def test_what_a_process_left_that_was_killed_before_it_had_marked_it_goes(tmp_path):
    left = tmp_path / f".model.{'0' * 32}.new"
    left.mkdir()
    (left / ".lock").touch()
    with beside(tmp_path / "model"):
        assert not left.exists()
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_removed_stays_a_leftover(tmp_path, monkeypatch):
    """The marker goes last, so that the next command removes the rest."""
    unlink = os.unlink

    def fail(path, **kwargs):
        if os.fspath(path).endswith("weights"):
            raise OSError(errno.EIO, "Input/output error")
        unlink(path, **kwargs)

    with monkeypatch.context() as patch:
        with beside(tmp_path / "model") as made:
            (made / "half").mkdir()
            (made / "half" / "weights").touch()
            patch.setattr(os, "unlink", fail)
        assert (made / "half" / "weights").exists()
    with beside(tmp_path / "model"):
        assert not made.exists()
    assert not list(tmp_path.iterdir())


def test_leftovers_go_and_links_in_them_are_not_followed(tmp_path, outside):
    left = tmp_path / f".model.{'0' * 32}.new"
    left.mkdir()
    (left / MARKER).write_bytes(WORDS)
    (left / "home").symlink_to(outside, target_is_directory=True)
    rescued = []
    with beside(tmp_path / "model", rescue=rescued.append) as made:
        assert rescued == [left] and not left.exists()
    assert rescued == [left, made]
