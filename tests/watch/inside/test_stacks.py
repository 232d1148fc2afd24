"""What looks at a stack make of it, and a loop that was left told from one that stands."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from stoker.watch.inside.doing import Reader
from stoker.watch.inside.frames import places_of
from stoker.watch.inside.leaving import Leaving
from stoker.watch.runs.columns import read_stacks

if TYPE_CHECKING:
    from pathlib import Path

    from stoker.watch.inside.doing import Places

PROGRAM = """\
import logging, sys
def get_batch():
    return look()
def grad_norms(model):
    look()
def main(model):
    for step in range(1):
        x = get_batch()
        loss = model(x)
        loss.backward()
        grad_norms(model)
        logging.getLogger("run").warning("loss")
        print(look(), file=sys.stderr)
    look()
"""


class _Handler:
    level = 0

    def __init__(self, look: Any) -> None:
        self.look = look

    def handle(self, record: Any) -> None:
        self.look()


class _Loss:
    def backward(self) -> None: ...


def stacks_of(folder: Path) -> list[Places]:
    """The stacks at every `look()` of the program, in order."""
    found: list[Places] = []
    path = folder / "train.py"
    path.write_text(PROGRAM)
    space: dict[str, Any] = {"look": lambda: found.append(places_of(sys._getframe(1)))}
    exec(compile(PROGRAM, str(path), "exec"), space)
    import logging

    logger = logging.getLogger("run")
    handler: Any = _Handler(space["look"])
    logger.addHandler(handler)
    try:
        space["main"](lambda x: _Loss())
    finally:
        logger.removeHandler(handler)
    return found


def test_a_stack_is_named_by_what_its_line_is_there_for(tmp_path: Path) -> None:
    batch, metrics, logged, printed, _ = (Reader().doing(one) for one in stacks_of(tmp_path))
    assert (batch.what, batch.line) == ("batch", f"{tmp_path}/train.py:3 get_batch")
    assert (metrics.what, metrics.line) == ("metrics", f"{tmp_path}/train.py:5 grad_norms")
    assert logged.what == "logging"
    assert (printed.what, printed.line) == ("output", f"{tmp_path}/train.py:13 main")


MORE = """\
import contextlib, json
def grad_norms(weights):
    return sum(look() or 1 for _ in weights)
def tokenize(text):
    return [look() for _ in text]
class EMA:
    def update(self, averaged):
        averaged.copy = look()
def save_weights(path):
    with open(path, "wb") as file:
        look(); file.flush()
def log_loss(path):
    with open(path, "w") as file:
        look(); json.dump({}, file)
@contextlib.contextmanager
def timer():
    look()
    yield
def main(model):
    for step in range(1):
        x = tokenize("a")
        loss = model(x)
        loss.backward()
        grad_norms([1])
        update_ema()
        save_weights("/dev/null")
        log_loss("/dev/null")
        with timer():
            pass
def update_ema():
    EMA().update(EMA())
"""


def test_comprehensions_belong_to_their_function_and_words_of_a_function_tell_what_it_is_for(
    tmp_path: Path,
) -> None:
    path = tmp_path / "more.py"
    path.write_text(MORE)
    found: list[Places] = []
    space: dict[str, Any] = {"look": lambda: found.append(places_of(sys._getframe(1)))}
    exec(compile(MORE, str(path), "exec"), space)
    space["main"](lambda x: _Loss())
    told = [Reader().doing(one) for one in found]
    assert [one.what for one in told] == ["batch", "metrics", "average", "saving", "logging", "other"]
    if sys.version_info >= (3, 11):
        assert told[0].line == f"{path}:5 tokenize"
        assert told[1].line == f"{path}:3 grad_norms", "a generator expression makes no batch"


def test_a_wait_in_a_library_is_told_by_who_asks_for_it() -> None:
    def log() -> Places:
        return places_of(sys._getframe())

    waits = (threading.Event.wait.__code__, 1)
    assert Reader().doing((*log(), waits)).what == "logging"


def test_a_loop_that_was_left_is_told_from_one_that_stands(tmp_path: Path) -> None:
    batch, metrics, _, _, after = stacks_of(tmp_path)
    leaving, thread = Leaving(Reader()), threading.get_ident()
    leaving.trains(batch, thread)
    leaving.trains(metrics, thread)
    assert leaving.why(metrics, thread) == ""
    assert leaving.why(after, thread) == "the loop is over"
    assert leaving.why(places_of(sys._getframe())[:1], thread) == "the loop is over"


@pytest.mark.skipif(not hasattr(sys, "_current_exceptions"), reason="of Python 3.11 and later")
def test_an_exception_under_way_is_an_end_and_no_hang(tmp_path: Path) -> None:
    batch = stacks_of(tmp_path)[0]
    leaving, thread = Leaving(Reader()), threading.get_ident()
    leaving.trains(batch, thread)
    try:
        raise KeyError("gone")
    except KeyError:
        assert leaving.why(batch, thread) == "KeyError is under way"


def test_stacks_that_were_cut_short_are_none(tmp_path: Path) -> None:
    (tmp_path / "stacks-a-1.json").write_text('{"seconds": 3, "rows": [["", "batch"')
    assert read_stacks(tmp_path / "stacks-a-1.json").seen == ()


def test_a_collection_that_nobody_asked_for_is_told_by_the_line_it_ran_in(tmp_path: Path) -> None:
    import gc

    from stoker.watch.inside.stacks import Collecting

    collecting = Collecting()
    program = tmp_path / "program.py"
    program.write_text("import gc\ndef fills():\n    gc.collect(1)\n")
    space: dict[str, Any] = {}
    exec(compile(program.read_text(), str(program), "exec"), space)
    gc.callbacks.append(collecting)
    try:
        space["fills"]()
    finally:
        gc.callbacks.remove(collecting)
    assert f"{program}:3 fills" in collecting.lines
    assert collecting.lines[f"{program}:3 fills"] == pytest.approx(collecting.seconds)
