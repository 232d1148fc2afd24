"""Probe texts: what an engine is tried on before it is trusted with a tokenizer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

_OWN_TOKENS, _PAIRED = 64, 12
_AROUND = (("", "\n\n"), ("\n\n", ""), ("  ", "  "), ("\t", "\r\n"), ("É", "İ"), ("(", "."))

# What tokenizers disagree about: white space, case marks, digits, scripts, joiners, controls.
EDGE_STRINGS = (
    "",
    " ",
    "\n",
    "  leading and trailing  ",
    "tabs\tand\r\nline\n\n\nbreaks \n x",
    "I'm you'll THEY'RE don't 'tis rock'n'roll",
    "1 12 123 1234 12345.67890 1,000,000 ½ ²",
    "naïve café Zürich ÅNGSTRÖM e\u0301 ﬁ ﬂ",
    "中文字符 日本語テキスト 한국어 ไทย हिन्दी العربية עברית",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🤷🏽‍♀️ \u200b\u200d\ufeff\u00a0\u2028",
    "\x00\x01\x1f\x7f",
    "def f(x):\n    return {'a': [1, 2], \"b\": x**2}  # comment\n",
    "https://example.org/a?b=c&d=%20#frag user@host.example",
    "a" * 300 + "!" * 50 + " " * 70 + "\n" * 20,
    "\U0010ffff\ue000\ufffd",
    "<|endoftext|> </s> <s> [CLS] <unk> <|im_start|>",
)


def added_token_texts(added: Sequence[Any]) -> list[str]:
    """Texts with added tokens in them: each alone, then those that overlap or meet white space, where one
    engine matches before it normalises and another after."""
    kinds = {
        (token.normalized, token.lstrip, token.rstrip, token.single_word, token.special): token
        for token in added
    }
    chosen = dict.fromkeys(token.content for token in (*kinds.values(), *_overlapping(added), *added))
    tokens = list(chosen)[:_OWN_TOKENS]
    alone = [f"a{token}b {token} c" for token in tokens]
    spaced = [f"{before}{token}{after}x" for token in tokens for before, after in _AROUND]
    pairs = itertools.product(tokens[:_PAIRED], repeat=2)
    return (
        alone + spaced + [f"{one}{between}{other}" for one, other in pairs for between in ("", "\n", " x ")]
    )


def _overlapping(added: Sequence[Any]) -> list[Any]:
    """Added tokens that share an end and a beginning with another, or lie in it: which is matched depends on
    the order in which an engine looks."""
    by_end = {token.content[-size:] for token in added for size in range(1, len(token.content))}
    starts = [
        token
        for token in added
        if any(token.content[:size] in by_end for size in range(1, len(token.content)))
    ]
    joined = "\0".join(token.content for token in added)
    inside = [token for token in added if joined.count(token.content) > 1]
    return [*inside, *starts]
