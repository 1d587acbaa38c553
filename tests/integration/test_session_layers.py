"""The order of a session's layers is the project's list, whatever third parties call their plugins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import djinn
from djinn.hookspecs import hookimpl
from djinn.kinds import BackendContext, Layer
from djinn.kinds.backend_wrapper import BackendWrapper
from djinn.kinds.connection_wrapper import ConnectionWrapper
from djinn.plugins import register
from djinn.session.layers import ORDER
from djinn_plugins.cli.session_layers import layers_of

DJINNS = ["djinn-known-values", "djinn-prefetch", "djinn-notices", "djinn-later", "djinn"]


class CountingBackend(BackendWrapper):
    """Counts the questions that reach it."""

    questions = 0

    def fetch(self, slots: Any, *, whole: bool) -> list[Any]:
        """Count, and fetch."""
        self.questions += 1
        return super().fetch(slots, whole=whole)


class PlainConnection(ConnectionWrapper):
    """Passes everything on."""


class Acme:
    """A third party's plugin: an observer, and a layer of each sort."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.name = name
        self.seen: list[Mapping[str, int]] = []

    def observe(self, stats: Mapping[str, int]) -> None:
        """Take counters."""
        self.seen.append(stats)

    @hookimpl
    def djinn_register_observers(self, register: Callable[[Any], None]) -> None:
        """Register the observer."""
        register(self)

    @hookimpl
    def djinn_wrap_backend(self, context: BackendContext) -> Layer:
        """Stand inside of what the client knows."""

        def wrap(opens: Any) -> Any:
            return lambda *arguments: CountingBackend(opens(*arguments))

        return Layer(wrap, after="djinn-known-values")

    @hookimpl
    def djinn_wrap_connection(self, context: BackendContext) -> Layer:
        """Stand outside of the counters."""
        return Layer(PlainConnection, before="djinn-observer-core")


def layers_and_counts(name: str) -> tuple[list[str], int, int, int]:
    """Run a small program with the plugin of a name."""
    acme = Acme(name)
    with ExitStack() as stack:
        stack.callback(register(acme))
        session = djinn.init(result_cache_bytes=1 << 20)
        stack.callback(djinn.shutdown)
        layers = [row.plugin or row.type for row in layers_of(session)]
        known = torch.arange(3, device="remote_accelerator:0")
        assert (known + 1).tolist() == [1, 2, 3]
        for _ in range(3):
            assert torch.full((2,), 0.5, device="remote_accelerator:0").exp().cpu().equal(torch.full((2,), 0.5).exp())
        counting: Any = session.backend.plain  # type: ignore[attr-defined]  # what the order says
        questions, trips = counting.questions, djinn.stats()["round_trips"]
    return layers, questions, trips, len(acme.seen)


def test_layers_observers_and_caches_do_not_depend_on_names() -> None:
    first, last = map(layers_and_counts, ("aaa-acme", "zzz-acme"))
    assert first == last
    layers, questions, _, observed = first
    known, *rest = DJINNS
    assert layers == [known, "CountingBackend", *rest, "PlainConnection", "djinn-observer-core", "djinn-wire-delta",
                      "djinn-later", "djinn-transport-local"]
    assert questions == 3
    assert observed


def test_the_architecture_page_lists_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("djinn_plugins.watch.progress.connection.screen_here", lambda: print)
    session = djinn.init(recovery="replay")
    rows = ["  ".join((f"{row.around:10}", f"{row.plugin:21}", row.type)) for row in layers_of(session)]
    djinn.shutdown()
    page = Path(__file__).parents[2] / "docs" / "architecture.md"
    assert "```text\n" + "\n".join(rows) + "\n```" in page.read_text()
    assert {row.split()[1] for row in rows} >= {name for names in ORDER.values() for name in names}


def test_two_layers_at_one_place_are_refused_by_name() -> None:
    with ExitStack() as stack:
        for name in ("aaa-acme", "zzz-acme"):
            stack.callback(register(Acme(name)))
        with pytest.raises(djinn.errors.PluginError, match="'in-process-aaa-acme' and 'in-process-zzz-acme'"):
            djinn.init()
    djinn.init()
    djinn.shutdown()


def test_what_layers_share_is_one_object_of_each_type() -> None:
    session = djinn.init()
    try:
        assert session.shared(list) is session.shared(list) is not session.shared(dict)
    finally:
        djinn.shutdown()
    session = djinn.init()
    assert session.shared(list) == []
    djinn.shutdown()
