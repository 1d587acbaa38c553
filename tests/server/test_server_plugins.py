"""A server whose authenticator, admission policy and output of metrics are somebody else's."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.clients.tenants import Saturating, Worked, session
from support.servers.serving import Serving

from djinn.errors import LimitError, RefusedError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="djinn serve needs what Linux has")
PLUGINS = """
import json, os, threading
from pathlib import Path
import djinn.plugins
from djinn.errors import LimitError
from djinn_plugins.server.kinds.admission import AdmissionPolicy, TurnOrder
from djinn_plugins.server.kinds.authenticator import Authenticator
from djinn_plugins.server.kinds.metrics import PeriodicOutput
from djinn_plugins.server.tenants import AuthenticatedClient, Tenant

class ByName(Authenticator):
    def authenticate(self, token, *, resumes=False):
        assert threading.current_thread() is not threading.main_thread(), "it may wait"
        if token == "a secret that it fails on":
            raise KeyError(token)
        if token == "nonsense":
            return token
        if token == "no name":
            return AuthenticatedClient(Tenant("../" + token), b"")
        return AuthenticatedClient(Tenant(token), token[::-1].encode())

    def current(self, tenant):
        raise OSError("the directory of users does not answer")

class Authentication:
    name, secret_variables = "by-name", ("OF_THE_GATEWAY",)

    def check(self, options):
        return True

    def open(self, options):
        assert os.environ["OF_THE_GATEWAY"] == "secret"
        return ByName()

class HighFirst(TurnOrder):
    def rank(self, tenant):
        return 0.0 if tenant == "high" else 1.0

class Policy(AdmissionPolicy):
    def admit(self, tenant, load):
        if tenant.name == "late":
            raise LimitError("Come back later.", retry_after_s=120.0)
        if tenant.name == "odd":
            raise ZeroDivisionError

    def order_of(self, device):
        return HighFirst()

class Admission:
    name = "high-first"

    def open(self, options):
        return Policy()

class Lines(PeriodicOutput):
    def __init__(self, source):
        super().__init__(3600.0)
        self.source = source

    def export(self):
        found = {label: totals.counts.requests for label, totals in self.source.totals().items()}
        Path(os.environ["LINES"]).write_text(json.dumps([found, self.source.gateway().rejections]))

class Output:
    name = "lines"

    def open(self, options, source):
        return Lines(source)

djinn.plugins.register(Authentication(), "authenticator")
djinn.plugins.register(Admission(), "admission")
djinn.plugins.register(Output(), "metrics")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plugins")


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Serving]:
    with Serving(place / "log", "--plugins", "authenticator=by-name,admission=high-first,metrics=lines",
                 "--device-turns", "1", "--no-look-ahead", prelude=PLUGINS, OF_THE_GATEWAY="secret",
                 STARTS_FORKSERVER="1", LINES=str(place / "lines.json")) as serving:
        yield serving
    found, rejections = json.loads((place / "lines.json").read_text())
    assert found["high"]["ok"] > 0
    assert rejections["token"] == 3
    assert rejections["admission"] == 2
    assert not {"late", "odd", "nonsense"} & set(found)


@pytest.mark.parametrize("token", ["a secret that it fails on", "nonsense", "no name"])
def test_an_authenticator_that_fails_lets_nobody_in_and_the_log_repeats_no_token(server: Serving, token: str) -> None:
    with pytest.raises(RefusedError, match="cannot check this client"):
        session(server.address, token)
    log = server.log.read_text()
    assert "the authenticator failed in authenticate: " in log
    assert "a secret" not in log


def test_a_policy_says_who_may_start(server: Serving) -> None:
    with pytest.raises((LimitError, RefusedError), match="Come back later"):
        session(server.address, "late", patience_s=5)
    with pytest.raises(RefusedError, match="cannot admit sessions"):
        session(server.address, "odd", patience_s=5)
    assert "ZeroDivisionError" in server.log.read_text()


def test_a_policy_says_who_runs_next(server: Serving) -> None:
    """Fair queueing would give both about the same."""
    with ExitStack() as stack:
        low = stack.enter_context(Saturating(Worked(server.address, "low", 200), ahead=8))
        high = [stack.enter_context(Saturating(Worked(server.address, "high", 200), ahead=8)) for _ in range(3)]

        def done() -> tuple[int, int]:
            return low.done, sum(each.done for each in high)

        while not all(each.done for each in high):
            time.sleep(0.01)
        before = done()
        while done()[1] < before[1] + 600:
            assert not any(each.error for each in (low, *high))
            time.sleep(0.01)
        low_programs, high_programs = (now - then for now, then in zip(done(), before, strict=True))
    assert low_programs * 4 < high_programs, (low_programs, high_programs)


def test_workers_see_no_secret_of_the_authenticator_and_its_failures_end_no_session(server: Serving) -> None:
    with Worked(server.address, "low", 1) as working:
        for worker in server.workers:
            about = Path(f"/proc/{worker}")
            assert b"djinn_plugins.server.forkserver" in (about / "cmdline").read_bytes(), "nothing of the gateway"
            assert b"OF_THE_GATEWAY" not in (about / "environ").read_bytes()
        while "the authenticator failed in current" not in server.log.read_text():
            time.sleep(0.05)
        working.ask()
