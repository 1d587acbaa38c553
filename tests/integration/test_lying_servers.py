"""What a server sends is compared with what was recorded, and its texts do nothing to a terminal."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from support.network.lying import Liar
from support.servers.serving import Serving

import djinn
from djinn.errors import DjinnError, ProtocolError, RefusedError, TransportError
from djinn.session.single_backend import MAX_FAILURES
from djinn.settings import Config, Settings
from djinn.wire.messages import (
    PROTOCOL_VERSION,
    Batch,
    Description,
    Failure,
    Plain,
    Poisoned,
    Refusal,
    Result,
    TensorHeader,
    Warned,
    Welcome,
)
from djinn.wire.tensors import header_of
from djinn_plugins.cluster.messages import DirectoryProblem, ListedServer, ServerList, encoded
from djinn_plugins.cluster.resolving import resolve
from djinn_plugins.common.net.terminal_text import harmless
from djinn_plugins.common.settings.cluster import ClusterSettings
from djinn_plugins.common.wire.assumptions import MAX_EARLY
from djinn_plugins.transport.tcp.answers import checked
from djinn_plugins.transport.tcp.connection import SocketConnection
from djinn_plugins.transport.tcp.reasons import refused
from djinn_plugins.transport.tcp.stream import FrameStream

DEVICE = "remote_accelerator:0"
SEEDS = 12
Answer = tuple[Result, list[torch.Tensor]]


def _of(tensor: torch.Tensor) -> Callable[[Result, list[torch.Tensor]], Answer]:
    return lambda result, data: (msgspec.structs.replace(result, items=(header_of(tensor),)), [tensor])


def _items(*items: Any, keeps: bool = False) -> Callable[[Result, list[torch.Tensor]], Answer]:
    return lambda result, data: (msgspec.structs.replace(result, items=items), data if keeps else [])


ONE = header_of(torch.ones(3, 2))
LIES = {
    "one element less": _of(torch.ones(5)), "another shape of as many": _of(torch.ones(2, 3)),
    "one dimension more": _of(torch.ones(3, 2, 1)), "another dtype": _of(torch.ones(3, 2, dtype=torch.float64)),
    "a number": _items(Plain(1.0)), "a text": _items(Plain("1")), "nothing": _items(),
    "more than asked": _items(ONE, ONE, keeps=True), "its metadata": _items(Description("float32", (3, 2), (2, 1), 0)),
    "a header alone": _items(ONE), "a tensor without its header": _items(Plain(None), keeps=True),
    "an unknown failure": _items(Poisoned(7)), "half a complex number": _items(Plain({"real": 1.0})),
    "texts in a list": _items(Plain([["x"]])),
}


@pytest.fixture
def lying(server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """A session with a server, whose further answers are changed before the client checks them."""
    djinn.init(server=server.address)
    honest = SocketConnection._awaited
    yield lambda lie: monkeypatch.setattr(SocketConnection, "_awaited", lambda self: lie(*honest(self)))
    djinn.shutdown()


@pytest.mark.parametrize("lie", list(LIES))
def test_an_answer_that_does_not_fit_the_question_is_an_error_of_djinn(lie: str, lying: Any) -> None:
    value = torch.ones(3, 2, device=DEVICE) * 2
    lying(LIES[lie])
    with pytest.raises(DjinnError):
        value.cpu()


@pytest.mark.parametrize("lie", ["a text", "nothing", "more than asked", "its metadata", "half a complex number"])
def test_a_false_number_is_an_error_of_djinn(lie: str, lying: Any) -> None:
    value = torch.ones(3, device=DEVICE).sum()
    lying(LIES[lie])
    with pytest.raises(DjinnError):
        value.item()


@pytest.mark.parametrize("lie", ["nothing", "a text", "a header alone"])
def test_false_metadata_is_an_error_of_djinn(lie: str, lying: Any) -> None:
    value = torch.tensor([1.0, 0.0], device=DEVICE)
    lying(LIES[lie])
    with pytest.raises(DjinnError):
        value.nonzero()


def test_what_a_terminal_would_obey_is_escaped() -> None:
    evil = "\x1b]0;title\x07 \x9b31m\r\u202egone\nnext\tline, é"
    escaped = "\\x1b]0;title\\x07 \\x9b31m\\r\\u202egone\nnext\tline, é"
    assert harmless(evil) == escaped
    result, _ = checked(Batch(), (Result((), (Failure(1, "ValueError", evil, evil),), warnings=(
        Warned("UserWarning", evil),)), []))
    assert (result.failures[0].message, result.failures[0].operator, result.warnings[0].text) == (escaped,) * 3
    assert "\x1b" not in str(refused("tcp://there", Refusal(evil, evil, evil)))


def test_headers_are_counted() -> None:
    answer = Result((TensorHeader("float32", (1,), (1,)),)), [torch.ones(1)]
    assert checked(Batch(fetch=(1,)), answer) is answer


def test_failures_that_were_caught_are_not_remembered_for_ever() -> None:
    session = djinn.init()
    table, wrong = torch.ones(2, 2, device=DEVICE), torch.tensor([5], device=DEVICE)
    for _ in range(MAX_FAILURES // 20 + 3):
        kept = [torch.embedding(table, wrong) for _ in range(20)]
        with pytest.raises(IndexError):
            djinn.synchronize()
        del kept
    [link] = session.backend.executors
    assert len(link._reported) == len(link._failures) == MAX_FAILURES
    djinn.shutdown()


@pytest.mark.parametrize(("line", "kind", "said"), [
    (encoded(ServerList(())), ProtocolError, "names no server"),
    (encoded(ServerList((ListedServer("tcp://\x1b[31m:1"),))), ProtocolError, "is no directory"),
    (encoded(DirectoryProblem("DJ305", "\x1b]0;title\x07", "\x1b[31m")), RefusedError, r"^\[DJ305\] \\x1b\]0;title"),
    (b" ", TransportError, "timed out")], ids=["nobody", "address", "text", "drips"])
def test_a_directory_that_lies_is_an_error_and_reaches_no_terminal(
        line: bytes, kind: type[Exception], said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        def answer() -> None:
            with sock.accept()[0] as client, suppress(OSError):
                while not line.endswith(b"\n"):
                    client.sendall(line)
                    time.sleep(0.1)
                client.sendall(line)

        answering = threading.Thread(target=answer)
        answering.start()
        given = {Config: Config(connect_timeout_s=1.0), ClusterSettings: ClusterSettings(
            f"tcp://127.0.0.1:{sock.getsockname()[1]}")}
        with pytest.raises(kind, match=said):
            resolve(given[ClusterSettings], Settings(*given.values()))  # type: ignore[arg-type]  # each of its kind
        answering.join(20)


def _values() -> None:
    value = torch.ones(3, 2, device=DEVICE) * 2
    value.cpu()
    value.sum().item()
    torch.tensor([1.0, 0.0], device=DEVICE).nonzero().cpu()


def _later() -> None:
    values = [djinn.later(torch.ones(3, device=DEVICE) * number) for number in range(3)]
    torch.ones(2, device=DEVICE).cpu()
    [value.result() for value in values]


def _named() -> None:
    djinn.kept["a"] = {"w": torch.ones(3, device=DEVICE), "n": 1}
    djinn.kept["a"]["w"].cpu()


def _models() -> None:
    djinn.models.list()
    djinn.models.load("m")["x"].cpu()


SCENES: dict[str, tuple[dict[str, Any], Callable[[], None]]] = {
    "greeting": ({}, _values), "values": ({}, _values), "later": ({}, _later), "named": ({"name": "lies"}, _named),
    "models": ({}, _models)}


@pytest.fixture(scope="module")
def storing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("storing")
    (folder / "models").mkdir()
    save_file({"x": torch.ones(4, 3)}, folder / "models" / "m.safetensors")
    with Serving(folder / "log", "--models", str(folder / "models")) as server:
        yield server.address


@pytest.mark.parametrize("scene", list(SCENES))
def test_whatever_a_server_changes_in_an_answer_is_no_other_error_and_reaches_no_terminal(
        scene: str, storing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    options, run = SCENES[scene]
    lies = 0
    for seed in range(SEEDS):
        liar, texts = Liar(seed, first=int(scene == "named")), []
        if scene == "greeting":
            monkeypatch.setattr(FrameStream, "read", lambda self, liar=liar: liar.read(self))
        try:
            djinn.init(server=storing, connect_timeout_s=5.0, request_timeout_s=10.0, **options)
            monkeypatch.setattr(FrameStream, "read", lambda self, liar=liar: liar.read(self))
            run()
        except DjinnError as error:
            texts.append(str(error))
        except KeyError as error:
            # A model or a value may not be there.
            assert scene in ("named", "models"), liar.lies
            texts.append(str(error))
        finally:
            with suppress(DjinnError):
                djinn.shutdown()
            monkeypatch.undo()
        said = "".join((*texts, caplog.text))
        assert not [text for text in "\x1b\x07\x9b\u202e" if text in said], (liar.lies, said)
        lies += bool(liar.lies)
    assert lies > SEEDS / 2


EARLY = Result((Plain(99),), assumes=b"x" * 16, since=1)


@pytest.mark.parametrize(("lies", "is_caught"), [
    ([EARLY], False), ([EARLY, EARLY], False), ([EARLY] * (MAX_EARLY + 2), True),
    ([Result((Plain(99),), assumes=b"x" * 16, since=9)], True), ([Result((Poisoned(1),), assumes=b"x")], True),
    ([Result((Plain([99] * 2**17),), assumes=b"x")], True)],
    ids=["guess", "twice", "many", "past", "poison", "long"])
def test_what_a_server_guesses_is_no_answer(
        lies: list[Result], is_caught: bool, serve: Any, open_connection: Any) -> None:
    def script(channel: Any) -> None:
        number, _, _ = channel.receive()
        channel.send(number, Welcome(
            PROTOCOL_VERSION, "", "", sys.byteorder, "cpu", "0", resume=bytes(16), lease_s=9.0))
        channel.greeted()
        with suppress(OSError):
            for place, lie in enumerate(lies):
                channel._frames.write(number + 1 + place, lie, ())
            received = channel.receive()
            if received is not None:
                channel.send(received[0], Result((Plain(1),)))

    connection = open_connection(serve(script, greets=False), resume=True)
    if is_caught:
        with pytest.raises(TransportError):
            connection.request(Batch(fetch=(1,)), ())
    else:
        assert connection.request(Batch(fetch=(1,)), ())[0].items == (Plain(1),)
