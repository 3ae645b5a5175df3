"""`pearl push`: a model's directory, or an export, becomes a repository of the Hugging Face Hub in one commit."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import yaml

from pearl.errors import ExportError, counted, printable
from pearl.export.card import card, load_section
from pearl.export.trained import FACTS
from pearl.export.verbs import card_file
from pearl.lifecycle.model import StoredModel
from pearl.storage.checkpoint import FILES
from pearl.storage.files import read_regular
from pearl.storage.locks import is_held
from pearl.storage.run_directory import RunDirectory
from pearl.storage.stored_task import MANIFEST

CARD = "README.md"
REPOSITORY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"


def push(
    path: Path, repository: str, *, private: bool = False, method: str | None = None, dry_run: bool = False
) -> str:
    """Upload a model or run, or a file or folder that `export` wrote; return a line for the user.

    A model is uploaded as `files_of` lists it, with a model card. Files of the repository that a former push of the
    model left, and that the model no longer has, are removed in the same commit; they stay in the repository's history.

    Raises:
        ExportError: huggingface_hub, a token or the connection is missing, or the Hub rejects the upload.
        PearlError: not a model, not an export, or damaged.
    """
    if not REPOSITORY.fullmatch(repository):
        raise ExportError(f"{printable(repository)!r} is not the name of a repository; give it as USER/NAME")
    files = files_of(path, repository, method=method)
    size = sum(len(data) if isinstance(data, bytes) else data.stat().st_size for data in files.values())
    what = f"{counted(len(files), 'file')}, {size / 1e6:.1f} MB"
    if dry_run:
        return "\n".join([f"dry run, nothing is uploaded: {what} for {repository}", *(f"  {name}" for name in files)])
    try:
        import huggingface_hub as hub
        import huggingface_hub.errors as hub_errors
    except ImportError:
        raise ExportError('push needs huggingface_hub, not installed: pip install "pearl[hub]"') from None
    if not hub.get_token():
        raise ExportError(f"push: no token of the Hub; {LOGIN}")
    api = hub.HfApi(library_name="pearl")
    with _one_line(hub_errors, repository), redirect_stdout(StringIO()):
        api.create_repo(repository, private=private, exist_ok=True)
        there = api.list_repo_files(repository)
        gone = [name for name in there if name not in files and name.startswith(("tasks/", "reference/"))]
        commit = api.create_commit(
            repository,
            [
                *(hub.CommitOperationAdd(name, data) for name, data in files.items()),
                *(hub.CommitOperationDelete(name) for name in gone),
            ],
            commit_message=f"pearl push: {what}",
        )
    removed = f"; {counted(len(gone), 'file')} of an earlier state removed, which the history keeps" if gone else ""
    return f"pushed {what} to {commit.repo_url}{removed}"


def files_of(path: Path, repository: str, *, method: str | None = None) -> dict[str, Path | bytes]:
    """Return what is uploaded, by its name in the repository: a file, or bytes.

    Of a model these are its settings, tensors, manifests, certificates and the card; never its lock, the state of an
    unfinished task, messages, logs or reports.

    Raises:
        PearlError: not a model, not an export, damaged, or being changed.
    """
    directory = RunDirectory(path)
    if directory.config_file.is_file() or directory.tasks_folder.is_dir():
        return _of_model(directory, repository, method)
    if (path / FACTS).is_file():
        return {file.relative_to(path).as_posix(): file for file in sorted(path.rglob("*")) if _may_go(file, path)}
    if path.is_file() and card_file(path).is_file():
        return {CARD: card_file(path), path.name: path}
    if path.is_file():
        raise ExportError(f"{path}: no model card {card_file(path).name} is beside it; export it again")
    raise ExportError(f"{path}: neither a model nor an export; give a model's directory, or what `pearl export` wrote")


def _may_go(file: Path, path: Path) -> bool:
    """Return True for a file that no link leads out of the folder for: a received folder may contain links."""
    hidden = any(part.startswith(".") or part == "__pycache__" for part in file.relative_to(path).parts)
    return file.is_file() and not hidden and file.resolve().is_relative_to(path.resolve())


def _of_model(directory: RunDirectory, repository: str, method: str | None) -> dict[str, Path | bytes]:
    path = directory.path
    if is_held(path):
        raise ExportError(f"{path}: a process is changing it; push it when that has ended")
    model = StoredModel.open(path, method=method)
    if model.first_answer:
        raise ExportError(
            f"{path}: {model.first_answer}; push it when it is trained, or take it back with `pearl undo`"
        )
    name = path.resolve().name
    text = card(model, load_section("model", repo=repository, name=name), export=False)
    files: dict[str, Path | bytes] = {CARD: text.encode(), directory.config_file.name: _settings(directory)}
    candidates = [directory.classes_file, directory.environment_file, directory.results_file, directory.code_file]
    candidates += directory.certificates
    for folder in (directory.reference, *directory.finished):
        candidates += [folder / file for file in (MANIFEST, *FILES)]
    return files | {file.relative_to(path).as_posix(): file for file in candidates if _may_go(file, path)}


def _settings(directory: RunDirectory) -> bytes:
    """Return config.yaml, in which a file of weights has no folder: the path would be of this machine."""
    data = read_regular(directory.config_file)
    settings = yaml.safe_load(data)
    backbone = settings.get("backbone", {})
    if not backbone.get("weights"):
        return data
    settings["backbone"] = {**backbone, "weights": Path(str(backbone["weights"])).name}
    return yaml.safe_dump(settings, sort_keys=False).encode()


@contextmanager
def _one_line(errors: Any, repository: str) -> Iterator[None]:
    """Turn errors of the Hub and of the connection into one line."""
    try:
        yield
    except errors.OfflineModeIsEnabled:
        raise ExportError("push: HF_HUB_OFFLINE is set; unset it to upload") from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        why = " ".join(str(getattr(error, "server_message", None) or error).split())[:300]
        fix = LOGIN if status in (401, 403) else "see the status of the Hub, then push again"
        raise ExportError(f"push: the Hub refuses {repository} ({status}: {why}); {fix}") from None
    except errors.HFValidationError as error:
        raise ExportError(f"push: {' '.join(str(error).split())}") from None
    except Exception as error:
        if not _is_connection(error):
            raise
        raise ExportError(
            f"push: the Hub cannot be reached ({type(error).__name__}); check the connection, then push again"
        ) from None


def _is_connection(error: Exception) -> bool:
    """Return True for errors of the HTTP client, which differs between versions of huggingface_hub."""
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(error).__mro__}
    clients = ("httpx", "httpx2", "httpcore", "requests", "urllib3")
    names = ("TransportError", "RequestException", "HTTPError")
    return isinstance(error, ConnectionError | TimeoutError) or any(
        (client, name) in kinds for client in clients for name in names
    )
