"""A Sphinx extension for the tables of measured pages: each as CSV below it, and a chart above the first one."""

from __future__ import annotations

import csv
from pathlib import Path

from charts import CHARTS
from provenance import PAGES


def unique(names: list[str]) -> list[str]:
    """The names of columns; one that was there before gets its number, as in ``quantized 2``."""
    counts: dict[str, int] = {}
    found = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        found.append(name if counts[name] == 1 else f"{name} {counts[name]}")
    return found


def _write_tables(app: object, doctree: object, page: str) -> None:
    """Write each table of a measured page as a CSV file, link it below the table, and draw the chart of the first."""
    from docutils import nodes

    if page not in PAGES or app.builder.format != "html":
        return
    for number, table in enumerate(list(doctree.findall(nodes.table)), 1):
        name = f"{page.rpartition('/')[2]}_{number}"
        body = next(table.findall(nodes.tbody))
        if not any(table.findall(nodes.thead)):  # the grid of PrettyTable does not mark its first row as the header
            body.parent.insert(body.parent.index(body), nodes.thead("", body.pop(0)))
        rows = [[entry.astext().replace("\n", " ") for entry in row] for row in table.findall(nodes.row)]
        file = Path(app.outdir) / "_csv" / f"{name}.csv"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows(rows)
        link = nodes.reference("", "this table as CSV", refuri=f"../_csv/{name}.csv", internal=False)
        place = table.parent.index(table)
        table.parent.insert(place + 1, nodes.paragraph("", "", link, classes=["csv"]))
        if number == 1 and page in CHARTS:
            names = unique(rows[0])
            chart = CHARTS[page]
            chart.draw(
                [dict(zip(names, row, strict=True)) for row in rows[1:]], Path(app.outdir) / "_charts" / f"{name}.svg"
            )
            picture = (
                f'<img class="chart" src="../_charts/{name}.svg" alt="{chart.title}: the figures of the table below">'
            )
            table.parent.insert(place, nodes.raw("", picture, format="html"))


def setup(app: object) -> dict[str, bool]:
    """Connect the extension."""
    app.connect("doctree-resolved", _write_tables)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
