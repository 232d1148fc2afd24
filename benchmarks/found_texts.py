"""Texts of many languages and kinds that a Debian machine holds anyway: nothing is downloaded.

    messages(language)   sentences of programs' translations (gettext catalogues), each at least 40 letters
    manuals(language)    manual pages, roff taken off; "en" are the untranslated ones
    programs(), papers() Python's own source files; what packages say of themselves under /usr/share/doc
    sources(ending)      files of any programming language that packages of Debian, Python or npm brought

The same machine gives the same lists in the same order; another one gives other texts of the same kinds.
"""

from __future__ import annotations

import gettext
import gzip
import re
import sysconfig
from collections import Counter
from contextlib import suppress
from functools import cache
from pathlib import Path

LOCALES = (Path("/usr/share/locale"),)
MAN, DOC = Path("/usr/share/man"), Path("/usr/share/doc")
_LETTERS = 40
_ROFF_LINE = re.compile(
    r"^['.]\s*(?:\\\"|[a-z]{2}\b|(?:TH|PP|P|LP|RS|RE|TP|IX|UR|UE|de|if|ie|el)\b).*$", re.M
)
_ROFF_MACRO = re.compile(r"^\.(?:SH|SS|B|I|BR|IR|RB|RI|BI|IB|IP|SM|Nm|Fl|Ar|Sh|It|Pp)\s?", re.M)
_ROFF_ESCAPE = re.compile(r"\\(?:f(?:\[\w*\]|\(?\w)|s[+-]?\d|[&/,%|:])|\\\(\w\w")


@cache
def messages(language: str) -> list[str]:
    """Translations into a language, each once, without those that were left in English."""
    found: dict[str, None] = {}
    for path in sorted(path for root in LOCALES for path in root.glob(f"{language}/LC_MESSAGES/*.mo")):
        for english, text in _catalogue(path).items():
            if english and english != text and _letters(text) >= _LETTERS:
                found[text.strip()] = None
    return list(found)


@cache
def manuals(language: str, most: int = 300) -> list[str]:
    folder = MAN if language == "en" else MAN / language
    pages = sorted(folder.glob("man[1-8]/*.gz"))
    return [page for path in pages[:: max(1, len(pages) // most)] if len(page := _unrolled(path)) > 200]


@cache
def programs(most: int = 300) -> list[str]:
    return [
        path.read_text("utf-8", "replace") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    ][:most]


@cache
def sources(ending: str, most: int = 400) -> list[str]:
    """At least 600 characters long, at most 40 of a package, spread over all there are."""
    roots = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    roots += [Path("/usr") / name for name in ("include", "share", "lib")]
    paths = sorted(path for root in roots for path in root.rglob(f"*.{ending}") if path.is_file())
    taken: Counter[Path] = Counter()
    found: dict[str, None] = {}
    for path in paths[:: max(1, len(paths) // (4 * most))]:
        if taken[path.parents[-min(6, len(path.parents))]] < _OF_A_PACKAGE and len(found) < most:
            text = path.read_text("utf-8", "replace")
            if len(text) >= _SOURCE and text not in found:
                taken[path.parents[-min(6, len(path.parents))]] += 1
                found[text] = None
    return list(found)


_SOURCE, _OF_A_PACKAGE = 600, 40


@cache
def papers(most: int = 600) -> list[str]:
    plain = [path for path in sorted(DOC.glob("*/*")) if path.suffix in ("", ".txt", ".md", ".html")]
    return [
        path.read_text("utf-8", "replace")[:60_000]
        for path in [path for path in plain if path.is_file()][:most]
    ]


def _catalogue(path: Path) -> dict[str, str]:
    with path.open("rb") as file, suppress(UnicodeDecodeError):  # a few are older than UTF-8
        return gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined] # no other way to list them
    return {}


def _letters(text: str) -> int:
    return sum(map(str.isalpha, text))


def _unrolled(path: Path) -> str:
    try:
        text = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
    except OSError:
        return ""
    for pattern in (_ROFF_LINE, _ROFF_MACRO, _ROFF_ESCAPE):
        text = pattern.sub("", text)
    return re.sub(r"\n{3,}", "\n\n", text.replace("\\-", "-").replace("\\e", "\\")).strip()
