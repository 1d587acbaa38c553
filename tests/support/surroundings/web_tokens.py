"""The authenticator that docs/plugins/authenticator.md shows, and tokens that it must refuse.

They are made here, of known classes of attacks on verifiers: what is tried is our example.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PAGE = Path(__file__).parents[3] / "docs" / "plugins" / "authenticator.md"
KEY, OTHER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
PEM = KEY.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
RAW = KEY.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
NOW = int(time.time())
CLAIMS: dict[str, Any] = {"sub": "ann", "aud": "djinn", "iss": "https://login.example.org", "exp": NOW + 3600}


def code_of(module: str) -> str:
    """Return a module of the example."""
    found = re.search(rf"`djinn_authenticator_jwt/{re.escape(module)}`:\n\n```python\n(.*?)```", PAGE.read_text(),
                      re.DOTALL)
    assert found is not None
    return found[1]


def text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def made(header: dict[str, Any], claims: Any, sign: Callable[[bytes], bytes]) -> str:
    parts = [text(each if isinstance(each, bytes) else json.dumps(each).encode()) for each in (header, claims)]
    return ".".join([*parts, text(sign(".".join(parts).encode()))])


def of(**changed: Any) -> str:
    """A token of the provider's, with other claims; ``None`` leaves one out."""
    return made({"alg": "EdDSA"}, {name: value for name, value in (CLAIMS | changed).items() if value is not None},
                KEY.sign)


def hmac_of(secret: bytes) -> Callable[[bytes], bytes]:
    return lambda data: hmac.new(secret, data, hashlib.sha256).digest()


GOOD = of()
HEAD, BODY, SIGNATURE = GOOD.split(".")
WRONG = {
    **{f"algorithm {name}": made({"alg": name}, CLAIMS, lambda _: b"") for name in ("none", "None", "nOnE", "", None)},
    "no algorithm, signed": made({"alg": "none"}, CLAIMS, KEY.sign), "no header": made({}, CLAIMS, KEY.sign),
    "algorithms": made({"alg": ["EdDSA"]}, CLAIMS, KEY.sign),
    **{f"public key as a secret, {name}": made({"alg": algorithm}, CLAIMS, hmac_of(secret))
       for algorithm in ("HS256", "EdDSA") for name, secret in (("PEM", PEM), ("raw", RAW), ("empty", b""))},
    "another key": made({"alg": "EdDSA"}, CLAIMS, OTHER.sign),
    "another kind of key": jwt.encode(CLAIMS, ec.generate_private_key(ec.SECP256R1()), "ES256"),
    "a key in the header": made({"alg": "EdDSA", "jwk": {"kty": "OKP", "crv": "Ed25519", "x": text(
        OTHER.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw))}}, CLAIMS,
        OTHER.sign),
    "a key elsewhere": made({"alg": "EdDSA", "jku": "http://127.0.0.1:1/", "kid": "../../null"}, CLAIMS, OTHER.sign),
    "unknown and critical": made({"alg": "EdDSA", "crit": ["later"], "later": 1}, CLAIMS, KEY.sign),
    "not valid yet": of(nbf=NOW + 3000), "issued later": of(iat=NOW + 3000),
    **{f"no {claim}": of(**{claim: None}) for claim in CLAIMS},
    "another audience": of(aud="djinn2"), "other audiences": of(aud=["a", "b"]), "another issuer": of(iss="x"),
    "issuers": of(iss=[CLAIMS["iss"]]), "an end in words": of(exp="never"), "ends": of(exp=[NOW + 3600]),
    "an endless end": of(exp=float("inf")), "no number as its end": of(exp=float("nan")),
    "a path as subject": of(sub="../ann"), "no subject": of(sub=""), "a line as subject": of(sub="ann\n"),
    "subjects": of(sub=["ann"]), "a number as subject": of(sub=5), "a long subject": of(sub="a" * 65),
    **{f"weight {weight}": of(djinn_weight=weight) for weight in (float("nan"), float("inf"), -1, 0, "x", [1], 1e308)},
    "another payload": f"{HEAD}.{text(json.dumps(CLAIMS | {'sub': 'bob'}).encode())}.{SIGNATURE}",
    "no signature": f"{HEAD}.{BODY}.", "two parts": f"{HEAD}.{BODY}", "four parts": f"{GOOD}.x",
    "half a signature": GOOD[:-40], "zeros as signature": f"{HEAD}.{BODY}.{text(bytes(64))}", "blank": f" {GOOD}",
    "a list": made({"alg": "EdDSA"}, [], KEY.sign), "no JSON": made({"alg": "EdDSA"}, b"{", KEY.sign),
    "no text": made({"alg": "EdDSA"}, b"\xff\xfe", KEY.sign), "giant": GOOD + "a" * 4096, "dots": "." * 4000,
    "nothing": "", "surrogates": "\udcff.\udcff.\udcff",
}
