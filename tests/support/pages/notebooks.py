"""Runs the cells of a notebook as Jupyter would.

``python tests/support/pages/notebooks.py FILE`` writes what they print into the file.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

__all__ = ("code_cells", "run_cells", "text_of")


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells that hold code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def text_of(cell: dict[str, Any]) -> str:
    """What a cell is stored as having printed, with the text of the value that it ends with."""
    parts = ["".join(output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"])
             for output in cell["outputs"]]
    return "".join(parts)


def _value_of(code: str, namespace: dict[str, Any]) -> Any:
    parsed = ast.parse(code)
    last = parsed.body.pop() if isinstance(parsed.body[-1], ast.Expr) else None
    exec(compile(parsed, "<cell>", "exec"), namespace)
    return None if last is None else eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def run_cells(cells: list[dict[str, Any]]) -> None:
    """Run cells one after the other, and store their outputs in them."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells, 1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            value = _value_of("".join(cell["source"]), namespace)
        cell["execution_count"] = number
        cell["outputs"] = []
        if printed.getvalue():
            cell["outputs"].append({"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())})
        if value is not None:
            data = {"text/plain": _lines(repr(value))}
            if hasattr(value, "_repr_html_"):
                data["text/html"] = _lines(value._repr_html_())
            cell["outputs"].append({"data": data, "execution_count": number, "metadata": {},
                                    "output_type": "execute_result"})


if __name__ == "__main__":
    path = Path(sys.argv[1])
    held = json.loads(path.read_text(encoding="utf-8"))
    run_cells(code_cells(held))
    text = json.dumps(held, indent=1, ensure_ascii=False) + "\n"
    Path(sys.argv[2] if len(sys.argv) > 2 else path).write_text(text, encoding="utf-8")
