"""`import stoker` and `stoker --help` load no heavy package: they cost next to no time."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

HEAVY = {
    "PIL", "awkward", "backports", "datasets", "fastokens", "gigatoken", "huggingface_hub", "megatron",
    "numpy", "obstore", "orjson", "pandas", "pyarrow", "ray", "rich", "tiktoken", "tokenizers", "torch",
    "torchcodec", "webdataset", "xxhash", "yaml",
}  # fmt: skip

HELP = "import sys; from stoker.cli import main; sys.argv = ['stoker', *sys.argv[1:]]; main()"
LIST = "import atexit, sys; atexit.register(lambda: print('\\nMODULES', *sys.modules)); "


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("import stoker", []),
        (HELP, ["--help"]),
        (HELP, ["--version"]),
        (HELP, ["prepare", "--help"]),
        (HELP, ["prepare", "run", "--help"]),
        (HELP, ["stage", "--help"]),
        (HELP, ["stage", "run", "--help"]),
        (HELP, ["diagnose", "--help"]),
        (HELP, ["watch", "--help"]),
        (HELP, ["checkpoint", "ls", "--help"]),
        (HELP, ["history", "check", "--help"]),
        (HELP, ["metrics", "--help"]),
        (HELP, ["tune", "--help"]),
        (HELP, ["plan", "--help"]),
        (HELP, ["deploy", "k8s", "--help"]),
    ],
    ids=[
        "import",
        "help",
        "version",
        "verb-help",
        "run-help",
        "stage-help",
        "stage-run-help",
        "diagnose-help",
        "watch-help",
        "checkpoint-help",
        "history-help",
        "metrics-help",
        "tune-help",
        "plan-help",
        "deploy-help",
    ],
)
def test_no_heavy_package_is_loaded(
    program: str, arguments: list[str], stoker_environ: Callable[..., dict[str, str]]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIST + program, *arguments],
        env=stoker_environ(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    loaded = {name.partition(".")[0] for name in done.stdout.rpartition("MODULES ")[2].split()}
    assert loaded & HEAVY == set()
