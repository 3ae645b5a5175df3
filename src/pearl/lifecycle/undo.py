"""The state of a model before its last task, byte for byte."""

from contextlib import nullcontext, suppress
from pathlib import Path

from pearl.errors import RunError, counted, printable
from pearl.lifecycle.changing import changed, edit_events, list_classes
from pearl.lifecycle.session import check_inside
from pearl.settings.config import ModelConfig
from pearl.storage.change import Change
from pearl.storage.checkpoint import lost_running
from pearl.storage.inside import remove_tree
from pearl.storage.locks import locked
from pearl.storage.run_directory import RunDirectory
from pearl.storage.stored_task import read_manifest


def undo(path: Path, *, dry_run: bool = False, discard: bool = False) -> str:
    """Remove the last task of a model, and return a line about it.

    The files of the model are then those from before the task's `learn`, except that running statistics of the task
    before are not kept any longer: with class statistics, one task can be taken back. The first answer of a task
    whose training was interrupted is taken back alone.

    Raises:
        RunError: not a model, or the earlier state is not stored.
        Busy: another process works on it.
    """

    def planned(change: Change | None, config: ModelConfig) -> str:
        directory = RunDirectory(path)
        *left, last = directory.finished or [path]
        if not left:
            raise RunError(f"{path}: it has no task before its last one; remove the folder to take the model back")
        name, tasks = last.name, directory.first_tasks(len(left))
        with suppress(RunError):  # a damaged task can be taken back, too
            name = read_manifest(last)["name"]
        if lost := lost_running(path, len(left)):
            raise RunError(
                f"{path}: the state before task {printable(name)} is not stored, since the task has replaced "
                f"{lost.relative_to(path)}; only the last `learn` can be taken back, unless a model is created with "
                f"engine.earlier_states=true"
            )
        if change:
            list_classes(change, ((task.name, task.classes) for task in tasks))
            edit_events(change, lambda event: None if event.get("task") == len(left) else event)
            for file in sorted(last.iterdir()):
                if file.is_symlink() or not file.is_dir():
                    change.remove(file)
        classes = counted(sum(len(task.classes) for task in tasks), "class")
        return f"{path}: task {printable(name)} is taken back; {counted(len(tasks), 'task')} with {classes} left"

    directory = RunDirectory(path)
    if directory.first_answer and directory.finished and not directory.change_file.is_file():
        return _without_first_answer(path, dry_run=dry_run)
    return changed(path, "pearl undo", planned, dry_run=dry_run, discard=discard)


def discard_first_answer(path: Path) -> None:
    """Discard the first answer of an interrupted task whose images were in memory; its checkpoints are kept.

    Raises:
        Busy: another process works on the model.
    """
    directory = RunDirectory(path)
    if directory.first_answer is None or directory.interrupted_task["data"]:
        return
    with locked(path):
        check_inside(path)
        remove_tree(directory.first_answer_folder, path)


def _without_first_answer(path: Path, *, dry_run: bool) -> str:
    """Discard the task whose training was interrupted, and return a line about it."""
    directory = RunDirectory(path)
    with nullcontext() if dry_run else locked(path):
        name = directory.interrupted_task.get("name", "")
        if not dry_run:
            check_inside(path)
            remove_tree(directory.resume_folder, path)
    begin = "dry run, nothing is changed: " if dry_run else ""
    return (
        f"{begin}{path}: the first answer of task {printable(name)}, which is not trained yet, is taken back; "
        f"{counted(len(directory.finished), 'task')} left"
    )
