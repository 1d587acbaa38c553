"""Counts of samples: a line of JSON for each group, from which the tables of the documentation are made."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

__all__ = ("IN_PROCESS", "SERVED", "record", "record_to", "totals")

_path: Path | None = None
SERVED, IN_PROCESS = "served", "in process"
"""Where a session's executor is: a guarded server's, or one in the client's process."""
totals: dict[tuple[str, str, str], Counter[str]] = {}
"""What has been counted in this process, by suite, direction and session: ``equal``, ``different`` and ``total``."""


def record_to(path: str | None) -> None:
    """Append what is recorded from now on to a file; ``None`` records nothing."""
    global _path
    _path = None if path is None else Path(path).absolute()


def record(
    *, suite: str, name: str, variant: str, dtype: str, direction: str, session: str, equal: int, different: int,
    total: int,
) -> None:
    """Count a group of samples, and append it to the file that the option ``--djinn-report`` names.

    Args:
        suite: Where the samples come from: ``operators``, ``optimizers``, ``modules``.
        name: The operator, optimizer or module.
        variant: What tells groups of one name apart.
        dtype: Of the samples, without ``torch.``.
        direction: What is compared: ``forward``, ``backward``, ``steps``, ``refused``.
        session: `SERVED` or `IN_PROCESS`.
        equal: Samples that were equal.
        different: Samples that were different, as expected.
        total: All samples; more than the sum of the other two if some differed that should not.
    """
    counted = totals.setdefault((suite, direction, session), Counter())
    counted.update(equal=equal, different=different, total=total)
    if _path is None:
        return
    line = {"suite": suite, "name": name, "variant": variant, "dtype": dtype, "direction": direction,
            "session": session, "equal": equal, "different": different, "total": total}
    with _path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
