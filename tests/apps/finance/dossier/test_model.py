"""Hashes, signatures, and whoever tries to change a dossier: each change is noticed."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st

from apps.finance.dossier.model import (
    FORMAT,
    MOST_PARTS,
    MOST_SECTION_BYTES,
    MOST_SECTION_PARTS,
    SECTIONS,
    Missing,
    Outcome,
    Section,
    Why,
    begin_section,
    check,
    compose,
    fit,
    hash_manifest,
    hash_record,
    read_public_key,
)
from apps.finance.dossier.signing import Signer
from apps.shared.canonical import encode

PAYMENT = UUID("01900000-0000-7000-8000-000000000001")
DECISION, POSTED, HELD, ALERT, FIRST, SECOND = (str(UUID(int=number)) for number in range(2, 8))
SEED, OTHER = b"s" * 32, b"o" * 32
SIGNER = Signer({"2026": SEED})
TRUSTED = [read_public_key(key) for key in SIGNER.public_keys().values()]
RECORDS: dict[str, list[dict[str, Any]]] = {
    "payment": [
        {"id": str(PAYMENT), "version": 3, "decisionId": DECISION, "transactionId": POSTED, "reviewHoldId": HELD,
         "amount": "10.00"},
    ],
    "history": [{"number": n, "toState": state} for n, state in enumerate(("PROCESSING", "UNKNOWN", "COMPLETED"), 1)],
    "decisions": [{"id": DECISION, "decision": "APPROVE", "trace": [{"rule": "a", "matched": False}]}],
    "postings": [{"id": POSTED, "entries": [{"amount": "10.00"}, {"amount": "-10.00"}], "seal": {"number": 1}}],
    "holds": [{"id": HELD, "status": "VOIDED"}],
    "events": [{"id": str(uuid4()), "type": "payment.created"}, {"id": str(uuid4()), "type": "payment.completed"}],
    "deliveries": [{"number": 1, "status": "DELIVERED", "attempts": 2, "log": [{"number": 1}, {"number": 2}]}],
    "callbacks": [],
    "alerts": [{"id": ALERT, "decisionId": DECISION}],
    "cases": [
        {"id": FIRST, "kind": "PAYMENT_REVIEW", "paymentId": str(PAYMENT), "transactionId": None, "alertId": ALERT,
         "version": 2, "reopensId": None, "reopenedAs": SECOND},
        {"id": SECOND, "kind": "PAYMENT_REVIEW", "paymentId": str(PAYMENT), "transactionId": None, "alertId": ALERT,
         "version": 1, "reopensId": FIRST, "reopenedAs": None},
    ],
    "timelines": [
        {"caseId": FIRST, "number": 1, "kind": "OPENED"}, {"caseId": FIRST, "number": 2, "kind": "RESOLVED"},
        {"caseId": SECOND, "number": 1, "kind": "OPENED"},
    ],
}  # fmt: skip
CASE, FOLLOWER = RECORDS["cases"]
LINES = RECORDS["timelines"]


def make(
    records: dict[str, list[dict[str, Any]]] | None = None, *, signer: Signer = SIGNER, at: str = "2026-03-01",
    missing: dict[str, list[Missing]] | None = None, payment: UUID = PAYMENT,
) -> dict[str, Any]:  # fmt: skip
    given = RECORDS | (records or {})
    sections = [Section(name, given[name], (missing or {}).get(name, ())) for name in SECTIONS]
    made = compose(payment, at, sections)
    return {**copy.deepcopy(made), "signature": signer.sign(made["manifest"]["head"])}


def outcome(dossier: Any, trusted: list[bytes] | None = None) -> Outcome:
    return check(encode(dossier), trusted=TRUSTED if trusted is None else trusted).outcome


def rehash(dossier: dict[str, Any]) -> dict[str, Any]:
    """What a forger does who knows how hashes are made, and has no key."""
    payment, at = dossier["paymentId"], dossier["createdAt"]
    listed = []
    for section in dossier["sections"]:
        head = begin_section(payment, at, section["name"])
        for link in section["records"]:
            head = link["hash"] = hash_record(head, link["record"])
        standing = {name: section[name] for name in ("name", "complete", "missing")}
        listed.append({**standing, "count": len(section["records"]), "head": head})
    dossier["manifest"] = {"sections": listed, "head": hash_manifest(payment, at, listed)}
    return dossier


def test_a_dossier_is_valid_for_whoever_trusts_its_key() -> None:
    verdict = check(encode(make()), trusted=TRUSTED)
    assert (verdict.outcome, verdict.payment_id, verdict.key_id) == (Outcome.VALID, str(PAYMENT), "2026")
    assert verdict.is_complete
    assert verdict.counts == {name: len(RECORDS[name]) for name in SECTIONS}
    pretty = json.dumps(make(), indent=3, sort_keys=False).encode()
    assert check(pretty, trusted=TRUSTED).outcome is Outcome.VALID, "the spelling of the file does not matter"


def test_without_a_trusted_key_nothing_is_valid() -> None:
    assert outcome(make(), []) is Outcome.SIGNER_UNKNOWN
    forged = rehash(make({"events": []}))
    forged["signature"] = Signer({"2026": OTHER}).sign(forged["manifest"]["head"])
    assert outcome(forged, []) is Outcome.SIGNER_UNKNOWN, "anybody can make one"
    assert outcome(forged) is Outcome.FORGED


def test_an_older_key_is_trusted_beside_a_newer_one() -> None:
    both = Signer({"2027": OTHER, "2026": SEED})
    keys = [read_public_key(f"{key_id}:{key}") for key_id, key in both.public_keys().items()]
    assert [outcome(make(), keys), outcome(make(signer=both), keys)] == [Outcome.VALID] * 2
    assert outcome(make(signer=both)) is Outcome.FORGED


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a dossier."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    return [path, *(one for key, part in inner for one in leaves(part, (*path, key)))] if path or inner else [path]


PATHS = [path for path in leaves(make()) if path]
OTHERS = st.sampled_from([None, True, False, 0, 1, -1, "", "x", [], {}, [1], {"a": 1}, "0" * 64, 2**40])


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(PATHS), OTHERS)
def test_any_value_that_is_changed_is_noticed(path: tuple[Any, ...], other: Any) -> None:
    dossier = make()
    holder = dossier
    for key in path[:-1]:
        holder = holder[key]
    before = holder[path[-1]]
    holder[path[-1]] = other
    same = type(before) is type(other) and before == other
    assert (outcome(dossier) is Outcome.VALID) == same


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(PATHS))
def test_any_part_that_is_dropped_is_noticed(path: tuple[Any, ...]) -> None:
    dossier = make()
    holder = dossier
    for key in path[:-1]:
        holder = holder[key]
    del holder[path[-1]]
    assert outcome(dossier) in (Outcome.FORGED, Outcome.UNREADABLE)


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=1, max_size=1), st.integers(0, len(encode(make())) - 1))
def test_any_byte_that_is_changed_is_noticed(byte: bytes, place: int) -> None:
    content = encode(make())
    changed = content[:place] + byte + content[place + 1 :]
    assert (check(changed, trusted=TRUSTED).outcome is Outcome.VALID) == (changed == content)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(encode(make())) - 1))
def test_a_file_that_ends_early_is_not_readable(length: int) -> None:
    assert check(encode(make())[:length], trusted=TRUSTED).outcome is Outcome.UNREADABLE


def drop_record(dossier: dict[str, Any]) -> None:
    dossier["sections"][1]["records"].pop()


def drop_first(dossier: dict[str, Any]) -> None:
    dossier["sections"][1]["records"].pop(0)


def drop_middle(dossier: dict[str, Any]) -> None:
    dossier["sections"][1]["records"].pop(1)


def repeat_record(dossier: dict[str, Any]) -> None:
    dossier["sections"][5]["records"] *= 2


def reorder_records(dossier: dict[str, Any]) -> None:
    dossier["sections"][5]["records"].reverse()


def add_record(dossier: dict[str, Any]) -> None:
    dossier["sections"][10]["records"].append({"record": {"what": "a line"}, "hash": "0" * 64})


def swap_sections(dossier: dict[str, Any]) -> None:
    dossier["sections"][5], dossier["sections"][6] = dossier["sections"][6], dossier["sections"][5]


def swap_records_of_sections(dossier: dict[str, Any]) -> None:
    first, second = dossier["sections"][5], dossier["sections"][6]
    first["records"], second["records"] = second["records"], first["records"]


def drop_section(dossier: dict[str, Any]) -> None:
    dossier["sections"].pop(10)


def rename_section(dossier: dict[str, Any]) -> None:
    dossier["sections"][10]["name"] = "notes"


def call_it_incomplete(dossier: dict[str, Any]) -> None:
    dossier["sections"][5] |= {"complete": False, "missing": [{"what": "events", "why": "retention"}]}


def add_member(dossier: dict[str, Any]) -> None:
    dossier["note"] = "this payment is fine"


def add_member_to_a_section(dossier: dict[str, Any]) -> None:
    dossier["sections"][0]["note"] = "this payment is fine"


def add_member_to_a_link(dossier: dict[str, Any]) -> None:
    dossier["sections"][0]["records"][0]["note"] = "this payment is fine"


def rename_payment(dossier: dict[str, Any]) -> None:
    dossier["paymentId"] = str(uuid4())


TAMPERS: list[Callable[[dict[str, Any]], None]] = [
    drop_record, drop_first, drop_middle, repeat_record, reorder_records, add_record, swap_sections,
    swap_records_of_sections, drop_section, rename_section, call_it_incomplete, add_member, add_member_to_a_section,
    add_member_to_a_link, rename_payment,
]  # fmt: skip


@pytest.mark.parametrize("knows_hashes", [False, True])
@pytest.mark.parametrize("tamper", TAMPERS)
def test_a_forger_without_the_key_is_found_out(tamper: Callable[[dict[str, Any]], None], knows_hashes: bool) -> None:
    """Also one who makes all hashes anew: the signature is over the head."""
    dossier = make()
    tamper(dossier)
    if knows_hashes:
        rehash(dossier)
    verdict = check(encode(dossier), trusted=TRUSTED)
    assert verdict.outcome is Outcome.FORGED
    assert "this payment is fine" not in verdict.reason


def test_a_section_of_another_dossier_does_not_fit() -> None:
    """The same payment, an hour later: neither the records nor the manifest nor the signature can be mixed."""
    one, other = make(), make({"events": []}, at="2026-03-01T01")
    for part in ("manifest", "signature"):
        assert outcome({**one, part: other[part]}) is Outcome.FORGED
    mixed = copy.deepcopy(one)
    mixed["sections"][5] = other["sections"][5]
    mixed["manifest"]["sections"][5] = other["manifest"]["sections"][5]
    assert outcome(mixed) is Outcome.FORGED


@pytest.mark.parametrize(
    "records",
    [
        {"history": RECORDS["history"][1:]}, {"history": RECORDS["history"][:2]}, {"history": RECORDS["history"][::2]},
        {"history": []}, {"history": RECORDS["history"][::-1]}, {"decisions": []}, {"postings": []}, {"payment": []},
        {"payment": [{"id": str(uuid4())}]}, {"history": [{"number": "1"}, {"number": None}, {}]}, {"holds": []},
        {"payment": [RECORDS["payment"][0] | {"decisionId": []}]}, {"postings": [{"id": {}}]},
    ],
)  # fmt: skip
def test_whoever_signs_cannot_call_a_part_the_whole(records: dict[str, Any]) -> None:
    """Properly signed, and still not believed: it says complete, and cannot be."""
    assert outcome(make(records)) is Outcome.FORGED


ELSEWHERE = str(UUID(int=99))
PARTS_OF_CASES: dict[str, dict[str, list[dict[str, Any]]]] = {
    "what was held for a review has no case": {"cases": [], "timelines": [], "alerts": []},
    "its case is of another kind": {
        "cases": [CASE | {"kind": "AML", "reopenedAs": None}], "timelines": LINES[:2],
    },
    "the end of a timeline is cut off": {"timelines": [LINES[0], LINES[2]]},
    "the beginning of a timeline is cut off": {"timelines": LINES[1:]},
    "a timeline is gone": {"timelines": LINES[:2]},
    "all timelines are gone": {"timelines": []},
    "a line is there twice": {"timelines": [LINES[0], LINES[0], LINES[2]]},
    "lines are out of order": {"timelines": [LINES[1], LINES[0], LINES[2]]},
    "a version is no number": {"cases": [CASE | {"version": "2"}, FOLLOWER]},
    "a timeline has no case": {"timelines": [*LINES, {"caseId": ELSEWHERE, "number": 1}]},
    "a line is of nothing": {"timelines": [*LINES, {"caseId": None, "number": 1}]},
    "what a case was reopened as is gone": {"cases": [CASE], "timelines": LINES[:2]},
    "what a case reopens is gone": {"cases": [FOLLOWER], "timelines": LINES[2:]},
    "what a case reopens is hidden": {"cases": [CASE | {"reopenedAs": None}, FOLLOWER]},
    "what follows a case denies it": {"cases": [CASE, FOLLOWER | {"reopensId": None}]},
    "the first case is gone, and the others are a ring": {
        "cases": [CASE | {"reopensId": SECOND}, FOLLOWER | {"reopenedAs": FIRST}],
    },
    "a case reopens a list": {"cases": [CASE, FOLLOWER | {"reopensId": [FIRST]}]},
    "a case is there twice": {"cases": [CASE, FOLLOWER, FOLLOWER]},
    "a case has no id": {"cases": [CASE, FOLLOWER | {"id": None}]},
    "a case is about another payment": {"cases": [CASE, FOLLOWER | {"paymentId": ELSEWHERE}]},
    "an alert is gone": {"alerts": []},
    "the decision of an alert is gone": {"alerts": [{"id": ALERT, "decisionId": ELSEWHERE}]},
    "attempts are gone": {"deliveries": [RECORDS["deliveries"][0] | {"log": [{"number": 2}]}]},
    "all attempts are gone": {"deliveries": [{"number": 1, "attempts": 2}]},
}  # fmt: skip


@pytest.mark.parametrize("kind", PARTS_OF_CASES)
def test_whoever_signs_cannot_call_a_part_of_the_cases_the_whole(kind: str) -> None:
    assert outcome(make(PARTS_OF_CASES[kind])) is Outcome.FORGED


def test_what_is_gone_of_cases_is_stated_and_not_forged() -> None:
    """The same parts, when they are said to be parts."""
    for kind in ("what was held for a review has no case", "the end of a timeline is cut off", "an alert is gone",
                 "what a case was reopened as is gone", "attempts are gone"):  # fmt: skip
        gone = {name: [Missing("some of it", Why.ABSENT)] for name in PARTS_OF_CASES[kind]}
        verdict = check(encode(make(PARTS_OF_CASES[kind], missing=gone)), trusted=TRUSTED)
        assert (verdict.outcome, verdict.is_complete) == (Outcome.VALID, False), (kind, verdict.reason)


def test_a_case_of_its_posting_needs_no_payment() -> None:
    """What screening found in the books afterwards."""
    other = CASE | {"id": ELSEWHERE, "kind": "AML", "paymentId": None, "transactionId": POSTED, "reopenedAs": None,
                    "version": 1}  # fmt: skip
    lines = [*LINES, {"caseId": ELSEWHERE, "number": 1}]
    assert outcome(make({"cases": [*RECORDS["cases"], other], "timelines": lines})) is Outcome.VALID


@pytest.mark.parametrize("why", list(Why))
def test_what_is_gone_is_stated_and_neither_whole_nor_forged(why: Why) -> None:
    """History that was cut is not history that was tampered with."""
    missing = {"history": [Missing("lines before 2", why)], "decisions": [Missing(f"decision {DECISION}", why)]}
    cut = make({"history": RECORDS["history"][1:], "decisions": []}, missing=missing)
    verdict = check(encode(cut), trusted=TRUSTED)
    assert (verdict.outcome, verdict.is_complete) == (Outcome.VALID, False)
    assert verdict.missing == [f"history: lines before 2 ({why})", f"decisions: decision {DECISION} ({why})"]
    gap = make({"history": RECORDS["history"][::2]}, missing=missing)
    assert outcome(gap) is Outcome.FORGED, "a gap in the middle is no cut"


@pytest.mark.parametrize(
    "signature",
    [
        {}, {"algorithm": "none"}, {"algorithm": "ed25519"}, {"value": ""}, {"value": "AAAA"}, {"value": "%%"},
        {"publicKey": base64.b64encode(b"\0" * 32).decode()}, {"publicKey": ""}, {"keyId": ""}, {"keyId": "a b"},
        {"keyId": "2027"}, {"value": base64.b64encode(b"\0" * 64).decode()}, {"publicKey": 7}, {"extra": 1},
    ],
)  # fmt: skip
def test_a_signature_that_is_none_is_refused(signature: dict[str, Any]) -> None:
    dossier = make()
    dossier["signature"] = {**dossier["signature"], **signature} if signature else signature
    assert outcome(dossier) is Outcome.FORGED
    assert outcome(dossier, []) is Outcome.FORGED
    assert outcome({name: part for name, part in dossier.items() if name != "signature"}) is Outcome.FORGED


@pytest.mark.parametrize(
    "content",
    [
        b"[]",
        b"null",
        b"7",
        b'"text"',
        b"{}",
        b'{"format": null}',
        b"\x00",
        b"PK\x03\x04",
    ],
)
def test_what_is_no_dossier_is_not_readable(content: bytes) -> None:
    assert check(content, trusted=TRUSTED).outcome is Outcome.UNREADABLE


@pytest.mark.parametrize("version", ["duly.dossier/1", "duly.dossier/3", "duly.dossier/20", "duly.dossier/"])
def test_a_dossier_of_another_version_is_refused_and_told_apart(version: str) -> None:
    """What was not checked of it then is not called valid now."""
    verdict = check(encode({**make(), "format": version}), trusted=TRUSTED)
    assert (verdict.outcome, verdict.reason) == (
        Outcome.UNREADABLE, f"this is a dossier of another version: here {FORMAT} is read",
    )  # fmt: skip
    assert check(b'{"format": "x"}', trusted=TRUSTED).reason == "this is no dossier"


def test_a_section_that_is_too_long_is_cut_and_says_so() -> None:
    records = [{"number": n, "payload": "x" * 100_000} for n in range(50)]
    cut = fit(Section("events", records))
    assert 0 < len(cut.records) < 50
    assert sum(len(encode(one)) for one in cut.records) <= MOST_SECTION_BYTES
    assert cut.missing == [Missing(f"{50 - len(cut.records)} records, the largest", Why.LIMIT)]
    assert list(cut.records) == records[: len(cut.records)], "of those that are as large the first stay"
    small = Section("events", records[:3])
    assert fit(small) is small
    many = fit(Section("events", [{"a": [1] * 5_000}] * 100))
    assert len(many.records) < 100, "parts count, too"


def test_no_record_pushes_out_one_that_is_smaller() -> None:
    """However large, and wherever it stands: the others are all there, in their order."""
    small = [{"number": number, "text": "so"} for number in range(100)]
    huge = {"number": 7, "text": "x" * (MOST_SECTION_BYTES + 1)}
    wide = {"number": 8, "list": [1] * (MOST_SECTION_PARTS + 1)}
    for name in ("timelines", "events", "cases"):
        cut = fit(Section(name, [huge, *small[:50], wide, *small[50:]]))
        assert list(cut.records) == small
        assert cut.missing == [Missing("2 records, the largest", Why.LIMIT)]
    many = fit(Section("timelines", [*({"text": "x" * 4_000} for _ in range(600)), *small]))
    assert list(many.records)[-100:] == small


def test_what_is_written_in_a_record_is_no_part_of_it() -> None:
    """Somebody who writes nothing but commas makes a section longer, and not wider."""
    said = Section("timelines", [{"number": number, "text": ",[{" * 4_000} for number in range(30)])
    assert fit(said) is said
    lines = [{"caseId": FIRST, "number": number, "text": ",[{" * 3_000} for number in range(1, 101)]
    assert sum(encode(line).count(b",") for line in lines) * 3 > MOST_PARTS * 2, "more than a whole dossier's"
    cases = [CASE | {"version": 100, "reopenedAs": None}]
    assert outcome(make({"cases": cases, "timelines": lines})) is Outcome.VALID


def test_of_a_history_the_end_is_cut_off() -> None:
    lines = [{"number": number, "detail": "x" * (9_000 if number == 2 else 5_000)} for number in range(1, 501)]
    cut = fit(Section("history", lines))
    assert list(cut.records) == lines[: len(cut.records)]
    assert 300 < len(cut.records) < 500
    assert cut.missing == [Missing(f"{500 - len(cut.records)} records, the last", Why.LIMIT)]
    assert (
        outcome(make({"history": lines[: len(cut.records)]}, missing={"history": list(cut.missing)})) is Outcome.VALID
    )


@pytest.mark.parametrize("text", ["", "x", "AAAA", base64.b64encode(b"1" * 31).decode(), "id:", "a:b:%%"])
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no public key"):
        read_public_key(text)


@pytest.mark.parametrize("part", ["value", "publicKey"])
def test_a_signature_is_written_in_one_way_only(part: str) -> None:
    """Base64 has letters of which some bits mean nothing: the same bytes in other letters are another file."""
    made = make()
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    written = made["signature"][part]
    place = len(written.rstrip("=")) - 1
    other = written[:place] + letters[letters.index(written[place]) ^ 1] + written[place + 1 :]
    assert base64.b64decode(other) == base64.b64decode(written)
    made["signature"][part] = other
    assert outcome(made) is Outcome.FORGED


def test_the_hashes_are_those_of_the_documentation() -> None:
    """docs/howto/dossier.md: whoever checks with a program of their own comes to the same."""

    def c(value: Any) -> bytes:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    def h(value: Any) -> str:
        return hashlib.sha256(c(value)).hexdigest()

    made = make()
    about = ["duly.dossier/2", made["paymentId"], made["createdAt"]]
    for section, listed in zip(made["sections"], made["manifest"]["sections"], strict=True):
        head = h([*about, section["name"]])
        for link in section["records"]:
            head = h([head, link["record"]])
            assert link["hash"] == head
        assert listed["head"] == head
    assert made["manifest"]["head"] == h([*about, made["manifest"]["sections"]])
    signed = made["signature"]
    key = Ed25519PublicKey.from_public_bytes(base64.b64decode(signed["publicKey"]))
    said = c(["duly.dossier/2", "Ed25519", signed["keyId"], made["manifest"]["head"]])
    key.verify(base64.b64decode(signed["value"]), said)  # raises when it is not over that
