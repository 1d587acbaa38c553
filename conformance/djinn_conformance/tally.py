"""Counts of samples: a line of JSON per group, from which the documentation's tables are generated."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

__all__ = ("IN_PROCESS", "SERVED", "record", "record_to", "totals")

_path: Path | None = None
SERVED, IN_PROCESS = "served", "in process"
"""Where a session's executor is: on a guarded server, or in the client's process."""
totals: dict[tuple[str, str, str], Counter[str]] = {}
"""Counts of this process, by suite, direction and session: ``equal``, ``different`` and ``total``."""


def record_to(path: str | None) -> None:
    """Append all further records to a file; ``None`` disables this."""
    global _path
    _path = None if path is None else Path(path).absolute()


def record(
    *, suite: str, name: str, variant: str, dtype: str, direction: str, session: str, equal: int, different: int,
    total: int,
) -> None:
    """Count a group of samples, and append it to the file given by the option ``--djinn-report``.

    Args:
        suite: Source of the samples: ``operators``, ``optimizers``, ``modules``.
        name: The operator, optimizer or module.
        variant: Distinguishes groups with the same name.
        dtype: Dtype of the samples, without ``torch.``.
        direction: The kind of comparison: ``forward``, ``backward``, ``steps``, ``refused``.
        session: `SERVED` or `IN_PROCESS`.
        equal: Samples that were equal.
        different: Samples that were different, as expected.
        total: All samples; more than the sum of the other two if there were unexpected differences.
    """
    counted = totals.setdefault((suite, direction, session), Counter())
    counted.update(equal=equal, different=different, total=total)
    if _path is None:
        return
    line = {"suite": suite, "name": name, "variant": variant, "dtype": dtype, "direction": direction,
            "session": session, "equal": equal, "different": different, "total": total}
    with _path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
