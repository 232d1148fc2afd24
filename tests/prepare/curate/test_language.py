"""Language identification: right on 27 languages, no worse than another library, code told apart."""

from __future__ import annotations

import pytest
from sentences import PROGRAMS, SENTENCES

from stoker.errors import UsageError
from stoker.prepare.curate.batch import Batch
from stoker.prepare.curate.language import Language, identify
from stoker.prepare.sources.documents import Documents


def batch(*texts: str) -> Batch:
    documents = Documents.of(list(texts), list(range(len(texts))))
    return Batch(texts=documents.texts, places=documents.places)


def test_nearly_every_sentence_is_told() -> None:
    cases = [(language, text) for language, texts in SENTENCES.items() for text in texts]
    wrong = [(language, identify(text)) for language, text in cases if identify(text)[0] != language]
    assert len(SENTENCES) >= 20
    assert len(wrong) <= len(cases) // 50, wrong


@pytest.mark.parametrize("language", ["ko", "ja", "zh", "en"])
def test_the_languages_most_asked_for_are_told_and_surely(language: str) -> None:
    found, score = identify(" ".join(SENTENCES[language]))
    assert (found, score > 0.65) == (language, True)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_is_code(program: str) -> None:
    assert identify(program)[0] == "code"


@pytest.mark.parametrize(
    "text",
    [
        "<시각_형식> 인자는 full-iso, long-iso, iso 중 하나가 될 수 있습니다.\n"
        "<형식>은 date(1)처럼 해석합니다.\n"
        "<형식1>에는 최신 이전의 설정을 적용합니다;\n"
        "  -j <필드>   '-1 <필드> -2 <필드>'와 동일합니다;\n  <경로>를 씁니다;",
        "用法：\n  <路径>   要复制的文件；\n  -o=<文件>  输出 {默认};\n  -v=<级别>  日志 {默认};\n  --help;",
        "Optionen:\n  --muster=WORT   Zeilen mit diesem Wort\n  --größe=ZAHL    höchstens so viele Zeilen\n"
        "  --schlüssel=X   wonach geordnet wird\n  --länge=ZAHL    wie viele Zeichen",
    ],
    ids=["Korean options", "Chinese options", "German options"],
)
def test_options_in_another_language_are_no_program(text: str) -> None:
    assert identify(text)[0] != "code"


LONG_COMMENT = "# Coal first.\n" * 12
ONE_LINE = "!function(e,t){return e.a=t.b?[1,2]:{c:0},e(t)}(window,{});" * 8
KOREAN_COMMENTS = "".join(f"int 석탄_{i}(void) {{\n  return {i};  // 석탄\n}}\n" for i in range(6))


@pytest.mark.parametrize(
    "text",
    [
        LONG_COMMENT + "import os\ndef load(path):\n    size = os.stat(path)\n    return size\n",
        ONE_LINE,
        KOREAN_COMMENTS,
        "<html>\n<body>\n<p>\nThe fire is lit.\n</p>\n</body>\n</html>\n",
        'if [ -n "$COAL" ]; then\n  echo $(date) >> log\n  shovel --from=$COAL\nfi\nexit 0\n',
    ],
    ids=["long comment", "one line", "Korean comments", "a page's source", "shell"],
)
def test_programs_of_other_shapes_are_code(text: str) -> None:
    assert identify(text)[0] == "code"


@pytest.mark.parametrize(
    "text",
    [
        "We wait for the train; it is late (as ever).\nIf it comes, we get on it.\nReturn tickets cost more.",
        "- coal\n- water\n- fire\n* a shovel\n* a poker\n",
        "import the coal before winter\nclass of 1923\nwhile we wait, we talk",
    ],
    ids=["sentences", "a list", "words that programs have too"],
)
def test_prose_is_no_program(text: str) -> None:
    assert identify(text)[0] != "code"


@pytest.mark.parametrize("text", ["", "12345 67", "\n\n", "!!! ???"])
def test_what_has_no_letters_has_no_language(text: str) -> None:
    assert identify(text) == ("und", 0.0)


def test_documents_of_other_languages_go() -> None:
    outcome = Language(keep=("ko",)).run(batch(SENTENCES["ko"][0], SENTENCES["de"][0]))
    assert list(outcome.reasons) == ["", "language_de"]
    assert outcome.found == {"ko": 1, "de": 1}


def test_of_a_mixed_document_the_lines_in_other_languages_go() -> None:
    mixed = "\n".join([SENTENCES["ko"][0], SENTENCES["en"][0], SENTENCES["ko"][1]])
    outcome = Language(keep=("ko",), by_line=True).run(batch(mixed))
    assert outcome.texts is not None
    assert outcome.texts.strings == ["\n".join(SENTENCES["ko"])]


def test_lines_need_to_know_which_languages_stay() -> None:
    with pytest.raises(UsageError, match="by_line"):
        Language(by_line=True)
