"""Do the quality rules give the verdicts of datatrove's own filters, rule by rule, and where not, why?

Question: for each rule of Gopher, C4 and FineWeb, on how many of 20,000 and more documents of many languages
and kinds do stoker and datatrove, both with the published thresholds, say the same?
Method: half of the documents are made (the generator of the tests), half are drawn with a seed from what this
machine holds (found_texts.py): translations of 32 languages, manual pages, programs, package papers, whole
and in pieces, mixed and repeated. A difference is explained by trying again: if our rule given spaCy's words
(or sentences, for C4) says what datatrove says, words were the cause; any other is printed and counted.
Command: python benchmarks/curate_agreement.py [--documents 24000]   (extra bench; about eight minutes)
Writes benchmarks/results/curate_agreement.json: no times, so any machine may be busy.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

from found_texts import manuals, messages, papers, programs
from kept_runs import keep

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "prepare" / "curate"))
from made_documents import documents as made_documents  # noqa: E402 - a folder of tests is no package
from test_rules_as_published import OURS, datatrove_verdicts  # noqa: E402

from stoker.prepare.curate import rules  # noqa: E402

_LANGUAGES = (
    "ar bg bn ca cs da de el es fa fi fr he hi hu id it ja ka ko nl pl pt_BR ro ru sv ta th tr uk vi zh_CN"
)
LANGUAGES = _LANGUAGES.split()
MANUALS = ("en", "en", "en", "de", "fr", "ko", "ja", "ru", "es", "zh_CN")
_BLOCK = 500
_SHOWN = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--documents", type=int, default=24_000)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "curate_agreement.json")
    options = parser.parse_args()
    half = options.documents // 2
    texts = made_documents(half, seed=11) + found_documents(options.documents - half, seed=11)
    theirs = in_parallel(texts)
    report = {
        "documents": len(texts),
        "megabytes": round(sum(len(text.encode()) for text in texts) / 1e6, 1),
        "languages": len(LANGUAGES) + 1,
        "steps": {step: compared(step, texts, verdicts) for step, verdicts in theirs.items()},
        "versions": {name: version(name) for name in ("datatrove", "spacy")},
    }
    keep(options.results, report)
    print(json.dumps(report["steps"], indent=1, ensure_ascii=False))


def found_documents(count: int, *, seed: int) -> list[str]:
    """Documents of many kinds drawn from the machine's own texts."""
    chooser = random.Random(seed)
    kinds = (translated, translated, translated, manual, manual, program, paper, mixed, repeated)
    return [chooser.choice(kinds)(chooser) for _ in range(count)]


def translated(chooser: random.Random) -> str:
    language = chooser.choice(LANGUAGES)
    chosen = chooser.choices(messages(language), k=chooser.randint(1, 25))
    return chooser.choice((" ", "\n", "\n\n")).join(chosen)


def manual(chooser: random.Random) -> str:
    return _piece(chooser, chooser.choice(manuals(chooser.choice(MANUALS))))


def program(chooser: random.Random) -> str:
    return _piece(chooser, chooser.choice(programs()))


def paper(chooser: random.Random) -> str:
    return _piece(chooser, chooser.choice(papers()))


def mixed(chooser: random.Random) -> str:
    parts = [chooser.choice((translated, manual, paper))(chooser)[:1500] for _ in range(3)]
    return "\n".join(parts)


def repeated(chooser: random.Random) -> str:
    lines = translated(chooser).split("\n")
    return "\n".join(chooser.choices(lines, k=len(lines) + chooser.randint(1, 8)))


def _piece(chooser: random.Random, text: str) -> str:
    """Up to some 6,000 characters of whole lines."""
    lines = text.split("\n")
    start = chooser.randrange(len(lines))
    return "\n".join(lines[start : start + chooser.randint(10, 150)])[:6000]


def in_parallel(texts: list[str]) -> dict[str, list[str]]:
    blocks = [texts[at : at + _BLOCK] for at in range(0, len(texts), _BLOCK)]
    with ProcessPoolExecutor(2) as pool:
        parts = list(pool.map(datatrove_verdicts, blocks))
    return {step: list(chain.from_iterable(part[step] for part in parts)) for step in parts[0]}


def compared(step: str, texts: list[str], theirs: list[str]) -> dict[str, Any]:
    """Agreement of each rule, and the causes of what differs."""
    ours = [OURS[step](text) for text in texts]
    pairs = list(zip(ours, theirs, strict=True))
    agreement = {
        rule or "kept": {
            "datatrove": theirs.count(rule),
            "stoker": ours.count(rule),
            "agreement": round(sum((a == rule) == (b == rule) for a, b in pairs) / len(pairs), 5),
        }
        for rule in sorted(set(ours) | set(theirs))
    }
    differ = [(text, a, b) for text, (a, b) in zip(texts, pairs, strict=True) if a != b]
    causes = Counter(cause(step, text, theirs=b) for text, _, b in differ)
    for text, a, b in [one for one in differ if cause(step, one[0], theirs=one[2]) == "unexplained"][:_SHOWN]:
        print(f"{step}: ours {a!r}, datatrove's {b!r}: {text[:300]!r}", file=sys.stderr)
    return {"rules": agreement, "differ": len(differ), "causes": dict(causes)}


def cause(step: str, text: str, *, theirs: str) -> str:
    """What must be spaCy's for our rules to say what datatrove's say."""
    from datatrove.utils.text import split_into_sentences, split_into_words

    kept = rules.words, rules.count_sentences
    try:
        rules.words = split_into_words
        rules.count_sentences = lambda line, most: len(split_into_sentences(line))
        same = OURS[step](text) == theirs
    finally:
        rules.words, rules.count_sentences = kept
    return ("sentences" if step == "c4" else "words") if same else "unexplained"


if __name__ == "__main__":
    main()
