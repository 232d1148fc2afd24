"""Task loop: runs tasks one after another in this process, the part every launcher shares.

    python -m stoker.prepare.launch.worker ENTRY FOLDER STAGE --slot I/N --todo FILE

runs lines I, I+N, I+2N ... of FILE. A failing task is written down and the next one runs all the same;
the exit code is 1 if any failed.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from stoker.errors import StokerError, TaskError
from stoker.prepare.launch.ledger import Ledger

Entry = Callable[[Path, str, int], None]


def load_entry(name: str) -> Entry:
    """The function behind `package.module:function`."""
    module, _, function = name.partition(":")
    entry: Entry = getattr(import_module(module), function)
    return entry


def run_task(entry: Entry, ledger: Ledger, stage: str, number: int) -> StokerError | None:
    """Run one task and log it; returns why it failed, or nothing."""
    started = time.monotonic()
    failure: StokerError | None
    try:
        entry(ledger.folder, stage, number)
        failure, detail = None, f"done in {time.monotonic() - started:.2f} s"
    except StokerError as error:
        failure, detail = error, str(error)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a bug, or native code in panic: keep the trace, let the others run
        where = f"the trace is in {ledger.log(stage, number)}"
        failure, detail = TaskError(f"{type(error).__name__}: {error}", hint=where), traceback.format_exc()
    try:
        _write_down(ledger, stage, number, failure, detail)
    except (OSError, StokerError) as error:  # a full disk must not end the worker, nor hide the reason
        told = f"{stage} {number}: {failure or detail}; not written down: {error}"
        print(told, file=sys.stderr, flush=True)
    return failure


def _write_down(ledger: Ledger, stage: str, number: int, failure: StokerError | None, detail: str) -> None:
    log = ledger.log(stage, number)
    log.parent.mkdir(parents=True, exist_ok=True)
    # names of files may hold bytes that are no UTF-8
    with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {stage} {number}: {detail}\n")
    if failure:
        ledger.fail(stage, number, failure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("entry")
    parser.add_argument("folder", type=Path)
    parser.add_argument("stage")
    parser.add_argument("--plan", required=True)
    parser.add_argument("--slot", default="0/1")
    parser.add_argument("--todo", type=Path, required=True)
    options = parser.parse_args(arguments)
    slot, slots = map(int, options.slot.split("/"))
    numbers = [int(line) for line in options.todo.read_text().split()][slot::slots]
    entry, ledger = load_entry(options.entry), Ledger(folder=options.folder, plan=options.plan)
    failed = 0
    for number in numbers:
        if reason := run_task(entry, ledger, options.stage, number):
            print(f"{options.stage} {number} failed: {reason}", file=sys.stderr, flush=True)
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
