"""Publishing what came of breaking things.

``python -m support.reports.reliability FOUND.jsonl`` takes what a run has found into docs/results/reliability.json,
where it replaces what the same tests found before, and writes the table of docs/reliability.md anew.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import attrs
import cattrs
import torch
from support.reports.generated_part import with_generated

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reliability.md"
RESULTS = ROOT / "docs" / "results" / "reliability.json"


@attrs.frozen
class Found:
    """What came of one test.

    Attributes:
        test: Its name.
        done: What was done.
        found: What came of it.
        date: When.
        machine: Where.
    """

    test: str
    done: str
    found: str
    date: str
    machine: str

    @classmethod
    def now(cls, test: str, done: str, found: str) -> Found:
        """Say what was found here and now."""
        return cls(test, done, found, datetime.datetime.now(datetime.UTC).date().isoformat(),
                   f"PyTorch {torch.__version__.partition('+')[0]}, Python {platform.python_version()}, "
                   f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}")


def keep(path: Path, found: Found) -> None:
    """Add a line to a file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(attrs.asdict(found)) + "\n")


def load() -> dict[str, Found]:
    """Read what is published, by test."""
    published = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return cattrs.structure(published, dict[str, Found])


def table(published: Mapping[str, Found]) -> str:
    """Write what was found as a table in Markdown."""
    rows = [f"| {found.done} | {found.found} | {found.date}, {found.machine} |"
            for _, found in sorted(published.items())]
    return "\n".join(["| what was done | what came of it | when and where |", "|---|---|---|", *rows, ""])


def page(text: str, published: Mapping[str, Found]) -> str:
    """Put a new table into the page."""
    return with_generated(text, table(published))


def main() -> None:
    """Take in what a run has found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("found", type=Path, help="what the run has kept")
    lines = parser.parse_args().found.read_text(encoding="utf-8").splitlines()
    published = load() | {found.test: found for found in cattrs.structure(list(map(json.loads, lines)), list[Found])}
    RESULTS.write_text(json.dumps({test: attrs.asdict(found) for test, found in sorted(published.items())}, indent=1)
                       + "\n", encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), published), encoding="utf-8")


if __name__ == "__main__":
    main()
