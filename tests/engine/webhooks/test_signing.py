"""Signatures against an independent reading of the two schemes (E6.1, E6.3)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duly.errors import Invalid
from duly.webhooks.signing import check_secret, is_plain, is_standard, new_secret, sign_plain, sign_standard

KEY = bytes(range(32))
SECRET = "whsec_" + base64.b64encode(KEY).decode()
PLAIN = "a plain secret with no spaces".replace(" ", "-")


def test_a_standard_signature_is_what_the_specification_says() -> None:
    mac = hmac.new(KEY, b"msg_1.1700000000." + b'{"a":1}', hashlib.sha256).digest()
    expected = "v1," + base64.b64encode(mac).decode()
    assert sign_standard(SECRET, id="msg_1", timestamp=1_700_000_000, body=b'{"a":1}') == expected


@pytest.mark.skipif(not shutil.which("openssl"), reason="there is no openssl on this machine")
def test_openssl_makes_the_same_plain_signature() -> None:
    command = ["openssl", "dgst", "-sha256", "-hmac", PLAIN]
    done = subprocess.run(command, input=b'{"a":1}', capture_output=True, check=True)
    assert sign_plain(PLAIN, b'{"a":1}') == done.stdout.decode().split()[-1]


@pytest.mark.parametrize("secret", [SECRET, PLAIN])
@given(body=st.binary(max_size=200), flip=st.integers(0, 10_000))
def test_one_changed_byte_is_another_message(secret: str, body: bytes, flip: int) -> None:
    signature = sign_standard(secret, id="i", timestamp=5, body=body)
    hexed = sign_plain(secret, body)
    assert is_standard([PLAIN + "x", secret], signature, id="i", timestamp="5", body=body)
    assert is_plain([PLAIN + "x", secret], hexed.upper(), body)
    assert is_standard([secret, PLAIN + "x"], f"{signature} v1,AAAA", id="i", timestamp="5", body=body)
    assert is_plain([secret, PLAIN + "x"], hexed, body)
    changed = bytearray(body or b"x")
    changed[flip % len(changed)] ^= 1 + flip % 255
    if bytes(changed) != body:
        assert not is_standard([secret], signature, id="i", timestamp="5", body=bytes(changed))
        assert not is_plain([secret], hexed, bytes(changed))
    assert not is_standard([secret], signature, id="j", timestamp="5", body=body)
    assert not is_standard([secret], signature, id="i", timestamp="6", body=body)


@pytest.mark.parametrize(
    "given",
    ["", " ", "v1", "v1,", "v1,!!!", "v2," + "A" * 44, "v1a,AAAA", "v1," + "A" * 43 + "=", "v1,é", "0" * 64],
)
def test_what_is_no_signature_is_not_right(given: str) -> None:
    assert not is_standard([SECRET], given, id="i", timestamp="5", body=b"")
    assert not is_plain([SECRET], given, b"")


def test_a_signature_of_another_version_is_not_right_although_its_bytes_are() -> None:
    right = sign_standard(SECRET, id="i", timestamp=5, body=b"")
    assert not is_standard([SECRET], "v2" + right.removeprefix("v1"), id="i", timestamp="5", body=b"")


def test_every_pair_is_compared_in_constant_time_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a comparison with == would tell by its time, and what an early end would."""
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def watched(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", watched)
    right = sign_standard(SECRET, id="i", timestamp=5, body=b"")
    assert is_standard([SECRET, PLAIN], f"{right} v1,AAAA v1,BBBB", id="i", timestamp="5", body=b"")
    assert len(compared) == 6
    compared.clear()
    assert is_plain([SECRET, PLAIN], sign_plain(SECRET, b""), b"")
    assert len(compared) == 2


def test_many_signatures_are_looked_at_up_to_a_bound() -> None:
    right = sign_standard(SECRET, id="i", timestamp=5, body=b"")
    assert is_standard([SECRET], " ".join(["v1,AAAA"] * 15 + [right]), id="i", timestamp="5", body=b"")
    assert not is_standard([SECRET], " ".join(["v1,AAAA"] * 16 + [right]), id="i", timestamp="5", body=b"")


def test_made_secrets_are_good_and_never_the_same() -> None:
    made = {new_secret() for _ in range(100)}
    assert len(made) == 100
    for secret in made:
        assert check_secret(secret) == secret


@pytest.mark.parametrize("size", [16, 128])
def test_the_shortest_and_the_longest_key_are_taken(size: int) -> None:
    secret = "whsec_" + base64.b64encode(b"k" * size).decode()
    assert check_secret(secret) == secret


@pytest.mark.parametrize(
    "secret",
    ["", "short", "x" * 201, "with space in the middle", "whsec_AAAA", "whsec_!!!!!!!!!!!!!!!!", "whsec_" + "A" * 20,
     "whsec_" + "A" * 172],
)  # fmt: skip
def test_a_bad_secret_is_refused_without_being_repeated(secret: str) -> None:
    with pytest.raises(Invalid) as refusal:
        check_secret(secret)
    assert not secret or len(secret) < 6 or secret not in str(refusal.value)
