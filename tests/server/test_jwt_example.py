"""The authenticator that docs/plugins/authenticator.md shows, against tokens that it must refuse."""

from __future__ import annotations

import sys
import time
import types

import pytest
from support.surroundings.web_tokens import CLAIMS, GOOD, PEM, WRONG, code_of, of

from djinn.errors import RefusedError, TokenEndedError
from djinn_plugins.server.authentication import Authentication
from djinn_plugins.server.options import ServeOptions


@pytest.fixture(scope="module")
def authentication() -> Authentication:
    module = sys.modules["jwt_example"] = types.ModuleType("jwt_example")
    exec(code_of("authenticator.py"), module.__dict__)
    return Authentication(module.JwtAuthenticator(PEM, ServeOptions()))


@pytest.mark.parametrize("name", WRONG)
def test_a_token_that_nobody_should_have_admits_nobody(
        authentication: Authentication, name: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RefusedError):
        authentication.authenticate(WRONG[name])
    assert not caplog.records, "the authenticator has failed instead"


def test_a_token_ends_in_time_though_the_clocks_of_provider_and_server_differ(authentication: Authentication) -> None:
    admitted = authentication.authenticate(of(iat=int(time.time()) + 5, nbf=int(time.time()) + 5))
    assert (admitted.tenant.name, admitted.expires_s) == ("ann", CLAIMS["exp"])
    assert authentication.authenticate(f"{GOOD}==").token == authentication.authenticate(GOOD).token
    for ago_s in (1, 60):
        with pytest.raises(TokenEndedError):
            authentication.authenticate(of(exp=int(time.time()) - ago_s))
