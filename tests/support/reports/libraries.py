"""Writes docs/libraries.md: the scripts of tests/libraries, what matters of each, and how its results compared."""

from __future__ import annotations

import ast
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "libraries.md"
SCRIPTS = ROOT / "tests" / "libraries" / "scripts"
PACKAGES = ("torch", "accelerate", "captum", "datasets", "diffusers", "einops", "gpytorch", "lightning", "peft",
            "pyro-ppl", "sentence-transformers", "torch-geometric", "torchao", "torchdiffeq", "torchmetrics",
            "transformers", "trl")
HEAD = """# Libraries

Each script below is ordinary code of its library. None mentions djinn. `nox -s libraries` runs each on the CPU, with
[`djinn run`](run.md) in its own process, and with `djinn run` on a guarded `djinn serve` in another process, compares
the numbers that they print, and writes this page.
"""


def page(rows: Sequence[Mapping[str, Any]], versions: Mapping[str, str]) -> str:
    """Make the page.

    Args:
        rows: One for each script, as tests/libraries/check_libraries.py writes them.
        versions: The libraries' releases.
    """
    known = {row["script"]: row for row in rows}
    lines = [HEAD, f"Versions: {', '.join(f'{name} {number}' for name, number in versions.items())}.", "",
             "Differences are relative to the largest number of a result.", "",
             "| script | in process | on a server | operations | round trips |", "|---|---|---|---:|---:|"]
    for script in sorted(SCRIPTS.glob("*.py")):
        link = f"[{script.stem}](../tests/libraries/scripts/{script.name})"
        row = known[script.stem]
        served = row["served"]
        lines.append(f"| {link} | {_compared(row['in_process'])} | "
                     f"{_compared(served)} | {served['operations']:,} | {served['round_trips']:,} |")
    for script in sorted(SCRIPTS.glob("*.py")):
        source = script.read_text(encoding="utf-8")
        described = ast.get_docstring(ast.parse(source)) or ""
        snippet = source.partition("# begin\n")[2].partition("# end")[0].rstrip(" ")
        lines += ["", f"## {script.stem.replace('_', ' ').capitalize()}", "", *textwrap.wrap(described, 118), "",
                  "```text", textwrap.dedent(snippet).rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _compared(result: Mapping[str, Any]) -> str:
    return "equal" if result["difference"] == 0 else f"within {result['difference']:.0e}"


if __name__ == "__main__":
    found = [json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
    PAGE.write_text(page(found, {name: version(name) for name in PACKAGES}), encoding="utf-8")
