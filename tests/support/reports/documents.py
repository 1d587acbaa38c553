"""Publishing the tables that earlier documents of djinn left blank.

``python -m support.reports.documents BENCHMARKS.json`` reads what ``pytest --benchmark-json`` has written, and takes
the rows that were measured into docs/results/documents.json and the tables of docs/documents.md. With ``--partial``, it
only prints them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import attrs
import cattrs
import torch
from support.reports.generated_part import with_generated
from support.reports.performance import machine

ROOT = Path(__file__).parents[3]
PAGE, RESULTS = ROOT / "docs" / "documents.md", ROOT / "docs" / "results" / "documents.json"
Cell: TypeAlias = float | str


@attrs.frozen
class Table:
    """A table of the page.

    Attributes:
        title: Its heading.
        first: The heading of its first column.
        columns: Headings of the others, by the name of their cells.
        rows: What is measured, in this order.
        note: How to read it.
    """

    title: str
    first: str
    columns: Mapping[str, str]
    rows: tuple[str, ...]
    note: str


TABLES: Mapping[str, Table] = MappingProxyType({
    "overhead": Table(
        "Interception", "operation",
        {"eager": "eager (µs)", "recorded": "recorded (µs)", "of eager": "of eager (%)",
         "run": "recorded and run, client and server (µs)", "more": "more than eager (%)"},
        ("`torch.randn(1000, 1000)`", "`x @ y`", "`x.sum()`", "ResNet-50 forward", "GPT-2 forward"),
        "`x` and `y` are 1000x1000 float32, ResNet-50 sees one picture of 224x224, GPT-2 has 124M parameters and reads "
        "16 tokens. Recording is all that happens in the program before the call returns. The server is another "
        "process behind TCP; each call is sent and waited for alone, as no program does with single operations."),
    "memory": Table(
        "Memory of GPT-2", "part", {"megabytes": "memory (MB)", "node": "bytes a node"},
        ("the model's weights, on the server", "the model, in the client", "pending operations", "captured graphs",
         "metadata of them, once somebody looks"),
        "Growth of the client's resident set for a forward of 16 tokens, averaged over 20 forwards. Pending operations "
        "are what every program has until it needs a value; graphs and their metadata exist only where "
        "`djinn.capture()` is used, and somebody looks."),
    "graphs": Table(
        "Construction of graphs", "model",
        {"nodes traced": "nodes", "traced": "traced (ms)", "nodes recorded": "nodes", "recorded": "recorded (ms)"},
        ("Linear", "ResNet-50", "GPT-2", "BERT-Base"),
        "Traced: `djinn.build_graph` of the model on the CPU, without running it. Recorded: the forward in a "
        "`djinn.capture()` block and the block's graph, the operations still pending."),
    "headlines": Table(
        "Headline figures", "what", {"documents": "the documents", "measured": "measured"},
        ("recording an operation", "a graph that is known", "a compiled graph that is known",
         "metadata without a question to the server", "control checks that are repeated",
         "bytes of an argmax of GPT-2's logits"), ""),
})


@attrs.frozen
class Row:
    """What was measured, when and where."""

    cells: Mapping[str, Cell]
    date: str
    where: str


Rows: TypeAlias = dict[str, dict[str, Row]]


_converter = cattrs.Converter()
_converter.register_structure_hook(Cell, lambda cell, _: cell)


class UnknownRowError(ValueError):
    """A benchmark fills a row that no table has, or fills it otherwise."""


def found_in(report: Mapping[str, Any]) -> Rows:
    """Take the rows out of what pytest-benchmark has written.

    Raises:
        UnknownRowError: No table has such a row, or such cells.
    """
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    where = f"PyTorch {torch.__version__.partition('+')[0]}, Python {platform.python_version()}, {machine()}"
    rows: Rows = {}
    for benchmark in report["benchmarks"]:
        for told in benchmark["extra_info"].get("documents", ()):
            table = TABLES.get(told["table"])
            if table is None or told["row"] not in table.rows or set(told["cells"]) != set(table.columns):
                raise UnknownRowError(f"{benchmark['name']} fills {told['row']!r} of {told['table']!r}.")
            rows.setdefault(told["table"], {})[told["row"]] = Row(told["cells"], date, where)
    return rows


def _shown(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell
    return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:.2g}" if abs(cell) < 10 else f"{cell:.3g}"


def tables(rows: Rows) -> str:
    """Write the tables in Markdown, without rows that have not been measured."""
    lines: list[str] = []
    for name, table in TABLES.items():
        known = {row: rows.get(name, {})[row] for row in table.rows if row in rows.get(name, {})}
        if not known:
            continue
        numbers = {column for row in known.values() for column, cell in row.cells.items() if not isinstance(cell, str)}
        lines += [f"## {table.title}", "", f"| {table.first} | {' | '.join(table.columns.values())} |",
                  f"|---|{'|'.join('---:' if column in numbers else '---' for column in table.columns)}|"]
        lines += [f"| {row} | {' | '.join(_shown(measured.cells[column]) for column in table.columns)} |"
                  for row, measured in known.items()]
        when = sorted({f"{row.date}, {row.where}" for row in known.values()})
        lines += ["", *([table.note, ""] if table.note else []), f"Measured {'; '.join(when)}.", ""]
    return "\n".join(lines)


def page(text: str, rows: Rows) -> str:
    """Put new tables into the page."""
    return with_generated(text, tables(rows))


def load() -> Rows:
    """Read what is published."""
    published = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return _converter.structure(published, Rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Take in what a run has measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, help="what pytest --benchmark-json has written")
    parser.add_argument("--partial", action="store_true", help="print the tables, publish nothing")
    given = parser.parse_args(arguments)
    found = found_in(json.loads(given.measured.read_text(encoding="utf-8")))
    if given.partial:
        print(tables(found))
        return
    published = load()
    rows = {name: published.get(name, {}) | found.get(name, {}) for name in TABLES}
    RESULTS.write_text(json.dumps(_converter.unstructure(rows), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
