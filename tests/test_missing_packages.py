"""Each optional package that is not there says its pip line, at every door where it is needed."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import stoker
from stoker import errors
from stoker.cli import run
from stoker.errors import MissingPackageError, require
from stoker.prepare import tokens

if TYPE_CHECKING:
    from collections.abc import Callable

PREPARE = ["prepare", "--out", "out", "--workers", "1", "--tokenizer"]

# package, the command that needs it, what its pip line brings
COMMANDS = {
    "obstore, prepare": ("obstore", [*PREPARE, "TOKENIZER", "s3://bucket/web"], "obstore"),
    "obstore, stage": ("obstore", ["stage", "s3://bucket/web", "--cache", "near"], "obstore"),
    "obstore, checkpoint": ("obstore", ["checkpoint", "ls", "run", "--remote", "s3://bucket/run"], "obstore"),
    "huggingface_hub, prepare": ("huggingface_hub", [*PREPARE, "gpt2", "a.txt"], "huggingface_hub"),
    "huggingface_hub, stage": (
        "huggingface_hub",
        ["stage", "hf://org/name", "--cache", "near"],
        "huggingface_hub",
    ),
    "datasets": ("datasets", [*PREPARE, "TOKENIZER", "hf://org/name"], "datasets"),
    "tokenizers": ("tokenizers", [*PREPARE, "TOKENIZER", "a.txt"], "tokenizers"),
    "gigatoken": ("gigatoken", [*PREPARE, "TOKENIZER", "a.txt", "--engine", "gigatoken"], "gigatoken"),
    "fastokens": ("fastokens", [*PREPARE, "TOKENIZER", "a.txt", "--engine", "fastokens"], "fastokens"),
    "tiktoken": ("tiktoken", [*PREPARE, "tiktoken:gpt2", "a.txt"], "tiktoken"),
    "zstd": ("backports.zstd", [*PREPARE, "TOKENIZER", "a.txt.zst"], "backports.zstd"),
    "zstd, out": ("backports.zstd", [*PREPARE, "TOKENIZER", "a.txt", "--zstd"], "backports.zstd"),
    "pyarrow": ("pyarrow", [*PREPARE, "TOKENIZER", "a.parquet"], "pyarrow"),
    "pillow": ("PIL", ["prepare", "--out", "out", "--workers", "1", "a.jpg"], "pillow"),
    "orjson": ("orjson", [*PREPARE, "TOKENIZER", "a.jsonl"], "orjson"),
    "ray": ("ray", [*PREPARE, "TOKENIZER", "a.txt", "--on", "ray"], "ray"),
    "yaml, plan": ("yaml", ["plan", "job.yaml"], "pyyaml"),
    "yaml, deploy": ("yaml", ["deploy", "slurm", "job.yaml", "--out", "out"], "pyyaml"),
    "cuda": ("cuda", ["checkpoint", "suspend", "1"], "cuda-bindings"),
    "wandb": ("wandb", ["history", "export", "wandb", "out"], "wandb"),
    "torch, import": ("torch", ["checkpoint", "import", "a.txt", "--out", "run"], "torch"),
}

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import stoker
for call in (
    lambda: stoker.feed("corpus", batch_size=8),
    lambda: stoker.Feeder("corpus", batch_size=8),
    lambda: stoker.Checkpointer("run1"),
    lambda: stoker.Loader("corpus", batch_size=8),
):
    try:
        call()
    except stoker.StokerError as error:
        print(error)
"""


WITHOUT_TRAINER = """
import sys
class Hidden:
    def find_spec(name, path=None, target=None):
        if name == "NAME":
            raise ModuleNotFoundError("No module named 'NAME'", name=name)
sys.meta_path.insert(0, Hidden)
try:
    import stoker.integrations.NAME
except ImportError as error:
    print(error)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "a.txt").write_text("Coal for the boiler. " * 20, "utf-8")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "coal"}) + "\n", "utf-8")
    (tmp_path / "a.txt.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    (tmp_path / "a.parquet").write_bytes(b"PAR1PAR1")
    (tmp_path / "a.jpg").write_bytes(b"\xff\xd8\xff")
    (tmp_path / "job.yaml").write_text("nodes: 2\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    tokens.huggingface.cache_clear()  # one that was loaded before needs no package
    return tmp_path


@pytest.mark.parametrize("case", COMMANDS)
def test_a_command_without_its_package_says_the_pip_line(
    case: str,
    folder: Path,
    tokenizer_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    package, arguments, brings = COMMANDS[case]
    monkeypatch.setitem(sys.modules, package, None)
    for name in [one for one in sys.modules if package == "torch" and one.startswith("stoker.checkpoint.")]:
        monkeypatch.delitem(sys.modules, name)  # imported by a test before, while it was there
    given = [str(tokenizer_path) if one == "TOKENIZER" else one for one in arguments]
    assert run(given) == 1
    told = capsys.readouterr().err
    assert "hint: pip install " in told, told
    hint = told.partition("hint: pip install ")[2].splitlines()[0]
    assert hint.strip("'").startswith(brings), told
    assert "stoker" not in hint


def test_a_call_without_torch_says_the_pip_line(stoker_environ: Callable[..., dict[str, str]]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        env=stoker_environ(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    *others, of_loader = done.stdout.split("torch is not installed\n")[1:]
    line = errors.pip_line("torch", extra="torch")
    assert [told.rstrip() for told in others] == [f"hint: {line}"] * 3
    assert of_loader.rstrip() == f"hint: {line}, or output='numpy'"


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_a_callback_without_its_trainer_says_the_pip_line(
    name: str, stoker_environ: Callable[..., dict[str, str]]
) -> None:
    program = WITHOUT_TRAINER.replace("NAME", name)
    said = subprocess.check_output([sys.executable, "-c", program], env=stoker_environ(), text=True)
    assert said == f"{name} is not installed\nhint: pip install {name}\n"


def test_a_call_without_obstore_says_the_pip_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    for call in (
        lambda: stoker.open_store("s3://bucket"),
        lambda: stoker.read_manifest("s3://bucket/corpus"),
        lambda: stoker.fetch("s3://bucket/corpus", cache=tmp_path / "near"),
        lambda: stoker.feed("s3://bucket/corpus", cache=tmp_path / "near", batch_size=8),
        lambda: stoker.Checkpointer(tmp_path / "run", remote="s3://bucket/run"),
    ):
        with pytest.raises(MissingPackageError, match=r"hint: pip install '?obstore"):
            call()


def test_watching_without_nvml_goes_on_and_says_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker.watch.gauges.cards import open_cards

    monkeypatch.setitem(sys.modules, "pynvml", None)
    cards, _, missing = open_cards("nvml")
    assert cards is None
    assert errors.pip_line("nvidia-ml-py", extra="gpu") in missing[0]


def test_a_missing_package_is_an_import_error_too() -> None:
    with pytest.raises(
        ImportError, match="no_such_package is not installed\nhint: pip install no_such_package"
    ):
        require("no_such_package", extra="none")


def test_an_import_that_is_none_of_our_extras_is_left_as_it_is() -> None:
    error = ModuleNotFoundError("No module named 'zzz'", name="zzz")
    assert errors.explained(error) is error


def test_the_pip_line_brings_what_else_its_extra_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = [
        "one>=1",
        'two>=2; extra == "some"',
        'three; python_version < "4" and extra == "some"',
        'no; extra == "x"',
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: declared)
    assert errors.pip_line("two", extra="some") == """pip install 'two>=2' 'three; python_version < "4"'"""
