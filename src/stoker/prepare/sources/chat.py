"""Chat messages as text: rendered by the tokenizer's own chat template, in a sandbox, as transformers does.

Where a loss mask is asked for, what the assistant says stands between two marks that no text has (Unicode
keeps U+FDD0 and U+FDD1 for such use): they pass curation with the text and go before it is encoded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from stoker.errors import TokenizerError, require
from stoker.prepare.sources.documents import Conversation

BEGIN, END = "\ufdd0", "\ufdd1"

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}  # ShareGPT's


class BadChat(Exception):
    """Messages that are none, or that the template refuses."""


def render(messages: Any, tools: Any, conversation: Conversation) -> str:
    """A conversation as the model sees it. Dates are not given: a template that asks for today's would make
    other bytes every day, and takes its own default instead."""
    turns = _turns(messages)
    write = _Writer(conversation, tools)
    if not conversation.mask:
        return write(turns)
    marked = write.marked(turns)
    return marked if BEGIN in marked else _marked_by_turns(write, turns)


def unmarked(texts: Sequence[str]) -> tuple[list[str], list[list[tuple[int, int]]]]:
    """Texts without their marks, and what lay between each pair, as characters."""
    plain, spans = [], []
    for text in texts:
        parts, found, at, begin = re.split(f"([{BEGIN}{END}])", text), [], 0, 0
        for part in parts:
            if part == BEGIN:
                begin = at
            elif part == END:
                found.append((begin, at))
            else:
                at += len(part)
        plain.append("".join(part for part in parts if part not in (BEGIN, END)))
        spans.append(found)
    return plain, spans


class _Writer:
    def __init__(self, conversation: Conversation, tools: Any) -> None:
        self._conversation, self._tools = conversation, tools

    def __call__(self, turns: list[Any], *, prompt: bool = False) -> str:
        return self.marked(turns, prompt=prompt).replace(BEGIN, "").replace(END, "")

    def marked(self, turns: list[Any], *, prompt: bool = False) -> str:
        """With marks where the template itself says what the model generates."""
        template = compiled(self._conversation.template)
        special = dict(self._conversation.special)
        try:
            return str(
                template.render(messages=turns, tools=self._tools, add_generation_prompt=prompt, **special)
            )
        except Exception as error:  # jinja's kinds, and what expressions of a template raise
            raise BadChat(f"the chat template refuses it: {error}") from error


def _marked_by_turns(write: _Writer, turns: list[Any]) -> str:
    """What a turn of the assistant adds to the turns before it."""
    whole, parts, done = write(turns), [], 0
    for number, turn in enumerate(turns):
        if turn["role"] == "assistant":
            before, after = write(turns[:number], prompt=True), write(turns[: number + 1])
            if not (whole.startswith(after) and after.startswith(before) and len(before) >= done):
                raise BadChat(
                    "the template does not write it turn by turn, so that what the assistant says cannot be"
                    " told apart: use a template with {% generation %}, or leave the loss mask out"
                )
            parts += [whole[done : len(before)], BEGIN, whole[len(before) : len(after)], END]
            done = len(after)
    return "".join([*parts, whole[done:]])


def _turns(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise BadChat("no list of messages")
    return [_turn(message) for message in messages]


def _turn(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadChat(f"a message is {type(message).__name__}, not an object with role and content")
    if "role" not in message and "from" in message:
        speaker = str(message["from"])
        message = {"role": _ROLES.get(speaker, speaker), "content": message.get("value")}
    if "role" not in message or not ("content" in message or "tool_calls" in message):
        raise BadChat(f"a message has {', '.join(map(str, message)) or 'nothing'}, not role and content")
    if any(mark in json.dumps(message, ensure_ascii=False, default=str) for mark in (BEGIN, END)):
        raise BadChat("a message holds U+FDD0 or U+FDD1, which mark what the assistant says")
    return {name: value for name, value in message.items() if value is not None or name == "content"}


@lru_cache(maxsize=4)
def compiled(template: str) -> Any:
    """A chat template, ready to render."""
    sandbox = require("jinja2.sandbox", extra="chat")
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation()]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(template)
    except Exception as error:  # a syntax error, of jinja's kinds
        raise TokenizerError(
            f"the chat template cannot be read: {error}", hint="mend it in tokenizer_config.json"
        ) from error


def _generation() -> type[Any]:
    """The tag with which templates say what the model generates."""
    nodes, extensions = (require(f"jinja2.{part}", extra="chat") for part in ("nodes", "ext"))

    class Generation(extensions.Extension):  # type: ignore[name-defined, misc]
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            output = [nodes.Output([nodes.TemplateData(mark)]) for mark in (BEGIN, END)]
            return nodes.Scope([output[0], *body, output[1]]).set_lineno(line)

    return Generation


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """As transformers has it: jinja's own would escape < and >."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _refuse(message: str) -> None:
    raise BadChat(message)
