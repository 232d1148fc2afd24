"""PII scrubbing: private data replaced by tags, each kind counted; what has a checksum must pass it."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_BYTE = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
_GROUP = r"[0-9a-f]{1,4}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One kind of private data: what looks like it, and what proves it. `hints` are strings of which one is
    in every text that holds it: most texts hold none, and are not searched."""

    name: str
    pattern: re.Pattern[str]
    proof: Callable[[str], bool] = lambda found: True
    hints: Sequence[str] = ()

    @property
    def tag(self) -> str:
        return f"<{self.name.upper()}>"


def scrubbed(text: str, kinds: Sequence[Kind]) -> tuple[str, Counter[str]]:
    """A text with tags for what is private, and how many of each kind there were."""
    counts: Counter[str] = Counter()
    for kind in kinds:
        if kind.hints and not any(hint in text for hint in kind.hints):
            continue

        def replaced(match: re.Match[str], kind: Kind = kind) -> str:
            if not kind.proof(match[0]):
                return match[0]
            counts[kind.name] += 1
            return kind.tag

        text = kind.pattern.sub(replaced, text)
    return text, counts


def _digits(found: str) -> list[int]:
    return [int(character) for character in found if character.isdigit()]


def is_card(found: str) -> bool:
    """Luhn's sum, the first digits of an issuer, and a length that cards have."""
    digits = _digits(found)
    doubled = [digit * 2 - 9 * (digit > 4) for digit in digits[-2::-2]]
    return (
        13 <= len(digits) <= 19
        and digits[0] in (2, 3, 4, 5, 6)
        and len(set(digits)) > 1
        and (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0
    )


def is_korean_resident(found: str) -> bool:
    """YYMMDD-SNNNNNC: a date, a digit for century and sex, and a checksum modulo 11. Numbers given out since
    October 2020 have no checksum: those count where the date is of 2020 or later."""
    digits = _digits(found)
    year, month, day = digits[0] * 10 + digits[1], digits[2] * 10 + digits[3], digits[4] * 10 + digits[5]
    if not (1 <= month <= 12 and 1 <= day <= 31 and 1 <= digits[6] <= 8):
        return False
    weights = (2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5)
    total = sum(weight * digit for weight, digit in zip(weights, digits, strict=False))
    newer = digits[6] in (3, 4, 7, 8) and year >= 20
    return (
        newer
        or (11 - total % 11) % 10 == digits[12]
        or (digits[6] >= 5 and (13 - total % 11) % 10 == digits[12])
    )


def is_social_security(found: str) -> bool:
    area, group, serial = found.split("-")
    return area not in ("000", "666") and area < "900" and group != "00" and serial != "0000"


def is_public_address(found: str) -> bool:
    try:
        return ipaddress.ip_address(found).is_global
    except ValueError:
        return False


def is_phone(found: str) -> bool:
    """Nine to fifteen digits; without a plus, a bracket or a leading zero a number is just a number."""
    digits = _digits(found)
    grouped = len(re.findall(r"\d+", found)) >= 3
    return 9 <= len(digits) <= 15 and (found[0] in "+(0" or grouped) and len(set(digits)) > 2


KINDS = (
    Kind(
        name="api_key",
        pattern=re.compile(
            r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{36,}\b|\bgithub_pat_\w{22,}\b"
            r"|\bsk-(?:ant-|proj-)?[A-Za-z0-9_-]{20,}|\bAIza[0-9A-Za-z_-]{35}|\bxox[baprs]-[A-Za-z0-9-]{10,}"
            r"|\bhf_[A-Za-z0-9]{30,}\b|\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}"
            r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]+?-----END [A-Z ]*PRIVATE KEY-----"
        ),
        hints=("AKIA", "ASIA", "gh", "sk-", "AIza", "xox", "hf_", "eyJ", "PRIVATE KEY"),
    ),
    Kind(
        name="email",
        pattern=re.compile(
            r"\b[A-Za-z0-9][\w.!#$%&'*+/=?^`{|}~-]*@(?:[A-Za-z0-9-]+\.)+[A-Za-z]{2,24}\b", re.ASCII
        ),
        hints=("@",),
    ),
    Kind(
        name="korean_id",
        pattern=re.compile(r"(?<![\d-])\d{6}[-–]?[1-8]\d{6}(?![\d-])"),
        proof=is_korean_resident,
    ),
    Kind(
        name="social_security",
        pattern=re.compile(r"(?<![\d-])\d{3}-\d{2}-\d{4}(?![\d-])"),
        proof=is_social_security,
        hints=("-",),
    ),
    Kind(name="card", pattern=re.compile(r"(?<![\d.-])\d(?:[ -]?\d){12,18}(?![\d-])"), proof=is_card),
    Kind(
        name="ip",
        pattern=re.compile(
            rf"(?<![\d.])(?:{_BYTE}\.){{3}}{_BYTE}(?![\d.]*\d)"
            rf"|(?<![\w:])(?:{_GROUP}:){{7}}{_GROUP}(?![\w:])"
            rf"|(?<![\w:])(?:{_GROUP}:){{1,6}}(?::{_GROUP}){{1,6}}(?![\w:])",
            re.IGNORECASE,
        ),
        proof=is_public_address,
        hints=(".", ":"),
    ),
    Kind(
        name="phone",
        pattern=re.compile(
            r"(?<![\w./-])(?:\+\d{1,3}(?:[ .-]?\(?\d{1,5}\)?){2,5}|\(\d{2,4}\)[ .-]?\d{3,4}[ .-]\d{4}"
            r"|\d{2,4}[ .-]\d{3,4}[ .-]\d{4})(?![\w-]|\.\d)"
        ),
        proof=is_phone,
    ),
)
