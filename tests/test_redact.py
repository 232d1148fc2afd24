"""Redaction: what must not be read anywhere is not."""

from __future__ import annotations

import pytest

from stoker.errors import StorageError
from stoker.redact import is_secret, redact_args, redact_text, redact_url


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("http://user:pw@host/a", "http://***@host/a"),
        ("https://ghp_0123456789abcdefghijklmn@github.com/a.git", "https://***@github.com/a.git"),
        ("https://u:p%40ss@host:8080/a?b=1", "https://***@host:8080/a?b=1"),
        ("http://u:p?q#r@host/a", "http://***@host/a"),
        ("http://u:p@ss@host/a", "http://***@host/a"),
        ("https://host/a?token=abc&page=2", "https://host/a?token=***&page=2"),
        (
            "https://host/a?page=2&api_key=abc#access_token=x",
            "https://host/a?page=2&api_key=***#access_token=***",
        ),
        (
            "https://b.s3.amazonaws.com/k?X-Amz-Date=20261117T000000Z&X-Amz-Credential=AK%2F1&X-Amz-Signature=0f",
            "https://b.s3.amazonaws.com/k?X-Amz-Date=20261117T000000Z&X-Amz-Credential=***&X-Amz-Signature=***",
        ),
        (
            "https://a.blob.core.windows.net/c/k?sv=2026&sig=abc%3D",
            "https://a.blob.core.windows.net/c/k?sv=2026&sig=***",
        ),
        ("https://host/a?x=" + "a1" * 12, "https://host/a?x=***"),
        ("https://host?token=abc", "https://host?token=***"),
        ("abfss://container@account/k", "abfss://container@account/k"),
        ("s3://bucket/a=1/b.bin", "s3://bucket/a=1/b.bin"),
        ("redis://:pw@host/0", "redis://***@host/0"),
        ("/plain/path?token=x", "/plain/path?token=x"),
        ("hf://org/name@main/x", "hf://org/name@main/x"),
    ],
)
def test_a_url_keeps_its_place_and_loses_its_secrets(url: str, seen: str) -> None:
    assert redact_url(url) == seen
    assert redact_url(seen) == seen  # twice is once


def test_text_loses_the_secrets_of_every_url_in_it() -> None:
    said = "cannot read http://u:p@h/x?token=t: see https://v:q@h/y. (http://w:r@h/z)"
    assert redact_text(said) == "cannot read http://***@h/x?token=***: see https://***@h/y. (http://***@h/z)"


@pytest.mark.parametrize(
    "secret",
    [
        "hf_abcdefghijklmnopqrstuvwxyz",
        "ghp_0123456789abcdefghijklmnop",
        "AKIAIOSFODNN7EXAMPLE",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
    ],
)
def test_tokens_that_say_what_they_are_go_wherever_they_stand(secret: str) -> None:
    assert secret not in redact_text(f"the server says: {secret} is unknown")


def test_what_is_no_secret_is_left_alone() -> None:
    for plain in (
        "s3://bucket/corpus/shard-00001.bin has 67,108,352 bytes",
        "pad_token_id=0 is not in the vocabulary",
        "task sk-1 of 3",
        "basic types only",
        "process 17437 on node-3 (fetching)",
    ):
        assert redact_text(plain) == plain


def test_arguments_lose_the_values_of_options_that_name_secrets() -> None:
    given = [
        "train.py",
        "--api-key",
        "k",
        "--password=p",
        "HF_TOKEN=t",
        "--lr",
        "0.1",
        "http://u:p@h/x",
        "--token",
    ]
    assert redact_args(given) == [
        "train.py", "--api-key", "***", "--password=***", "HF_TOKEN=***", "--lr", "0.1", "http://***@h/x",
        "--token",
    ]  # fmt: skip


def test_options_about_tokens_of_text_are_no_secrets() -> None:
    plain = [
        "--tokenizer",
        "gpt2",
        "--max-tokens",
        "512",
        "--pad-token",
        "0",
        "--n_tokens=5",
        "--keyframes",
        "3",
    ]
    assert redact_args(plain) == plain


@pytest.mark.parametrize(
    "name",
    ["AWS_SECRET_ACCESS_KEY", "wandb-api-key", "apiKey", "X-Amz-Security-Token", "--hub_token", "PGPASSWORD"],
)
def test_names_of_secrets_are_known(name: str) -> None:
    assert is_secret(name)


def test_every_error_is_redacted_wherever_it_was_made() -> None:
    error = StorageError("cannot read http://user:pw@host/x?token=abc", hint="try http://user:pw@other/")
    assert "pw" not in str(error) + repr(error) + error.message + error.hint
    assert "abc" not in str(error)


def test_a_script_that_is_one_argument_loses_its_secrets_and_nothing_else() -> None:
    script = (
        "cd /data && export HF_TOKEN=abc123; python 'train.py' --api-key  abc123 --max-tokens 512 | tee log"
    )
    assert redact_args(["sh", "-c", script]) == [
        "sh",
        "-c",
        "cd /data && export HF_TOKEN=***; python 'train.py' --api-key  *** --max-tokens 512 | tee log",
    ]
    assert redact_args(["-p:password=abc", "++auth.token=abc", "a b"]) == [
        "-p:password=***",
        "++auth.token=***",
        "a b",
    ]
