"""Why a program ended, by what it wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.watch.said import last_words

TORCHRUN = """/usr/bin/python: can't open file '/srv/nosuch.py': [Errno 2] No such file or directory
E1119 13:55:14.000000 140 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 2)
Traceback (most recent call last):
  File "/usr/bin/torchrun", line 8, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
nosuch.py FAILED
------------------------------------------------------------
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TORCHRUN, "/usr/bin/python: can't open file '/srv/nosuch.py': [Errno 2] No such file or directory"),
        ("step 1\nTraceback\nValueError: x is y\nwandb: synced\n", "ValueError: x is y"),
        ("loading\nno data here\n-----\n", "no data here"),
        (
            "torch.cuda.OutOfMemoryError: CUDA out of memory\n",
            "torch.cuda.OutOfMemoryError: CUDA out of memory",
        ),
        ("", ""),
    ],
)
def test_the_line_that_says_why_is_found(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "output.log").write_text(text)
    assert last_words(tmp_path / "output.log") == said


def test_secrets_in_it_are_not_told(tmp_path: Path) -> None:
    (tmp_path / "output.log").write_text("OSError: https://me:hunter2@store/x is gone\n")
    assert "hunter2" not in last_words(tmp_path / "output.log")


def test_without_an_output_there_are_no_words(tmp_path: Path) -> None:
    assert last_words(tmp_path / "nothing.log") == ""
