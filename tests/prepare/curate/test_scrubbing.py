"""Private data: planted cases are found, and what only looks like them stays."""

from __future__ import annotations

import random

import pytest

from stoker.prepare.curate.private import KINDS, is_card, is_korean_resident, scrubbed

PLANTED = {
    "email": [
        "anna.schmidt@example.org",
        "a+b@sub.domain.co.kr",
        "x_y-z@firma.de",
        "josé@example.com",
        "müller@gmx.de",
        "info@müller.de",
    ],
    "phone": [
        "+49 30 1234567",
        "010-1234-5678",
        "(212) 555-0187",
        "+821012345678",
        "02-123-4567",
        "555-867-5309",
        "138-1234-5678",
    ],
    "ip": ["8.8.8.8", "203.104.5.17", "2001:4860:4860::8888"],
    "card": ["4111 1111 1111 1111", "5500-0055-5555-5559", "378282246310005", "3782 822463 10005"],
    "korean_id": ["900101-1234568", "850505-2345676"],
    "social_security": ["078-05-1120", "219-09-9999"],
    "api_key": [
        "AKIAIOSFODNN7EXAMPLE",
        "ghp_" + "a1B2c3D4" * 5,
        "sk-proj-abcdefghijklmnopqrstuvwx",
        "hf_" + "AbCdEfGh" * 4,
    ],
}
INNOCENT = [
    "version 1.2.3 of the 10.0.0.1 router", "in 1998-2003 and 2024-11-18 10:30:55", "3.14159265358979",
    "ISBN 978-3-16-148410-0", "the ratio 16:9, at 12:30", "call f(x) @ 3 pm",
    "order 1234 5678", "127.0.0.1:8080",
    "4111 1111 1111 1112", "1,234,567,890 people", "192.168.1.77", "array[0:10:2]", "std::vector", "a::b::c",
    "2024-01-02 03:04:05", "0.1.2.3.4.5", "price: 12.50 - 13.75", "900101-1234567", "900101-9234568",
    "lines 100-200-300", "12345678901234567890123", "Section 4.1.2", "7-11",
    "2019 2020 2021 2022", "100 200 3000", "std::vector<a::b>", "v8.8.8.8", "icon@2x.png",
    "sk-learn-contrib-something-long-name", "4 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1",
    "5500-0055-5555-5558", "pi@", "@handle",
]  # fmt: skip


def korean(chooser: random.Random) -> str:
    """A resident number with a true checksum."""
    digits = [*map(int, f"{chooser.randint(50, 99)}{chooser.randint(1, 12):02d}{chooser.randint(1, 28):02d}")]
    digits += [chooser.randint(1, 2), *(chooser.randint(0, 9) for _ in range(5))]
    total = sum(
        weight * digit for weight, digit in zip((2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5), digits, strict=True)
    )
    text = "".join(map(str, [*digits, (11 - total % 11) % 10]))
    return f"{text[:6]}-{text[6:]}"


@pytest.mark.parametrize(
    ("kind", "planted"), [(kind, text) for kind, some in PLANTED.items() for text in some]
)
@pytest.mark.parametrize(
    "around", ["Write to {}.", "{}", "연락처: {} 입니다", "({})", "ID {}/26", "앞{}로", "a\n{}\nb"]
)
def test_what_is_planted_is_replaced_by_its_tag(kind: str, planted: str, around: str) -> None:
    if kind == "korean_id":
        planted = korean(random.Random(planted))
    clean, found = scrubbed(around.format(planted), KINDS)
    assert found == {kind: 1}
    assert clean.startswith(around.split("{")[0])
    assert f"<{kind.upper()}>" in clean


@pytest.mark.parametrize("text", INNOCENT)
def test_what_only_looks_private_stays(text: str) -> None:
    assert scrubbed(f"See {text} there.", KINDS) == (f"See {text} there.", {})


def test_checksums_tell_true_numbers_from_others() -> None:
    chooser = random.Random(0)
    numbers = [korean(chooser) for _ in range(200)]
    assert all(map(is_korean_resident, numbers))
    broken = [f"{number[:-1]}{(int(number[-1]) + 1) % 10}" for number in numbers]
    assert sum(map(is_korean_resident, broken)) == 0
    cards = ["".join(str(chooser.randint(0, 9)) for _ in range(16)) for _ in range(2000)]
    assert sum(map(is_card, cards)) < 2000 * 0.08, (
        "a tenth of random digits pass Luhn, half begin like a card"
    )


@pytest.mark.parametrize(
    "text",
    [
        "card {} 12/26", "order 12 {}", "{} 123", "ID-{}", "{}-", "paid 100 {} 20",
    ],
)  # fmt: skip
@pytest.mark.parametrize("card", ["4111 1111 1111 1111", "4111-1111-1111-1111", "4111111111111111"])
def test_numbers_beside_a_card_do_not_hide_it(text: str, card: str) -> None:
    assert scrubbed(text.format(card), KINDS) == (text.format("<CARD>"), {"card": 1})


@pytest.mark.parametrize("between", ["", "-", " - ", "\u2011", "\uff0d", "–"])
@pytest.mark.parametrize("around", ["주민{}입니다", "ID-{}", "{}-"])
def test_resident_numbers_are_told_however_they_are_written(between: str, around: str) -> None:
    number = f"900101{between}1234568"
    assert scrubbed(around.format(number), KINDS) == (around.format("<KOREAN_ID>"), {"korean_id": 1})


WIDE = {**{code: code + 0xFEE0 for code in range(0x21, 0x7F)}, 0x20: 0x3000}
NO_BREAK = {ord("-"): "\u2011", ord(" "): "\u00a0"}


@pytest.mark.parametrize("written", [WIDE, NO_BREAK], ids=["full width", "no-break signs"])
@pytest.mark.parametrize(
    ("kind", "planted"),
    [(kind, text) for kind, some in PLANTED.items() if kind != "api_key" for text in some],
)
def test_private_data_is_told_in_other_signs(kind: str, planted: str, written: dict[int, int]) -> None:
    if kind == "korean_id":
        planted = korean(random.Random(planted))
    text = f"연락처（{planted.translate(written)}）입니다"
    assert scrubbed(text, KINDS) == (f"연락처（<{kind.upper()}>）입니다", {kind: 1})


@pytest.mark.parametrize("phone", ["01012345678", "010 - 1234 - 5678", "0161234567"])
def test_korean_phones_are_told_however_they_are_written(phone: str) -> None:
    assert scrubbed(f"전화{phone}으로", KINDS) == ("전화<PHONE>으로", {"phone": 1})


def test_what_is_not_private_keeps_its_signs() -> None:
    text = "값은　３．１４、２０２４－１１－１８（ａ＠ｂ）– 1\u00a0000"
    assert scrubbed(text, KINDS) == (text, {})


def test_a_private_key_goes_also_where_it_was_cut_off() -> None:
    begin, body = "-----BEGIN RSA PRIVATE KEY-----\n", ("MIIEpAIBAAKCAQEA" * 4 + "\n") * 5
    for key in (begin + body + "-----END RSA PRIVATE KEY-----", begin + body):
        clean, found = scrubbed(f"Here: {key} and more", KINDS)
        assert "MIIE" not in clean
        assert found == {"api_key": 1}


@pytest.mark.parametrize(
    "text", ["a." * 200_000 + "@", "@" + "a." * 200_000 + "1", "-----BEGIN PRIVATE KEY-----" * 20_000]
)
def test_long_texts_without_private_data_do_not_take_forever(text: str) -> None:
    """Each took minutes to hours with a pattern that begins anew at every character."""
    assert scrubbed(text, KINDS) == (text, {})


def test_addresses_of_other_scripts_go() -> None:
    assert scrubbed("연락은 홍길동@회사.한국으로", KINDS) == ("연락은 <EMAIL>으로", {"email": 1})
