"""Prometheus text format: the lines of a metric, with what may stand in a label quoted."""

from __future__ import annotations

from collections.abc import Iterable

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def head(name: str, *, kind: str, help: str) -> str:
    return f"# HELP {name} {_escaped(help)}\n# TYPE {name} {kind}\n"


def sample(name: str, labels: Iterable[tuple[str, str]], value: float) -> str:
    said = ",".join(f'{label}="{_quoted(text)}"' for label, text in labels)
    return f"{name}{{{said}}} {value!r}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', r"\"")
