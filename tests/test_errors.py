"""Errors say what happened and what to do, also after a trip between processes."""

from __future__ import annotations

import pickle

import pytest

from stoker import errors
from stoker.errors import BadShardError, EngineMismatchError, MissingPackageError, StokerError, require

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, StokerError)]


def test_the_hint_stands_on_its_own_line() -> None:
    assert (
        str(BadShardError("shard 7 is short", hint="fetch it again"))
        == "shard 7 is short\nhint: fetch it again"
    )


def test_an_error_without_a_hint_is_its_message() -> None:
    assert str(BadShardError("shard 7 is short")) == "shard 7 is short"


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_pickling(kind: type[StokerError]) -> None:
    copy = pickle.loads(pickle.dumps(kind("what", hint="do this")))
    assert (type(copy), copy.message, copy.hint) == (kind, "what", "do this")


@pytest.mark.parametrize("kind", KINDS)
def test_the_tree_in_the_docstring_names_every_error(kind: type[StokerError]) -> None:
    assert kind.__name__ in (errors.__doc__ or "")


def test_a_mismatch_is_a_tokenizer_error() -> None:
    assert issubclass(EngineMismatchError, errors.TokenizerError)


def test_a_missing_package_says_the_pip_line() -> None:
    with pytest.raises(MissingPackageError) as caught:
        require("no_such_package_of_ours", extra="arrow")
    assert caught.value.hint == "pip install no_such_package_of_ours"


def test_a_package_that_breaks_while_importing_is_not_called_missing(
    tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_package.py").write_text("import a_dependency_it_lacks\n")  # type: ignore[operator]
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_dependency_it_lacks"):
        require("broken_package", extra="arrow")


def test_a_required_package_is_returned() -> None:
    assert require("json", extra="none") is __import__("json")
