"""Nothing readable is lost, and what is lost is counted: in every format, by every launcher's worker."""

from __future__ import annotations

import bz2
import fcntl
import io
import json
import lzma
import random
import socket
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from curations import curation_of
from stoker.errors import BadManifestError, DeniedError, StokerError, TaskError, TokenizerError
from stoker.manifest import find_manifest
from stoker.prepare.check import verify_dataset
from stoker.prepare.leftovers import owner, sweep

if TYPE_CHECKING:
    from collections.abc import Callable

    Make = Callable[..., Any]

TEXTS = [f"document number {number} about coal and steam" for number in range(1000)]


def damage(path: Path, needle: bytes, *, bytes_after: int = 0) -> None:
    data = bytearray(path.read_bytes())
    at = data.index(needle) + bytes_after
    data[at : at + 40] = b"\xff" * 40
    path.write_bytes(bytes(data))


def write_parquet(path: Path, **options: Any) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), path, use_dictionary=False, **options)
    return path


@pytest.mark.parametrize("group", [100, 250], ids=["ten row groups", "four row groups"])
def test_of_a_damaged_parquet_file_only_what_arrow_cannot_read_is_lost_and_it_is_counted(
    group: int, make: Make, tmp_path: Path
) -> None:
    import pyarrow.parquet

    path = write_parquet(
        tmp_path / "x.parquet",
        row_group_size=group,
        compression="zstd",
        data_page_size=512,
        write_page_checksum=True,
    )
    file = pyarrow.parquet.ParquetFile(path)
    chunk = file.metadata.row_group(file.num_row_groups // 2).column(0)
    data = bytearray(path.read_bytes())
    at = chunk.data_page_offset + chunk.total_compressed_size // 2
    data[at : at + 64] = b"\xff" * 64
    path.write_bytes(bytes(data))
    readable = 0
    for number in range(file.num_row_groups):
        try:
            checked = pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)
            for batch in checked.iter_batches(batch_size=1, row_groups=[number]):
                readable += batch.num_rows
        except (OSError, ValueError):
            continue
    found = make(path, on_error="skip").statistics
    assert found.documents_out == readable
    assert 0 < found.bad["truncated"] == 1000 - readable


def test_of_a_damaged_arrow_file_the_other_batches_are_read(make: Make, tmp_path: Path) -> None:
    import pyarrow

    path, table = tmp_path / "x.arrow", pyarrow.table({"text": TEXTS})
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    with pyarrow.ipc.new_file(path, table.schema, options=options) as file:
        file.write_table(table, max_chunksize=100)
    with pyarrow.ipc.open_file(path) as file:
        assert file.num_record_batches == 10
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 64] = b"\xff" * 64
    path.write_bytes(bytes(data))
    found = make(path, on_error="skip").statistics
    assert found.documents_out == 900
    assert found.bad["truncated"] >= 1


def tar_of(path: Path, members: list[tarfile.TarInfo]) -> Path:
    with tarfile.open(path, "w") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * member.size))
    return path


def member(name: str, **facts: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = 600
    for key, value in facts.items():
        setattr(info, key, value)
    return info


def test_of_a_damaged_tar_the_members_behind_the_damage_are_read(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as archive:
        for number in range(10):
            data = f"text {number} ".encode() * 100
            info = tarfile.TarInfo(f"{number:04d}.txt")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    damage(path, b"0005.txt")
    found = make(path, on_error="skip").statistics
    assert (found.documents_out, found.bad) == (9, {"truncated": 1})


def test_a_tar_member_in_capitals_is_read_and_a_link_is_counted(make: Make, tmp_path: Path) -> None:
    link = member("b.txt", size=0, type=tarfile.SYMTYPE, linkname="a.TXT")
    path = tar_of(tmp_path / "x.tar", [member("a.TXT"), link])
    found = make(path, on_error="skip").statistics
    assert (found.documents_out, found.bad) == (1, {"not_a_file": 1})


@pytest.mark.long
@pytest.mark.parametrize(("suffix", "pack"), [("xz", lzma.compress), ("bz2", bz2.compress)])
def test_xz_and_bz2_are_read_and_what_is_cut_off_is_counted(
    suffix: str, pack: Any, make: Make, tmp_path: Path
) -> None:
    chooser = random.Random(0)
    plain = "\n".join(json.dumps({"text": chooser.randbytes(500).hex()}) for _ in range(1000)).encode()
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / f"x.jsonl.{suffix}"
    path.write_bytes(pack(plain))
    assert make(tmp_path / "in").statistics.documents_out == 1000
    path.write_bytes(pack(plain)[:-40])
    found = make(tmp_path / "in", out=tmp_path / "cut", on_error="skip", eod="none").statistics
    assert found.bad == {"truncated": 1}
    assert 500 < found.documents_out < 1000


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "[1, NaN]"])
def test_a_number_that_is_none_in_another_field_takes_nothing_from_the_text(
    value: str, make: Make, tmp_path: Path
) -> None:
    (tmp_path / "x.jsonl").write_text(f'{{"score": {value}, "text": "fine"}}\n{{"text": "also"}}\n')
    assert make(tmp_path / "x.jsonl").statistics.documents_out == 2


def test_two_spellings_of_a_path_are_one_source(make: Make, write_jsonl: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", TEXTS[:5])
    (tmp_path / "link.jsonl").symlink_to(path)
    other = f"{tmp_path}/../{tmp_path.name}/x.jsonl"
    assert make(path, other, tmp_path / "link.jsonl", dedup=False).statistics.documents_in == 5


@pytest.mark.parametrize(("line", "flag"), [('{"body": "x"}', "--field"), ('{"text": 3}', "--field")])
def test_the_hint_names_the_option_that_helps(line: str, flag: str, make: Make, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(line)
    with pytest.raises(TaskError) as caught:
        make(tmp_path / "x.jsonl")
    assert flag in caught.value.hint


def test_the_hint_for_a_long_document_names_the_limit(make: Make, write_jsonl: Any, tmp_path: Path) -> None:
    from stoker.prepare.sources.documents import Reading

    with pytest.raises(TaskError) as caught:
        make(write_jsonl(tmp_path / "x.jsonl", ["x" * 200]), reading=Reading(max_document_bytes=100))
    assert "--max-document-size" in caught.value.hint


@pytest.mark.parametrize(
    "options", [{"shuffle": False}, {"near_dedup": 0.8}, {"shuffle": False, "near_dedup": 0.8}]
)
def test_input_without_documents_is_told_in_a_sentence(
    options: dict[str, Any], make: Make, tmp_path: Path
) -> None:
    (tmp_path / "x.jsonl").write_text("\n\n")
    with pytest.raises(StokerError, match="none of 0 documents is left to write"):
        make(tmp_path / "x.jsonl", **options)


def test_a_truncated_statistics_file_is_named(make: Make, corpus: Path, tmp_path: Path) -> None:
    make(corpus)
    (tmp_path / "out/statistics.json").write_text('{"documents_in": 5,')
    with pytest.raises(BadManifestError, match=r"statistics\.json cannot be read"):
        make(corpus)


@pytest.mark.parametrize("name", ["tokenizer.json", "statistics.json"])
@pytest.mark.parametrize("content", [None, "{}"], ids=["gone", "other"])
def test_verify_looks_at_every_file(
    name: str, content: str | None, make: Make, corpus: Path, tmp_path: Path
) -> None:
    make(corpus)
    assert verify_dataset(str(tmp_path / "out")) == []
    path = tmp_path / "out" / name
    path.unlink() if content is None else path.write_text(content)
    faults = verify_dataset(str(tmp_path / "out"))
    assert len(faults) == 1
    assert name in faults[0]


FILTERS = """
import helper

def returns_bytes(text):
    return text.replace("secret", "gone").encode()

def returns_number(text):
    return 1

def returns_none(text):
    return None if "spam" in text else text

def fails_on_spam(text):
    if "spam" in text:
        raise ValueError("cannot parse")
    return helper.keep(text)
"""


@pytest.fixture
def filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"filters_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(FILTERS.replace("helper", f"helper_{tmp_path.name}"))
    (tmp_path / f"helper_{tmp_path.name}.py").write_text("def keep(text):\n    return True\n")
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.mark.parametrize(("function", "kind"), [("returns_bytes", "bytes"), ("returns_number", "int")])
def test_a_filter_that_returns_neither_text_nor_verdict_is_an_error_that_names_it(
    function: str, kind: str, filters: str, make: Make, write_jsonl: Any, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", ["a secret"])
    with pytest.raises(
        TaskError, match=rf"x\.jsonl at 0: .*{filters}:{function}: TypeError: it returned {kind}"
    ):
        make(path, curation=curation_of(filter=f"{filters}:{function}"))


def test_none_from_a_filter_drops(filters: str, make: Make, write_jsonl: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", ["fine", "spam"])
    found = make(path, curation=curation_of(filter=f"{filters}:returns_none")).statistics
    assert (found.documents_out, found.dropped) == (1, {"filter": 1})


def test_what_a_filter_fails_on_is_skipped_and_counted_if_asked(
    filters: str, make: Make, write_jsonl: Any, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", ["fine", "spam", "good"])
    made = make(path, on_error="skip", curation=curation_of(filter=f"{filters}:fails_on_spam"))
    assert (made.statistics.documents_out, made.statistics.bad) == (2, {"filter_failed": 1})
    assert "cannot parse" in made.statistics.bad_examples[0]


def test_a_filter_is_another_when_a_module_it_imports_changes(filters: str, tmp_path: Path) -> None:
    import sys

    curation = curation_of(filter=f"{filters}:fails_on_spam")
    before = curation.digest()
    (tmp_path / f"helper_{tmp_path.name}.py").write_text("def keep(text):\n    return 'x' in text\n")
    assert curation.digest() != before
    sys.modules.pop(filters)


def test_bpe_dropout_is_refused(tokenizer_path: Path, make: Make, corpus: Path, tmp_path: Path) -> None:
    definition = json.loads(tokenizer_path.read_text())
    definition["model"]["dropout"] = 0.1
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(TokenizerError, match="BPE dropout"):
        make(corpus, tokenizer=tmp_path / "tokenizer.json")


def test_overlapping_added_tokens_are_tried_before_an_engine_is_chosen(
    tokenizer_path: Path, make: Make, write_jsonl: Any, read_tokens: Any, tmp_path: Path
) -> None:
    """Tokens with mixed `normalized` flags that end and begin alike: the ids are the reference's."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.normalizers import NFC

    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    tokenizer.normalizer = NFC()
    tokenizer.add_special_tokens([AddedToken("<tool>", normalized=False, special=True)])
    tokenizer.add_tokens([AddedToken(">\n\n", normalized=True), AddedToken("\n\n", normalized=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = ["<tool>\n\nx", "a <tool>\n\n\n\nb", ">\n\n<tool>", "plain text"]
    path = write_jsonl(tmp_path / "x.jsonl", texts)
    make(path, tokenizer=tmp_path / "tokenizer.json", shuffle=False, eod="none")
    wanted = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert read_tokens(tmp_path / "out") == wanted


def test_half_written_files_of_a_dead_task_go_and_those_of_a_living_one_stay(tmp_path: Path) -> None:
    dead, living, empty = (tmp_path / f".map-0000{n}.tokens.{owner()}{n}.tmp" for n in range(3))
    other = tmp_path / ".map-00004.tokens.another-host.4.tmp"
    for path in (dead, living, other):
        path.write_bytes(b"half")
    empty.touch()
    assert socket.gethostname() in dead.name
    with living.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert sweep([tmp_path]) == 1
    assert sorted(tmp_path.iterdir()) == sorted([living, empty, other])


class Denying:
    """A store that lets nobody read, as Amazon's answers are seen."""

    url = "s3://bucket/out"

    def __init__(self, listed: list[str] | None) -> None:
        self._listed = listed

    def open(self, name: str) -> Any:
        raise DeniedError("403", hint="") from PermissionError("403")

    def list(self, prefix: str = "") -> Any:
        from stoker.storage import Entry

        if self._listed is None:
            raise DeniedError("403 for the listing", hint="")
        return iter([Entry(path=name, bytes=1, version="") for name in self._listed])


@pytest.mark.parametrize(
    "listed", [["manifest.json", "shard-00000.bin"], None], ids=["it is there", "who knows"]
)
def test_a_manifest_that_may_not_be_read_is_not_taken_for_none(
    listed: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.manifest.open_store", lambda url: Denying(listed))
    with pytest.raises(DeniedError):
        find_manifest("s3://bucket/out")


def test_a_manifest_that_a_listing_does_not_show_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.manifest.open_store", lambda url: Denying(["other.bin"]))
    assert find_manifest("s3://bucket/out") is None
