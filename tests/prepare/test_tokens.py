"""Where tokenizers come from, which engine runs them, and what happens when one is wrong."""

from __future__ import annotations

import json
import re
import struct
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import EngineMismatchError, TaskError, TokenizerError
from stoker.prepare.sources.documents import Texts
from stoker.prepare.tokens import choose_engine, choose_eod, load_tokenizer, open_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    Make = Callable[..., Any]
    Encode = Callable[[str], list[int]]


ENGINES = ["gigatoken", "fastokens", "huggingface"]


# --- where tokenizers come from -------------------------------------------------------------------


def test_a_folder_that_holds_a_tokenizer_is_one(tokenizer_path: Path) -> None:
    assert load_tokenizer(str(tokenizer_path.parent)).digest == load_tokenizer(str(tokenizer_path)).digest


@pytest.mark.parametrize(
    "name", ["./tok", "/nowhere/tok", "~/tok", "tok.json", "my/tok.json", "a/b/c", "tok/"]
)
def test_a_path_that_does_not_exist_is_not_sought_on_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # who asked for it would hear of that
    with pytest.raises(TokenizerError, match=f"there is no tokenizer {re.escape(repr(name))}"):
        load_tokenizer(name)


def test_the_vocabulary_counts_added_tokens(tokenizer_path: Path) -> None:
    from tokenizers import Tokenizer

    found = load_tokenizer(str(tokenizer_path))
    assert found.vocabulary == Tokenizer.from_file(str(tokenizer_path)).get_vocab_size(with_added_tokens=True)


def test_a_cached_hub_name_is_found_offline(
    tokenizer_path: Path, corpus: Path, run_stoker: Any, snapshot: Any, tmp_path: Path
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = tmp_path / "hf" / "hub" / "models--acme--tokens"
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit / "tokenizer.json").write_bytes(tokenizer_path.read_bytes())
    offline = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    ran = run_stoker(
        "prepare",
        corpus,
        "--tokenizer",
        "acme/tokens",
        "--out",
        tmp_path / "out",
        "--workers",
        1,
        env=offline,
    )
    assert ran.rc == 0, ran.stderr
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == tokenizer_path.read_bytes()


@pytest.mark.parametrize("name", ["no/such/tokenizer.json", "acme/nothing", "bad name!", "", "a" * 300])
def test_a_tokenizer_that_does_not_exist_is_named(name: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(name)
    assert repr(name) in caught.value.message or "no tokenizer at" in caught.value.message


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no tokenizer at"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"version": "1.0"}'])
def test_a_file_that_is_no_tokenizer_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=rf"{tmp_path}/tokenizer.json is not a tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError):
        load_tokenizer(str(tmp_path))


PLUGIN = """
def tiny():
    ranks = {bytes([n]): n for n in range(256)} | {b"th": 256, b"the": 257, b" the": 258}
    return {
        "name": "tiny",
        "pat_str": r"\\s?\\w+|\\s+|[^\\s\\w]+",
        "mergeable_ranks": ranks,
        "special_tokens": {"<|endoftext|>": 259},
    }

ENCODING_CONSTRUCTORS = {"tiny": tiny}
"""


@pytest.fixture
def tiktoken_plugin(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "plugins" / "tiktoken_ext").mkdir(parents=True)
    (tmp_path / "plugins" / "tiktoken_ext" / "tiny.py").write_text(PLUGIN)
    return {"PYTHONPATH": str(tmp_path / "plugins")}


def test_a_tiktoken_encoding_is_used(
    tiktoken_plugin: dict[str, str], run_stoker: Any, write_jsonl: Any, read_tokens: Any, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", ["the <|endoftext|>", "other"])
    arguments = ["--tokenizer", "tiktoken:tiny", "--out", tmp_path / "out", "--no-shuffle", "--workers", 1]
    ran = run_stoker("prepare", path, *arguments, env=tiktoken_plugin)
    assert ran.rc == 0, ran.stderr
    wanted = [[257, *b" <|endoftext|>", 259], [*b"o", 257, *b"r", 259]]
    assert read_tokens(tmp_path / "out") == wanted


def test_an_unknown_tiktoken_encoding_is_refused() -> None:
    with pytest.raises(TokenizerError, match="cannot load tiktoken:nonsense"):
        load_tokenizer("tiktoken:nonsense")


# --- the end-of-document token --------------------------------------------------------------------


def test_the_end_token_is_the_configured_one(tokenizer_path: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_path.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "!"}}))
    tokenizer = load_tokenizer(str(tmp_path))
    assert choose_eod(tokenizer, "") == choose_eod(tokenizer, "!") != choose_eod(tokenizer, "<|endoftext|>")


def test_an_end_token_it_does_not_have_is_refused(make: Make, corpus: Path) -> None:
    with pytest.raises(TokenizerError, match="has no end-of-document token called 'nope'"):
        make(corpus, eod="nope")


def test_a_first_token_it_does_not_have_is_refused(make: Make, corpus: Path) -> None:
    with pytest.raises(TokenizerError, match="has no token called 'nope'") as caught:
        make(corpus, bos="nope")
    assert "--bos" in caught.value.hint


def test_a_tokenizer_without_a_usual_end_token_asks_for_one(
    tokenizer_path: Path, make: Make, corpus: Path, tmp_path: Path
) -> None:
    plain = json.loads(tokenizer_path.read_text())
    plain["added_tokens"] = []
    plain["model"]["vocab"]["nothing usual"] = plain["model"]["vocab"].pop("<|endoftext|>")
    (tmp_path / "tokenizer.json").write_text(json.dumps(plain))
    with pytest.raises(TokenizerError) as caught:
        make(corpus, tokenizer=str(tmp_path / "tokenizer.json"))
    assert "--eod none" in caught.value.hint


# --- engines --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engines(tokenizer_path: Path) -> dict[str, Any]:
    tokenizer = load_tokenizer(str(tokenizer_path))
    return {name: open_engine(name, tokenizer) for name in ENGINES}


def ids(engine: Any, texts: Iterable[str]) -> list[list[int]]:
    flat, offsets = engine.encode(Texts.of(texts))
    return [flat[a:b].tolist() for a, b in pairwise(offsets.tolist())]


@pytest.mark.parametrize("name", ["gigatoken", "fastokens"])
@given(texts=st.lists(st.text(max_size=60), min_size=1, max_size=6))
@settings(max_examples=60)
def test_a_fast_engine_gives_the_reference_ids(name: str, texts: list[str], engines: dict[str, Any]) -> None:
    assert ids(engines[name], texts) == ids(engines["huggingface"], texts)


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_prepares_the_same_bytes(
    name: str, make: Make, corpus: Path, texts: list[str], encode: Encode, read_tokens: Any, tmp_path: Path
) -> None:
    done = make(corpus, engine=name, shuffle=False)
    assert done.manifest.tokenizer.engine == name
    assert read_tokens(tmp_path / "out") == [encode(text) for text in texts]


def test_the_fastest_engine_that_is_exact_is_chosen(tokenizer_path: Path, texts: list[str]) -> None:
    assert choose_engine(load_tokenizer(str(tokenizer_path)), "auto", texts[:5])[0] == "gigatoken"


def test_the_manifest_names_the_version_of_the_engine(make: Make, corpus: Path) -> None:
    from importlib.metadata import version

    assert make(corpus, engine="fastokens").manifest.tokenizer.engine_version == version("fastokens")


# --- an engine that is wrong ----------------------------------------------------------------------


MARKED = [f"MARKED document number {number}" for number in range(4000)]


class Panic(BaseException):
    """What a native engine raises when it gives up: no kind of Exception."""


@pytest.fixture
def wrong_engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], bool]], None]:
    """Make fastokens give wrong ids for the texts that a test picks."""
    import fastokens

    real = fastokens.Tokenizer

    def install(is_wrong: Callable[[str], bool]) -> None:
        class Wrong:
            def __init__(self, definition: str) -> None:
                self._real = real.from_json_str(definition)

            @classmethod
            def from_json_str(cls, definition: str) -> Wrong:
                return cls(definition)

            def encode_batch_flat(self, texts: list[str]) -> tuple[bytes, bytes]:
                lists = [self._real.encode_batch_flat([text])[0] for text in texts]
                lists = [
                    bytes(4) + bytes(flat)[4:] if is_wrong(text) and flat else bytes(flat)
                    for text, flat in zip(texts, lists, strict=True)
                ]
                ends = [0]
                for flat in lists:
                    ends.append(ends[-1] + len(flat) // 4)
                return b"".join(lists), struct.pack(f"<{len(ends)}Q", *ends)

        monkeypatch.setattr(fastokens, "Tokenizer", Wrong)

    return install


@pytest.fixture
def two_files(texts: list[str], write_jsonl: Any, tmp_path: Path) -> Path:
    """Good documents, which an engine is tried on, and behind them marked ones: so many that some are in the
    sample that is checked during the run."""
    folder = tmp_path / "two"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", texts[:100])
    write_jsonl(folder / "b.jsonl", [*texts[100:200], *MARKED])
    return folder


def test_an_engine_that_is_always_wrong_is_refused_at_the_start(
    wrong_engine: Any, make: Make, corpus: Path
) -> None:
    wrong_engine(lambda text: True)
    with pytest.raises(EngineMismatchError, match="fastokens differs from the reference on an edge string"):
        make(corpus, engine="fastokens")


def test_an_engine_wrong_on_the_first_documents_is_refused_at_the_start(
    wrong_engine: Any, make: Make, corpus: Path, texts: list[str]
) -> None:
    wrong_engine(lambda text: text == texts[10])
    with pytest.raises(EngineMismatchError, match="on a first document"):
        make(corpus, engine="fastokens")


def test_a_wrong_engine_asked_for_by_no_name_is_passed_over(
    wrong_engine: Any, monkeypatch: pytest.MonkeyPatch, make: Make, corpus: Path, watcher: Any
) -> None:
    import gigatoken

    monkeypatch.delattr(gigatoken, "Tokenizer")
    wrong_engine(lambda text: True)
    assert make(corpus).manifest.tokenizer.engine == "huggingface"
    assert any("fastokens differs from the reference" in note for note in watcher.notes)


def test_an_engine_that_panics_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, make: Make, corpus: Path
) -> None:
    import gigatoken

    class Panics:
        @classmethod
        def from_json(cls, definition: str) -> Panics:
            return cls()

        def encode_batch(self, *given: Any, **more: Any) -> None:
            raise Panic("index out of bounds")

    monkeypatch.setattr(gigatoken, "Tokenizer", Panics)
    assert make(corpus).manifest.tokenizer.engine == "fastokens"


def test_a_mismatch_during_the_run_stops_it_and_names_the_document(
    wrong_engine: Any, make: Make, two_files: Path
) -> None:
    wrong_engine(lambda text: text.startswith("MARKED"))
    with pytest.raises(EngineMismatchError, match=rf"differs from the reference on {two_files}/b\.jsonl at "):
        make(two_files, engine="fastokens")


def test_a_mismatch_leaves_no_dataset(wrong_engine: Any, make: Make, two_files: Path, tmp_path: Path) -> None:
    wrong_engine(lambda text: text.startswith("MARKED"))
    with pytest.raises(EngineMismatchError):
        make(two_files, engine="fastokens")
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("start", [True, False], ids=["at the start", "during the run"])
def test_a_mismatch_falls_back_to_the_reference_if_asked(
    start: bool,
    wrong_engine: Any,
    make: Make,
    two_files: Path,
    texts: list[str],
    encode: Encode,
    read_tokens: Any,
    tmp_path: Path,
) -> None:
    wrong_engine(lambda text: start or text.startswith("MARKED"))
    done = make(two_files, engine="fastokens", on_mismatch="fallback", shuffle=False)
    assert done.manifest.tokenizer.engine == "huggingface"
    wanted = [*texts[:200], *MARKED]
    assert read_tokens(tmp_path / "out") == [encode(text) for text in wanted]


def test_a_fallback_leaves_nothing_of_the_first_try(
    wrong_engine: Any, make: Make, two_files: Path, tmp_path: Path
) -> None:
    wrong_engine(lambda text: text.startswith("MARKED"))
    make(two_files, engine="fastokens", on_mismatch="fallback")
    assert [path.name for path in (tmp_path / "out").glob(".*")] == []


def test_an_engine_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, make: Make, corpus: Path
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "fastokens", None)
    with pytest.raises(Exception, match="fastokens is not installed"):
        make(corpus, engine="fastokens")


def test_an_engine_that_panics_during_the_run_fails_its_task(
    monkeypatch: pytest.MonkeyPatch, make: Make, two_files: Path
) -> None:
    import fastokens

    real = fastokens.Tokenizer

    class Panics:
        def __init__(self, definition: str) -> None:
            self._real = real.from_json_str(definition)

        @classmethod
        def from_json_str(cls, definition: str) -> Panics:
            return cls(definition)

        def encode_batch_flat(self, texts: list[str]) -> Any:
            if any(text.startswith("MARKED") for text in texts):
                raise Panic("index out of bounds")
            return self._real.encode_batch_flat(texts)

    monkeypatch.setattr(fastokens, "Tokenizer", Panics)
    with pytest.raises(TaskError, match="index out of bounds"):
        make(two_files, engine="fastokens")
