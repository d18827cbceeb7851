"""Tables and figures as HTML. All texts are escaped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from markupsafe import Markup, escape

from tapfm.results.figure import Figure
from tapfm.results.figure_drawing import draw_svg
from tapfm.results.table import (
    Cell,
    Column,
    Row,
    Table,
    cell_detail,
    cell_reason,
    cell_text,
    has_details,
    list_reasons,
    missing_text,
)

_RANK_TAGS = {1: Markup("<strong>{}</strong>"), 2: Markup("<u>{}</u>")}
_MAX_UNWRAPPED_CHARACTERS = 50  # characters; longer texts are wrapped
_PHONE_CHARACTERS, _COLUMN_GAP_CHARACTERS = 38, 2  # width of a phone, and of the space between two columns
_PANEL_SCALE = 0.8  # the page enlarges a smaller panel, so that its text is as large as that of notes


def html_table(table: Table) -> Markup:
    """Return a table in a scrollable region, with its notes. Reasons for missing values become footnotes.

    A table that is too wide for a phone has the class `stacks`: with the style of the report, each row becomes a block
    of labels and values there.
    """
    shown = table.without_hidden_columns()
    reasons, classes = list_reasons(shown), [_css_class(shown, index) for index in range(len(shown.columns))]
    stacks = not _fits_on_phone(shown)
    parts = [Markup("<h3>{}</h3>").format(table.title) if table.title else Markup("")]
    parts.append(
        Markup('<div class="{}" tabindex="0" role="region" aria-label="{}"><table>').format(
            "scroll stacks" if stacks else "scroll", table.title or "Table"
        )
    )
    if any(column.title or column.group for column in shown.columns):
        parts.append(Markup("<thead>{}</thead>").format(_html_header(shown.columns, classes)))
    rows = [_html_row(row, shown.columns, classes, reasons, stacks=stacks) for row in shown.rows]
    parts.append(Markup("<tbody>{}</tbody></table></div>").format(Markup("\n").join(rows)))
    if reasons:
        items = Markup("").join(Markup("<li>{}</li>").format(reason) for reason in reasons)
        parts.append(Markup('<ol class="reasons">{}</ol>').format(items))
    parts += [Markup('<p class="note quiet">{}</p>').format(note) for note in table.notes]
    return Markup("\n").join(parts)


def _fits_on_phone(table: Table) -> bool:
    """Return whether a table has two columns, whose texts can be wrapped, or rows that are short enough for a phone."""
    if len(table.columns) <= 2:
        return True
    width = -_COLUMN_GAP_CHARACTERS
    for index, column in enumerate(table.columns):
        cells = [row.cells[index] for row in table.rows if row.cells]
        texts = [f"{cell_text(cell, column)} {cell_detail(cell, column)}".strip() for cell in cells]
        words = f"{column.group} {column.title}".split()
        width += max(map(len, [*texts, *words]), default=0) + _COLUMN_GAP_CHARACTERS
    return width <= _PHONE_CHARACTERS


def _html_header(columns: Sequence[Column], classes: Sequence[str]) -> Markup:
    lines = []
    if any(column.group for column in columns):
        groups = [(group, len(list(members))) for group, members in groupby(columns, key=lambda each: each.group)]
        cells = [Markup('<th scope="colgroup" colspan="{}">{}</th>').format(width, group) for group, width in groups]
        lines.append(Markup("<tr>{}</tr>").format(Markup("").join(cells)))
    titles = zip(columns, classes, strict=True)
    cells = [
        Markup('<th scope="col"{}>{}</th>').format(_class_attribute(name), column.title) for column, name in titles
    ]
    lines.append(Markup("<tr>{}</tr>").format(Markup("").join(cells)))
    return Markup("").join(lines)


def _css_class(table: Table, index: int) -> str:
    """Return the CSS class of a column. Numbers with details are left-aligned, so that their digits line up."""
    if table.columns[index].text:
        return ""
    return "number detailed" if has_details(table, index) else "number"


def _class_attribute(css_class: str) -> Markup:
    return Markup(' class="{}"').format(css_class) if css_class else Markup("")


def _html_row(
    row: Row, columns: Sequence[Column], classes: Sequence[str], reasons: Sequence[str], *, stacks: bool
) -> Markup:
    if not row.cells:
        return Markup('<tr class="heading"><th colspan="{}" scope="colgroup">{}</th></tr>').format(
            len(columns), row.heading
        )
    cells = []
    for index, (cell, column, css_class) in enumerate(zip(row.cells, columns, classes, strict=True)):
        long = column.text and len(cell_text(cell, column)) > _MAX_UNWRAPPED_CHARACTERS
        attribute, content = _class_attribute("long" if long else css_class), _html_cell(cell, column, reasons)
        if index == 0:
            cells.append(Markup('<th scope="row"{}>{}</th>').format(attribute, content))
        elif stacks and content:
            label = _column_label(column)
            cells.append(Markup('<td{} data-label="{}"><span>{}</span></td>').format(attribute, label, content))
        else:
            cells.append(Markup("<td{}>{}</td>").format(attribute, content))
    return Markup("<tr>{}</tr>").format(Markup("").join(cells))


def _column_label(column: Column) -> str:
    """Return the label of a value if its row is a block, without a header above it."""
    return ", ".join(part for part in (column.group, column.title) if part)


def _html_cell(cell: Cell, column: Column, reasons: Sequence[str]) -> Markup:
    text, detail, reason = cell_text(cell, column), cell_detail(cell, column), cell_reason(cell)
    text = text if isinstance(cell.value, str) else _use_minus_signs(text, column) or missing_text(cell)
    parts = [_RANK_TAGS[cell.rank].format(text) if text and cell.rank in _RANK_TAGS else escape(text)]
    if reason:
        parts.append(Markup('<sup class="reason">{}</sup>').format(reasons.index(reason) + 1))
    if detail:
        parts.append(Markup(' <span class="detail">{}</span>').format(_use_minus_signs(detail, column)))
    return Markup("").join(parts)


def _use_minus_signs(text: str, column: Column) -> str:
    """Replace hyphens in numbers with minus signs, which are as wide as plus signs."""
    return text if column.text else text.replace("-", "\N{MINUS SIGN}")


def html_figure(figure: Figure, unique_numbers: Iterator[int]) -> Markup:
    """Return a figure as SVG with its title and caption. An empty panel shows its reason.

    `unique_numbers` yields a different number for each drawing on a page, which makes its ids unique.
    """
    panels = []
    for panel in figure.panels:
        title = panel.title or figure.title
        if panel.why_empty:
            drawing = Markup('<p class="empty">{}</p>').format(panel.why_empty)
        else:
            width_in, height_in = _PANEL_SCALE * figure.panel_width_in, _PANEL_SCALE * figure.panel_height_in
            alone = Figure(title, [panel], panel_width_in=width_in, panel_height_in=height_in)
            drawing = Markup(draw_svg(alone, next(unique_numbers)))  # escaped by the XML writer
        panels.append(Markup('<figure><figcaption class="name">{}</figcaption>{}</figure>').format(title, drawing))
    caption = Markup('<p class="caption">{}</p>').format(figure.caption) if figure.caption else Markup("")
    heading = Markup("<h4>{}</h4>").format(figure.title) if figure.title and len(figure.panels) > 1 else Markup("")
    return Markup('{}<div class="figures">{}</div>{}').format(heading, Markup("\n").join(panels), caption)
