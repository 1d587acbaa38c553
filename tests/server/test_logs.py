"""Lines of the log: one for each record, whatever is in it."""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Iterator

import pytest

from djinn_plugins.common.net import stranger_log
from djinn_plugins.common.net.stranger_log import MAX_LINES, StrangerLog
from djinn_plugins.server.log_lines import write_to
from djinn_plugins.server.options import LogFormat

FORGED = "hello\n2026-01-01 00:00:00,000 ERROR djinn.server: forged\x1b[2J\u2028\x85"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before = list(root.handlers)
    # Sessions of other tests have set the levels of their loggers.
    names = ("", "djinn", "djinn.server", "djinn.transport")
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    root.handlers[:] = []
    for logger in levels:
        logger.setLevel("DEBUG")
    yield io.StringIO()
    root.handlers[:] = before
    for logger, level in levels.items():
        logger.setLevel(level)


def fail(text: str) -> None:
    try:
        raise ValueError(text)
    except ValueError:
        logging.getLogger("djinn.server").exception("%s failed", text)


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_text_makes_a_record_of_its_own(stream: io.StringIO, form: LogFormat) -> None:
    write_to(stream, form)
    logging.getLogger("djinn.server").warning("said: %s", FORGED)
    fail(FORGED)
    lines = stream.getvalue().split("\n")[:-1]
    records = [line for line in lines if not line.startswith("    ")]
    assert len(records) == 2
    assert not any(not character.isprintable() for line in lines for character in line)
    assert "forged" in records[0]


@pytest.mark.parametrize("form", ["text", "json"])
def test_secrets_are_left_out_wherever_they_are(stream: io.StringIO, form: LogFormat) -> None:
    write_to(stream, form, secrets=("hush", ""))
    logging.getLogger("djinn.server").info("a %s and an error", "hush")
    fail("hush!")
    assert "hush" not in stream.getvalue()
    assert stream.getvalue().count("***") >= 3


def test_a_record_is_an_object_that_says_where_it_comes_from(stream: io.StringIO) -> None:
    write_to(stream, "json", role="worker", tenant="alice")
    logging.getLogger("djinn.transport").info("%d bytes", 7)
    logging.getLogger("elsewhere").error("é")
    fail("it")
    first, second, third = map(json.loads, stream.getvalue().splitlines())
    assert (first["component"], first["level"], first["message"]) == ("transport", "INFO", "7 bytes")
    assert (first["role"], first["tenant"]) == ("worker", "alice")
    assert first["time"].endswith("+00:00")
    assert "error" not in first
    assert second["component"] == "elsewhere"
    assert third["error"].startswith("Traceback")
    assert third["error"].endswith("ValueError: it")


def test_strangers_write_a_few_lines_and_a_sum(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stranger_log, "INTERVAL_S", 0.2)
    write_to(stream, "text")
    strangers = StrangerLog(logging.getLogger("djinn.server"))
    for number in range(3000):
        strangers.write(logging.WARNING, "refused", "stranger %d: refused", number)
    strangers.write(logging.WARNING, "closed", "another kind")
    until_s = time.monotonic() + 20
    while "more such lines" not in stream.getvalue():
        assert time.monotonic() < until_s
        time.sleep(0.01)
    lines = stream.getvalue().splitlines()
    assert len(lines) == MAX_LINES + 2
    assert len(stream.getvalue()) < 4096
    assert "refused: 2990 more such lines" in lines[-1]
    strangers.write(logging.WARNING, "refused", "the next one")
    assert "the next one" in stream.getvalue()
