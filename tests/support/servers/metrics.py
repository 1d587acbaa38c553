"""The metrics of a server under test."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from djinn_plugins.watch.monitor.reading import Reading, read

__all__ = ("page_of", "wait_for")


def page_of(server: Any) -> str:
    """Return the address of the page of a server's metrics, which its log tells."""
    (url,) = set(re.findall(r"metrics on (http://[^/]+)/metrics", server.log.read_text()))
    return str(url)


def wait_for(server: Any, true: Callable[[Reading], Any], patience_s: float = 15) -> Reading:
    """Wait until the metrics are as they should be."""
    until = time.monotonic() + patience_s
    while not true(found := read(page_of(server))):
        assert time.monotonic() < until, found
        time.sleep(0.05)
    return found
