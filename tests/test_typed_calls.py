"""A user's type checker and `help` know the options of the public calls."""

from __future__ import annotations

import inspect
import os
import pydoc
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import stoker
from stoker.checkpoint.options import CheckpointOptions
from stoker.feeder import FeedOptions
from stoker.load.options import LoaderOptions
from stoker.options import options_of
from stoker.stage.cache import CacheOptions

RIGHT = """
from pathlib import Path

import stoker

with stoker.feed("corpus", batch_size=8, seq_len=2048, shuffle="blocks", device="cpu") as feeder:
    for batch in feeder:
        print(batch["input_ids"])

loader: stoker.Loader = stoker.Loader(["web", "code"], weights=[0.7, 0.3], batch_size=8, workers="inline")
checkpoints = stoker.Checkpointer(Path("run1"), remote="s3://bucket/run1", every="auto", keep=3)
checkpoints.step(1, loader=loader)
with stoker.Cache("near", budget="2TB", preload="shm") as cache:
    stoker.Feeder(dataset="s3://bucket/corpus", cache=cache, batch_size=8, dtype=None)
"""

WRONG = {
    'stoker.feed("corpus", batch_size=8, shufle="off")': 'Unexpected keyword argument "shufle" for "feed"',
    'stoker.feed("corpus", batch_size="8")': '"batch_size" to "feed" has incompatible type "str"',
    'stoker.feed("corpus", seq_len=8)': 'Missing named argument "batch_size" for "feed"',
    'stoker.Feeder("corpus", batch_size=8, cash="x")': 'Unexpected keyword argument "cash" for "Feeder"',
    'stoker.Loader("corpus", 8)': 'Too many positional arguments for "Loader"',
    'stoker.Loader("corpus", batch_size=8, tail="keep")': '"tail" to "Loader" has incompatible type',
    'stoker.Checkpointer("run1", evry=5)': 'Unexpected keyword argument "evry" for "Checkpointer"',
    'stoker.Checkpointer("run1", keep="3")': '"keep" to "Checkpointer" has incompatible type "str"',
    'stoker.Cache("near", budgt="2TB")': 'Unexpected keyword argument "budgt" for "Cache"',
}

RECORDS = {
    "feed": FeedOptions,
    "Feeder": FeedOptions,
    "Loader": LoaderOptions,
    "Checkpointer": CheckpointOptions,
    "Cache": CacheOptions,
}


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What mypy says of a right program and a wrong one, where stoker is installed and nothing else."""
    pytest.importorskip("mypy")
    home = tmp_path_factory.mktemp("user")
    installed = home / "venv"
    venv.create(installed, symlinks=True)
    site = sysconfig.get_path("purelib", "venv" if os.name == "posix" else "nt", {"base": str(installed)})
    Path(site, "stoker.pth").write_text(f"{Path(stoker.__file__).parents[1]}\n", "utf-8")
    (home / "right.py").write_text(RIGHT, "utf-8")
    (home / "wrong.py").write_text("import stoker\n" + "\n".join(WRONG), "utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-pretty", "--hide-error-context"]
    done = subprocess.run(
        [*command, "--python-executable", str(installed / "bin" / "python"), "right.py", "wrong.py"],
        cwd=home,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_a_right_program_passes(checked: list[str]) -> None:
    assert [line for line in checked if line.startswith("right.py")] == []


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_call_is_an_error_of_its_line(checked: list[str], line: str) -> None:
    place = f"wrong.py:{2 + list(WRONG).index(line)}: error: "
    assert any(one.startswith(place) and WRONG[line] in one for one in checked), "\n".join(checked)


@pytest.mark.parametrize("name", RECORDS)
def test_help_lists_every_option_with_its_default_and_why(name: str) -> None:
    text = " ".join(
        pydoc.render_doc(getattr(stoker, name), renderer=pydoc.plaintext).replace("|", " ").split()
    )
    for option in options_of(RECORDS[name]):
        assert option.why, f"{option.name} does not say what it is for"
        shown = f"{option.parameter} {option.why}".replace("|", " ")
        assert " ".join(shown.split()) in text


@pytest.mark.parametrize("name", RECORDS)
def test_the_signature_is_that_of_the_record(name: str) -> None:
    parameters = inspect.signature(getattr(stoker, name)).parameters
    assert list(parameters) == [option.name for option in options_of(RECORDS[name])]


def test_the_signature_of_feed_says_what_it_gives() -> None:
    assert str(inspect.signature(stoker.feed)).endswith(" -> Feeder")


def test_a_missing_option_is_named_as_the_caller_knows_it() -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'batch_size'"):
        stoker.Loader("corpus")  # type: ignore[call-arg]


def test_a_value_that_is_no_choice_is_refused_with_the_choices() -> None:
    with pytest.raises(stoker.StokerError, match="tail='keep' is unknown\nhint: use one of 'drop', 'pad'"):
        stoker.Loader("corpus", batch_size=8, tail="keep")  # type: ignore[arg-type]


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(stoker.__file__).parent / "py.typed").exists()
