"""Words of a text as the published rules count them: as spaCy cuts English, which is what datatrove takes.

Text is parted by white space; from both ends of each part marks are taken off, then it is cut at hyphens and
the like. Contractions part (do n't), abbreviations keep their point (Dr.). The rules and the lists are those
of spaCy 3 (MIT licence, Explosion AI), shortened where it rarely matters: rare letters and emoticons.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain

_UPPER = r"A-ZÀ-ÖØ-ÞА-ЯЁІЇЄҐΑ-ΩΆΈΊΌΏΉΎ"
# What has no case counts as both: a point between two such words parts them.
_LOWER = r"a-zß-öø-ÿа-яёіїєґα-ωάέίόώήύ\u0100-\u017f\u1e00-\u1eff"
_UNCASED = (
    r"\u0591-\u05f4\u0620-\u064a\u066e-\u06d5\u06e5-\u06ff\u0900-\u09ff\u0b80-\u0cff\u0d80-\u0dff\u1100-\u137f"
    r"\u2e80-\u2fff\u3000-\u30ff\u31c0-\u9fff\uac00-\ud7af\uf900-\ufaff"
)
_LETTERS = rf"{_UPPER}{_LOWER}{_UNCASED}"
_MARKS = r"[,:;!?¿؟¡()\[\]{}<>_#*&。？！，、；：～·।،۔؛٪]|…+"
_QUOTE = r"'\"”“`‘´’‚,„»«「」『』（）〔〕【】《》〈〉⟦⟧"
_MONEY = r"(?:US|[CA])?\$|[£€¥฿﷼\u20a0-\u20bf]"
_ICON = (
    r"[¦©®°\u0482\u2100-\u2101\u2103-\u2106\u2116\u2117\u2120-\u2123\u2195-\u2199\u21d0\u21d1\u21d5-\u21f3"
    r"\u2300-\u2307\u230c-\u231f\u2322-\u2426\u249c-\u24e9\u2500-\u25b6\u25b8-\u25c0\u25c2-\u25f7\u2600-\u266e"
    r"\u2670-\u2767\u2794-\u27bf\u2800-\u28ff\u2b00-\u2bfe\u3012\u3013\u3200-\u33ff\ufffc\ufffd"
    r"\U0001f000-\U0001fa6d]"
)
_UNIT = (
    r"(?:[kdcm]?m[²³]?|ha|[µn]m|yd|in|ft|[mkµ]?g|t|lb|oz|m/s|km/h|kmh|mph|h?Pa|mbar|mb|[MkKgGtT]B|[kgt]b|[TGMK]"
    r"|[дсмк]?м[²³]?|нм|[км]?г|м/с|км/ч|к?Па|мбар|[КкМмГгТ]б|[КМГТ]Б|%)"
)
_BOTH = rf"{_MARKS}|\.\.+|[{_QUOTE}]|{_ICON}|[—–]"
_PREFIX = re.compile(rf"[§%=]|\+(?![0-9])|{_BOTH}|{_MONEY}")
_SUFFIX = re.compile(
    rf"(?:{_BOTH}|['’][sS]|(?<=[0-9])(?:\+|{_MONEY}|{_UNIT})|(?<=°[FfCcKk])\."
    rf"|(?<=[0-9{_LOWER}{_UNCASED}%²\-+…:;!?¿؟¡()\[\]{{}}<>_#*&。？！，、；：～·।،۔؛٪{_QUOTE}|])\."
    rf"|(?<=[{_UPPER}{_UNCASED}][{_UPPER}{_UNCASED}])\.)$"
)
_INFIX = re.compile(
    rf"\.\.+|…|{_ICON}|(?<=[0-9])[+\-*^](?=[0-9-])"
    rf"|(?<=[{_LOWER}{_UNCASED}{_QUOTE}])\.(?=[{_UPPER}{_UNCASED}{_QUOTE}])|(?<=[{_LETTERS}]),(?=[{_LETTERS}])"
    rf"|(?<=[{_LETTERS}0-9])(?:---?|[-–~]|——?|[:<>=/])(?=[{_LETTERS}])"
)
_ADDRESS = re.compile(  # of a page or of a person: stays whole
    r"(?:[\w+\-.]{2,}://)?(?:\S+@)?(?:(?:[1-9]\d{0,2}(?:\.\d{1,3}){3})"
    r"|(?:[A-Za-z0-9\u00a1-\uffff](?:[A-Za-z0-9\u00a1-\uffff_-]{0,62}[A-Za-z0-9\u00a1-\uffff])?\.)+"
    rf"[{_LOWER}{_UNCASED}]{{2,63}})(?::\d{{2,5}})?(?:[/?#]\S*)?$"
)
_ENDS = frozenset("!.?։؟۔܀܁܂߹।॥၊။።፧፨᙮᜵᜶᠃᠉᥄᥅᪨᪩᪪᪫᭚᭛᭞᭟᰻᰼᱾᱿‼‽⁇⁈⁉⸮⸼꓿꘎꘏꛳꛷꡶꡷꣎꣏꤯꧈꧉꩝꩞꩟꫰꫱꯫﹒﹖﹗！．？｡。")
_PLAIN = re.compile(r"\w+|[^\w\s]")
_LONG = 1000  # characters: marks taken off one by one would take for ever, and no word is that long


def words(text: str) -> list[str]:
    """The words and marks of a text."""
    return list(chain.from_iterable(map(_pieces, text.split())))


def count_sentences(text: str, *, most: int) -> int:
    """Sentences of a text, or `most` if there are more: one ends with a mark and those that follow it."""
    count, ended = 1, False
    for word in words(text):
        if word in _ENDS:
            ended = True
        elif ended and not _is_mark(word):
            count, ended = count + 1, False
            if count >= most:
                break
    return count


def _is_mark(word: str) -> bool:
    return not word[0].isalnum() and all(unicodedata.category(character)[0] == "P" for character in word)


@lru_cache(1 << 16)  # words repeat: most are looked up
def _pieces(part: str) -> tuple[str, ...]:
    if part in _SPECIAL:
        return _SPECIAL[part]
    if part.isalpha():
        return (part,)
    if len(part) > _LONG:
        return tuple(_PLAIN.findall(part))
    before: list[str] = []
    after: list[str] = []
    while part and part not in _SPECIAL:
        start, end = _PREFIX.match(part), _SUFFIX.search(part)
        if start:
            before.append(start[0])
            part = part[start.end() :]
            end = None if part in _SPECIAL else _SUFFIX.search(part)
        if end:
            after.append(end[0])
            part = part[: end.start()]
        if not start and not end:
            break
    return tuple(_joined([*before, *_inner(part), *reversed(after)]))


def _joined(pieces: list[str]) -> list[str]:
    """Marks that make a face are one, in programs too: `):`."""
    for size in (3, 2):
        at = 0
        while at + size <= len(pieces):
            if (face := "".join(pieces[at : at + size])) in _FACE_SET:
                pieces[at : at + size] = [face]
            at += 1
    return pieces


def _inner(part: str) -> Iterable[str]:
    """What is left without marks at its ends, cut at those inside."""
    if not part or part in _SPECIAL:
        return _SPECIAL.get(part, ())
    if part.isalpha() or _ADDRESS.match(part):
        return (part,)
    return _cut(part)


def _cut(part: str) -> Iterator[str]:
    last = 0
    for mark in _INFIX.finditer(part):
        if mark.start() > last:
            yield part[last : mark.start()]
        yield mark[0]
        last = mark.end()
    if last < len(part):
        yield part[last:]


# --- contractions and abbreviations -------------------------------------------------------------------

_WILL, _IS, _ARE, _HAVE = ("'ll", "'ll 've", "'d", "'d 've"), ("'s",), ("'re",), ("'ve",)
_NOT, _NOT_HAVE = ("n't",), ("n't", "n't 've")
_CONTRACTED = {
    "i": ("'m", "'m a", *_WILL, *_HAVE),
    "you we they": (*_WILL, *_ARE, *_HAVE),
    "he she it": (*_WILL, *_IS),
    "who what when where why how there": (*_WILL, *_IS, *_ARE, *_HAVE),
    "that this": (*_WILL, *_IS),
    "these those": (*_WILL, *_ARE, *_HAVE),
    "ca do does did had may need ought sha wo": _NOT_HAVE,
    "could might must should would": (*_NOT_HAVE, *_HAVE),
    "ai are is was were have has dare": _NOT,
    "not": _HAVE,
}
_WORDS_OF_THEIR_OWN = ["ill", "its", "hell", "shell", "shed", "were", "well", "whore"]
_FACES = (
    ":) :-) :)) (: (-: =) (= :] :-] [: [-: [= =] :} :-} 8) 8-) ;) ;-) (; (-; :( :-( :(( ): )-: "
    "=( )= :/ :-/ =/ =| :| :-| :> :-> ^_^ :* :-* >.< -_- ._. '' ;_; <3 :x :p :P :D :0 :O :o xD"
)
_PARTED = "y' all|how 'd 'y|can not|gon na|got ta|let 's|c'm on"
_WHOLE = (
    "'s 'S 're 'd 'em 'll 'nuff 'cause 'cos 'coz 'cuz 'bout and/or w/o ma'am o'clock lovin' havin' doin' "
    "goin' nothin' nuthin' ol' somethin' C++ '' ' \\n \\t a.m. p.m. e.g. E.G. i.e. I.E. v.s. vs. co. N.C. "
    "N.D. N.H. N.J. N.M. N.Y. S.C. D.C. Ph.D. Mt. Ak. Ala. Apr. Ariz. Ark. Aug. Calif. Colo. Conn. Dec. "
    "Del. Feb. Fla. Ga. Ia. Id. Ill. Ind. Jan. Jul. Jun. Kan. Kans. Ky. La. Mar. Mass. Mich. Minn. Miss. "
    "Neb. Nebr. Nev. Nov. Oct. Okla. Ore. Pa. Sep. Sept. Tenn. Va. Wash. Wis. Adm. Bros. Co. Corp. Dr. "
    "Gen. Gov. Inc. Jr. Ltd. Md. Messrs. Mo. Mont. Mr. Mrs. Ms. Prof. Rep. Rev. Sen. St. ä. ö. ü. <space>"
)


def _special() -> dict[str, tuple[str, ...]]:
    parted = [
        head + " " + tail for heads, tails in _CONTRACTED.items() for head in heads.split() for tail in tails
    ]
    parted += [f"{hour} {half}" for hour in range(1, 13) for half in ("a.m.", "am", "p.m.", "pm")]
    parted += _PARTED.split("|")
    parted += [line.replace("'", "") for line in parted]
    whole = [*_WHOLE.split(), *(f"{letter}." for letter in "abcdefghijklmnopqrstuvwxyz")]
    found = {"".join(line.split()): tuple(line.split()) for line in [*parted, *whole]}
    found |= {word[0].upper() + word[1:]: (parts[0][0].upper() + parts[0][1:], *parts[1:])
              for word, parts in found.items() if word[1:] != "."}  # fmt: skip
    found |= {word.replace("'", "’"): tuple(part.replace("'", "’") for part in parts)
              for word, parts in found.items()}  # fmt: skip
    for word in _WORDS_OF_THEIR_OWN:
        found.pop(word, None)
        found.pop(word.title(), None)
    return found


_SPECIAL, _FACE_SET = _special(), frozenset(_FACES.split())
