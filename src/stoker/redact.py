"""Redaction: what nobody may read in a record, a log, an error or a report. Pure.

Passwords and tokens come to us in URLs (`http://user:pw@host`, `?token=…`, signatures), in arguments, and in
what others say in their errors. Names stay and values go, so that a person still sees which link was meant.
When in doubt a value goes: a report without a harmless number can be read, a leaked key must be changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

HIDDEN = "***"

# Names are compared in words: `apiKey`, `api_key` and `--api-key` are "api key".
_SECRET = re.compile(
    r"token|secret|passw|pwd|passphrase|credential|signature|api ?key|access ?key|private ?key|authorization|"
    r"bearer|jwt|cookie|session|\b(sig|key|auth|sas|pass|code|otp)\b",
    re.IGNORECASE,
)
# What such names hold when they are settings: `--max-tokens 512`, `--tokenizer gpt2`, `--key-size 8`.
_NO_SECRET = re.compile(
    r"tokenizer|tokens\b|\b(max|num|n|pad|bos|eos|unk|mask|sep|cls|special) token|"
    r"token (id|type|count|size)|key (size|frames?|name)|session (name|length)",
    re.IGNORECASE,
)
_LOOKS_RANDOM = re.compile(r"(?=[^&]*\d)(?=[^&]*[A-Za-z])[A-Za-z0-9_\-+/=%.~]{20,}").fullmatch
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://[^\s'\"<>`]+")
_AFTER_URL = ".,;:!?)]}"
# Tokens that say what they are: GitHub's, the Hugging Face hub's, AWS', OpenAI's, Slack's, GitLab's, JWT.
_TOKEN = re.compile(
    r"\b(gh[pousr]_\w{20,}|github_pat_\w{20,}|hf_[A-Za-z0-9]{20,}|(AKIA|ASIA)[0-9A-Z]{16}|sk-[\w\-]{20,}|"
    r"xox[abprs]-[\w\-]{10,}|glpat-[\w\-]{20,}|eyJ[\w\-]{10,}\.[\w\-]{10,}\.[\w\-]*)"
)
_HEADER = re.compile(r"\b(Bearer|Basic|Token)(\s+)[A-Za-z0-9+/=._~\-]{8,}", re.IGNORECASE)
_FLAG = re.compile(r"-{1,2}[\w.\-]+").fullmatch
_SETTING = re.compile(r"([\w.:+/~\-]+)=(.*)", re.DOTALL).fullmatch  # also -p:password=X, ++auth.token=X
_BETWEEN = re.compile(r"([\s;&|'\"()]+)")  # the words of a script that is one argument: sh -c "…"
_NAMES_NO_USER = ("abfs://", "abfss://", "wasb://", "wasbs://")  # container@account


def redact_url(url: str) -> str:
    """A URL (or path) without the name and password before its host, and without secret values after `?`."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return url
    host, slash, path = rest.partition("/")  # as the wire reads it: a password may hold ? and #
    user, at, host = host.rpartition("@")
    if at and (":" in user or not url.lower().startswith(_NAMES_NO_USER)):
        user = HIDDEN
    return _TOKEN.sub(HIDDEN, f"{scheme}://{user}{at}{_without_values(host)}{slash}{_without_values(path)}")


def redact_text(text: str) -> str:
    """What somebody says, with every URL in it redacted, and what is known to be a key."""
    if "://" in text:
        text = _URL.sub(_redact_match, text)
    return _HEADER.sub(rf"\1\2{HIDDEN}", _TOKEN.sub(HIDDEN, text))


def redact_args(args: Iterable[str]) -> list[str]:
    """The words of a command: `--api-key X`, `--password=X` and `HF_TOKEN=X` lose their values."""
    found: list[str] = []
    secret_next = False
    for word in args:
        if secret_next and not _FLAG(word):
            found.append(HIDDEN)
            secret_next = False
            continue
        secret_next = bool(_FLAG(word)) and is_secret(word)
        found.append(_redact_script(word) if _BETWEEN.search(word) else _redact_setting(word))
    return found


def _redact_script(text: str) -> str:
    """A command line inside an argument: its words as arguments, what stands between them as it is."""
    parts = _BETWEEN.split(redact_text(text))
    words = redact_args(parts[::2])
    return "".join(word + between for word, between in zip(words, [*parts[1::2], ""], strict=True))


def is_secret(name: str) -> bool:
    """Whether something of this name (an option, a variable, a header) is likely to hold a secret."""
    words = re.sub(r"[_\-.]+|(?<=[a-z])(?=[A-Z])", " ", name)
    return bool(_SECRET.search(_NO_SECRET.sub("", words)))


def _redact_setting(word: str) -> str:
    if (setting := _SETTING(word)) and setting[2] and is_secret(setting[1]):
        return f"{setting[1]}={HIDDEN}"
    return redact_text(word)


def _redact_match(match: re.Match[str]) -> str:
    url = match[0].rstrip(_AFTER_URL)
    return redact_url(url) + match[0][len(url) :]


def _without_values(path: str) -> str:
    """Of what follows `?` and `#`: each `name=value`."""
    return re.sub(r"(?<=[?&#;])([^=&#;]+)=([^&#;]*)", _hide_value, path)


def _hide_value(match: re.Match[str]) -> str:
    name, value = match[1], match[2]
    return f"{name}={HIDDEN}" if value and (is_secret(name) or _LOOKS_RANDOM(value)) else match[0]
