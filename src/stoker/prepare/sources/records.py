"""Text of a record: a field, a nested one (`data.text`), several joined by a template, or a chat.

A record is what a line of JSON, a row of a table or of a CSV file gives: names and values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from string import Formatter
from typing import Any

from stoker.errors import UsageError
from stoker.prepare.sources.chat import BadChat, render
from stoker.prepare.sources.documents import Conversation, Reading

_NAMES_SHOWN = 12
_ESCAPES = {r"\n": "\n", r"\t": "\t", "\\\\": "\\"}  # as a shell hands them on


class NoText(Exception):
    """A record has no text: one word on why, and a sentence."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What of a record is its text. `parts`, of a template: literal text and the field behind it."""

    field: str
    parts: tuple[tuple[str, str], ...] = ()
    chat: str = ""
    conversation: Conversation | None = None

    @property
    def plain(self) -> bool:
        """Whether the text is a field of the record itself, which the fast parser can find."""
        return not (self.parts or self.chat) and "." not in self.field

    @property
    def fields(self) -> tuple[str, ...]:
        if self.chat:
            return (self.chat,)
        return tuple(name for _, name in self.parts if name) if self.parts else (self.field,)

    def columns(self, names: Sequence[str]) -> list[str]:
        """The columns, of these, that the text is made of; a name that is none of them raises KeyError."""
        found = [name if name in names else name.partition(".")[0] for name in self.fields]
        for name, column in zip(self.fields, found, strict=True):
            if column not in names:
                raise KeyError(name, list(names))
        return list(dict.fromkeys([*found, *(("tools",) if self.chat and "tools" in names else ())]))

    def value(self, value: Any) -> str:
        """The text of a plain field's value."""
        return _string(value, self.field)

    def text(self, record: Any) -> str:
        """The text of a record; NoText says why there is none."""
        if self.chat:
            text = self._chat(record)
        elif self.parts:
            text = "".join(before + (_piece(record, name) if name else "") for before, name in self.parts)
        else:
            text = _string(look_up(record, self.field), self.field)
        try:
            text.encode()  # half a surrogate pair, which no tokenizer can take
        except UnicodeEncodeError as error:
            raise NoText("invalid_utf8", f"{error.reason} at character {error.start:,}") from error
        return text

    def _chat(self, record: Any) -> str:
        assert self.conversation
        messages = look_up(record, self.chat)
        tools = record.get("tools") if isinstance(record, Mapping) else None
        try:
            return render(_unpacked(messages), _unpacked(tools) or None, self.conversation)
        except BadChat as error:
            raise NoText("bad_chat", f"{self.chat}: {error}") from error


@lru_cache(maxsize=64)
def wanted(reading: Reading) -> Wanted:
    """What a reading asks for; a template that means nothing is refused."""
    if reading.template and reading.chat:
        raise UsageError("a template and a chat are two texts", hint="give --template or --chat")
    return Wanted(
        field=reading.field,
        parts=_parts(reading.template),
        chat=reading.chat,
        conversation=reading.conversation,
    )


def _parts(template: str) -> tuple[tuple[str, str], ...]:
    try:
        found = list(Formatter().parse(re.sub(r"\\[nt\\]", lambda mark: _ESCAPES[mark[0]], template)))
    except ValueError as error:
        raise UsageError(
            f"the template {template!r} cannot be read: {error}",
            hint='name fields in braces, as "{title}\\n\\n{body}"; write {{ and }} for braces',
        ) from error
    for _, name, form, conversion in found:
        if name == "" or form or conversion:
            raise UsageError(
                f"the template {template!r} has a field without a name or with a format",
                hint='name fields in braces, as "{title}\\n\\n{body}"; write {{ and }} for braces',
            )
    if found and not any(name for _, name, _, _ in found):
        raise UsageError(f"the template {template!r} names no field", hint='name one in braces, as "{text}"')
    return tuple((before, name or "") for before, name, _, _ in found)


def look_up(record: Any, path: str) -> Any:
    """What stands at a path: a field of that very name, or `a.b.0.c` step by step."""
    if not isinstance(record, Mapping):
        raise NoText("not_text", f"the record is no object but {_kind(record)}")
    if path in record:
        return record[path]
    found: Any = record
    for name in path.split("."):
        if isinstance(found, Mapping) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            raise NoText("missing_field", f"the record has no field {path!r}; it has {names_of(record)}")
    return found


def names_of(record: Any) -> str:
    """The fields of a record in words, those of records inside it too."""
    names = list(_names(record)) if isinstance(record, Mapping) else []
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return (", ".join(names[:_NAMES_SHOWN]) + more) or "none"


def _names(record: Mapping[str, Any], above: str = "", depth: int = 0) -> Sequence[str]:
    found = []
    for name, value in record.items():
        found.append(f"{above}{name}")
        if isinstance(value, Mapping) and depth < 2:
            found += _names(value, f"{above}{name}.", depth + 1)
    return found


def _string(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise NoText("invalid_utf8", f"{name}: {error.reason} at byte {error.start:,}") from error
    raise NoText("not_text", f"{name} is {_kind(value)}, not a string")


def _piece(record: Any, name: str) -> str:
    """A field of a template: numbers are written out, and nothing is written where there is none."""
    value = look_up(record, name)
    if isinstance(value, (int, float)):
        return json.dumps(value)
    return "" if value is None else _string(value, name)


def _unpacked(value: Any) -> Any:
    """Messages that a table or CSV file holds as JSON."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError as error:
            raise BadChat(f"neither a list of messages nor JSON of one ({error})") from error
    return value


def _kind(value: Any) -> str:
    return {"NoneType": "null", "dict": "an object", "list": "a list"}.get(
        type(value).__name__, type(value).__name__
    )
