"""YAML and JSON files: the one home of PyYAML.

What is read may be anybody's. A document is small, shallow and says everything once; plain YAML words stay
text, so that nobody's rules turn 010 into 8, 1:30 into 90 and `no` into false before the reader of a value
has looked at it. Aliases are refused: a page of them unfolds into gigabytes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

from stoker.errors import UsageError, require
from stoker.formats.small_json import parse_json

_MOST_BYTES = {".json": 64 << 20}  # a plan with all its courses, a benchmark with all its runs
_MOST_YAML = 256 << 10  # a job is a page of it, and PyYAML reads some 100 kB a second
_DEEPEST = 32
# kubectl takes 3e-4 for a number and y for a boolean; to PyYAML, which writes them, both are text.
_TAKEN_FOR_OTHER = re.compile(r"^[-+]?\.?[0-9]|^[yYnN]$")
_NULL = ("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])


def read_document(path: Path) -> dict[str, Any]:
    """The object a .yaml, .yml or .json file holds; plain words of YAML are text."""
    text = _text(path)
    read = _read_json if path.suffix == ".json" else _read_yaml
    try:
        found = read(text)
    except RecursionError:
        raise _wrong(path, "it is nested too deeply") from None
    except ValueError as error:
        raise _wrong(path, " ".join(str(error).split())) from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds no keys and values", hint="write lines such as `nodes: 16`")
    return found


def _text(path: Path) -> str:
    most = _MOST_BYTES.get(path.suffix, _MOST_YAML)
    try:
        with path.open("rb") as file:
            read = file.read(most + 1)  # a device has no end
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="check its name") from error
    if len(read) > most:
        raise UsageError(
            f"{path} is longer than {most >> 10:,} KiB", hint="check its name: no job is so long"
        )
    try:
        return read.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 text: {error.reason}", hint="see docs/guides/plan.md"
        ) from error


def _wrong(path: Path, why: str) -> UsageError:
    format_ = "JSON" if path.suffix == ".json" else "YAML"
    return UsageError(f"{path} is not {format_}: {why}", hint="see docs/guides/plan.md")


def dump_yaml(documents: Iterable[Mapping[str, Any]]) -> str:
    """Documents one after another, keys in their order, text of several lines as a block."""
    yaml = require("yaml", extra="deploy")

    def text(dumper: Any, value: str) -> Any:
        style = "|" if "\n" in value else "'" if _TAKEN_FOR_OTHER.match(value) else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    def indent(dumper: Any, flow: bool = False, indentless: bool = False) -> Any:
        return yaml.SafeDumper.increase_indent(dumper, flow, False)  # lists stand under their key

    dumper_class: Any = type("Dumper", (yaml.SafeDumper,), {"increase_indent": indent})  # PyYAML has no types
    dumper_class.add_representer(str, text)
    dumped = [yaml.dump(dict(one), Dumper=dumper_class, sort_keys=False, width=110) for one in documents]
    return "---\n".join(dumped)


def _read_json(text: str) -> Any:
    return parse_json(text, object_pairs_hook=_once)


def _read_yaml(text: str) -> Any:
    yaml = require("yaml", extra="deploy")
    try:
        return yaml.load(text, Loader=_strict_loader(yaml)) or {}
    except yaml.YAMLError as error:
        raise ValueError(error) from error


def _strict_loader(yaml: Any) -> Any:  # PyYAML has no types
    """A SafeLoader that refuses what it would unfold, and lets a word be a word."""

    def compose_node(self: Any, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ValueError(f"line {self.peek_event().start_mark.line + 1}: aliases (*) are not read here")
        self.depth = getattr(self, "depth", 0) + 1
        if self.depth > _DEEPEST:
            raise RecursionError
        node = yaml.SafeLoader.compose_node(self, parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self: Any, node: Any, deep: bool = False) -> Any:
        pairs = [(self.construct_object(key, deep=True), key) for key, _ in node.value]
        _once([(name, key) for name, key in pairs if isinstance(name, Hashable)])
        return yaml.SafeLoader.construct_mapping(self, node, deep=deep)

    methods = {"compose_node": compose_node, "construct_mapping": construct_mapping}
    loader: Any = type("Loader", (yaml.SafeLoader,), {**methods, "yaml_implicit_resolvers": {}})
    loader.add_implicit_resolver(*_NULL)
    for tag in ("int", "float", "bool", "timestamp"):  # asked for by !!int
        loader.add_constructor(f"tag:yaml.org,2002:{tag}", yaml.SafeLoader.construct_yaml_str)
    return loader


def _once(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    """Both formats would let the last of two equal names win without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{twice} stands there twice")
    return found
