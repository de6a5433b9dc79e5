"""What a dossier is, how its hashes are made, and how a stranger's is checked; no database, no network.

Each record is hashed together with the hash before it, each section begins with a hash of its name and its payment, a
manifest has the head of each section, the head of the dossier is the hash of the manifest, and that head is signed. So
nothing can be changed, dropped, added, put in another order, or taken from another dossier.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from uuid import UUID

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from apps.shared.canonical import NotCanonical, count_parts, encode, parse

KIND = "duly.dossier/"
FORMAT = KIND + "2"
ALGORITHM = "Ed25519"
SECTIONS = (
    "payment", "history", "decisions", "postings", "holds", "events", "deliveries", "callbacks", "alerts", "cases",
    "timelines",
)  # fmt: skip
"""In this order, each of them, always."""
MOST_BYTES = 25_000_000
MOST_PARTS = 400_000
MOST_SECTION_BYTES = 2_000_000
MOST_SECTION_PARTS = 30_000
"""Of one section's records: what does not fit is left out, and the section says so."""
LINK_BYTES, LINK_PARTS = 100, 4
"""What a record costs besides itself."""
REVIEW = "PAYMENT_REVIEW"
KEY_BYTES = 32
_KEY_ID = re.compile(r"[A-Za-z0-9_.-]{1,40}")


class Why(StrEnum):
    """Why something is not there."""

    RETENTION = "retention"  # it was kept for as long as it is kept
    LIMIT = "limit"  # there is more than a dossier holds
    NOT_YET = "not_yet"  # it comes: a seal, within minutes
    ABSENT = "absent"  # it should be there, and is not: somebody should look


@dataclass(frozen=True)
class Missing:
    """Something that is not in a section."""

    what: str
    why: Why


@dataclass(frozen=True)
class Section:
    """Records of one kind, in order, and what is missing of them."""

    name: str
    records: Sequence[Mapping[str, Any]]
    missing: Sequence[Missing] = ()


class Outcome(StrEnum):
    """What a check came to."""

    VALID = "valid"
    FORGED = "forged"
    UNREADABLE = "unreadable"
    SIGNER_UNKNOWN = "signer_unknown"


EXIT_CODES = {Outcome.VALID: 0, Outcome.FORGED: 1, Outcome.UNREADABLE: 2, Outcome.SIGNER_UNKNOWN: 3}


@dataclass(frozen=True)
class Verdict:
    """What a check came to, why, and of a sound dossier what it is about and what it lacks."""

    outcome: Outcome
    reason: str
    payment_id: str = ""
    key_id: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)
    missing: Sequence[str] = ()

    @property
    def is_complete(self) -> bool:
        """Whether a sound dossier lacks nothing."""
        return not self.missing


class Forged(Exception):
    """Something is not as whoever signed it wrote it."""


# -- making ----------------------------------------------------------------------------------------------------------


def compose(payment_id: UUID, created_at: str, sections: Sequence[Section]) -> dict[str, Any]:
    """The dossier without its signature."""
    assert tuple(section.name for section in sections) == SECTIONS
    written = [_write(section, payment_id=str(payment_id), created_at=created_at) for section in sections]
    listed = [{**_standing(one), "count": len(one["records"]), "head": one.pop("head")} for one in written]
    head = hash_manifest(str(payment_id), created_at, listed)
    return {
        "format": FORMAT, "paymentId": str(payment_id), "createdAt": created_at, "sections": written,
        "manifest": {"sections": listed, "head": head},
    }  # fmt: skip


def fit(section: Section) -> Section:
    """The section, or as much of it as a dossier holds: without its largest records.

    So nobody's records push out any that are smaller than theirs. Of a history the end is cut off: it has no holes.
    """
    costs = [_cost(record) for record in section.records]
    order = list(range(len(costs)))
    if section.name != "history":
        order.sort(key=lambda place: max(costs[place][0] / MOST_SECTION_BYTES, costs[place][1] / MOST_SECTION_PARTS))
    size, parts = sum(one[0] for one in costs), sum(one[1] for one in costs)
    while size > MOST_SECTION_BYTES or parts > MOST_SECTION_PARTS:
        last = costs[order.pop()]
        size, parts = size - last[0], parts - last[1]
    left_out = len(costs) - len(order)
    if not left_out:
        return section
    rest = Missing(f"{left_out} records, {'the last' if section.name == 'history' else 'the largest'}", Why.LIMIT)
    return Section(section.name, [section.records[place] for place in sorted(order)], [*section.missing, rest])


def _cost(record: Mapping[str, Any]) -> tuple[int, int]:
    """What a record takes of a section's bytes and parts."""
    spelled = encode(record)
    return len(spelled) + LINK_BYTES, count_parts(spelled.decode()) + LINK_PARTS


def _write(section: Section, *, payment_id: str, created_at: str) -> dict[str, Any]:
    head = begin_section(payment_id, created_at, section.name)
    records = []
    for record in section.records:
        head = hash_record(head, record)
        records.append({"record": record, "hash": head})
    missing = [{"what": one.what, "why": one.why.value} for one in section.missing]
    return {"name": section.name, "complete": not missing, "missing": missing, "records": records, "head": head}


def _standing(section: Mapping[str, Any]) -> dict[str, Any]:
    return {name: section[name] for name in ("name", "complete", "missing")}


def begin_section(payment_id: str, created_at: str, name: str) -> str:
    """What the first record of a section follows: it belongs to this section of this dossier, and no other."""
    return _hash([FORMAT, payment_id, created_at, name])


def hash_record(previous: str, record: Any) -> str:
    """The hash of a record and of everything before it."""
    return _hash([previous, record])


def hash_manifest(payment_id: str, created_at: str, listed: Any) -> str:
    """The head of the dossier."""
    return _hash([FORMAT, payment_id, created_at, listed])


def signed_text(key_id: str, head: str) -> bytes:
    """What the signature is over."""
    return encode([FORMAT, ALGORITHM, key_id, head])


def _hash(value: Any) -> str:
    return hashlib.sha256(encode(value)).hexdigest()


# -- checking --------------------------------------------------------------------------------------------------------


def check(content: bytes, *, trusted: Sequence[bytes]) -> Verdict:
    """Whether a dossier is as it was signed, and by one of these keys; without keys, nobody is trusted."""
    if len(content) > MOST_BYTES:
        return Verdict(Outcome.UNREADABLE, f"a dossier has at most {MOST_BYTES} bytes")
    try:
        found = parse(content, most_parts=MOST_PARTS)
    except NotCanonical as error:
        return Verdict(Outcome.UNREADABLE, f"this cannot be read: {error}")
    if not isinstance(found, dict) or not str(found.get("format")).startswith(KIND):
        return Verdict(Outcome.UNREADABLE, "this is no dossier")
    if found["format"] != FORMAT:
        return Verdict(Outcome.UNREADABLE, f"this is a dossier of another version: here {FORMAT} is read")
    try:
        return _check(found, trusted)
    except Forged as wrong:
        return Verdict(Outcome.FORGED, str(wrong))
    except NotCanonical:
        return Verdict(Outcome.FORGED, "something in it has no canonical spelling")


def _check(found: Mapping[str, Any], trusted: Sequence[bytes]) -> Verdict:
    _only(found, {"format", "paymentId", "createdAt", "sections", "manifest", "signature"}, "the dossier")
    payment_id, created_at = _text(found, "paymentId"), _text(found, "createdAt")
    sections = _list(found, "sections")
    manifest = _object(found.get("manifest"), "the manifest")
    _only(manifest, {"sections", "head"}, "the manifest")
    listed = _list(manifest, "sections")
    heads = [_check_section(_object(one, "a section"), payment_id, created_at) for one in sections]
    if [one["name"] for one in heads] != list(SECTIONS):
        raise Forged("the sections are not those of a dossier, in their order")
    if listed != heads:
        raise Forged("the manifest does not list the sections as they are")
    head = hash_manifest(payment_id, created_at, listed)
    if manifest.get("head") != head:
        raise Forged("the head is not the hash of the manifest")
    _check_whole({one["name"]: one for one in sections}, payment_id)
    key_id, key = _check_signature(_object(found.get("signature"), "the signature"), head)
    lacking = [f"{one['name']}: {miss['what']} ({miss['why']})" for one in listed for miss in one["missing"]]
    facts: dict[str, Any] = {
        "payment_id": payment_id, "key_id": key_id, "counts": {one["name"]: one["count"] for one in listed},
        "missing": lacking,
    }  # fmt: skip
    if not trusted:
        reason = "the hashes and the signature are consistent, but nobody said whose key to trust"
        return Verdict(Outcome.SIGNER_UNKNOWN, reason, **facts)
    if key not in trusted:
        raise Forged("it is signed with a key that is not trusted")
    return Verdict(Outcome.VALID, "every record is as it was signed", **facts)


def _check_section(section: Mapping[str, Any], payment_id: str, created_at: str) -> dict[str, Any]:
    """What the manifest must say of it."""
    _only(section, {"name", "complete", "missing", "records"}, "a section")
    name, missing = _text(section, "name"), _list(section, "missing")
    for one in missing:
        _only(_object(one, "a gap"), {"what", "why"}, "a gap")
        if _text(one, "why") not in set(Why) or not _text(one, "what"):
            raise Forged(f"section {name[:40]!r}: a gap is not explained")
    if section.get("complete") is not (not missing):
        raise Forged(f"section {name[:40]!r}: it says that it is complete, and what is missing, or neither")
    head = begin_section(payment_id, created_at, name)
    records = _list(section, "records")
    for number, one in enumerate(records, 1):
        link = _object(one, f"record {number} of {name[:40]!r}")
        _only(link, {"record", "hash"}, f"record {number} of {name[:40]!r}")
        head = hash_record(head, _object(link.get("record"), "a record"))
        if link.get("hash") != head:
            raise Forged(f"section {name[:40]!r}: record {number} is not what was hashed, or not where it was")
    return {"name": name, "complete": not missing, "missing": missing, "count": len(records), "head": head}


def _check_whole(sections: Mapping[str, Mapping[str, Any]], payment_id: str) -> None:
    """Whether what is called complete can be: also whoever signs cannot call a part the whole."""
    records = {name: [link["record"] for link in section["records"]] for name, section in sections.items()}
    whole = {name for name, section in sections.items() if section["complete"]}
    if "payment" in whole and [one.get("id") for one in records["payment"]] != [payment_id]:
        raise Forged("the dossier is not about the payment that it names")
    numbers = [line.get("number") for line in records["history"]]
    begin = numbers[0] if numbers and isinstance(numbers[0], int) else 1
    if numbers != list(range(begin, begin + len(numbers))):
        raise Forged("the history has a gap that nobody has declared")
    for payment in records["payment"]:
        if "history" in whole and numbers != list(range(1, len(numbers) + 1)):
            raise Forged("the history is called complete, and does not begin at its beginning")
        if "history" in whole and payment.get("version") != len(numbers):
            raise Forged("the history is called complete, and does not end where the payment is")
        wanted = {
            "decisions": [payment.get("decisionId")],
            "postings": [payment.get("transactionId"), payment.get("reversalId")],
            "holds": [payment.get("reviewHoldId"), payment.get("incomingHoldId")],
        }
        for name, ids in wanted.items():
            if name in whole:
                _check_there(name, records[name], ids, of="the payment")
        _check_about(records["cases"], payment, is_whole="cases" in whole)
    if "deliveries" in whole:
        for delivery in records["deliveries"]:
            if delivery.get("attempts") != len(_list(delivery, "log")):
                raise Forged("section 'deliveries' is called complete, and lacks attempts")
    _check_cases(records, whole)


def _check_about(cases: Sequence[Mapping[str, Any]], payment: Mapping[str, Any], *, is_whole: bool) -> None:
    """That each case is about this payment; and that what was held for a review has the case of its review."""
    payment_id = payment.get("id")
    posted = [id for id in (payment.get("transactionId"), payment.get("reversalId")) if id is not None]
    for case in cases:
        if case.get("paymentId") != payment_id and case.get("transactionId") not in posted:
            raise Forged("a case is about something else")
    has_review = any((one.get("kind"), one.get("paymentId")) == (REVIEW, payment_id) for one in cases)
    if is_whole and payment.get("reviewHoldId") is not None and not has_review:
        raise Forged("section 'cases' is called complete, and lacks the case of the payment's review")


def _check_cases(records: Mapping[str, Sequence[Mapping[str, Any]]], whole: set[str]) -> None:
    """That cases, their alerts and their timelines belong together, as far as they are called complete."""
    cases = {_text(case, "id"): case for case in records["cases"]}
    if len(cases) != len(records["cases"]):
        raise Forged("a case is there twice")
    lines: dict[str, list[Any]] = {}
    for line in records["timelines"]:
        lines.setdefault(_text(line, "caseId"), []).append(line.get("number"))
    named: dict[str, list[Any]] = {
        "alerts": [case.get("alertId") for case in records["cases"]],
        "cases": list(lines),
        "decisions": [alert.get("decisionId") for alert in records["alerts"]],
    }
    for name, ids in named.items():
        if name in whole:
            _check_there(name, records[name], ids, of="a case")
    if "cases" in whole:
        _check_chains(cases)
    for case_id, case in cases.items() if "timelines" in whole else ():
        numbers = lines.get(case_id, [])
        if case.get("version") != len(numbers) or numbers != list(range(1, len(numbers) + 1)):
            raise Forged("section 'timelines' is called complete, and lacks lines of a case")


def _check_chains(cases: Mapping[str, Mapping[str, Any]]) -> None:
    """That whatever a case reopens, or is reopened as, is there and says the same, from a first case on."""
    ends = {name: {id: case.get(name) for id, case in cases.items()} for name in ("reopensId", "reopenedAs")}
    for here, there in (("reopensId", "reopenedAs"), ("reopenedAs", "reopensId")):
        for case_id, other in ends[here].items():
            if other is not None and (not isinstance(other, str) or ends[there].get(other) != case_id):
                raise Forged("section 'cases' is called complete, and lacks a case that was reopened, or its follower")
    reached = 0
    for case_id in [id for id, before in ends["reopensId"].items() if before is None]:
        following: Any = case_id
        while following is not None:
            reached, following = reached + 1, ends["reopenedAs"][following]
    if reached != len(cases):
        raise Forged("section 'cases' is called complete, and lacks the case that was reopened first")


def _check_there(name: str, records: Sequence[Mapping[str, Any]], ids: Sequence[Any], *, of: str) -> None:
    """That there is a record with each of these ids."""
    there = {id for one in records if isinstance(id := one.get("id"), str)}
    if any(id is not None and (not isinstance(id, str) or id not in there) for id in ids):
        raise Forged(f"section {name!r} is called complete, and lacks what {of} names")


def _check_signature(signature: Mapping[str, Any], head: str) -> tuple[str, bytes]:
    """Who signed it: the key's id and the key."""
    _only(signature, {"algorithm", "keyId", "publicKey", "value"}, "the signature")
    key_id, key, value = _text(signature, "keyId"), _bytes(signature, "publicKey"), _bytes(signature, "value")
    if signature.get("algorithm") != ALGORITHM or not _KEY_ID.fullmatch(key_id) or len(key) != KEY_BYTES:
        raise Forged("it is not signed as dossiers are")
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(value, signed_text(key_id, head))
    except (InvalidSignature, ValueError):
        raise Forged("the signature is not over this dossier") from None
    return key_id, key


def read_public_key(text: str) -> bytes:
    """A public key as ``duly-dossier key`` writes it: ``id:base64``, or the base64 alone; ValueError otherwise."""
    encoded = text.strip().rpartition(":")[2]
    try:
        key = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise ValueError(f"this is no public key: write base64 of {KEY_BYTES} bytes")
    return key


def _only(found: Mapping[str, Any], names: set[str], what: str) -> None:
    if found.keys() - names:
        raise Forged(f"{what} has members that no hash covers")


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Forged(f"{what} is missing, or not an object")
    return value


def _list(found: Mapping[str, Any], name: str) -> list[Any]:
    value = found.get(name)
    if not isinstance(value, list):
        raise Forged(f"{name} is missing, or not a list")
    return value


def _text(found: Mapping[str, Any], name: str) -> str:
    value = found.get(name)
    if not isinstance(value, str):
        raise Forged(f"{name} is missing, or not text")
    return value


def _bytes(found: Mapping[str, Any], name: str) -> bytes:
    text = _text(found, name)
    try:
        value = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Forged(f"{name} is not base64") from None
    if base64.b64encode(value).decode() != text:  # the last letter has bits that mean nothing
        raise Forged(f"{name} is not base64 as it is written")
    return value
