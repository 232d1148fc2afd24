"""Broken data, a full disk, closed folders: named, counted or refused, and never half a dataset."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stoker.errors import BadInputError, TaskError
from stoker.formats.zstd import zstd_module
from stoker.prepare.sources.documents import Reading

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Make = Callable[..., Any]

GOOD = ["a good document", "another good document"]
LINES = b"".join(
    json.dumps({"text": f"line {number} of a packed file"}).encode() + b"\n" for number in range(3000)
)


# --- records that cannot be read ------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A file that holds something bad: what it is called, what is in it, and what must be said of it."""

    name: str
    content: Callable[[], bytes]
    reason: str
    where: str


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def parquet() -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": ["x" * 100] * 100}), sink)
    return sink.getvalue()


def tar() -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        info = tarfile.TarInfo("1.txt")
        info.size = 5000
        archive.addfile(info, io.BytesIO(b"x" * 5000))
    return sink.getvalue()


CASES = {
    "invalid UTF-8": Case(
        "bad.jsonl", lambda: b'{"text": "x"}\n{"text": "\xff"}\n', "invalid_utf8", "at byte 14"
    ),
    "invalid UTF-8 in a text": Case("bad.txt", lambda: b"abc\xff", "invalid_utf8", "at byte 3"),
    "cut JSON": Case("bad.jsonl", lambda: b'{"text": "x"}\n{"text": "y', "invalid_json", "at byte 14"),
    "a missing field": Case(
        "bad.jsonl", lambda: b'{"text": "x"}\n{"body": "y"}\n', "missing_field", "at byte 14"
    ),
    "a number": Case("bad.jsonl", lambda: b'{"text": 5}\n', "not_text", "at byte 0"),
    "a line of 50 MB": Case(
        "bad.jsonl",
        lambda: b'{"text": "x"}\n{"text": "' + b"word " * 10_000_000 + b'"}\n',
        "too_long",
        "at byte 14",
    ),
    "cut gzip": Case("bad.jsonl.gz", lambda: half(gzip.compress(LINES)), "truncated", "at byte "),
    "cut zstd": Case("bad.jsonl.zst", lambda: half(zstd_module().compress(LINES)), "truncated", "at byte "),
    "no gzip": Case("bad.jsonl.gz", lambda: b"not gzip at all", "truncated", "at byte 0"),
    "no zstd": Case("bad.jsonl.zst", lambda: b"not zstd at all", "truncated", "at byte 0"),
    "cut Parquet": Case("bad.parquet", lambda: parquet()[:-100], "truncated", ""),
    "no Parquet": Case("bad.parquet", lambda: b"", "truncated", ""),
    "cut tar": Case("bad.tar", lambda: tar()[:2000], "truncated", ""),
}


@pytest.fixture(params=CASES, scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def folder(case: Case, write_jsonl: Any, tmp_path: Path) -> Path:
    """The bad file beside a good one."""
    path = tmp_path / "data"
    path.mkdir()
    (path / case.name).write_bytes(case.content())
    write_jsonl(path / "good.jsonl", GOOD)
    return path


def visible(out: Path) -> set[str]:
    return {path.name for path in out.iterdir() if not path.name.startswith(".")} if out.exists() else set()


def test_stop_names_the_file_and_the_place_and_leaves_no_shard(
    case: Case, folder: Path, make: Make, tmp_path: Path
) -> None:
    with pytest.raises(TaskError) as caught:
        make(folder)
    sentence = caught.value.message
    assert f"{folder / case.name}" in sentence
    assert case.where in sentence
    assert case.reason in sentence
    assert visible(tmp_path / "out") == set()


def test_skip_counts_the_record_and_keeps_the_rest(
    case: Case, folder: Path, make: Make, encode: Any, read_tokens: Any, tmp_path: Path
) -> None:
    make(folder, on_error="skip")
    statistics = json.loads((tmp_path / "out" / "statistics.json").read_text())
    assert statistics["bad"] == {case.reason: 1}
    assert str(folder / case.name) in statistics["bad_examples"][0]
    found = read_tokens(tmp_path / "out")
    assert [encode(text) in found for text in GOOD] == [True, True]


def test_a_line_after_one_longer_than_a_block_is_read(
    make: Make, encode: Any, read_tokens: Any, tmp_path: Path
) -> None:
    long = json.dumps({"text": "word " * 2_000_000}).encode()
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "x"}\n' + long + b'\n{"text": "after"}\n')
    make(tmp_path / "x.jsonl", on_error="skip", shuffle=False, reading=Reading(max_document_bytes=1 << 20))
    assert read_tokens(tmp_path / "out") == [encode("x"), encode("after")]


def test_stop_leaves_no_shard_where_splits_become_shards_at_once(
    make: Make, write_jsonl: Any, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "a.jsonl", GOOD)
    (tmp_path / "b.jsonl").write_bytes(CASES["invalid UTF-8"].content())
    with pytest.raises(TaskError):
        make(tmp_path / "a.jsonl", tmp_path / "b.jsonl", shuffle=False, dedup=False)
    assert visible(tmp_path / "out") == set()


def test_every_empty_file_is_passed_over(make: Make, write_jsonl: Any, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, content in {
        "a.jsonl": b"",
        "b.txt": b"",
        "c.jsonl.gz": gzip.compress(b""),
        "d.txt.gz": b"",
    }.items():
        (folder / name).write_bytes(content)
    write_jsonl(folder / "good.jsonl", GOOD)
    assert make(folder).statistics.documents_out == 2


def test_nothing_but_empty_files_is_an_error(make: Make, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"")
    with pytest.raises(BadInputError, match="none of 0 documents is left to write"):
        make(tmp_path / "a.jsonl")


def test_a_table_without_the_column_is_refused(make: Make, tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(BadInputError, match=r"a\.parquet has no column 'text'"):
        make(tmp_path / "a.parquet")


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def mixed(write_jsonl: Any, tmp_path: Path) -> Path:
    """One of each bad file that the command meets, and a good one."""
    path = tmp_path / "data"
    path.mkdir()
    (path / "a.jsonl").write_bytes(b'{"text": "fine"}\n{"text": "\xff"}\n{"body": "x"}\n')
    (path / "b.jsonl.gz").write_bytes(half(gzip.compress(LINES)))
    (path / "c.parquet").write_bytes(parquet()[:-100])
    write_jsonl(path / "good.jsonl", GOOD)
    return path


@pytest.fixture
def command(tokenizer_path: Path, tmp_path: Path) -> list[object]:
    return ["--tokenizer", tokenizer_path, "--out", tmp_path / "out", "--workers", 1]


def test_the_command_stops_with_one_and_no_traceback(
    mixed: Path, command: list[object], run_stoker: Any
) -> None:
    ran = run_stoker("prepare", mixed, *command)
    assert (ran.rc, ran.stdout, "Traceback" in ran.stderr) == (1, "", False)
    assert f"{mixed}/a.jsonl at byte 17: invalid_utf8" in ran.stderr


def test_the_command_skips_and_says_what_was_skipped(
    mixed: Path, command: list[object], run_stoker: Any
) -> None:
    ran = run_stoker("prepare", mixed, *command, "--on-error", "skip")
    assert (ran.rc, "Traceback" in ran.stderr) == (0, False)
    skipped = [line for line in ran.stdout.splitlines() if line.startswith("skipped")]
    assert skipped == [
        "skipped  1 document: invalid_utf8",
        "skipped  1 document: missing_field",
        "skipped  2 documents: truncated",
    ]


def test_the_command_reports_skipped_records_as_json(
    mixed: Path, command: list[object], run_stoker: Any
) -> None:
    ran = run_stoker("prepare", mixed, *command, "--on-error", "skip", "--json")
    assert json.loads(ran.stdout)["statistics"]["bad"] == {
        "invalid_utf8": 1,
        "missing_field": 1,
        "truncated": 2,
    }


@pytest.mark.parametrize("name", ["missing/tokenizer.json"])
def test_a_tokenizer_that_does_not_exist_is_an_error(
    name: str, corpus: Path, run_stoker: Any, tmp_path: Path
) -> None:
    ran = run_stoker("prepare", corpus, "--tokenizer", name, "--out", tmp_path / "out", "--workers", 1)
    assert (ran.rc, "Traceback" in ran.stderr, name in ran.stderr) == (2, False, True)
    assert ran.stderr.splitlines()[-1].startswith("hint: ")
    assert visible(tmp_path / "out") == set()


def test_a_source_that_does_not_exist_is_an_error(
    command: list[object], run_stoker: Any, tmp_path: Path
) -> None:
    ran = run_stoker("prepare", tmp_path / "gone.jsonl", *command)
    assert (ran.rc, ran.stderr.splitlines()[0]) == (2, f"error: {tmp_path}/gone.jsonl does not exist")


# --- closed folders -------------------------------------------------------------------------------


@pytest.fixture
def run_without_privileges(require_binary: Any, stoker_environ: Any) -> Callable[..., Any]:
    """Run stoker so that permission bits bind: root gives up its capabilities first."""
    drop = [require_binary("setpriv"), "--inh-caps=-all", "--bounding-set=-all"] if os.geteuid() == 0 else []

    def run(*arguments: object) -> Any:
        return subprocess.run(
            [*drop, sys.executable, "-m", "stoker.cli", *map(str, arguments)],
            env=stoker_environ(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


@pytest.mark.parametrize(
    ("closed", "source", "named"),
    [
        ("data", "data", "data"),
        ("data", "data/sub/b.jsonl", "data/sub"),
        ("data/sub", "data", "data/sub"),
        ("data/a.jsonl", "data", "data/a.jsonl"),
        ("data/sub/b.jsonl", "data/sub/*.jsonl", "data/sub/b.jsonl"),
    ],
    ids=["folder", "below a folder", "folder in a folder", "file", "file of a glob"],
)
def test_what_may_not_be_read_is_named(
    closed: str,
    source: str,
    named: str,
    command: list[object],
    run_without_privileges: Any,
    write_jsonl: Any,
    tmp_path: Path,
) -> None:
    (tmp_path / "data" / "sub").mkdir(parents=True)
    write_jsonl(tmp_path / "data" / "a.jsonl", GOOD)
    write_jsonl(tmp_path / "data" / "sub" / "b.jsonl", GOOD)
    (tmp_path / closed).chmod(0)
    try:
        ran = run_without_privileges("prepare", tmp_path / source, *command)
    finally:
        (tmp_path / closed).chmod(0o700)
    assert (ran.returncode, "Traceback" in ran.stderr) == (1, False)
    assert f"{tmp_path / named}" in ran.stderr
    assert "Permission denied" in ran.stderr
    assert visible(tmp_path / "out") == set()


def test_an_output_folder_that_may_not_be_written_is_named(
    command: list[object], corpus: Path, run_without_privileges: Any, tmp_path: Path
) -> None:
    tmp_path.chmod(0o500)
    try:
        ran = run_without_privileges("prepare", corpus, *command)
    finally:
        tmp_path.chmod(0o700)
    assert (ran.returncode, "Traceback" in ran.stderr) == (1, False)
    assert f"{tmp_path}/out" in ran.stderr
    assert "Permission denied" in ran.stderr


def test_an_output_that_is_a_file_is_named(
    corpus: Path, command: list[object], run_stoker: Any, tmp_path: Path
) -> None:
    (tmp_path / "out").write_text("in the way")
    ran = run_stoker("prepare", corpus, *command)
    assert (ran.rc, "Traceback" in ran.stderr) == (1, False)
    assert f"{tmp_path}/out" in ran.stderr


# --- a full disk ----------------------------------------------------------------------------------

# In a mount namespace of its own, so that nothing stays mounted whatever happens.
ON_SMALL_DISK = """
set -u
disk=$1 size=$2; shift 2
mount -t tmpfs -o size=200m none "$disk"
fallocate -l $((200 * 1024 - size))KiB "$disk/of-others"
"$@"; echo "first exit code $?"
find "$disk" -type f | sed "s|^|file |"
rm "$disk/of-others"
"$@" >/dev/null; echo "second exit code $?"
"$0" -m stoker.cli prepare verify "$disk/out"
"""


@pytest.fixture
def on_small_disk(
    require_binary: Any, skip_or_fail: Any, stoker_environ: Any, tokenizer_path: Path, tmp_path: Path
) -> Callable[..., Any]:
    """Prepare onto a disk that others left so many KiB of; then again, once they have gone."""
    namespace = [require_binary("unshare"), "--user", "--map-root-user", "--mount"]
    if subprocess.run([*namespace, "mount", "-t", "tmpfs", "none", tmp_path], capture_output=True).returncode:
        skip_or_fail("mount namespaces are not allowed here: run as root, or allow user namespaces")

    def run(source: Path, free_kib: int) -> Any:
        disk = tmp_path / "disk"
        disk.mkdir()
        prepare = [
            sys.executable,
            "-m",
            "stoker.cli",
            "prepare",
            str(source),
            "--tokenizer",
            str(tokenizer_path),
        ]
        prepare += ["--out", f"{disk}/out", "--workers", "2", "--shard-size", "1MiB"]
        return subprocess.run(
            [*namespace, "sh", "-c", ON_SMALL_DISK, sys.executable, str(disk), str(free_kib), *prepare],
            env=stoker_environ(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


@pytest.mark.integration
@pytest.mark.parametrize(
    "free_kib", [64, 3 << 10, 12 << 10], ids=["at the plan", "in pass one", "in pass two"]
)
def test_a_full_disk_is_named_and_the_same_command_goes_on_once_there_is_space(
    free_kib: int, on_small_disk: Any, large_corpus: Path, tmp_path: Path
) -> None:
    ran = on_small_disk(large_corpus, free_kib)
    assert "first exit code 1" in ran.stdout
    assert "No space left on device" in ran.stderr
    assert f"cannot write {tmp_path}/disk/out" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert "manifest.json" not in ran.stdout
    assert "second exit code 0" in ran.stdout
    assert f"{tmp_path}/disk/out is whole" in ran.stdout
