"""Write down what a server runs of the installed PyTorch, after its overloads have been reviewed.

``python tests/support/operators/allowlist.py`` prints what differs from the committed
list; with ``--accept`` it is written.
"""

from __future__ import annotations

import sys
from pathlib import Path

from djinn_plugins.guard.allowlist import classified, lists, release, written

FILE = Path(__file__).parents[3] / "plugins/djinn_plugins/guard/overloads.txt"


def differences() -> list[str]:
    """Say in what the installed PyTorch and the rules differ from the list for its release."""
    found, reviewed = classified(), lists().get(release(), {})
    lines = [f"+ {name} is {group}" for name, group in found.items() if name not in reviewed]
    lines += [f"- {name}" for name in reviewed if name not in found]
    return lines + [f"~ {name} is {group}, and was {reviewed[name]}" for name, group in found.items()
                    if reviewed.get(name, group) != group]


if __name__ == "__main__":
    print("\n".join(differences()) or f"nothing has changed in PyTorch {release()}")
    if "--accept" in sys.argv:
        FILE.write_text(written({**lists(), release(): classified()}))
