"""Sources and datasets in an object store, against a real S3 server."""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from s3_server import S3Server, free_ports

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.integration


@pytest.fixture
def prepare(s3: S3Server, run_stoker: Any, tokenizer_path: Path, tmp_path: Path) -> Callable[..., Any]:
    def run(*arguments: object, out: object = tmp_path / "out", env: dict[str, str] | None = None) -> Any:
        options = ["--tokenizer", tokenizer_path, "--out", out, "--workers", 2]
        return run_stoker("prepare", *arguments, *options, env={**s3.environ(), **(env or {})})

    return run


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".bin", ".idx")}


def test_the_server_answers_ranges(s3: S3Server, bucket: Path) -> None:
    (bucket / "x").write_bytes(b"0123456789")
    request = urllib.request.Request(f"{s3.endpoint}/bucket/x", headers={"Range": "bytes=3-5"})
    with urllib.request.urlopen(request) as answer:
        assert (answer.status, answer.read()) == (206, b"345")


# --- sources --------------------------------------------------------------------------------------


def test_jsonl_is_read_by_ranges_of_many_tasks(
    bucket: Path, large_corpus: Path, large_dataset: Path, prepare: Any, tmp_path: Path
) -> None:
    whole = b"".join(path.read_bytes() for path in sorted(large_corpus.iterdir()))
    (bucket / "one.jsonl").write_bytes(whole)
    ran = prepare("s3://bucket/one.jsonl", "--shard-size", "1MiB")
    assert ran.rc == 0, ran.stderr
    assert re.search(r"1 source, .* [2-9] tasks", ran.stderr)
    assert shards(tmp_path / "out") == shards(large_dataset)


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.parquet"])
@pytest.mark.parametrize(
    "source", ["s3://bucket/a/{name}", "s3://bucket/a", "s3://bucket/*/x.*"], ids=["file", "prefix", "glob"]
)
def test_an_object_gives_the_documents_of_the_file(
    name: str,
    source: str,
    bucket: Path,
    corpus: Path,
    texts: list[str],
    encode: Any,
    prepare: Any,
    read_tokens: Any,
    tmp_path: Path,
) -> None:
    (bucket / "a").mkdir()
    if name == "x.parquet":
        pq.write_table(pa.table({"text": texts}), bucket / "a" / name, row_group_size=50)
    else:
        data = corpus.read_bytes()
        (bucket / "a" / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    ran = prepare(source.format(name=name), "--no-shuffle")
    assert ran.rc == 0, ran.stderr
    assert read_tokens(tmp_path / "out") == [encode(text) for text in texts]


def test_a_glob_leaves_out_what_it_does_not_match(
    bucket: Path, write_jsonl: Any, encode: Any, prepare: Any, read_tokens: Any, tmp_path: Path
) -> None:
    for name in ("a1", "a2", "b1"):
        write_jsonl(bucket / f"{name}.jsonl", [name])
    ran = prepare("s3://bucket/a*.jsonl", "--no-shuffle")
    assert ran.rc == 0, ran.stderr
    assert read_tokens(tmp_path / "out") == [encode("a1"), encode("a2")]


def test_a_bad_record_is_named_by_its_url(bucket: Path, prepare: Any) -> None:
    (bucket / "bad.jsonl").write_bytes(b'{"text": "x"}\n{"text": "\xff"}\n')
    ran = prepare("s3://bucket/bad.jsonl")
    assert (ran.rc, "s3://bucket/bad.jsonl at byte 14: invalid_utf8" in ran.stderr) == (1, True)


# --- datasets -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def upload(
    s3: S3Server, large_corpus: Path, tokenizer_path: Path, work: Path, stoker_environ: Any
) -> Callable[[], Any]:
    """Prepare the large corpus into the bucket `sets`."""
    (s3.root / "sets").mkdir()
    options = ["--tokenizer", tokenizer_path, "--shard-size", "1MiB", "--workers", 2, "--work", work]
    arguments = ["prepare", large_corpus, "--out", "s3://sets/one", *options]

    def run() -> Any:
        return subprocess.run(
            [sys.executable, "-m", "stoker.cli", *map(str, arguments)],
            env=stoker_environ(**s3.environ()),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


@pytest.fixture(scope="module")
def remote(upload: Any, s3: S3Server) -> Path:
    """A dataset written to the store: the folder where the server keeps it."""
    ran = upload()
    assert ran.returncode == 0, ran.stderr
    return s3.root / "sets" / "one"


@pytest.fixture
def copy(remote: Path, bucket: Path) -> Path:
    """A copy at s3://bucket/copy, to be changed."""
    return shutil.copytree(remote, bucket / "copy")


def test_a_dataset_in_the_store_has_the_bytes_of_a_local_one(remote: Path, large_dataset: Path) -> None:
    assert shards(remote) == shards(large_dataset)


def test_the_work_folder_is_empty_in_the_end(remote: Path, work: Path) -> None:
    assert list(work.iterdir()) == []


def test_a_finished_dataset_in_the_store_is_not_made_again(remote: Path, upload: Any) -> None:
    ran = upload()
    assert (ran.returncode, "already prepared" in ran.stderr) == (0, True)


def test_a_dataset_in_the_store_is_verified(remote: Path, s3: S3Server, run_stoker: Any) -> None:
    ran = run_stoker("prepare", "verify", "s3://sets/one", env=s3.environ())
    assert (ran.rc, ran.stdout) == (0, "s3://sets/one is whole\n")


def test_a_flipped_bit_in_the_store_is_found(copy: Path, s3: S3Server, run_stoker: Any) -> None:
    data = bytearray((copy / "shard-00001.bin").read_bytes())
    data[1000] ^= 1
    (copy / "shard-00001.bin").write_bytes(data)
    ran = run_stoker("prepare", "verify", "s3://bucket/copy", env=s3.environ())
    assert (ran.rc, "s3://bucket/copy/shard-00001.bin: block 0" in ran.stdout) == (1, True)


def test_a_folder_in_the_store_is_adopted(copy: Path, s3: S3Server, run_stoker: Any) -> None:
    (copy / "manifest.json").unlink()
    ran = run_stoker("prepare", "index", "s3://bucket/copy", env=s3.environ())
    assert ran.rc == 0, ran.stderr
    assert (copy / "manifest.json").exists()


def test_a_dataset_bound_for_a_store_needs_a_work_folder(corpus: Path, prepare: Any) -> None:
    ran = prepare(corpus, out="s3://bucket/sets/one")
    assert (ran.rc, "--work" in ran.stderr) == (2, True)


# --- what goes wrong ------------------------------------------------------------------------------


def test_wrong_credentials_are_a_clear_error(
    s3: S3Server, bucket: Path, write_jsonl: Any, prepare: Any
) -> None:
    write_jsonl(bucket / "x.jsonl", ["x"])
    ran = prepare("s3://bucket/x.jsonl", env=s3.environ(secret="wrong"))
    assert (ran.rc, "Traceback" in ran.stderr) == (1, False)
    assert ran.stderr.startswith("error: cannot read s3://bucket/x.jsonl: ")
    assert "AWS_SECRET_ACCESS_KEY" in ran.stderr.splitlines()[-1]


def test_wrong_credentials_for_the_output_are_a_clear_error(
    s3: S3Server, corpus: Path, prepare: Any, tmp_path: Path
) -> None:
    ran = prepare(
        corpus, "--work", tmp_path / "work", out="s3://bucket/sets/two", env=s3.environ(secret="wrong")
    )
    assert (ran.rc, "Traceback" in ran.stderr) == (1, False)
    assert "s3://bucket/sets/two" in ran.stderr


@pytest.mark.parametrize(
    "source", ["s3://bucket/gone.jsonl", "s3://bucket/gone", "s3://no-such-bucket/x.jsonl"]
)
def test_an_object_that_is_not_there_is_named(source: str, bucket: Path, prepare: Any) -> None:
    ran = prepare(source)
    assert (ran.rc, "Traceback" in ran.stderr, source in ran.stderr.splitlines()[0]) == (2, False, True)


def test_a_server_that_is_not_there_is_told_within_a_minute(prepare: Any) -> None:
    (port,) = free_ports(1)
    started = time.monotonic()
    ran = prepare("s3://bucket/x.jsonl", env={"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"})
    assert (ran.rc, "Traceback" in ran.stderr) == (1, False)
    assert time.monotonic() - started < 60
