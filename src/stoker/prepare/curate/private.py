"""PII scrubbing: private data replaced by tags, each kind counted; what has a checksum must pass it."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_BYTE = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
_GROUP = r"[0-9a-f]{1,4}"
# Letters of e-mail addresses. A word of another script may stand against an address without a space, as
# Korean particles do: only where it is the whole name is it of the address.
_LETTER = "A-Za-z0-9\u00c0-\u024f\u0370-\u052f"
_LOCAL_ENDINGS = "한국|中国|中國|香港|台灣|台湾|рф|укр|भारत|ไทย"
_FILES = ("png", "jpg", "jpeg", "gif", "svg", "webp")  # icon@2x.png


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
    folded = _folded(text)
    for kind in kinds:
        if kind.hints and not any(hint in folded for hint in kind.hints):
            continue
        found = [match.span() for match in kind.pattern.finditer(folded) if kind.proof(match[0])]
        if found:
            counts[kind.name] += len(found)
            ends = [0, *(end for _, end in found)]
            starts = [*(start for start, _ in found), len(text)]
            text = kind.tag.join(text[end:start] for end, start in zip(ends, starts, strict=True))
            folded = _folded(text)
    return text, counts


def _folded(text: str) -> str:
    """The text as it is searched: full-width signs as ASCII, any dash a hyphen, any space a space. Each
    character stays one, so that what is found lies at the same place in the text."""
    return text.translate(_FOLDS) if not text.isascii() and _ODD.search(text) else text


_SPACES = "\u00a0\u2000-\u200a\u202f\u205f\u3000"
_ODD = re.compile(f"[\uff01-\uff5e{_SPACES}\u2010-\u2015\u2212]")
_FOLDS = (
    {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
    | dict.fromkeys([0xA0, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000], " ")
    | dict.fromkeys([*range(0x2010, 0x2016), 0x2212], "-")
)


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
        address = ipaddress.ip_address(found)
    except ValueError:
        return False
    given_out = address.version == 4 or int(address) >> 125 == 1  # 2000::/3; a::b is C++
    return address.is_global and given_out


def is_phone(found: str) -> bool:
    """Nine to fifteen digits; without a plus, a bracket or a leading zero only North American (555-867-5309)
    and Chinese groups (138-1234-5678) count: years and columns of numbers look like the rest."""
    digits = "".join(map(str, _digits(found)))
    sizes = [len(group) for group in re.findall(r"\d+", found)]
    led = found[0] in "+(" or digits[0] == "0"
    american = sizes == [3, 3, 4] and digits[0] > "1" and digits[3] > "1"
    chinese = sizes == [3, 4, 4] and digits[0] == "1" and digits[1] > "2"
    return 9 <= len(digits) <= 15 and (led or american or chinese) and len(set(digits)) > 2


KINDS = (
    Kind(
        name="api_key",
        pattern=re.compile(
            r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{36,}\b|\bgithub_pat_\w{22,}\b"
            r"|\bsk-(?:(?:ant|proj|svcacct|admin|or-v1)-[\w-]{20,}|[A-Za-z0-9]{20,})|\bAIza[0-9A-Za-z_-]{35}"
            r"|\b[rs]k_(?:live|test)_[A-Za-z0-9]{16,}|\bxox[baprs]-[A-Za-z0-9-]{10,}"
            r"|\bhf_[A-Za-z0-9]{30,}\b|\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}"
            r"|-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----(?:"
            r"(?:[^-]|-(?!----))+-----END [A-Z ]{0,30}PRIVATE KEY-----"
            r"|(?:\s*[A-Za-z0-9+/=]{40,76})+)",  # one that was cut off has no end
            re.ASCII,  # whose \b also stands between a key and a letter of another script
        ),
        hints=("AKIA", "ASIA", "gh", "sk-", "k_", "AIza", "xox", "hf_", "eyJ", "PRIVATE KEY"),
    ),
    Kind(
        name="email",
        pattern=re.compile(
            rf"(?:(?<![{_LETTER}])[{_LETTER}][{_LETTER}\w.!#$%&'*+/=?^`{{|}}~-]{{0,63}}|[^\W_{_LETTER}]{{1,32}})"
            rf"@(?:[\w-]{{1,63}}\.){{1,8}}(?:{_LOCAL_ENDINGS}|[A-Za-z]{{2,24}}(?![{_LETTER}]))"
        ),
        proof=lambda found: found.rpartition(".")[2].lower() not in _FILES,
        hints=("@",),
    ),
    Kind(
        name="korean_id",
        pattern=re.compile(r"(?<!\d)(?<!\d-)\d{6}(?: ?- ?)?[1-8]\d{6}(?!-?\d)"),
        proof=is_korean_resident,
    ),
    Kind(
        name="social_security",
        pattern=re.compile(r"(?<!\d)(?<!\d-)\d{3}-\d{2}-\d{4}(?!-?\d)"),
        proof=is_social_security,
        hints=("-",),
    ),
    # Groups as cards are written: what stands beside one (12/26, a check number, an amount) is not of it.
    Kind(
        name="card",
        pattern=re.compile(r"(?<![\d.])\d{4}([ -])(?:\d{4}\1){3}\d{3}(?!-?\d)"),
        proof=is_card,
    ),
    Kind(
        name="card",
        pattern=re.compile(
            r"(?<![\d.])(?<!\d-)(?:\d{13,19}|\d{4}([ -])(?:\d{4}\1\d{4}\1\d{4}|\d{6}\1\d{4,5}))(?!-?\d)"
        ),
        proof=is_card,
    ),
    Kind(
        name="ip",
        pattern=re.compile(
            rf"(?<![v\d.])(?:{_BYTE}\.){{3}}{_BYTE}(?![\d.]*\d)"
            rf"|(?<![a-z\d_:])(?:{_GROUP}:){{7}}{_GROUP}(?![a-z\d_:])"
            rf"|(?<![a-z\d_:])(?:{_GROUP}:){{1,6}}(?::{_GROUP}){{1,6}}(?![a-z\d_:])",
            re.IGNORECASE,
        ),
        proof=is_public_address,
        hints=(".", ":"),
    ),
    Kind(
        name="phone",
        pattern=re.compile(
            r"(?<![A-Za-z_\d./-])(?:\+\d{1,3}(?:[ .-]?(?:\(\d{1,5}\)|\d{1,5})){2,5}"
            r"|\(\d{2,4}\)[ .-]?\d{3,4}[ .-]\d{4}"
            r"|\d{2,4}(?:[ .]| ?- ?)\d{3,4}(?:[ .]| ?- ?)\d{4}"
            r"|01[016-9]\d{7,8})(?![A-Za-z_\d-]|\.\d)"  # as Korean mobile phones are often written
        ),
        proof=is_phone,
    ),
)
