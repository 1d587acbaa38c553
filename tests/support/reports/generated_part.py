"""The generated part of a page of the docs: what people wrote around it stays."""

from __future__ import annotations

__all__ = ("BEGIN", "END", "with_generated")

BEGIN, END = "<!-- generated: begin -->\n", "<!-- generated: end -->\n"


def with_generated(page: str, body: str) -> str:
    """Put a new body between the marks of a page.

    Raises:
        ValueError: The page lacks one of them.
    """
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"has no part between {BEGIN.strip()} and {END.strip()}")
    return f"{head}{begin}{body}{end}{tail}"
