"""Figures as inline SVG: they use the page's font and, through CSS variables, its colours.

matplotlib draws with placeholder colours, which `_inline` replaces by the page's variables, so that a drawing is
readable on white, on black and on paper. Figures are 360 units wide, a phone's width, to keep text readable. Equal
numbers give equal bytes.
"""

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Line = tuple[Floats, Floats, Floats | None]  # x, y, and the spread of y; NaN interrupts a line

WIDTH = 5.0  # inches of 72 units
INK, GRID, PAPER = "#010101", "#020202", "#030303"
SERIES = [f"#0400{index:02x}" for index in range(8)]
MARKERS = "osD^vPX*"  # lines differ in more than colour
VARIABLES = {INK: "currentColor", GRID: "var(--grid)", PAPER: "var(--paper)"} | {
    colour: f"var(--series-{index})" for index, colour in enumerate(SERIES)
}
STYLE: Any = {
    **mpl.rcParamsDefault,  # overrides a matplotlibrc of the user or of the current folder
    "svg.fonttype": "none",  # text remains text: searchable, and in the page's font
    "text.parse_math": False,  # a $ in a name is literal
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "legend.frameon": False,
} | dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
ElementTree.register_namespace("", _SVG)
ElementTree.register_namespace("xlink", _XLINK)


def heat_map(
    values: Floats,
    *,
    name: str,
    alt: str,
    rows: Sequence[str],
    columns: Sequence[str],
    x: str,
    y: str,
    unit: str,
    decimals: Sequence[int] = (1, 0),
    top: float | None = None,
) -> str:
    """Draw a matrix in colour, first row at the top, NaN blank; with numbers in the cells if they fit.

    Args:
        values: (rows, columns).
        name: unique in the page; the SVG's ids begin with it.
        alt: alternative text of the figure.
        rows: a label for each row.
        columns: a label for each column.
        x: label of the x-axis.
        y: label of the y-axis.
        unit: unit of the values.
        decimals: numbers of decimals in cells, in order of preference.
        top: the largest value of the colour scale; by default the largest of the values.
    """
    labels = [shorten(label) for label in rows]
    with mpl.rc_context(STYLE):
        square = 34 if len(rows) <= 8 else 22 if len(rows) <= 14 else 16  # units of a row
        figure, axes = _figure(len(rows) * square / 72 + 0.8)
        colours = mpl.colormaps["viridis"].resampled(32)  # the colour bar has 32 paths instead of 256
        highest = float(np.nanmax(values, initial=0)) if top is None else top
        mesh = axes.pcolormesh(values, cmap=colours, vmin=0, vmax=highest or 1, edgecolor=PAPER, linewidth=1)
        axes.invert_yaxis()
        every = 1 + (len(columns) - 1) // 10
        axes.set_xticks(np.arange(len(columns))[::every] + 0.5, list(columns)[::every])
        axes.set_yticks(np.arange(len(rows)) + 0.5, labels, fontsize=11 if square > 16 else 9)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set(xlabel=x, ylabel=y)
        whole = MaxNLocator(integer=True) if list(decimals) == [0] else None
        bar = figure.colorbar(mesh, ax=axes, label=unit, aspect=30, pad=0.02, ticks=whole)
        bar.outline.set_visible(False)
        room = (WIDTH * 72 - 110 - 6 * max(map(len, labels))) / len(columns)
        _numbers(axes, values, decimals, room, highest)
        return _inline(figure, name, alt)


def _numbers(axes: Axes, values: Floats, decimals: Sequence[int], room: float, highest: float) -> None:
    """Write the values into their cells, with the first number of decimals that fits."""
    for digits in decimals:
        texts = {index: f"{value:.{digits}f}" for index, value in np.ndenumerate(values) if not np.isnan(value)}
        if 6 * max(map(len, texts.values()), default=0) <= room:
            break
    else:
        return
    for (row, column), text in texts.items():
        # viridis is dark for low values, light for high ones
        colour = "white" if values[row, column] < 0.6 * highest else "black"
        axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=colour, fontsize=10)


def lines(
    series: Mapping[str, Line],
    *,
    name: str,
    alt: str,
    x: str,
    y: str,
    marks: Mapping[str, tuple[float, float]] | None = None,
) -> str:
    """Draw curves over integers, from zero up; with a band for a spread, and a legend for several.

    Args:
        series: curves by legend label.
        name: unique in the page; the SVG's ids begin with it.
        alt: alternative text of the figure.
        x: label of the x-axis, with its unit.
        y: label of the y-axis, with its unit.
        marks: labelled ranges of the x-axis: from and to, by label.
    """
    with mpl.rc_context(STYLE):
        figure, axes = _figure(3.0 + 0.22 * (len(series) if len(series) > 1 else 0))
        for index, (label, (at, values, spread)) in enumerate(series.items()):
            colour, marker = SERIES[index % len(SERIES)], MARKERS[index % len(MARKERS)]
            dash = ("-", "--", ":", "-.")[index // len(SERIES) % 4]
            few = marker if len(at) <= 60 else None
            axes.plot(at, values, dash, color=colour, marker=few, markersize=4, linewidth=1.6, label=shorten(label, 46))
            if spread is not None:
                axes.fill_between(at, values - spread, values + spread, color=colour, alpha=0.2, linewidth=0)
        axes.grid(axis="y")
        axes.update_datalim([(axes.dataLim.x0, 0)])  # space above flat curves, too
        axes.autoscale_view()
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
        axes.set(xlabel=x, ylabel=y)
        if marks:
            _mark(axes, marks)
        if len(series) > 1:
            figure.legend(loc="outside lower center", fontsize=10)
        return _inline(figure, name, alt)


def _mark(axes: Axes, marks: Mapping[str, tuple[float, float]]) -> None:
    every = len(marks) // 10 + 1
    for start, _ in list(marks.values())[1:]:
        axes.axvline(start, color=GRID, linewidth=0.8)
    above = axes.secondary_xaxis("top")
    above.set_ticks([(start + end) / 2 for start, end in marks.values()][::every], list(marks)[::every])
    above.tick_params(length=0)
    above.spines[:].set_visible(False)
    above.set_xlabel("task")


def bars(labels: Sequence[str], values: Floats, *, name: str, alt: str, x: str, y: str) -> str:
    """Draw a bar per label, the first at the top; arguments as in `lines`."""
    with mpl.rc_context(STYLE):
        figure, axes = _figure(len(labels) * (22 if len(labels) <= 14 else 16) / 72 + 0.8)
        axes.barh(np.arange(len(labels)), values, color=SERIES[0], height=0.7)
        axes.set_yticks(np.arange(len(labels)), [shorten(label) for label in labels])
        axes.tick_params(axis="y", length=0, labelsize=11 if len(labels) <= 14 else 9)
        axes.set_ylim(len(labels) - 0.4, -0.6)
        axes.grid(axis="x")
        axes.set(xlabel=x, ylabel=y)
        return _inline(figure, name, alt)


def shorten(text: str, longest: int = 22) -> str:
    """Shorten a name for an axis in its middle, since ends distinguish names; removes characters that XML forbids."""
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    half = longest // 2
    return text if len(text) <= longest else f"{text[: half - 1]}…{text[-half:]}"


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def _inline(figure: Figure, name: str, alt: str) -> str:
    """Return a figure as an <svg> element for use in a page with others."""
    file = io.StringIO()
    with warnings.catch_warnings(), mpl.rc_context({"svg.hashsalt": name}):
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the page's font may have it
        figure.savefig(file, format="svg", metadata={"Date": None})
    svg = ElementTree.fromstring(file.getvalue().partition("<svg ")[2].join(("<svg ", "")))
    for parent in list(svg.iter()):
        for child in list(parent):
            if child.tag in {f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"}:  # a style would apply to the whole page
                parent.remove(child)
        for key, value in parent.attrib.items():
            parent.attrib[key] = _attribute(key, value, name)
    for key in ("width", "height", "version"):  # the page sets the size
        svg.attrib.pop(key, None)
    svg.attrib |= {"role": "img", "aria-label": shorten(alt, 1000)}
    title = ElementTree.Element(f"{{{_SVG}}}title")
    title.text = shorten(alt, 1000)
    svg.insert(0, title)
    return ElementTree.tostring(svg, encoding="unicode")


def _attribute(key: str, value: str, name: str) -> str:
    """Return an attribute with page-unique ids, the page's colours, and its font."""
    if key == "id":
        return f"{name}-{value}"
    if key == f"{{{_XLINK}}}href":
        return value.replace("#", f"#{name}-", 1)
    value = value.replace("url(#", f"url(#{name}-")
    if key == "style":
        value = re.sub(r"#0[0-9a-f]{5}\b", lambda colour: VARIABLES.get(colour[0], colour[0]), value)
        value = re.sub(r"font: ([\d.]+px)[^;]*", r"font-size: \1", value)
    return value
