"""Is a text a program? The model of languages has no word for those.

Told by its lines: how those of programs begin and end, and what they hold that prose hardly does. Comments
count for neither side: they are prose inside programs. The numbers were chosen on one half of the texts of
benchmarks/languages.py, which publishes how it does on the other half and on languages never looked at.
"""

from __future__ import annotations

import re

_SHARE = 0.45  # of the lines that are no comments look like a program's; in tables of options a third does
_SHARE_ALL = 0.7  # of all lines: enough in texts with letters of other scripts or with accents
_SYMBOLS = 0.05  # of the characters: prose has 0.03, programs 0.07 to 0.2
_SYMBOLS_DENSE = 0.15  # where lines tell nothing, in programs and pages squeezed into one line
_DENSE_LENGTH = 300  # characters, below which a line of symbols may be a usage message
_LINES = 3
_ASCII = 0.98  # of the letters: where fewer are, strings and comments do not explain it
_SCRIPT = 0.5  # a text mostly of another script is never a program
_LOOKED_AT = 200  # characters of a line

_BEGINS = re.compile(
    r"""
    (?: def|class|elif|except|assert|async|await|raise|yield|lambda|return|typedef|struct|enum|union|namespace
      | extern|inline|static|void|unsigned|public|private|protected|func|fn|impl|let|const|var|val|my|our
      | local|sub|function|export|proc|endif|endfunction|call|SELECT|INSERT|CREATE|UPDATE|ALTER|DROP
    )\b (?!\ +\w+\ +\w+\ +\w+\ +\w)                                       # four words more are a sentence
  | (?:import|package|use|using|require|module)\s+[\w.:"'<{*]+(?:\s+as\s+\w+|\s+import\b.*)?;?$
  | from\s+\S+\s+import\b | (?:else|try|finally):$ | (?:with|for|if|while)\s.*:$ | case\s+\S+?:
  | (?:if|for|while|switch|foreach|elseif|catch|template)\s*[(<] | (?:if|while)\s\[
  | (?:fi|then|done|esac|do|else|end)$
  | \#! | \#\s*(?:include|define|ifdef|ifndef|if|else|elif|endif|pragma|undef)\b
  | // | /\* | \*/ | @\w+(?:\(|$) | [}\])]+[;,)]*$
  | </?(?:!|\?|html|head|body|div|span|p|a|li|ul|ol|t[drh]|table|script|style|link|meta|h\d|br|img|input|form
      |pre|code|svg|path)\b | </\w[\w:-]*> | <\w[\w:-]*\s[\w:-]+="
  | [$@%&]?[A-Za-z_][\w.:$\[\]"'>-]*(?:\s*:\s\w[\w\[\],.|"]*)?            # a name, its type,
      \s*(?:[-+*/|&^%.:]|\|\||&&|<<|>>)?=(?!=)\s*\S                       # and what is assigned
  | [\w.:>-]+\(.*\)\s*[;,:{]?$ | ["'][\w-]+["']\s*:
  | (?:\w+_\w+|[A-Z]\w*[a-z]\w*[A-Z]\w*),$                                # names_like_this, NamesLikeThis
    """,
    re.ASCII | re.VERBOSE,
)
_HOLDS = re.compile(
    r"\w->\w|\)\s*->|=>|\w::\w|[=!]==?\s|\s(?:&&|\|\||\+=|-=|<<|>>)\s|\$[({]|\$\w+[\[-]", re.ASCII
)
_ENDS = (";", "{", "}", "(", "[", "):", "),")
_COMMENT = re.compile(r"""(?:[*#;"%]|//|--|<!--|REM\b)(?:\s|\W|$)""")
_SYMBOL = re.compile(r"[{}\[\]()<>=;_\\/*+|&^%$#@~`]")
_ASCII_LETTERS = re.compile("[A-Za-z]+")


def is_program(text: str) -> bool:
    letters = sum(map(str.isalpha, text))
    ascii_letters = sum(map(len, _ASCII_LETTERS.findall(text)))
    if ascii_letters <= _SCRIPT * letters:
        return False
    symbols = len(_SYMBOL.findall(text)) / sum(map(len, text.split()))
    if symbols <= _SYMBOLS:
        return False
    plain = ascii_letters >= _ASCII * letters
    dense = len(text) > _DENSE_LENGTH and symbols > _SYMBOLS_DENSE
    return (plain and dense) or _are_program(text, plain=plain)


def _are_program(text: str, *, plain: bool) -> bool:
    lines = [line for line in map(str.strip, text.split("\n")) if line]
    others = [line for line in lines if not _is_told(line)]
    told = len(lines) - len(others)
    if told < _LINES:
        return False
    if told > _SHARE_ALL * len(lines):
        return True
    comments = sum(bool(_COMMENT.match(line)) for line in others)
    return plain and told > _SHARE * (len(lines) - comments)


def _is_told(line: str) -> bool:
    start = line[:_LOOKED_AT]
    return line.endswith(_ENDS) or bool(_BEGINS.match(start) or _HOLDS.search(start))
