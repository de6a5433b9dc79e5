"""E5.1: a token is believed only when everything about it is right; every attack is 401."""

from __future__ import annotations

import base64
import datetime
import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from joserfc import jwe
from joserfc.jwk import RSAKey

from duly.auth.tokens import Verifier
from duly.errors import Unauthenticated
from tests.engine.auth.clock import MovedClock
from tests.engine.auth.conftest import Ask
from tests.engine.auth.forge import NOW, assemble, b64, claims, es256, hs256, ps256, rs256, rsa_key, signing_input
from tests.engine.auth.provider import Provider

pytestmark = pytest.mark.asyncio(loop_scope="module")
GOOD_HEADER = {"alg": "RS256", "typ": "JWT", "kid": "first"}


def assert_refused(answer: httpx2.Response, reason: str = "") -> None:
    """401 with the challenge of RFC 6750, which says why in words of ours."""
    assert answer.status_code == 401, answer.text
    detail = answer.json()["detail"]
    assert reason in detail
    assert answer.headers["www-authenticate"] == f'Bearer error="invalid_token", error_description="{detail}"'


async def test_a_good_token_is_a_principal(ask: Ask, provider: Provider) -> None:
    """E5.1."""
    resources = {"duly": {"roles": ["A"]}, "portal": {"roles": ["B"]}, "other": {"roles": ["C"]}}
    answer = await ask(provider.sign(resource_access=resources))
    assert answer.status_code == 200, answer.text
    assert answer.json() == {
        "caller": f"{provider.issuer} alice",
        "subject": "alice",
        "scopes": ["ledger:read", "quality"],
        "roles": ["A", "B", "QUALITY_ENGINEER"],
        "client_id": "web",
    }


# -- the signature and its header ------------------------------------------------------------------


@pytest.mark.parametrize("alg", ["none", "None", "NONE", "nOnE", "", None, 0, ["RS256"], "rs256", "RS256 ", "RS512"])
@pytest.mark.parametrize("signature", [b"", b"x"])
async def test_no_other_algorithm_is_believed_and_no_key_is_even_looked_up(
    alg: Any, signature: bytes, ask: Ask, provider: Provider
) -> None:
    header = {**GOOD_HEADER, "alg": alg}
    assert_refused(await ask(assemble(header, claims(iss=provider.issuer), signature)), "not signed with RS256")
    assert_refused(await ask(rs256(claims(iss=provider.issuer), rsa_key("first"), header)), "not signed with RS256")
    assert provider.fetches == 0


async def test_a_token_without_a_signature_is_refused_whatever_it_says(ask: Ask, provider: Provider) -> None:
    good = provider.sign()
    head, payload, _ = good.split(".")
    assert_refused(await ask(f"{head}.{payload}."), "signature")
    assert_refused(await ask(f"{head}.{payload}"), "not a signed JWT")
    assert (await ask(good)).status_code == 200


@pytest.mark.parametrize("alg", ["HS256", "RS256"])
@pytest.mark.parametrize("form", ["pem", "pem-stripped", "der", "jwk", "modulus"])
async def test_the_public_key_is_no_hmac_secret(form: str, alg: str, ask: Ask, provider: Provider) -> None:
    """E5.1: RS256 to HS256, with every spelling of the public key that a verifier might use as bytes."""
    key = rsa_key("first")
    jwk = key.as_dict(private=False)
    secret = {
        "pem": key.as_pem(private=False),
        "pem-stripped": key.as_pem(private=False).strip(),
        "der": key.as_der(private=False),
        "jwk": json.dumps(jwk).encode(),
        "modulus": str(jwk["n"]).encode(),
    }[form]
    assert_refused(await ask(hs256(claims(iss=provider.issuer), secret, {**GOOD_HEADER, "alg": alg})))


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP256K1()], ids=lambda curve: curve.name)
@pytest.mark.parametrize("alg", ["ES256", "ES384", "ES256K", "RS256"])
async def test_elliptic_curves_are_refused_right_or_wrong(
    alg: str, curve: ec.EllipticCurve, ask: Ask, provider: Provider
) -> None:
    assert_refused(await ask(es256(claims(iss=provider.issuer), {**GOOD_HEADER, "alg": alg}, curve)))


@pytest.mark.parametrize("alg", ["PS256", "RS256"])
async def test_another_padding_of_the_right_key_is_refused(alg: str, ask: Ask, provider: Provider) -> None:
    assert_refused(await ask(ps256(claims(iss=provider.issuer), rsa_key("first"), {**GOOD_HEADER, "alg": alg})))


@pytest.mark.parametrize(
    "extra",
    [
        {"crit": ["exp"]},
        {"crit": ["https://example.com/unknown"], "https://example.com/unknown": True},
        {"crit": []},
        {"crit": None},
        {"crit": ["b64"], "b64": False},
        {"crit": ["b64"], "b64": True},
        {"b64": False},
    ],
)
async def test_extensions_are_refused_before_a_key_is_looked_up(
    extra: dict[str, Any], ask: Ask, provider: Provider
) -> None:
    token = rs256(claims(iss=provider.issuer), rsa_key("first"), {**GOOD_HEADER, **extra})
    assert_refused(await ask(token), "extension")
    assert provider.fetches == 0


async def test_an_unencoded_payload_is_not_a_way_in(ask: Ask, provider: Provider) -> None:
    """RFC 7797: a signature over the raw payload."""
    key = rsa_key("first")
    good = rs256(claims(iss=provider.issuer), key)
    head = b64(json.dumps({**GOOD_HEADER, "b64": False, "crit": ["b64"]}).encode())
    assert_refused(await ask(f"{head}.{good.split('.')[1]}.{good.split('.')[2]}"))


async def test_an_encrypted_token_is_refused(ask: Ask, provider: Provider) -> None:
    """JWE for JWS: anybody can encrypt to a public key."""
    public = RSAKey.import_key(rsa_key("first").as_pem(private=False))
    inner = json.dumps(claims(iss=provider.issuer)).encode()
    header = {"alg": "RSA-OAEP", "enc": "A128CBC-HS256", "kid": "first"}
    assert_refused(await ask(jwe.encrypt_compact(header, inner, public)), "encrypted")
    assert_refused(await ask(f"{provider.sign()}.a.b"), "encrypted")
    assert provider.fetches == 0


def certificate(key: RSAKey) -> str:
    """Self-signed, as x5c wants it."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "provider")])
    start = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    assert key.private_key is not None
    made = (
        x509.CertificateBuilder(name, name, key.public_key, 1, start, start + datetime.timedelta(days=3650))
        .sign(key.private_key, SHA256())
        .public_bytes(Encoding.DER)
    )
    return base64.b64encode(made).decode()


@pytest.mark.parametrize("kid", ["first", "attacker", None])
@pytest.mark.parametrize("bring", ["jwk", "jku", "x5u", "x5c", "all"])
async def test_a_key_that_comes_with_the_token_is_not_used(
    bring: str, kid: str | None, ask: Ask, provider: Provider
) -> None:
    attacker = rsa_key("attacker")
    url = provider.issuer + "/elsewhere"
    brought: dict[str, Any] = {
        "jwk": attacker.as_dict(private=False),
        "jku": url,
        "x5u": url,
        "x5c": [certificate(attacker)],
    }
    chosen = brought if bring == "all" else {bring: brought[bring]}
    header = {name: value for name, value in {**GOOD_HEADER, "kid": kid, **chosen}.items() if value is not None}
    assert_refused(await ask(rs256(claims(iss=provider.issuer), attacker, header)))
    assert provider.strayed == 0
    header["kid"] = "first"
    assert (await ask(rs256(claims(iss=provider.issuer), rsa_key("first"), header))).status_code == 200


@pytest.mark.parametrize(
    "kid",
    [
        "../../../../dev/null",
        "/proc/self/environ",
        "' OR '1'='1",
        "first' UNION SELECT 'key'--",
        "http://169.254.169.254/latest/meta-data",
        "first\x00",
        "\x00",
        "FIRST",
        " first",
        "$(id)",
        "__class__",
    ],
)
async def test_a_kid_is_only_compared_with_known_ones(kid: str, ask: Ask, provider: Provider) -> None:
    header = {**GOOD_HEADER, "kid": kid}
    answer = await ask(rs256(claims(iss=provider.issuer), rsa_key("first"), header))
    assert_refused(answer, "not among the provider's")
    assert provider.fetches == 1
    assert (await ask(provider.sign())).status_code == 200


@pytest.mark.parametrize("kid", ["", "k" * 257, "k" * 9_000, None, 1, True, 1.5, ["first"], {"first": "first"}])
async def test_a_kid_that_is_none_costs_no_fetch(kid: Any, ask: Ask, provider: Provider) -> None:
    header = {**GOOD_HEADER, "kid": kid}
    assert_refused(await ask(rs256(claims(iss=provider.issuer), rsa_key("first"), header)), "does not name the key")
    header.pop("kid")
    assert_refused(await ask(rs256(claims(iss=provider.issuer), rsa_key("first"), header)), "does not name the key")
    assert provider.fetches == 0


async def test_another_key_under_a_known_kid_is_refused(ask: Ask, provider: Provider) -> None:
    assert_refused(await ask(rs256(claims(iss=provider.issuer), rsa_key("attacker"), GOOD_HEADER)), "signature")


async def test_a_payload_or_header_changed_after_signing_is_refused(ask: Ask, provider: Provider) -> None:
    head, payload, signature = provider.sign().split(".")
    richer = b64(json.dumps(claims(iss=provider.issuer, sub="root", scope="quality admin")).encode())
    assert_refused(await ask(f"{head}.{richer}.{signature}"), "signature")
    other = b64(json.dumps({**GOOD_HEADER, "extra": 1}).encode())
    assert_refused(await ask(f"{other}.{payload}.{signature}"), "signature")
    flipped = signature[:-5] + ("A" if signature[-5] != "A" else "B") + signature[-4:]
    assert_refused(await ask(f"{head}.{payload}.{flipped}"), "signature")


async def test_one_token_has_one_spelling(ask: Ask, provider: Provider) -> None:
    """Padding, other alphabets, line breaks and stray bits are not accepted."""
    head, payload, signature = provider.sign().split(".")
    assert len(signature) % 4 == 2  # four bits of the last character are not used
    last = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    stray = last[last.index(signature[-1]) + 1]
    for other in (signature + "==", signature[:-1] + stray, signature[:9] + "%0a" + signature[9:], signature + "é"):
        assert_refused(await ask(f"{head}.{payload}.{other}"), "not a signed JWT")
    assert (await ask(f"{head}.{payload}.{signature}")).status_code == 200


@pytest.mark.parametrize(
    "header",
    [
        b'{"alg":"none","alg":"RS256","kid":"first"}',
        b'{"alg":"RS256","kid":"attacker","kid":"first"}',
        b'{"alg":"RS256","kid":"first","typ":"JWT","typ":"JWT"}',
        b'{"alg":"RS256","kid":"first","x":{"y":1,"y":2}}',
    ],
)
async def test_a_header_with_a_name_twice_is_refused(header: bytes, ask: Ask, provider: Provider) -> None:
    assert_refused(await ask(rs256(claims(iss=provider.issuer), rsa_key("first"), header)), "header")
    assert provider.fetches == 0


async def test_a_payload_with_a_name_twice_is_refused(ask: Ask, provider: Provider) -> None:
    payload = json.dumps(claims(iss=provider.issuer))[:-1] + ',"sub":"root"}'
    assert_refused(await ask(rs256(payload.encode(), rsa_key("first"))), "payload")


@pytest.mark.parametrize(
    "token",
    [
        "garbage",
        "a.b.c",
        "..",
        ".",
        "a.b.c.d",
        "....",
        "e30.e30.e30",
        "bnVsbA.e30.e30",
        "W10.e30.e30",
        "IiI.e30.e30",
        "MQ.e30.e30",
        "%00.%00.%00",
        "x" * 16_385,
        b64(b"[" * 9_000) + ".e30.e30",
        b64(b'{"a":' * 2_000) + ".e30.e30",
        b64(b'{"alg":' + b"9" * 5_000 + b"}") + ".e30.e30",
        b64(b"\xff\xfe{\x00}\x00") + ".e30.e30",
        b64('{"alg":"RS256"}'.encode("utf-16")) + ".e30.e30",
        b64(b'\xef\xbb\xbf{"alg":"RS256","kid":"first"}') + ".e30.e30",
    ],
    ids=lambda token: token[:20],
)
async def test_garbage_is_401_and_costs_no_fetch(token: str, ask: Ask, provider: Provider) -> None:
    assert_refused(await ask(token))
    assert provider.fetches == 0


@pytest.mark.parametrize(
    "payload", [b"", b"null", b"[]", b'"alice"', b"1", b"{", b"[" * 9_000, b"\xff", b'{"exp":NaN}']
)
async def test_a_signed_payload_that_is_no_object_is_401(payload: bytes, ask: Ask) -> None:
    assert_refused(await ask(rs256(payload, rsa_key("first"))), "payload")


async def test_a_token_longer_than_16_kb_is_refused_though_it_is_right(ask: Ask, provider: Provider) -> None:
    assert (await ask(provider.sign(note="x" * 10_000))).status_code == 200
    assert_refused(await ask(provider.sign(note="x" * 12_500)), "too long")


# -- what kind of token ----------------------------------------------------------------------------


@pytest.mark.parametrize("typ", ["JWT", "jwt", "at+jwt", "AT+JWT", "application/at+jwt", "Application/JWT", None])
async def test_access_tokens_by_their_header(typ: str | None, ask: Ask, provider: Provider) -> None:
    header = {"alg": "RS256", "kid": "first", **({"typ": typ} if typ else {})}
    assert (await ask(rs256(claims(iss=provider.issuer), rsa_key("first"), header))).status_code == 200


@pytest.mark.parametrize(
    "typ",
    ["logout+jwt", "dpop+jwt", "secevent+jwt", "id_token", "JOSE", "", " JWT", "application/application/jwt", 1, None],
)
async def test_other_tokens_by_their_header_are_refused(typ: Any, ask: Ask, provider: Provider) -> None:
    token = rs256(claims(iss=provider.issuer), rsa_key("first"), {**GOOD_HEADER, "typ": typ})
    assert_refused(await ask(token), "not an access token")
    assert provider.fetches == 0


@pytest.mark.parametrize("typ", ["ID", "Refresh", "Offline", "Logout", "bearer", "", 1, ["Bearer"]])
async def test_id_and_refresh_tokens_of_keycloak_are_refused(typ: Any, ask: Ask, provider: Provider) -> None:
    assert_refused(await ask(provider.sign(typ=typ)), "not an access token")


@pytest.mark.parametrize("name", ["at_hash", "c_hash", "events"])
async def test_an_id_token_without_typ_is_known_by_its_claims(name: str, ask: Ask, provider: Provider) -> None:
    assert (await ask(provider.sign(typ=None))).status_code == 200
    assert_refused(await ask(provider.sign(typ=None, **{name: "x"})), "not an access token")


# -- issuer, audience, times, subject --------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda issuer: issuer + "/",
        lambda issuer: issuer[:-1],
        lambda issuer: issuer + ".evil.example",
        lambda issuer: issuer.upper(),
        lambda issuer: issuer.replace("http:", "https:"),
        lambda issuer: issuer.replace("127.0.0.1", "localhost"),
        lambda issuer: " " + issuer,
        lambda issuer: issuer + "\x00",
        lambda issuer: [issuer],
        lambda issuer: {issuer: issuer},
        lambda issuer: "",
        lambda issuer: None,
        lambda issuer: True,
    ],
)
async def test_the_issuer_is_exact(change: Callable[[str], Any], ask: Ask, provider: Provider) -> None:
    assert_refused(await ask(provider.sign(iss=change(provider.issuer))), "another issuer")


@pytest.mark.parametrize("aud", ["duly", ["duly"], ["account", "duly"]])
async def test_our_audience_alone_or_among_others(aud: Any, ask: Ask, provider: Provider) -> None:
    assert (await ask(provider.sign(aud=aud))).status_code == 200


@pytest.mark.parametrize(
    "aud",
    [
        *["account", "dul", "duly2", "Duly", "account duly", "duly,account", "", None, True, 0],
        *[[], ["account"], ["dul"], [["duly"]], {"duly": "duly"}, ["duly", 1], ["duly", None]],
    ],
)
async def test_another_audience_is_refused(aud: Any, ask: Ask, provider: Provider) -> None:
    assert_refused(await ask(provider.sign(aud=aud)), "another audience")


async def test_a_token_expires_and_a_little_later_for_clocks_that_differ(
    ask: Ask, provider: Provider, wall: MovedClock
) -> None:
    token = provider.sign(exp=NOW + 60)
    for at, status in ((59, 200), (89.9, 200), (90, 401), (10**6, 401)):
        wall.seconds = NOW + at
        assert (await ask(token)).status_code == status, at
    assert_refused(await ask(token), "expired")


@pytest.mark.parametrize("name", ["nbf", "iat"])
async def test_a_token_from_the_future_is_not_valid_yet(
    name: str, ask: Ask, provider: Provider, wall: MovedClock
) -> None:
    token = provider.sign(**{name: NOW + 100, "exp": NOW + 1000})
    wall.seconds = NOW + 69
    assert_refused(await ask(token), "not valid yet")
    wall.seconds = NOW + 70
    assert (await ask(token)).status_code == 200


@pytest.mark.parametrize("name", ["nbf", "iat"])
async def test_nbf_and_iat_may_be_left_out(name: str, ask: Ask, provider: Provider) -> None:
    assert (await ask(provider.sign(**{name: None}))).status_code == 200


@pytest.mark.parametrize("name", ["exp", "nbf", "iat"])
@pytest.mark.parametrize(
    "value",
    [
        *[b'"1900000000"', b'""', b"true", b"null", b"[1900000000]", b"{}"],
        *[b"1e400", b"-1", b"-1e400", b"1900000000000", b"9" * 400, b"1" + b"0" * 300],
    ],
    ids=lambda value: value.decode()[:14],
)
async def test_a_time_is_a_number_of_seconds(name: str, value: bytes, ask: Ask, provider: Provider) -> None:
    """Also: milliseconds, and numbers beyond any date, with which a token would live for ever."""
    made = claims(iss=provider.issuer)
    made.pop(name)
    payload = json.dumps(made).encode()[:-1] + b',"' + name.encode() + b'":' + value + b"}"
    assert_refused(await ask(rs256(payload, rsa_key("first"))), "not a time in seconds")


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
async def test_numbers_that_json_does_not_know_are_refused(constant: str, ask: Ask, provider: Provider) -> None:
    payload = json.dumps(claims(iss=provider.issuer, exp=1)).replace('"exp": 1', f'"exp": {constant}')
    assert constant in payload
    assert_refused(await ask(rs256(payload.encode(), rsa_key("first"))), "payload")


async def test_a_token_without_exp_is_refused(ask: Ask, provider: Provider) -> None:
    assert_refused(await ask(provider.sign(exp=None)), "exp is not a time")


@pytest.mark.parametrize("sub", ["alice", "a b", "a" * 255, "ülrike", "f:1f2e:alice@example.com"])
async def test_subjects(sub: str, ask: Ask, provider: Provider) -> None:
    answer = await ask(provider.sign(sub=sub))
    assert answer.json()["subject"] == sub


@pytest.mark.parametrize(
    "sub", [None, "", "a" * 256, "a\nb", "a\x00", "a\x7f", "\ud800", "\u202ea", 1, True, ["alice"], {"a": 1}]
)
async def test_a_token_needs_a_subject_that_can_be_written_down(sub: Any, ask: Ask, provider: Provider) -> None:
    assert_refused(await ask(provider.sign(sub=sub)), "whom it is for")


# -- rights ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "scopes"),
    [
        ({"scope": "quality"}, ["quality"]),
        ({"scope": " quality  other "}, ["other", "quality"]),
        ({"scope": None, "scp": "quality other"}, ["other", "quality"]),
        ({"scope": None, "scp": ["quality", "other"]}, ["other", "quality"]),
        ({"scope": None, "scp": ["quality", 1, None, ["other"], "a b", 'q"', "é", ""]}, ["quality"]),
        ({"scope": "quality", "scp": ["other"]}, ["quality"]),
    ],
)
async def test_scopes_in_each_layout(changes: dict[str, Any], scopes: list[str], ask: Ask, provider: Provider) -> None:
    answer = await ask(provider.sign(**changes))
    assert answer.json()["scopes"] == scopes


@pytest.mark.parametrize(
    "changes",
    [
        {"scope": None},
        {"scope": ["quality"]},
        {"scope": {"quality": True}},
        {"scope": 1},
        {"scope": True},
        {"scope": ["quality"], "scp": ["quality"]},
        {"scope": "quality\tother"},
        {"scope": "quality,other"},
        {"scope": "QUALITY"},
        {"scope": None, "scp": {"quality": 1}},
        {"scope": None, "scp": [["quality"]]},
        {"scope": None, "scp": 7},
    ],
)
async def test_a_malformed_scope_gives_no_right(changes: dict[str, Any], ask: Ask, provider: Provider) -> None:
    answer = await ask(provider.sign(**changes))
    assert answer.status_code == 403, answer.text


@pytest.mark.parametrize("value", [None, 1, "x", [], {}, {"roles": None}, {"roles": "A"}, {"roles": {"A": 1}}])
async def test_malformed_roles_give_no_right_and_are_no_error(value: Any, ask: Ask, provider: Provider) -> None:
    for changes in ({"realm_access": value}, {"realm_access": {}, "resource_access": {"duly": value, "portal": value}}):
        answer = await ask(provider.sign(**changes))
        assert (answer.status_code, answer.json()["roles"]) == (200, [])
    answer = await ask(
        provider.sign(realm_access={"roles": [1, None, ["A"], "B", "", "\ud800"]}, resource_access=value)
    )
    assert (answer.status_code, answer.json()["roles"]) == (200, ["B"])


@pytest.mark.parametrize(
    ("changes", "client_id"),
    [
        ({"azp": "web"}, "web"),
        ({"azp": None, "client_id": "service"}, "service"),
        ({"azp": None}, None),
        ({"azp": 1}, None),
        ({"azp": "a\nb"}, None),
    ],
)
async def test_the_client_is_known_if_the_token_says_it(
    changes: dict[str, Any], client_id: str | None, ask: Ask, provider: Provider
) -> None:
    assert (await ask(provider.sign(**changes))).json()["client_id"] == client_id


async def test_no_part_of_a_token_comes_back_in_an_error(verifier: Verifier, provider: Provider) -> None:
    """Canaries in each part, refused for different reasons."""
    canary = "canary-5f1c"
    tokens = [
        provider.sign(sub=canary, exp=1),
        provider.sign(iss=canary),
        provider.sign(aud=canary),
        rs256(claims(iss=provider.issuer), rsa_key("attacker"), {**GOOD_HEADER, "kid": canary}),
        rs256(claims(iss=provider.issuer), rsa_key("attacker"), {**GOOD_HEADER, "typ": canary}),
        rs256(claims(iss=provider.issuer), rsa_key("attacker"), {**GOOD_HEADER, "alg": canary}),
        rs256(f'{{"{canary}": '.encode(), rsa_key("first")),
        canary,
    ]
    for token in tokens:
        with pytest.raises(Unauthenticated) as raised:
            await verifier.verify(token)
        said = f"{raised.value!r} {raised.value.headers}"
        assert canary not in said
        assert raised.value.__cause__ is None
        assert raised.value.__suppress_context__ or raised.value.__context__ is None


async def test_what_is_signed_is_what_is_read() -> None:
    """The forger of these tests signs what it sends."""
    token = rs256(claims(), rsa_key("first"))
    assert token.rpartition(".")[0].encode() == signing_input(GOOD_HEADER, claims())
