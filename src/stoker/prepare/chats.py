"""Chats meet their tokenizer: its chat template, and ids with a mask of what the assistant says."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from stoker.errors import TokenizerError
from stoker.prepare.sources.chat import unmarked
from stoker.prepare.sources.documents import Texts
from stoker.prepare.tokens import Ids, Offsets, Tokenizer, from_hub, huggingface

MARKED = np.uint32(1 << 31)


def chat_template(name: str) -> tuple[str, dict[str, str]]:
    """The chat template beside a tokenizer.json, and the special tokens that it may name (`bos_token`)."""
    path = Path(name) if Path(name).is_dir() else Path(name).parent
    if not Path(name).exists():
        path = from_hub(name, "tokenizer_config.json").parent
    try:
        config = json.loads((path / "tokenizer_config.json").read_text("utf-8"))
    except (OSError, ValueError):
        config = {}
    found = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(found, list):  # several by name, as transformers once kept them
        found = {one.get("name"): one.get("template") for one in found}.get("default")
    with suppress(OSError):
        found = (path / "chat_template.jinja").read_text("utf-8")
    if not isinstance(found, str):
        raise TokenizerError(
            f"{name} has no chat template: neither {path / 'chat_template.jinja'} nor chat_template in"
            f" {path / 'tokenizer_config.json'}",
            hint="copy it there from the model that you train, or join fields with --template",
        )
    special = {name: config[name] for name in sorted(config) if name.endswith("_token")}
    return found, {name: _token_text(token) for name, token in special.items() if token}


def _token_text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def encode_marked(tokenizer: Tokenizer, texts: Texts) -> tuple[Texts, Ids, Offsets]:
    """(texts without the marks of what the assistant says, ids by the reference, offsets); an id that lies
    between marks, all of it or in part, has its highest bit set."""
    plain, spans = unmarked(texts.strings)
    encodings = huggingface(tokenizer.definition).encode_batch(plain, add_special_tokens=False)
    parts = []
    for encoding, marked in zip(encodings, spans, strict=True):
        ids = np.array(encoding.ids, np.uint32)
        starts, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        for begin, end in marked:
            ids[(starts < end) & (stops > begin)] |= MARKED
        parts.append(ids)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(ids) for ids in parts], dtype=np.int64)])
    return Texts.of(plain), np.concatenate([np.zeros(0, np.uint32), *parts]), offsets
