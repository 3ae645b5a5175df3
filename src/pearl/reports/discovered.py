"""An HTML page about unknown images: a contact sheet for each group, to be named."""

import io
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pearl.errors import counted, printable
from pearl.reports.html import Chapter, PagePart, Picture, Table, render
from pearl.storage.files import HTML, check_output, write_output

if TYPE_CHECKING:
    from pearl.lifecycle.discovery import Discovery, Group

SHEETS = 40  # maximum groups with a contact sheet, for readability
LISTED = 200  # maximum rows of a table
PIXELS = 96  # of a picture


def write(
    discovery: "Discovery",
    output: Path,
    title: str,
    *,
    model: str = "MODEL",
    groups: str = "groups.csv",
    stream: bool = False,
) -> Path:
    """Write the page atomically; return its path. `model` and `groups` are the paths that its commands have.

    `stream`: the model learns from a stream.

    Raises:
        ReportError: see `files.check_output`.
        DataError: an image of the page has become unreadable.
    """
    check_output(output, HTML, "page")
    write_output(output, page(discovery, title, model=model, groups=groups, stream=stream))
    return output


def page(discovery: "Discovery", title: str, *, model: str, groups: str, stream: bool = False) -> str:
    """Return the page as HTML."""
    shown = discovery.groups[:SHEETS]
    parts = [
        PagePart("Overview", tables=[_overview(discovery)], note=_overview_note(discovery)),
        *(
            [PagePart("Name the groups", text=_commands(model, groups, stream), note=NAME_NOTE)]
            if discovery.labels
            else []
        ),
        *(PagePart(f"{one.name}: {counted(len(one), 'image')}", pictures=_sheet(discovery, one)) for one in shown),
        *_rest(discovery),
        *_copies(discovery),
        *([PagePart("Unreadable files", text="\n".join(discovery.unreadable))] if discovery.unreadable else []),
    ]
    summary = f"{counted(len(discovery.groups), 'group')} of unknown images"
    return render(f"{title}: {summary}", [Chapter(title, parts)])


NAME_NOTE = (
    "The list has a line with path and label for each unknown image. Open it in a text editor or a spreadsheet and "
    "replace the labels by names. Groups with the same name become one class, also that of a class the model knows. An "
    "image or group with an empty label is left out. To split a group, give its images different labels. Then learn:"
)


def _commands(model: str, groups: str, stream: bool) -> str:
    return f"pearl learn {shlex.quote(model)} --data {shlex.quote(groups)}{' --stream' * stream}"


def _overview(discovery: "Discovery") -> Table:
    header, *rows = discovery.rows()
    return Table("Images", ["group", *header[1:]], [[name, int(count), near] for name, count, near in rows])


def _overview_note(discovery: "Discovery") -> str:
    note = (
        f"An image is unknown if it fits its nearest class worse than {100 * (1 - discovery.unknown_rate):g} % of the "
        f"images of known classes do, so that about {100 * discovery.unknown_rate:g} % of these are among the unknown. "
        f"The nearest known class is the most frequent one of a group, and is probably wrong."
    )
    if discovery.learnt:
        note += f" The model was trained on {len(discovery.learnt)} of the known images."
    return note


def _sheet(discovery: "Discovery", group: "Group") -> list[Picture]:
    kinds = [(i, "typical") for i in group.typical] + [(i, "doubtful") for i in group.doubtful]
    return [_picture(discovery, i, kind) for i, kind in kinds]


def _rest(discovery: "Discovery") -> list[PagePart]:
    """Return the images in no group, and a note on groups without a sheet."""
    parts = []
    if (more := len(discovery.groups) - SHEETS) > 0:
        parts.append(PagePart(counted(more, "smaller group"), note="Their images are in the list."))
    if alone := discovery.alone:
        pictures = [_picture(discovery, i, "in no group") for i in alone[:SHEETS]]
        note = "Too few images resemble them. They have an empty label in the list."
        parts.append(PagePart(f"In no group: {counted(len(alone), 'image')}", pictures=pictures, note=note))
    return parts


def _copies(discovery: "Discovery") -> list[PagePart]:
    """Return tables of duplicates and near-duplicates."""
    parts = []
    if discovery.duplicates:
        rows = [[discovery.where(same[0]), discovery.where(i)] for same in discovery.duplicates for i in same[1:]]
        note = "Their pixels are equal. Only the first one is grouped and listed."
        parts.append(
            PagePart("Duplicates", tables=[Table("Duplicates", ["image", "duplicate"], rows[:LISTED])], note=note)
        )
    if discovery.near_duplicates:
        rows = [[discovery.where(a), discovery.where(b)] for a, b in discovery.near_duplicates]
        note = "Probably one photo, resized or compressed again, or two of a series. Both are grouped and listed."
        table = Table("Near-duplicates", ["image", "nearly the same"], rows[:LISTED])
        parts.append(PagePart("Near-duplicates", tables=[table], note=note))
    return parts


def _picture(discovery: "Discovery", index: int, kind: str) -> Picture:
    from PIL import Image

    from pearl.data.images import to_pixels

    jpeg = io.BytesIO()
    Image.fromarray(to_pixels(discovery.images[index], PIXELS)).save(jpeg, "JPEG", quality=85)
    image = discovery.images[index]
    name = discovery.where(index) if isinstance(image, np.ndarray) else printable(image.name)
    return Picture(jpeg.getvalue(), f"{kind}: {name}", [kind, name])
