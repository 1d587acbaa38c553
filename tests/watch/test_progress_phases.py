"""What a connection is busy with, and the words and the page that show it."""

from __future__ import annotations

import attrs
import pytest

from djinn_plugins.watch.progress.phases import Phase, advanced
from djinn_plugins.watch.progress.screens import Notebook, page_of, words_of


@attrs.define
class Counters:
    """The counters of a connection."""

    address: str = "tcp://h:1"
    is_sending: bool = False
    is_asking: bool = False
    calls: int = 1
    bytes_sent: int = 0
    bytes_received: int = 0
    sending_bytes: int = 0
    receiving_bytes: int = 0


def test_many_uploads_in_a_row_are_one_transfer() -> None:
    counters, phase = Counters(is_sending=True, sending_bytes=10_000), None
    for tick in range(21):
        counters.calls = tick
        # Between two tensors, nothing is being sent for a moment.
        counters.is_sending = tick % 3 != 2
        counters.bytes_sent = 100 * tick
        phase = advanced(phase, counters, tick / 10)
    assert phase is not None
    assert (phase.kind, phase.is_long, phase.done_bytes, phase.total_bytes) == ("uploading", True, 1900, 10_000)
    assert phase.bytes_per_s == pytest.approx(1000)
    assert phase.left_s == pytest.approx(8.1)
    counters.is_sending = False
    assert advanced(phase, counters, 2.0) is phase
    assert advanced(phase, counters, 2.5) is None


def test_a_loop_of_short_waits_is_never_long() -> None:
    counters, phase = Counters(is_asking=True), None
    for tick in range(50):
        counters.calls = tick
        phase = advanced(phase, counters, tick / 10)
        assert phase is not None
        assert not phase.is_long
    for tick in range(50, 61):
        phase = advanced(phase, counters, tick / 10)
    assert phase is not None
    assert (phase.kind, phase.is_long) == ("waiting", True)


def test_an_answer_that_arrives_ends_the_wait_and_begins_a_download() -> None:
    counters = Counters(is_asking=True, bytes_received=500)
    phase = advanced(advanced(None, counters, 0.0), counters, 3.0)
    counters.receiving_bytes = 4500
    phase = advanced(phase, counters, 3.1)
    assert phase == Phase("downloading", 1, 3.1, 3.1, 500, 0, 4000)
    counters.bytes_received = 2500
    phase = advanced(phase, counters, 5.1)
    assert words_of("tcp://h:1", phase) == "djinn: downloading 0.0 of 0.0 MB, 0.0 MB/s, 2 s left"


LONG = Phase("uploading", 1, 0.0, 10.0, 0, 25_000_000, 100_000_000, 10.0)


def test_the_words_name_amount_rate_and_time_left() -> None:
    assert words_of("tcp://h:1", LONG) == "djinn: uploading 25.0 of 100.0 MB, 2.5 MB/s, 30 s left"
    wait = Phase("waiting", 1, 0.0, 75.0)
    assert words_of("tcp://h:1", wait) == "djinn: waiting for tcp://h:1, 1:15 min"


def test_the_page_of_a_notebook_has_a_bar_and_no_markup_of_others() -> None:
    assert 'value="25"' in page_of("tcp://h:1", LONG)
    page = page_of("<script>", Phase("waiting", 1, 0.0, 2.0))
    assert "<script>" not in page
    assert "value" not in page


def test_a_notebook_shows_one_bar_and_empties_it(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("IPython")
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import RichOutput

    shell, published = InteractiveShell.instance(), []
    publish = shell.display_pub.publish
    shell.display_pub.publish = lambda **kept: published.append(kept)
    try:
        screen = Notebook()
        screen.show("tcp://h:1", LONG)
        screen.show("tcp://h:1", attrs.evolve(LONG, done_bytes=50_000_000))
        screen.hide()
    finally:
        shell.display_pub.publish = publish
        InteractiveShell.clear_instance()
    pages = [RichOutput(data=kept["data"])._repr_html_() for kept in published]
    assert ['value="25"' in pages[0], 'value="50"' in pages[1], pages[2]] == [True, True, ""]
    assert [kept.get("update", False) for kept in published] == [False, True, True]
    assert len({kept["transient"]["display_id"] for kept in published}) == 1
