"""Tokenizers, and the engines that run them: fast ones behind a contract, checked against the reference.

An engine turns a list of texts into one flat array of ids and the offsets between documents. The
reference is Hugging Face `tokenizers` for a tokenizer.json and tiktoken for its encodings; any other
engine must give the same ids, checked on edge strings and the first documents before it is chosen, and
on a sample of documents while it runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from stoker.errors import EngineMismatchError, MissingPackageError, StokerError, TokenizerError, require
from stoker.prepare.probes import EDGE_STRINGS, added_token_texts
from stoker.prepare.sources.documents import Texts

Ids = npt.NDArray[np.uint32]
Offsets = npt.NDArray[np.int64]

ENGINES = ("gigatoken", "fastokens", "huggingface", "tiktoken")
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?$")  # what else does not exist is a path
_EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "[SEP]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokenizer:
    """A tokenizer as data: what it is called, its definition, its vocabulary."""

    name: str
    family: str
    definition: str
    digest: str
    vocabulary: int
    eod_name: str = ""

    @property
    def engines(self) -> tuple[str, ...]:
        """Engines that may run it, fastest first; the last is the reference."""
        return ("tiktoken",) if self.family == "tiktoken" else ENGINES[:3]

    @property
    def reference(self) -> str:
        return self.engines[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """A block of documents and their ids: document i has ids offsets[i] to offsets[i + 1]."""

    texts: Texts
    locations: npt.NDArray[np.int64]
    ids: Ids
    offsets: Offsets

    def take(self, rows: npt.NDArray[np.intp]) -> Encoded:
        """Those of these numbers, in this order."""
        sizes = np.diff(self.offsets)[rows]
        parts = [self.ids[self.offsets[row] : self.offsets[row + 1]] for row in rows.tolist()]
        return Encoded(
            texts=self.texts.take(rows),
            locations=self.locations[rows],
            ids=np.concatenate([self.ids[:0], *parts]),
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
        )


class Engine(Protocol):
    """Called from one thread of one process, many times."""

    def encode(self, texts: Texts) -> tuple[Ids, Offsets]: ...


def load_tokenizer(name: str) -> Tokenizer:
    """From a tokenizer.json, a folder that holds one, a hub name, or `tiktoken:ENCODING`."""
    if name.startswith("tiktoken:"):
        return _load_tiktoken(name)
    path = Path(name)
    try:
        if path.is_dir():
            path = path / "tokenizer.json"
        elif not path.exists():
            path = from_hub(name)
        definition = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(
            f"{path} is not text: {error}", hint="give the path of a tokenizer.json"
        ) from error
    except OSError as error:
        raise TokenizerError(
            f"no tokenizer at {path}: {error.strerror}",
            hint="give the path of a tokenizer.json, its folder, a hub name, or tiktoken:ENCODING",
        ) from error
    try:
        reference = huggingface(definition)
    except TokenizerError as error:
        raise TokenizerError(f"{path} is {error.message}", hint=error.hint) from error
    ids = reference.get_vocab(with_added_tokens=True).values()
    return Tokenizer(
        name=name,
        family="huggingface",
        definition=definition,
        digest=xxhash.xxh3_128_hexdigest(definition.encode()),
        vocabulary=max(ids, default=-1) + 1,
        eod_name=_configured_eod(path.with_name("tokenizer_config.json")),
    )


def token_id(tokenizer: Tokenizer, token: str) -> int | None:
    """The id of a token by its name."""
    found: int | None
    if tokenizer.family == "tiktoken":
        found = _tiktoken_encoding(tokenizer)._special_tokens.get(token)
    else:
        found = huggingface(tokenizer.definition).token_to_id(token)
    return found


def choose_eod(tokenizer: Tokenizer, asked: str) -> int | None:
    """The end-of-document id: the asked one, the configured one, or one with a usual name."""
    if asked == "none":
        return None
    for name in [asked] if asked else [tokenizer.eod_name, *_EOD_NAMES]:
        if name and (found := token_id(tokenizer, name)) is not None:
            return found
    raise TokenizerError(
        f"{tokenizer.name} has no end-of-document token" + (f" called {asked!r}" if asked else ""),
        hint="name one of its tokens with --eod, or say --eod none",
    )


def choose_bos(tokenizer: Tokenizer, asked: str) -> int | None:
    """The id of the token before each document, if one is asked for."""
    if asked in ("", "none"):
        return None
    found = token_id(tokenizer, asked)
    if found is None:
        raise TokenizerError(
            f"{tokenizer.name} has no token called {asked!r}",
            hint="name one of its tokens with --bos, or leave it out",
        )
    return found


def open_engine(name: str, tokenizer: Tokenizer) -> Engine:
    """An engine running this tokenizer; one that cannot raises TokenizerError."""
    makers: dict[str, Callable[[Tokenizer], Engine]] = {
        "gigatoken": _Gigatoken,
        "fastokens": _Fastokens,
        "huggingface": _HuggingFace,
        "tiktoken": _Tiktoken,
    }
    with _panics_named(name, tokenizer):
        return makers[name](tokenizer)


@contextmanager
def _panics_named(engine: str, tokenizer: Tokenizer) -> Iterator[None]:
    """Native engines panic with their own kinds, which are no Exceptions, on what they do not know."""
    try:
        yield
    except (MissingPackageError, TokenizerError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise TokenizerError(
            f"{engine} cannot run {tokenizer.name}: {error}", hint="choose another with --engine"
        ) from error


def engine_version(name: str) -> str:
    return version({"huggingface": "tokenizers"}.get(name, name))


def choose_engine(tokenizer: Tokenizer, asked: str, documents: Sequence[str]) -> tuple[str, list[str]]:
    """The fastest engine that is installed and gives the reference's ids; and why others were not taken.

    An engine asked for by name must pass, or this raises.
    """
    if asked != "auto":
        verify(asked, tokenizer, documents)
        return asked, []
    refused: list[StokerError] = []
    for name in tokenizer.engines:
        try:
            verify(name, tokenizer, documents)
            return name, [error.message for error in refused]
        except (MissingPackageError, TokenizerError) as error:
            refused.append(error)
    raise TokenizerError(
        f"no engine can run {tokenizer.name}: {'; '.join(error.message for error in refused)}",
        hint=refused[-1].hint,  # the reference's
    )


def verify(name: str, tokenizer: Tokenizer, documents: Sequence[str]) -> None:
    """Compare an engine with the reference on the edge strings and these documents."""
    engine = open_engine(name, tokenizer)
    if name != tokenizer.reference:
        texts = Texts.of([*EDGE_STRINGS, *_own_tokens(tokenizer), *documents])
        where = ["an edge string"] * (len(texts) - len(documents)) + ["a first document"] * len(documents)
        with _panics_named(name, tokenizer):
            ids, offsets = engine.encode(texts)
        Referee(tokenizer, name).check(texts, ids, offsets, where)


class Referee:
    """Compares an engine's ids with the reference's."""

    def __init__(self, tokenizer: Tokenizer, engine: str) -> None:
        self._engine = engine
        self._reference = open_engine(tokenizer.reference, tokenizer)

    def check(self, texts: Texts, ids: Ids, offsets: Offsets, where: Sequence[str]) -> None:
        """Raise EngineMismatchError, naming the document, unless every text has the reference's ids."""
        wanted, wanted_offsets = self._reference.encode(texts)
        if np.array_equal(wanted, ids) and np.array_equal(wanted_offsets, offsets):
            return
        for number, text in enumerate(texts.strings):
            mine = ids[offsets[number] : offsets[number + 1]]
            theirs = wanted[wanted_offsets[number] : wanted_offsets[number + 1]]
            if not np.array_equal(mine, theirs):
                at = _first_difference(mine, theirs)
                raise EngineMismatchError(
                    f"{self._engine} differs from the reference on {where[number]} ({text[:60]!r}...): "
                    f"token {at} is {mine[at : at + 3].tolist()}, should be {theirs[at : at + 3].tolist()}",
                    hint="run again with --engine huggingface (slower, exact), or --on-mismatch fallback",
                )


class _Gigatoken:
    def __init__(self, tokenizer: Tokenizer) -> None:
        gigatoken = require("gigatoken", extra="tokens")
        self._tokenizer = gigatoken.Tokenizer.from_json(tokenizer.definition)
        self._awkward = require("awkward", extra="tokens")

    def encode(self, texts: Texts) -> tuple[Ids, Offsets]:
        # One thread per worker process: the processes are the parallelism.
        layout = self._tokenizer.encode_batch(self._byte_strings(texts), parallel=False).layout
        return np.asarray(layout.content.data, np.uint32), np.asarray(layout.offsets.data, np.int64)

    def _byte_strings(self, texts: Texts) -> Any:
        """The texts as the array type gigatoken reads in place."""
        contents = self._awkward.contents
        data = contents.NumpyArray(texts.data, parameters={"__array__": "byte"})
        offsets = self._awkward.index.Index64(texts.offsets)
        layout = contents.ListOffsetArray(offsets, data, parameters={"__array__": "bytestring"})
        return self._awkward.Array(layout)


class _Fastokens:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = require("fastokens", extra="fastokens").Tokenizer.from_json_str(
            tokenizer.definition
        )

    def encode(self, texts: Texts) -> tuple[Ids, Offsets]:
        ids, offsets = self._tokenizer.encode_batch_flat(texts.strings)
        return np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.uint64).astype(np.int64)


class _HuggingFace:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = huggingface(tokenizer.definition)

    def encode(self, texts: Texts) -> tuple[Ids, Offsets]:
        encodings = self._tokenizer.encode_batch_fast(texts.strings, add_special_tokens=False)
        return _flatten([encoding.ids for encoding in encodings])


class _Tiktoken:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encoding = _tiktoken_encoding(tokenizer)

    def encode(self, texts: Texts) -> tuple[Ids, Offsets]:
        return _flatten([self._encoding.encode_ordinary(text) for text in texts.strings])


def _flatten(lists: list[list[int]]) -> tuple[Ids, Offsets]:
    offsets = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(ids) for ids in lists], out=offsets[1:])
    flat = np.fromiter((token for ids in lists for token in ids), np.uint32, count=int(offsets[-1]))
    return flat, offsets


def _own_tokens(tokenizer: Tokenizer) -> list[str]:
    """Texts with the tokenizer's own added tokens in them, which a fast engine may not know of."""
    if tokenizer.family != "huggingface":
        return []
    return added_token_texts(list(huggingface(tokenizer.definition).get_added_tokens_decoder().values()))


@lru_cache(maxsize=1)  # parsing a large vocabulary takes a second, and several questions are asked of it
def huggingface(definition: str) -> Any:
    """The reference engine's own tokenizer."""
    tokenizers = require("tokenizers", extra="tokens")
    try:
        loaded = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # tokenizers raises plain Exception
        raise TokenizerError(
            f"not a tokenizer.json: {error}", hint="save it with Tokenizer.save()"
        ) from error
    _refuse_dropout(definition)
    # A tokenizer saved with truncation would cut every document; preparing wants all of it.
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def _refuse_dropout(definition: str) -> None:
    """BPE dropout draws anew each time: no two runs would make the same ids."""
    model = json.loads(definition).get("model") or {}
    if model.get("dropout"):
        raise TokenizerError(
            f"one whose ids differ from run to run: its BPE dropout is {model['dropout']}",
            hint='set "dropout": null under "model" in the tokenizer.json',
        )


def from_hub(name: str, file: str = "tokenizer.json") -> Path:
    """A file of a repository of the Hugging Face hub, or of its cache."""
    if not _HUB_NAME.match(name) or name.endswith(".json"):
        raise TokenizerError(
            f"there is no tokenizer {name!r}",
            hint="give the path of a tokenizer.json or of its folder, or a hub's ORG/NAME",
        )
    hub = require("huggingface_hub")
    try:
        return Path(hub.hf_hub_download(name, file))
    except Exception as error:  # the hub client raises a dozen kinds for a name or a network at fault
        raise TokenizerError(
            f"no tokenizer {name!r}: it is no path, and the Hugging Face hub or its cache has none"
            f" ({str(error).splitlines()[0]})",
            hint="give the path of a tokenizer.json or of its folder, or tiktoken:ENCODING",
        ) from error


def _configured_eod(config: Path) -> str:
    """The eos_token of a tokenizer_config.json, which may be a string or an added-token object."""
    try:
        token = json.loads(config.read_text("utf-8")).get("eos_token")
    except (OSError, ValueError):
        return ""
    return str(token["content"] if isinstance(token, dict) else token or "")


def decoder_of(tokenizer: Tokenizer) -> Callable[[Any], str]:
    """What makes text of ids again, special tokens included."""
    if tokenizer.family == "tiktoken":
        encoding = require("tiktoken", extra="tiktoken").get_encoding(tokenizer.definition)
        return lambda ids: str(encoding.decode([int(one) for one in ids]))
    loaded = huggingface(tokenizer.definition)
    return lambda ids: str(loaded.decode([int(one) for one in ids], skip_special_tokens=False))


def _load_tiktoken(name: str) -> Tokenizer:
    tiktoken = require("tiktoken", extra="tiktoken")
    try:
        encoding = tiktoken.get_encoding(name.removeprefix("tiktoken:"))
    except Exception as error:  # ValueError for an unknown name, requests' own kinds for the download
        raise TokenizerError(
            f"cannot load {name}: {error}",
            hint="check the name; offline, point TIKTOKEN_CACHE_DIR at a folder that holds the encoding",
        ) from error
    ranks = b"".join(token + rank.to_bytes(4, "little") for token, rank in encoding._mergeable_ranks.items())
    facts = f"{encoding._pat_str}\n{sorted(encoding._special_tokens.items())}"
    return Tokenizer(
        name=name,
        family="tiktoken",
        definition=encoding.name,
        digest=xxhash.xxh3_128_hexdigest(ranks + facts.encode()),
        vocabulary=encoding.n_vocab,
    )


def _tiktoken_encoding(tokenizer: Tokenizer) -> Any:
    return require("tiktoken", extra="tiktoken").get_encoding(tokenizer.definition)


def _first_difference(mine: Ids, theirs: Ids) -> int:
    shared = min(len(mine), len(theirs))
    different = np.flatnonzero(mine[:shared] != theirs[:shared])
    return int(different[0]) if len(different) else shared
