"""Laws of authenticators."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from djinn.errors import RefusedError, TokenEndedError
from djinn_conformance.assertions import expect, expect_equal
from djinn_conformance.laws import law
from djinn_conformance.subjects import Subject
from djinn_plugins.server.kinds.authenticator import Authenticator, AuthenticatorFactory
from djinn_plugins.server.options import ServeOptions
from djinn_plugins.server.tenant_limits import Limits
from djinn_plugins.server.tenants import MAX_IDENTITY_BYTES, AuthenticatedClient, Tenant, is_tenant_name

Samples = tuple[ServeOptions, list[str], Authenticator]
_TEXT = st.text(max_size=64) | st.binary(max_size=64).map(lambda data: data.decode("utf-8", "surrogateescape"))


@pytest.fixture(scope="module")
def samples(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """Options under which the authenticator admits some tokens, these tokens, and the authenticator."""
    factory: Any = subject.registered.value
    options, tokens = factory.sample(tmp_path_factory.mktemp("authenticator"))
    return options, tokens, factory.open(options)


def _refusal(authenticator: Authenticator, token: str, subject: Subject) -> str:
    """Check that a token is refused, and return the text of the error."""
    try:
        found = authenticator.authenticate(token)
    except (RefusedError, TokenEndedError) as error:
        return str(error)
    except Exception as error:
        raise AssertionError(f"authenticate({token!r}): got {type(error).__name__}: {error}, should be RefusedError "
                             f"[{subject}]") from error
    raise AssertionError(f"authenticate({token!r}): got {found}, should be RefusedError [{subject}]")


@law("authenticator.unknown_refused")
@given(token=_TEXT)
def test_unknown_refused(subject: Subject, plugin: AuthenticatorFactory, samples: Samples, token: str) -> None:
    """Present text of all kinds, unpaired surrogates and null characters included."""
    options, tokens, authenticator = samples
    assume(token not in tokens)
    expect(plugin.check(options), "check of options with tokens", got=False, wanted="True", where=str(subject))
    _refusal(authenticator, token, subject)
    _refusal(authenticator, "", subject)


def _changed(token: str, at: int, how: str) -> str:
    at %= len(token)
    middle = {"change": "A" if token[at] != "A" else "B", "swap case": token[at].swapcase(), "leave out": "",
              "add": token[at] * 2}
    return token[:at] + middle[how] + token[at + 1:]


@law("authenticator.near_misses_refused")
@given(which=st.integers(0, 100), at=st.integers(0, 10_000),
       how=st.sampled_from(["change", "swap case", "leave out", "add", "cut", "continue", "surround"]))
def test_near_misses_refused(subject: Subject, samples: Samples, which: int, at: int, how: str) -> None:
    """Change a token at every place."""
    _, tokens, authenticator = samples
    token = tokens[which % len(tokens)]
    others: dict[str, Callable[[], str]] = {
        "cut": lambda: token[:at % len(token)], "continue": lambda: f"{token}A", "surround": lambda: f" {token} "}
    near = others[how]() if how in others else _changed(token, at, how)
    assume(near not in tokens)
    _refusal(authenticator, near, subject)


@law("authenticator.same_client")
@given(order=st.lists(st.integers(0, 100), min_size=2, max_size=8), resumes=st.booleans())
def test_same_client(subject: Subject, samples: Samples, order: list[int], resumes: bool) -> None:
    """Present tokens in any order, again and again, for new sessions and for resumed ones."""
    _, tokens, authenticator = samples
    first = {token: authenticator.authenticate(token) for token in tokens}
    for index in order:
        token = tokens[index % len(tokens)]
        found = authenticator.authenticate(token, resumes=resumes)
        expect_equal((found.tenant, found.token), (first[token].tenant, first[token].token), "the client",
                     str(subject))
    if authenticator.tenant is None:
        identities = {(found.tenant.name, found.token) for found in first.values()}
        expect_equal(len(identities), len(set(tokens)), "number of identities", str(subject))


@law("authenticator.client_valid")
def test_client_valid(subject: Subject, samples: Samples) -> None:
    """Look at each part of what is returned."""
    _, tokens, authenticator = samples
    for token in tokens:
        found: Any = authenticator.authenticate(token)
        expect(isinstance(found, AuthenticatedClient) and isinstance(found.tenant, Tenant), "the client", got=found,
               wanted="an AuthenticatedClient with a Tenant", where=str(subject))
        name = found.tenant.name
        expect(is_tenant_name(name) if authenticator.tenant is None else name == "", "name of the tenant", got=name,
               wanted="a name, or empty if all clients are one tenant", where=str(subject))
        expect(isinstance(found.tenant.limits, Limits) and 0 < found.tenant.weight < math.inf, "the tenant",
               got=found.tenant, wanted="limits and a weight above 0", where=str(subject))
        expect(isinstance(found.token, bytes) and len(found.token) <= MAX_IDENTITY_BYTES, "identity of the token",
               got=found.token, wanted=f"at most {MAX_IDENTITY_BYTES} bytes", where=str(subject))
        expect(found.expires_s is None or time.time() < found.expires_s, "expiry", got=found.expires_s,
               wanted="in the future, or None", where=str(subject))


@law("authenticator.token_kept_secret")
def test_token_kept_secret(subject: Subject, samples: Samples) -> None:
    """Look for tokens in what is returned and raised."""
    _, tokens, authenticator = samples
    for token in tokens:
        found = authenticator.authenticate(token)
        near = f"{token}A"
        for what, text in (("the client", repr(found)), ("the authenticator", repr(authenticator)),
                           ("the refusal", _refusal(authenticator, near, subject))):
            expect(token not in text, what, got="the token in it", wanted="no token in it", where=str(subject))
        expect(token.encode() not in found.token and found.token not in (token.encode(), token.encode()[:len(
            found.token)] or b"-"), "identity of the token", got="a part of the token", wanted="nothing of the token",
            where=str(subject))


@law("authenticator.admitted_is_current")
def test_admitted_is_current(subject: Subject, samples: Samples) -> None:
    """Ask what the server asks while sessions run."""
    _, tokens, authenticator = samples
    for token in tokens:
        found = authenticator.authenticate(token)
        for identity in (found.token, b""):
            why = authenticator.why_ended(found.tenant, identity)
            expect(why is None, "why_ended", got=why, wanted="None", where=str(subject))
        expect_equal(authenticator.current(found.tenant), found.tenant, "the current tenant", str(subject))


@law("authenticator.renewal_keeps_clients")
def test_renewal_keeps_clients(subject: Subject, plugin: AuthenticatorFactory, samples: Samples) -> None:
    """Prepare, look, use, look."""
    options, tokens, _ = samples
    authenticator = plugin.open(options)
    before = [authenticator.authenticate(token).tenant for token in tokens]
    use = authenticator.prepare(options)
    expect_equal([authenticator.authenticate(token).tenant for token in tokens], before, "tenants once it is prepared",
                 str(subject))
    use()
    expect_equal([authenticator.authenticate(token).tenant for token in tokens], before, "tenants once it is used",
                 str(subject))
