"""The `stoker` command: verbs in the order of a byte's journey."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import takewhile

import click

from stoker import __version__
from stoker.cli.groups import Group, did_you_mean
from stoker.errors import StokerError, explained
from stoker.redact import redact_text
from stoker.symptoms import page_of_text


class _Verbs(Group):
    """Imports a verb's module when the verb is used, so that --help stays quick."""

    _NAMES = (
        "prepare", "stage", "order", "checkpoint", "watch", "diagnose", "report", "metrics", "doctor",
        "bench", "tune", "history", "plan", "deploy",
    )  # fmt: skip

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._NAMES)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self._NAMES:
            return None
        command: click.Command = import_module(f"stoker.cli.{name}").command
        return command


@click.command(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="%(version)s")
def stoker() -> None:
    """Keep GPUs fed.

    The verbs follow the data: prepare raw text into shards, stage them next to the GPU, look after
    checkpoints. Loading and saving are Python: `stoker.feed`, `stoker.Checkpointer`. Then: watch any
    training job and diagnose why its GPU waits; check and measure a machine, size a job, write its manifests.

    Exit codes: 0 fine; 1 a problem was found, or the work failed; 2 wrong usage, or an input that is not
    there or cannot be read. With --json a failure is {"error": {"message", "hint", "exit_code"}} on stdout.
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command and end the process with its exit code: 0 fine, 1 failed, 2 wrong usage."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a bar that a locale lacks is no reason to say nothing
    if os.getpid() == 1:
        # the kernel ends no first process of a container by a signal: a pod would stay for its whole grace
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    code = run(sys.argv[1:] if arguments is None else arguments)
    _leave_nothing_to_write()
    sys.exit(code)


def _leave_nothing_to_write() -> None:
    """Python would try once more at its end to write what had no room or no reader, and exit with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # closed by whoever started us
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def run(arguments: list[str]) -> int:
    """Run the command; its exit code. What failed is said on stderr, and with --json on stdout too."""
    fail = partial(_fail, as_json="--json" in takewhile(lambda one: one != "--", arguments))
    try:
        code = _ran(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()  # into a file it is written now and not before
        return code
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        return fail(_said(error), f"see {context.command_path} --help" if context else "", error.exit_code)
    except StokerError as error:
        page = page_of_text(f"{type(error).__name__}: {error.message}")
        return fail(error.message, error.hint, error.exit_code, page)
    except ImportError as error:
        told = explained(error)
        if not isinstance(told, StokerError):
            raise
        return fail(told.message, told.hint, told.exit_code)
    except OSError as error:
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        return fail(f"{where}{error.strerror or error}", "", 1, page_of_text(str(error.strerror)))
    except (KeyboardInterrupt, click.Abort):
        hint = "run the same command again: prepare and stage go on where they stopped"
        return fail("interrupted", hint, 130)


def _ran(arguments: list[str]) -> int:
    try:
        code = stoker.main(arguments, prog_name="stoker", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()  # its message is the whole help text
        return error.exit_code


def _said(error: click.ClickException) -> str:
    if isinstance(error, click.NoSuchOption) and error.ctx:
        known = [name for one in error.ctx.command.get_params(error.ctx) for name in one.opts]
        return f"there is no option {error.option_name}{did_you_mean(error.option_name, known)}"
    return error.format_message()


def _fail(message: str, hint: str, code: int, page: str = "", *, as_json: bool) -> int:
    message, hint = redact_text(message), redact_text(hint)  # of a mistake in the command, say
    with suppress(OSError):  # a full disk, or nobody reads: there is the exit code
        click.echo(f"error: {message}", err=True)
        if hint:
            click.echo(f"hint: {hint}", err=True)
        if page:
            click.echo(f"more: {page}", err=True)
    if as_json:
        with suppress(OSError):
            said = {"message": message, "hint": hint, "exit_code": code} | ({"page": page} if page else {})
            click.echo(json.dumps({"error": said}, indent=1))
    return code
