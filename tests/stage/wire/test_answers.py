"""What a status means: go on, wait, sign again, or give up with a reason."""

from __future__ import annotations

import pytest

from stoker.errors import ChangedError, DeniedError, StorageError
from stoker.stage.wire.answers import (
    Busy,
    check_facts,
    pin_line,
    refuse,
    total_bytes,
    version_of,
)
from stoker.stage.wire.heads import Answer
from stoker.stage.wire.http import Address

URL = "s3://bucket/x"


@pytest.mark.parametrize(
    ("status", "said", "error"),
    [
        (503, "<Code>SlowDown</Code>", Busy),
        (429, "", Busy),
        (500, "", Busy),
        (400, "<Code>RequestTimeTooSkewed</Code>", DeniedError),
        (400, "<Code>ExpiredToken</Code>", DeniedError),
        (401, "", DeniedError),
        (403, "<Code>AccessDenied</Code>", DeniedError),
        (404, "<Code>NoSuchKey</Code>", StorageError),
        (412, "", ChangedError),
        (416, "", ChangedError),
        (418, "", StorageError),
    ],
)
def test_a_refusal_is_an_error_of_its_kind(status: int, said: str, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        refuse(Answer(status), said, url=URL)
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("url", "hint"), [(URL, "AWS_"), ("hf://org/name/x", "HF_TOKEN"), ("https://host/x", "link")]
)
def test_a_refusal_says_which_credentials(url: str, hint: str) -> None:
    with pytest.raises(DeniedError) as caught:
        refuse(Answer(403), "", url=url)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("said", "seconds"), [("7", 7.0), ("86400", 60.0), ("-3", 0.0), ("Fri, 31 Dec 1999 23:59:59 GMT", 0.0)]
)
def test_a_busy_server_says_how_long(said: str, seconds: float) -> None:
    with pytest.raises(Busy) as caught:
        refuse(Answer(503, {"retry-after": said}), "", url=URL)
    assert caught.value.after_s == seconds


def test_a_busy_server_may_say_when_by_its_own_clock() -> None:
    headers = {"retry-after": "Fri, 31 Dec 1999 23:59:59 GMT", "date": "Fri, 31 Dec 1999 23:59:50 GMT"}
    with pytest.raises(Busy) as caught:
        refuse(Answer(503, headers), "", url=URL)
    assert caught.value.after_s == 9.0


@pytest.mark.parametrize(
    ("version", "line"),
    [
        ('"abc"', 'If-Match: "abc"\r\n'),
        ("Sun, 15 Nov 2026 05:42:03 GMT", "If-Unmodified-Since: Sun, 15 Nov 2026 05:42:03 GMT\r\n"),
        ('W/"abc"', ""),
        ("1700000000000000000", ""),
        ("", ""),
    ],
)
def test_a_version_is_pinned_where_a_server_can(version: str, line: str) -> None:
    assert pin_line(version) == line


@pytest.mark.parametrize(
    ("status", "headers", "size"),
    [
        (200, {"content-length": "12"}, 12),
        (206, {"content-length": "1", "content-range": "bytes 0-0/12"}, 12),
        (206, {"content-length": "1", "content-range": "bytes 0-0/*"}, None),
        (416, {"content-range": "bytes */0"}, 0),
        (200, {"content-length": "12", "transfer-encoding": "chunked"}, None),
        (200, {}, None),
    ],
)
def test_the_size_of_the_file_is_read_from_any_answer(
    status: int, headers: dict[str, str], size: int | None
) -> None:
    assert total_bytes(Answer(status, headers)) == size


def test_a_version_is_the_etag_or_else_the_time() -> None:
    time = "Sun, 15 Nov 2026 05:42:03 GMT"
    assert version_of(Answer(200, {"etag": '"a"', "last-modified": time})) == '"a"'
    for now, version in (
        ("05:42:04", time),
        ("05:42:03", ""),
        ("", ""),
    ):  # may change again
        headers = {"last-modified": time, "date": time.replace("05:42:03", now) if now else ""}
        assert version_of(Answer(200, headers)) == version


@pytest.mark.parametrize(
    "headers",
    [
        {"content-range": "bytes 5-9/11"},
        {"content-range": "bytes 5-9/10", "etag": '"new"'},
    ],
    ids=["size", "etag"],
)
def test_an_answer_about_another_version_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(ChangedError):
        check_facts(Answer(206, headers), url=URL, bytes=10, version='"old"', start=5)


def test_an_answer_from_another_byte_is_refused() -> None:
    answer = Answer(206, {"content-range": "bytes 0-9/10"})
    with pytest.raises(StorageError, match="asked for byte 5"):
        check_facts(answer, url=URL, bytes=10, version="", start=5)


def test_a_name_and_password_become_a_header() -> None:
    assert Address.of("https://me:s%40cret@host:8443/a@b") == Address(
        url="https://host:8443/a@b", headers=(("Authorization", "Basic bWU6c0BjcmV0"),)
    )
    assert Address.of("https://host/a@b") == Address(url="https://host/a@b")


def test_another_host_is_not_told_the_token() -> None:
    here = Address(url="https://hub/a", headers=(("Authorization", "Bearer x"),))
    assert here.moved("/b") == Address(url="https://hub/b", headers=here.headers)
    assert here.moved("https://cdn/b") == Address(url="https://cdn/b")


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("https://host", "/"),
        ("https://host/a b/ü", "/a%20b/%C3%BC"),
        ("https://host/a%20b?x=1&y=%2F#part", "/a%20b?x=1&y=%2F"),
    ],
)
def test_an_address_is_fit_to_be_asked_for(url: str, target: str) -> None:
    assert Address(url=url).target == target
