"""HTML escaping: markup built from parts, text escaped where it enters; nothing from a run is markup."""

from __future__ import annotations

from html import escape


class Html(str):
    """Markup; a plain str is text."""

    __slots__ = ()


def tag(name: str, *parts: str, **attributes: str | float | None) -> Html:
    """An element. `class_` is class, `data_max` is data-max; an attribute that is None is left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{given}>{join(*parts)}</{name}>")


def join(*parts: str) -> Html:
    """Markup as it is, text escaped."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))
