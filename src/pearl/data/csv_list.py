"""Lists of images: CSV files of paths and labels."""

import csv
import io
from pathlib import Path

from pearl.data.sources import Files, is_image, reason, some
from pearl.errors import DataError, counted, printable
from pearl.names import class_name
from pearl.storage.files import read_regular
from pearl.storage.paths import as_path

SUFFIXES = (".csv", ".tsv", ".txt")
# Accepted names of the two columns, the most likely first.
_PATHS = ("path", "file_name", "filename", "file", "image")
_LABELS = ("label", "class", "category")
_MARKS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}  # by the byte order mark at the start of a file; else UTF-8


def read_list(path: Path) -> tuple[Files, list[str]]:
    """Return the images that a CSV file lists, by class in alphabetical order, and notes on those left out.

    See `read_pairs`.

    Raises:
        DataError: lists the unusable lines.
    """
    pairs, notes = read_pairs(path)
    files: Files = {}
    for file, label in pairs:
        files.setdefault(label, []).append(file)
    return {label: sorted(files[label]) for label in sorted(files)}, notes


def read_pairs(source: Path) -> tuple[list[tuple[Path, str]], list[str]]:
    """Return the images that a CSV file lists with their classes, in its order, and notes on those left out.

    Paths are relative to the file. An image with an empty label is left out, so that a list made by `pearl discover`
    can dismiss it.

    An optional header names the columns: path (or file_name, filename, file, image) and label (or class, category).
    Without a header they are the first two. Columns are separated by commas, semicolons or tabs; texts may be quoted.
    Paths may use Windows separators. The encoding is UTF-8, or UTF-16 with a byte order mark.

    Raises:
        DataError: lists the unusable lines.
    """
    lines = _lines(source)
    if not lines:
        raise DataError(f"{source}: lists no image; write a line PATH,LABEL for each")
    pairs: list[tuple[Path, str]] = []
    seen: dict[Path, int] = {}
    missing: list[str] = []
    for number, path, label in lines:
        if not path:
            raise DataError(f"{source}: line {number} has no path; write PATH,LABEL")
        if not label:
            continue
        file = source.parent / as_path(path, what=f"{source}, line {number}", error=DataError)
        if "\\" in path and not _is_file(file):
            file = source.parent / path.replace("\\", "/")
        if not _is_file(file):
            if number == 1 and len(lines) > 1 and not is_image(path):
                raise DataError(f"{source}: line 1 is a header without the columns path and label; rename two columns")
            missing.append(f"line {number}: {printable(path)}")
        elif (first := seen.setdefault(file.resolve(), number)) != number:
            raise DataError(f"{source}: line {number} names the image of line {first} again; keep one of them")
        pairs.append((file, label))
    if missing:
        raise DataError(
            f"{source}: {len(missing)} of {counted(len(lines), 'file')} missing ({some(missing, 5)}); paths are "
            f"relative to the folder of the list"
        )
    unlabelled = sum(not label for _, _, label in lines)
    if not pairs:
        raise DataError(f"{source}: no line has a label; write PATH,LABEL")
    notes = [f"{source}: {counted(unlabelled, 'line')} without a label; left out"] if unlabelled else []
    return pairs, notes


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the name is too long
        return False


def _lines(path: Path) -> list[tuple[int, str, str]]:
    """Return number, path and label of each line that lists an image."""
    try:
        content = read_regular(path)
        text = content.decode(_MARKS.get(content[:2], "utf-8-sig"))
    except UnicodeDecodeError:
        raise DataError(f"{path}: is not UTF-8 text; save the list as CSV in UTF-8") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({reason(error)}); give a CSV file of paths and labels") from None
    tables, problems = [], []
    for sign in (",", ";", "\t"):
        try:
            reader = csv.reader(io.StringIO(text, newline=""), delimiter=sign, skipinitialspace=True, strict=True)
            rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
        except csv.Error as error:
            problems.append(str(error))
            continue
        rows = [(number, row) for number, row in rows if any(row)]
        if all(len(row) >= 2 for _, row in rows):
            tables.append(rows)
    if not tables:
        why = f" ({problems[0]})" if problems else ""
        raise DataError(f"{path}: not every line has two columns, PATH,LABEL{why}; fix it, or quote names")
    with_header = [rows for rows in tables if rows and _columns(rows[0][1])]
    if len(tables) > 1 and any(tables) and len(with_header) != 1:
        raise DataError(f"{path}: the column separator is ambiguous; add the header path,label")
    rows = (with_header or tables)[0]
    first, second = 0, 1
    if with_header:
        first, second = _columns(rows.pop(0)[1]) or (0, 1)
        short = [number for number, row in rows if len(row) <= max(first, second)]
        if short:
            raise DataError(f"{path}: line {short[0]} has fewer columns than the first one; fix it")
    return [(number, row[first], class_name(row[second])) for number, row in rows]


def _columns(header: list[str]) -> tuple[int, int] | None:
    """Return the columns of paths and labels in a header; None if the line is not a header."""
    names = [cell.lower() for cell in header]
    columns = [next((names.index(name) for name in choices if name in names), None) for choices in (_PATHS, _LABELS)]
    return None if columns[0] is None or columns[1] is None else (columns[0], columns[1])
