"""The state of a model before its last task, byte for byte."""

from contextlib import suppress
from pathlib import Path

from pearl.errors import RunError, counted, printable
from pearl.lifecycle.changing import changed, edit_events, list_classes
from pearl.settings.config import ModelConfig
from pearl.storage.change import Change
from pearl.storage.checkpoint import lost_running
from pearl.storage.run_directory import RunDirectory
from pearl.storage.stored_task import read_manifest


def undo(path: Path, *, dry_run: bool = False, discard: bool = False) -> str:
    """Remove the last task of a model, and return a line about it.

    The files of the model are then those from before the task's `learn`, except that running statistics of the task
    before are not kept any longer: with class statistics, one task can be taken back.

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

    return changed(path, "pearl undo", planned, dry_run=dry_run, discard=discard)
