"""A list of images: a CSV file of paths and labels."""

import csv
import io
from pathlib import Path

from pearl.data.sources import Files, reason, some
from pearl.errors import DataError, counted, printable
from pearl.storage.files import read_regular
from pearl.storage.paths import as_path

SUFFIXES = (".csv", ".tsv", ".txt")
_COLUMNS = ("path", "label")


def read_list(place: Path) -> Files:
    """The images that a CSV file names, by class, in order of the alphabet; paths are relative to the file.

    The columns are called path and label in the first line, or are the first two of a file without a head. They are
    parted by commas, semicolons or tabs; texts may be quoted.

    Raises:
        DataError: with the lines that cannot be used.
    """
    lines = _lines(place)
    if not lines:
        raise DataError(f"{place}: names no image; write a line PATH,LABEL for each")
    files: Files = {}
    seen: dict[Path, int] = {}
    missing: list[str] = []
    for number, path, label in lines:
        if not path or not label:
            raise DataError(f"{place}: line {number} has no {'label' if path else 'path'}; write PATH,LABEL")
        file = place.parent / as_path(path, what=f"{place}, line {number}", error=DataError)
        if not _is_file(file):
            missing.append(f"line {number}: {printable(path)}")
        elif (first := seen.setdefault(file.resolve(), number)) != number:
            raise DataError(f"{place}: line {number} names the image of line {first} again; keep one of them")
        files.setdefault(label, []).append(file)
    if missing:
        raise DataError(
            f"{place}: {len(missing)} of {counted(len(lines), 'file')} missing ({some(missing, 5)}); paths are "
            f"relative to the folder of the list, and a first line other than data is path,label"
        )
    return {label: sorted(files[label]) for label in sorted(files)}


def _is_file(place: Path) -> bool:
    try:
        return place.is_file()
    except OSError:  # a name that is too long
        return False


def _lines(place: Path) -> list[tuple[int, str, str]]:
    """Number, path and label of each line that names an image."""
    try:
        text = read_regular(place).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{place}: is no UTF-8 text; save the list as CSV in UTF-8") from None
    except OSError as error:
        raise DataError(f"{place}: cannot be read ({reason(error)}); give a CSV file of paths and labels") from None
    tables, problems = [], []
    for sign in (",", ";", "\t"):
        try:
            reader = csv.reader(io.StringIO(text, newline=""), delimiter=sign, skipinitialspace=True, strict=True)
            rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
        except csv.Error as error:
            problems.append(str(error))
            continue
        rows = [(number, row) for number, row in rows if any(row)]
        if all(len(row) >= len(_COLUMNS) for _, row in rows):
            tables.append(rows)
    if not tables:
        why = f" ({problems[0]})" if problems else ""
        raise DataError(f"{place}: not every line has two columns, PATH,LABEL{why}; mend it, or quote names")
    with_head = [rows for rows in tables if rows and {*_COLUMNS} <= {cell.lower() for cell in rows[0][1]}]
    if len(tables) > 1 and any(tables) and len(with_head) != 1:
        raise DataError(f"{place}: its columns may be parted by one of several signs; begin it with a line path,label")
    rows = (with_head or tables)[0]
    first, second = 0, 1
    if with_head:
        head = [cell.lower() for cell in rows.pop(0)[1]]
        first, second = map(head.index, _COLUMNS)
        short = [number for number, row in rows if len(row) <= max(first, second)]
        if short:
            raise DataError(f"{place}: line {short[0]} has fewer columns than the first one; mend it")
    return [(number, row[first], row[second]) for number, row in rows]
