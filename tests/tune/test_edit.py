"""The user's file is changed at one call and nowhere else, or not at all."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.errors import UsageError
from stoker.tune.edit import edit_for, in_words

SETTING = {"num_workers": 2, "persistent_workers": True}


def site(path: Path, line: int, *through: str) -> dict[str, Any]:
    return {"file": str(path), "line": line, "function": "f", "text": "", "through": list(through)}


def edited(tmp_path: Path, text: str, line: int = 1, *through: str) -> str | None:
    path = tmp_path / "train.py"
    path.write_bytes(text.encode())
    edit = edit_for(site(path, line, *through), SETTING)
    return edit.after.decode() if edit else None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = DataLoader(d)\n", "x = DataLoader(d, num_workers=2, persistent_workers=True)\n"),
        ("x = DataLoader(d, num_workers=0)\n", "x = DataLoader(d, num_workers=2, persistent_workers=True)\n"),
        (
            "x = data.DataLoader(d, num_workers=args.n, shuffle=True)  # é\n",
            "x = data.DataLoader(d, num_workers=2, shuffle=True, persistent_workers=True)  # é\n",
        ),
        (
            "x = DataLoader(\n    d,\n    batch_size=8,  # rows\n)\n",
            "x = DataLoader(\n    d,\n    batch_size=8,  # rows\n    num_workers=2,\n"
            "    persistent_workers=True,\n)\n",
        ),
        ("é = 'é'; x = DataLoader(d)", "é = 'é'; x = DataLoader(d, num_workers=2, persistent_workers=True)"),
        (
            "x = DataLoader(d)\r\ny = 1\r\n",
            "x = DataLoader(d, num_workers=2, persistent_workers=True)\r\ny = 1\r\n",
        ),
    ],
)
def test_arguments_are_replaced_and_added_in_place(tmp_path: Path, before: str, after: str) -> None:
    assert edited(tmp_path, before) == after


@pytest.mark.parametrize(
    "text",
    [
        "x = DataLoader(d, **options)\n",
        "x = DataLoader(*parts)\n",
        "x = DataLoader(d, 8, True, None, None, 4)\n",
        "x = make(d)\n",
        "x = DataLoader(d), DataLoader(e)\n",
        "x = DataLoader(d, shuffle=(True))\n",
        "x = = \n",
    ],
)
def test_a_call_that_cannot_be_changed_safely_is_left_alone(tmp_path: Path, text: str) -> None:
    assert edited(tmp_path, text) is None


def test_another_loader_of_the_file_stays_as_it_is(tmp_path: Path) -> None:
    text = "train = DataLoader(a)\nval = DataLoader(b)\n"
    assert edited(tmp_path, text, 2) == text.replace("(b)", "(b, num_workers=2, persistent_workers=True)")


def test_a_trainer_s_arguments_are_changed_where_it_builds_the_loader(tmp_path: Path) -> None:
    text = "a = TrainingArguments(output_dir='o')\nTrainer(args=a).train()\n"
    added = ", dataloader_num_workers=2, dataloader_persistent_workers=True)"
    assert edited(tmp_path, text, 2, "torch", "transformers") == text.replace("'o')", f"'o'{added}")


def test_another_framework_s_call_is_said_in_words(tmp_path: Path) -> None:
    assert edited(tmp_path, "fit(DataLoader(d))\n", 1, "somebody") is None
    assert in_words({"through": ["somebody"]}, {**SETTING, "OMP_NUM_THREADS": "1", "torch_threads": 1}) == [
        "DataLoader(num_workers=2, persistent_workers=True)",
        "torch.set_num_threads(1)",
        "export OMP_NUM_THREADS=1",
    ]


def test_a_file_that_was_changed_meanwhile_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("x = DataLoader(d)\n")
    edit = edit_for(site(path, 1), SETTING)
    assert edit
    path.write_text("x = DataLoader(d)  # mine\n")
    with pytest.raises(UsageError, match="was changed"):
        edit.write()
    assert path.read_text() == "x = DataLoader(d)  # mine\n"


def test_a_written_file_keeps_its_mode_and_the_diff_is_what_was_changed(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("x = DataLoader(d)\n")
    path.chmod(0o750)
    edit = edit_for(site(path, 1), SETTING)
    assert edit
    edit.write()
    assert path.read_bytes() == edit.after
    assert os.stat(path).st_mode & 0o777 == 0o750
    assert "+x = DataLoader(d, num_workers=2, persistent_workers=True)" in edit.diff


ARGUMENTS = st.lists(
    st.sampled_from(
        ["d", "(d)", "f(a, b)", "[1, 2]", "'é, )'", "shuffle=True", "num_workers=f(3)", "timeout=(0)"]
    ),
    min_size=1,
    max_size=5,
    unique=True,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(parts=ARGUMENTS, between=st.sampled_from([", ", ",\n  ", ",  # note\n    "]), comma=st.booleans())
def test_whatever_the_call_looks_like_it_has_the_setting_afterwards(
    tmp_path: Path, parts: list[str], between: str, comma: bool
) -> None:
    ordered = sorted(parts, key=lambda part: part.split("=")[0] in ("shuffle", "num_workers", "timeout"))
    text = f"before = 1\nx = DataLoader(\n  {between.join(ordered)}{',' if comma else ''}\n)\nafter = 2\n"
    after = edited(tmp_path, text, 2)
    if after is not None:
        call = next(
            one for one in ast.walk(ast.parse(after)) if isinstance(one, ast.Call) and one.lineno == 2
        )
        values = {one.arg: ast.unparse(one.value) for one in call.keywords}
        assert values["num_workers"] == "2"
        assert values["persistent_workers"] == "True"
        assert after.startswith("before = 1\n")
        assert after.endswith("after = 2\n")


def test_an_option_of_the_program_that_the_edit_replaces_is_said(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("x = DataLoader(d, num_workers=args.n, persistent_workers=False)\n")
    edit = edit_for(site(path, 1), SETTING)
    assert edit
    assert edit.replaced == ("num_workers=args.n",)


def test_a_file_with_the_line_ends_of_windows_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(b"loader = DataLoader(\r\n    ds,\r\n    batch_size=8,\r\n)\r\n")
    edit = edit_for({"file": str(path), "line": 1, "text": "", "through": []}, {"num_workers": 4})
    assert edit is not None
    assert edit.after.count(b"\n") == edit.after.count(b"\r\n") == 5
