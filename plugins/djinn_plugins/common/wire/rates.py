"""How the handles of a program change from run to run."""

from __future__ import annotations

import attrs

__all__ = ("UNKNOWN", "HandleRate", "Handles")


@attrs.frozen(eq=False)
class HandleRate:
    """How one handle changes from run to run.

    Attributes:
        step: By how much it is expected to change.
        is_steady: Whether it changed by that twice in a row.
        other: By how much it changed last, if that was something else.
    """

    step: int = 0
    is_steady: bool = False
    other: int | None = None

    def after(self, step: int) -> HandleRate:
        """Return the rate after a change by ``step``."""
        if step == self.step:
            return self if self.is_steady and self.other is None else HandleRate(step, is_steady=True)
        if self.is_steady and step != self.other:
            return HandleRate(self.step, is_steady=True, other=step)
        return HandleRate(step, is_steady=self.is_steady)


UNKNOWN = HandleRate()


@attrs.frozen(eq=False)
class Handles:
    """The handles of one field of the last run, and the expected ones.

    Attributes:
        last: The last ones.
        rates: How each changes.
        expected: The next ones.
        is_steady: Whether all changed as expected, and steadily.
    """

    last: tuple[int, ...]
    rates: tuple[HandleRate, ...]
    expected: tuple[int, ...]
    is_steady: bool = False

    @classmethod
    def of(cls, handles: tuple[int, ...]) -> Handles:
        """Begin with the handles of the first run."""
        return cls(handles, (UNKNOWN,) * len(handles), handles)

    def after(self, handles: tuple[int, ...]) -> Handles:
        """Return the same after one more run."""
        if len(handles) != len(self.last):
            return self.of(handles)
        rates, is_steady = self.rates, self.is_steady
        if not is_steady or handles != self.expected:
            rates = tuple([rate.after(new - old) for rate, old, new in zip(rates, self.last, handles, strict=True)])
            is_steady = all(rate.is_steady and rate.other is None for rate in rates)
        elif handles == self.last:
            return self
        expected = tuple([handle + rate.step for handle, rate in zip(handles, rates, strict=True)])
        return Handles(handles, rates, expected, is_steady)
