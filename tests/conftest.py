"""What every test may use: a small corpus, a tokenizer, an inline launcher, the command in a process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import stoker
from stoker.formats.megatron import read_index
from stoker.manifest import read_manifest
from stoker.prepare.launch.worker import load_entry, run_task
from stoker.prepare.plan import Options
from stoker.prepare.run import prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from stoker.prepare.finish import Prepared
    from stoker.prepare.launch.ledger import Ledger
    from stoker.prepare.plan import Plan

EOD = "<|endoftext|>"

# Modules that every Python from 3.10 on has: the corpus differs between versions but is always there.
_MODULES = ("argparse", "ast", "calendar", "codecs", "csv", "datetime", "difflib", "enum", "heapq", "inspect")
_SCRIPTS = (
    "Der Heizer schaufelt Kohle in den Kessel; ohne ihn steht die Lokomotive still. " * 3,
    "石炭を火室に投げ入れる火夫がいなければ、機関車は動かない。" * 4,
    "Кочегар бросает уголь в топку, и поезд едет дальше.\n\n\tПоследняя строка без точки",
    "👩‍👩‍👧‍👦 emoji 🏳️‍🌈, half ½, zero\u200bwidth, combining e\u0301, and\r\nwindows lines\r\n",
)


def pytest_configure(config: pytest.Config) -> None:
    """What every test starts from: Ctrl-C as at a terminal, Hugging Face off the network."""
    # a shell that runs us in the background has us ignore Ctrl-C, and so would all that tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.pop("PYTHONUNBUFFERED", None)  # where it is set, nobody sees what a buffer does at the end
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # How fast an example runs says more about a shared machine than about the code.
    # In CI the examples are the same each time: a landing must not hang on a draw; elsewhere they are new.
    settings.register_profile(
        "stoker",
        deadline=None,
        max_examples=60,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize="CI" in os.environ,
    )
    settings.load_profile("stoker")


_WHOLE_PROCESSES = {"run_stoker", "run_without_privileges"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs the command as a process of its own takes a second: the quick tests leave it out."""
    for item in items:
        if _WHOLE_PROCESSES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.integration)
    _long_files_first(items)


def _long_files_first(items: list[pytest.Item]) -> None:
    """Workers take a file at a time, and end together if the last ones are quick. A file stays together."""
    marks = {item: {mark.name for mark in item.iter_markers()} for item in items}
    long = Counter(item.path for item, has in marks.items() if "integration" in has and "slow" not in has)
    items.sort(key=lambda item: -long[item.path])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why a test was run again (CI does so): a race that is only named cannot be mended."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"at first {report.nodeid}", sep="_")
        terminalreporter.line("\n".join(report.longreprtext.splitlines()[-40:]))


# --- leaks ----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """A test that leaves a thread or a child process behind fails."""
    threads, children = set(threading.enumerate()), _children()
    yield
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and (set(threading.enumerate()) - threads or _children() - children):
        time.sleep(0.01)
    left = [thread.name for thread in set(threading.enumerate()) - threads]
    left += [f"process {pid}: {_command_line(pid)}" for pid in _children() - children]
    assert not left, f"left behind: {left}"


def _children() -> set[int]:
    """Child processes; the one that multiprocessing keeps for the life of this process is not ours."""
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        try:
            found.update(map(int, path.read_text().split()))
        except OSError:  # the thread has just ended
            continue
    return {pid for pid in found if "resource_tracker" not in _command_line(pid)}


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


# --- programs and packages ------------------------------------------------------------------------


def _skip_or_fail(reason: str) -> None:
    """Where everything is promised (CI) nothing may skip."""
    if os.environ.get("STOKER_REQUIRE_ALL") == "1":
        pytest.fail(f"{reason}, and STOKER_REQUIRE_ALL=1")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def skip_or_fail() -> Callable[[str], None]:
    """Skip for a reason; fail where STOKER_REQUIRE_ALL=1 promises that there is none."""
    return _skip_or_fail


@pytest.fixture(scope="session")
def need_root() -> None:
    """For namespaces, cgroups, mounts and other users; the root of a container may have none of them."""
    tried = ["unshare", "--uts", "--mount", "--net", "true"]
    if os.geteuid() or subprocess.run(tried, capture_output=True).returncode:
        _skip_or_fail(
            "namespaces, mounts and other users need root: run the tests as root in a container of its own "
            "(docker run --privileged) or in a virtual machine"
        )


# What tests start, and what brings it.
_BROUGHT_BY = {
    **dict.fromkeys(("rclone", "ray"), "`make venv` brings it"),
    **dict.fromkeys(("slurmctld", "slurmd", "sbatch", "srun", "munged"), "apt-get install slurm-wlm munge"),
    **dict.fromkeys(("promtool", "prometheus"), "apt-get install prometheus"),
    **dict.fromkeys(("setpriv", "unshare", "prlimit"), "apt-get install util-linux"),
    **dict.fromkeys(("gcc", "cc"), "apt-get install gcc"),
    "nginx": "apt-get install nginx-light",
    "ffmpeg": "apt-get install ffmpeg",
    "openssl": "apt-get install openssl",
    "zstd": "apt-get install zstd",
    "ganesha.nfsd": "apt-get install nfs-ganesha nfs-ganesha-vfs",
    "linux.uml": "apt-get install user-mode-linux",
    "chromium-headless-shell": "apt-get install chromium-headless-shell",
}


@pytest.fixture(scope="session")
def require_binary() -> Callable[[str], str]:
    """The path of a program; without it the test skips, or fails where STOKER_REQUIRE_ALL=1."""

    def find(name: str) -> str:
        places = [str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]
        found = shutil.which(name, path=os.pathsep.join(places))
        if not found:
            _skip_or_fail(f"{name} is not installed: {_BROUGHT_BY.get(name, 'install it')}")
        return str(found)

    return find


@pytest.fixture(scope="session")
def megatron() -> Any:
    """megatron-core's own indexed dataset module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of what it would like to have on a GPU
        from megatron.core.datasets import indexed_dataset

    return indexed_dataset


@pytest.fixture(scope="session")
def webdataset() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import webdataset

    return webdataset


# --- the corpus and its tokenizer -----------------------------------------------------------------


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """A few hundred different documents, and a handful in other scripts."""
    documents = dict.fromkeys(_SCRIPTS)
    for name in _MODULES:
        source = (Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py").read_text("utf-8")
        documents.update(dict.fromkeys(_paragraphs(source, 1200)))
    return list(documents)


def _paragraphs(source: str, chars: int) -> Iterator[str]:
    """Pieces of about this many characters, cut between lines."""
    lines = source.splitlines(keepends=True)
    piece = ""
    for line in lines:
        piece += line
        if len(piece) >= chars:
            yield piece
            piece = ""
    if piece:
        yield piece


@pytest.fixture(scope="session")
def corpus(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documents as one JSONL file; read it, do not change it."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    return write_jsonl(path, texts)


@pytest.fixture(scope="session")
def large_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 10 MB: just large enough that a plan has several map tasks and shards."""
    folder = tmp_path_factory.mktemp("large")
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [text for path in sources for text in _paragraphs(path.read_text("utf-8"), 3000)]
    texts = texts[: 3_400_000 * len(texts) // sum(map(len, texts))]  # a file each of a map task's size
    for name in "abc":
        write_jsonl(folder / f"{name}.jsonl", list(dict.fromkeys(f"# {name}\n{text}" for text in texts)))
    return folder


def write_jsonl(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), "utf-8")
    return path


@pytest.fixture(scope="session", name="write_jsonl")
def write_jsonl_fixture() -> Callable[[Path, Sequence[str]], Path]:
    return write_jsonl


@pytest.fixture(scope="session")
def tokenizer_path(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of some 2,000 tokens, trained on the corpus."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=[EOD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[:120], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def encode(tokenizer_path: Path) -> Callable[[str], list[int]]:
    """The ids a document must have: Hugging Face's, and the end-of-document token."""
    from tokenizers import Tokenizer

    reference = Tokenizer.from_file(str(tokenizer_path))
    eod = reference.token_to_id(EOD)

    @cache  # half of the tests ask for the ids of the whole corpus
    def ids(text: str) -> tuple[int, ...]:
        return (*reference.encode(text, add_special_tokens=False).ids, eod)

    return lambda text: list(ids(text))


# --- running --------------------------------------------------------------------------------------


class Inline:
    """A launcher that runs tasks one after another in this process, in any order asked for."""

    def __init__(self, order: Callable[[Sequence[int]], Sequence[int]] = lambda numbers: numbers) -> None:
        self._order = order
        self.ran: list[tuple[str, int]] = []

    def run(self, ledger: Ledger, stage: str, numbers: Sequence[int], on_done: Callable[[int], None]) -> None:
        entry = load_entry("stoker.prepare.tasks:run_task")
        for number in self._order(numbers):
            run_task(entry, ledger, stage, number)
            self.ran.append((stage, number))
            on_done(number)


class Notes:
    """A watcher that remembers what it was told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def planned(self, plan: Plan, folder: Path) -> None: ...
    def stage(self, name: str, *, total: int, done: int) -> None: ...
    def advance(self, name: str, number: int) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def inline() -> type[Inline]:
    return Inline


@pytest.fixture
def watcher() -> Notes:
    return Notes()


def prepare_inline(
    *sources: Path | str,
    launcher: Any = None,  # any launcher
    watcher: Notes | None = None,
    work: Path | None = None,
    **given: Any,
) -> Prepared:
    options = Options(sources=tuple(map(str, sources)), **{k: _plain(v) for k, v in given.items()})
    return prepare(options, launcher or Inline(), watcher=watcher or Notes(), work=work)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


@pytest.fixture
def make(tokenizer_path: Path, watcher: Notes, tmp_path: Path) -> Callable[..., Prepared]:
    """Prepare sources in this process: `make(path, ..., out=..., any option of Options)`."""

    def run(*sources: Path | str, **given: Any) -> Prepared:
        defaults = {"out": tmp_path / "out", "tokenizer": tokenizer_path, "watcher": watcher}
        return prepare_inline(*sources, **{**defaults, **given})

    return run


@pytest.fixture(scope="session")
def large_dataset(large_corpus: Path, tokenizer_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The large corpus prepared undisturbed into shards of 1 MiB; read it, do not change it."""
    out = tmp_path_factory.mktemp("prepared") / "large"
    prepare_inline(large_corpus, out=out, tokenizer=tokenizer_path, shard_bytes=1 << 20)
    return out


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    rc: int
    stdout: str
    stderr: str


def stoker_environ(**extra: str) -> dict[str, str]:
    """An environment in which a child imports the stoker that this process tests."""
    paths = [str(Path(stoker.__file__).parents[1]), extra.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
    return {**os.environ, **extra, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.fixture(scope="session", name="stoker_environ")
def stoker_environ_fixture() -> Callable[..., dict[str, str]]:
    return stoker_environ


@pytest.fixture
def run_stoker(tmp_path: Path) -> Callable[..., Ran]:
    """Run `stoker ARGUMENTS` in a process of its own."""

    def run(*arguments: object, env: dict[str, str] | None = None, timeout: float = 300, **popen: Any) -> Ran:
        done = subprocess.run(
            [sys.executable, "-m", "stoker.cli", *map(str, arguments)],
            env=stoker_environ(**(env or {})),
            cwd=popen.pop("cwd", tmp_path),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            text=True,
            **popen,
        )
        return Ran(rc=done.returncode, stdout=done.stdout, stderr=done.stderr)

    return run


# --- looking at what came out ---------------------------------------------------------------------


def read_tokens(folder: Path, *, epoch: int = 0) -> list[list[int]]:
    """The token ids of every document of a Megatron dataset, in its order."""
    documents: list[list[int]] = []
    for shard in read_manifest(folder).shards:
        if shard.epoch == epoch:
            with (folder / f"{shard.name}.idx").open("rb") as file:
                index = read_index(file, name=shard.name)
            ids = np.fromfile(folder / f"{shard.name}.bin", index.dtype)
            documents += [part.tolist() for part in np.split(ids, np.cumsum(index.lengths)[:-1])]
    return documents


@pytest.fixture(scope="session", name="read_tokens")
def read_tokens_fixture() -> Callable[..., list[list[int]]]:
    return read_tokens


def snapshot(folder: Path) -> dict[str, bytes]:
    """The visible files of a folder: what a reader of the dataset can see."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    }


@pytest.fixture(scope="session", name="snapshot")
def snapshot_fixture() -> Callable[[Path], dict[str, bytes]]:
    return snapshot
