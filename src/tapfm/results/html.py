"""Write tables and figures as HTML; texts are escaped."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from markupsafe import Markup, escape

from tapfm.results.drawing import draw_svg
from tapfm.results.figure import Figure
from tapfm.results.table import Cell, Column, Row, Table, cell_detail, cell_reason, cell_text, list_reasons

_RANKS = {1: Markup("<strong>{}</strong>"), 2: Markup("<u>{}</u>")}
_LONG = 50  # characters of a text that is wrapped
_SHORT = 6  # characters of a detail such as a percentage
_PANEL_IN = 3.0  # width and height of a panel: text has the size of a page's small print


def html_table(table: Table) -> Markup:
    """Return a table in a region that scrolls, with its notes; missing values refer to a numbered list of reasons."""
    shown = table.shown()
    reasons = list_reasons(shown)
    parts = [Markup("<h3>{}</h3>").format(table.title) if table.title else Markup("")]
    parts.append(
        Markup('<div class="scroll" tabindex="0" role="region" aria-label="{}"><table>').format(table.title or "Table")
    )
    if any(column.title or column.group for column in shown.columns):
        parts.append(Markup("<thead>{}</thead>").format(_head(shown.columns)))
    details = [_detail_class(shown, place) for place in range(len(shown.columns))]
    rows = [_row(row, shown.columns, details, reasons) for row in shown.rows]
    parts.append(Markup("<tbody>{}</tbody></table></div>").format(Markup("\n").join(rows)))
    if reasons:
        items = Markup("").join(Markup("<li>{}</li>").format(reason) for reason in reasons)
        parts.append(Markup('<ol class="reasons">{}</ol>').format(items))
    parts += [Markup('<p class="note quiet">{}</p>').format(note) for note in table.notes]
    return Markup("\n").join(parts)


def _head(columns: Sequence[Column]) -> Markup:
    lines = []
    if any(column.group for column in columns):
        groups = [(group, len(list(members))) for group, members in groupby(columns, key=lambda each: each.group)]
        cells = [Markup('<th scope="colgroup" colspan="{}">{}</th>').format(width, group) for group, width in groups]
        lines.append(Markup("<tr>{}</tr>").format(Markup("").join(cells)))
    cells = [Markup('<th scope="col"{}>{}</th>').format(_css_class(column), column.title) for column in columns]
    lines.append(Markup("<tr>{}</tr>").format(Markup("").join(cells)))
    return Markup("").join(lines)


def _css_class(column: Column, text: str = "") -> Markup:
    if not column.text:
        return Markup(' class="number"')
    return Markup(' class="long"') if len(text) > _LONG else Markup("")


def _detail_class(table: Table, place: int) -> str:
    """Return the CSS class of details in a column, which are as wide in every row so that numbers align."""
    column = table.columns[place]
    longest = max((len(cell_detail(row.cells[place], column)) for row in table.rows if row.cells), default=0)
    return "" if not longest else "detail" if column.text else "detail short" if longest <= _SHORT else "detail wide"


def _row(row: Row, columns: Sequence[Column], details: Sequence[str], reasons: Sequence[str]) -> Markup:
    if not row.cells:
        return Markup('<tr class="heading"><th colspan="{}" scope="colgroup">{}</th></tr>').format(
            len(columns), row.heading
        )
    cells = []
    for place, (cell, column, detail) in enumerate(zip(row.cells, columns, details, strict=True)):
        opening, closing = (Markup('th scope="row"'), Markup("th")) if place == 0 else (Markup("td"), Markup("td"))
        css_class = _css_class(column, cell_text(cell, column))
        cells.append(Markup("<{}{}>{}</{}>").format(opening, css_class, _cell(cell, column, detail, reasons), closing))
    return Markup("<tr>{}</tr>").format(Markup("").join(cells))


def _cell(cell: Cell, column: Column, detail_class: str, reasons: Sequence[str]) -> Markup:
    text, reason = _minus(cell_text(cell, column), column), cell_reason(cell)
    parts = [_RANKS[cell.rank].format(text) if text and cell.rank in _RANKS else escape(text)]
    if reason:
        parts.append(Markup('<sup class="why">{}</sup>').format(reasons.index(reason) + 1))
    if detail_class:
        detail = _minus(cell_detail(cell, column), column)
        parts.append(Markup(' <span class="{}">{}</span>').format(detail_class, detail))
    return Markup("").join(parts)


def _minus(text: str, column: Column) -> str:
    """Replace hyphens of numbers by minus signs, which are as wide as a plus."""
    return text if column.text else text.replace("-", "\N{MINUS SIGN}")


def html_figure(figure: Figure) -> Markup:
    """Return a figure as SVG with its title and caption; an empty panel says why it is empty."""
    panels = []
    for panel in figure.panels:
        title = panel.title or figure.title
        if panel.why_empty:
            drawing = Markup('<p class="empty">{}</p>').format(panel.why_empty)
        else:
            alone = Figure(title, [panel], panel_width_in=_PANEL_IN, panel_height_in=_PANEL_IN)
            drawing = Markup(draw_svg(alone))  # escaped by the XML writer
        panels.append(Markup('<figure><figcaption class="name">{}</figcaption>{}</figure>').format(title, drawing))
    caption = Markup('<p class="caption">{}</p>').format(figure.caption) if figure.caption else Markup("")
    heading = Markup("<h4>{}</h4>").format(figure.title) if figure.title and len(figure.panels) > 1 else Markup("")
    return Markup('{}<div class="figures">{}</div>{}').format(heading, Markup("\n").join(panels), caption)
