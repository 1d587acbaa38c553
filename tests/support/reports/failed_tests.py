"""Names what failed in several runs of pytest.

``python tests/support/reports/failed_tests.py REPORT...``, with files of ``--junitxml``.

The names are the last lines that it prints, and it ends with status 1 if there are any.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree


def failed_in(report: Path) -> Iterator[str]:
    """Name the tests of a report that failed, and say if the run itself did."""
    try:
        root = ElementTree.parse(report).getroot()  # written by pytest a moment ago
    except (OSError, ElementTree.ParseError) as error:
        yield f"{report.name}: pytest ended without a report ({error})"
        return
    cases = list(root.iter("testcase"))
    if not cases:
        yield f"{report.name}: no test ran"
    for case in cases:
        for kind in ("failure", "error"):
            if (found := case.find(kind)) is not None:
                where = "::".join(filter(None, (case.get("file") or case.get("classname"), case.get("name"))))
                lines = (found.get("message") or "").splitlines() or [""]
                yield f"{where} - {lines[0][:200]}"


def main(reports: Sequence[str]) -> int:
    """Print what failed, and return the status."""
    failed = [line for report in reports for line in failed_in(Path(report))]
    if failed:
        print(f"{len(failed)} failed:", *failed, sep="\n", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
