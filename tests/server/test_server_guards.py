"""What a server does when its authenticator, admission policy or output of metrics fails or answers nonsense."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from djinn.errors import ConfigurationError, LimitError, PluginError, RefusedError, TokenEndedError
from djinn_plugins.server.admission import GuardedAdmission, GuardedOrder
from djinn_plugins.server.authentication import Authentication
from djinn_plugins.server.event_loop import Tasks
from djinn_plugins.server.kinds.admission import AdmissionPolicy, ServerLoad, TurnOrder
from djinn_plugins.server.kinds.authenticator import Authenticator
from djinn_plugins.server.kinds.metrics import MetricsOutput, MetricsSource
from djinn_plugins.server.metrics_store import MetricsStore
from djinn_plugins.server.options import ServeOptions
from djinn_plugins.server.outputs import Outputs, ServerMetrics
from djinn_plugins.server.tenants import AuthenticatedClient, Tenant
from djinn_plugins.server.turn_queue import GrantedTurn, TurnQueue, TurnSettings
from djinn_plugins.server.watching import TenantWatch

ANN = Tenant("ann")


class Answering(Authenticator):
    """Answers what it is given, or raises it."""

    def __init__(self, answer: Any, tenant: Tenant | None = None) -> None:
        self.answer = answer
        self.tenant = tenant

    def authenticate(self, token: str, *, resumes: bool = False) -> AuthenticatedClient:
        return self._answered(token)

    def current(self, tenant: Tenant) -> Tenant | None:
        return self._answered("")

    def why_ended(self, tenant: Tenant, token: bytes) -> TokenEndedError | None:
        return self._answered("")

    def _answered(self, token: str) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize("answer", [
    None, True, ANN, "ann", AuthenticatedClient("ann"), AuthenticatedClient(Tenant("")),
    AuthenticatedClient(Tenant("../ann")), AuthenticatedClient(Tenant("ann\n")), AuthenticatedClient(Tenant("a" * 65)),
    AuthenticatedClient(Tenant("(other)")), AuthenticatedClient(Tenant("ann", weight=0)),
    AuthenticatedClient(Tenant("ann", weight=math.nan)), AuthenticatedClient(Tenant("ann", limits={"sessions": 1})),
    AuthenticatedClient(Tenant("ann", key=b"k")), AuthenticatedClient(ANN, "text"),
    AuthenticatedClient(ANN, b"x" * 65), AuthenticatedClient(ANN, expires_s="soon"), OSError("down"),
    ConfigurationError("down"), RefusedError("the token the-token is wrong")], ids=repr)
def test_whatever_an_authenticator_does_wrong_refuses_the_client(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RefusedError, match="cannot check this client") as caught:
        Authentication(Answering(answer)).authenticate("the-token")
    assert "the-token" not in str(caught.value)
    (record,) = caplog.records
    assert "the authenticator failed in authenticate" in record.getMessage()
    assert "the-token" not in record.getMessage()
    assert record.exc_info is None


@pytest.mark.parametrize("says", [False, True, "yes", None])
def test_only_plugins_that_are_quick_run_in_the_event_loop(says: Any) -> None:
    authenticator, policy = Answering(AuthenticatedClient(ANN)), AdmissionPolicy()
    assert not Authentication(authenticator).is_quick
    assert not GuardedAdmission(policy).is_quick
    authenticator.is_quick = policy.is_quick = says
    assert Authentication(authenticator).is_quick is GuardedAdmission(policy).is_quick is (says is True)


def test_a_token_that_is_too_long_reaches_no_authenticator() -> None:
    seen: list[str] = []

    class Recording(Authenticator):
        def authenticate(self, token: str, *, resumes: bool = False) -> AuthenticatedClient:
            seen.append(token)
            return AuthenticatedClient(ANN)

    guarded = Authentication(Recording())
    assert guarded.authenticate("x" * 4096).tenant == ANN
    with pytest.raises(RefusedError, match="too long"):
        guarded.authenticate("x" * 4097)
    assert len(seen) == 1


def test_an_expired_client_is_refused_whatever_the_authenticator_says() -> None:
    with pytest.raises(TokenEndedError, match="expired at 2001-09-09"):
        Authentication(Answering(AuthenticatedClient(ANN, b"id", 1e9))).authenticate("")
    client = AuthenticatedClient(ANN, b"id", 1e9)
    with pytest.raises(TokenEndedError, match="expired at"):
        Authentication(Answering(None)).check_current(client)
    with pytest.raises(RefusedError, match="cannot check"):
        Authentication(Answering(OSError())).check_current(AuthenticatedClient(ANN))


def test_the_watch_of_an_authenticator_that_fails_ends_nothing_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for answer in (OSError("down"), Tenant("bob"), "ann"):
        caplog.clear()
        guarded = Authentication(Answering(answer))
        assert [guarded.current(ANN) for _ in range(3)] == [ANN] * 3
        assert len(caplog.records) == 1
    guarded = Authentication(Answering(OSError("down")))
    assert guarded.why_ended(ANN, b"") is None


class Workers:
    """Stands for a `Supervisor`; notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def tenants(self) -> list[Tenant]:
        return [ANN]

    async def change(self, tenant: Tenant) -> None:
        pass

    async def tell(self, tenant: Tenant, message: Any) -> bool:
        self.told.append((tenant.name, message.token))
        return True


def test_the_server_ends_the_sessions_of_a_token_that_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    workers: Any = Workers()
    watch = TenantWatch(Authentication(Authenticator()), workers, Tasks())
    now = time.time()
    watch.let_in(AuthenticatedClient(ANN, b"soon", now + 100))
    watch.let_in(AuthenticatedClient(ANN, b"later", now + 300))
    watch.let_in(AuthenticatedClient(ANN, b"never"))
    anyio.run(watch.look)
    assert workers.told == []
    monkeypatch.setattr(time, "time", lambda: now + 200)
    anyio.run(watch.look)
    anyio.run(watch.look)
    assert workers.told == [("ann", b"soon")]


class Failing(TurnOrder):
    """Raises in every method, and has ranks that are no numbers."""

    def join(self, tenant: str, weight: float) -> None:
        raise OSError("join")

    reweigh = request = grant = finish = leave = join

    def charge(self, *_: Any, **__: Any) -> None:
        raise OSError("charge")

    def idle(self) -> None:
        raise OSError("idle")

    def rank(self, tenant: str) -> float:
        if tenant == "ann":
            return math.nan
        raise OSError("rank")


def test_a_device_whose_order_fails_is_shared_in_the_order_of_arrival(caplog: pytest.LogCaptureFixture) -> None:
    queue = TurnQueue(TurnSettings(), GuardedOrder(Failing()))
    for now, tenant in enumerate(("ann", "bob", "cid")):
        queue.join(tenant, 1.0)
        queue.ask(tenant, now * 0.001)
    order: list[str] = []
    for now in range(1, 10):
        order += [notice.key for notice in queue.take() if isinstance(notice, GrantedTurn)]
        queue.give_back(order[-1], queue._flows[order[-1]].turn, now, wants_more=True)
    assert order[:6] == ["ann", "bob", "cid"] * 2
    assert len(caplog.records) <= 9, "each method is logged once"


def test_a_policy_that_fails_refuses_the_session(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(AdmissionPolicy):
        def admit(self, tenant: Tenant, load: ServerLoad) -> None:
            raise LimitError("later", retry_after_s=3.0) if tenant.name == "late" else ZeroDivisionError

    with pytest.raises(RefusedError, match="cannot admit"):
        GuardedAdmission(Odd()).admit(ANN, ServerLoad())
    assert caplog.records[0].levelno == logging.ERROR
    with pytest.raises(LimitError, match="later"):
        GuardedAdmission(Odd()).admit(Tenant("late"), ServerLoad())


class Opening:
    """Opens outputs by a function."""

    def __init__(self, name: str, make: Callable[[], MetricsOutput | None]) -> None:
        self.name = name
        self._make = make

    def open(self, options: ServeOptions, source: MetricsSource) -> MetricsOutput | None:
        return self._make()


class Stopping(MetricsOutput):
    """Notes that it was stopped, and fails."""

    address = "http://here"
    stopped = 0

    def stop(self) -> None:
        self.stopped += 1
        raise OSError("cannot stop")


def test_outputs_are_opened_together_or_not_at_all(caplog: pytest.LogCaptureFixture) -> None:
    source = ServerMetrics("0", MetricsStore(), str)
    opened = Stopping()

    def fail() -> MetricsOutput:
        raise OSError("no such socket")

    with pytest.raises(PluginError, match="'broken' cannot be opened: OSError: no such socket"):
        Outputs([Opening("good", lambda: opened), Opening("broken", fail)], ServeOptions(), source)
    assert opened.stopped == 1
    assert "'good' could not be stopped" in caplog.text
    outputs = Outputs([Opening("good", lambda: opened), Opening("none", lambda: None)], ServeOptions(), source)
    assert outputs.addresses == ["http://here"]
    outputs.stop()
    outputs.stop()
    assert opened.stopped == 2
