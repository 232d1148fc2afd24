"""The `stoker` command: verbs in the order of a byte's journey."""

from __future__ import annotations

import io
import os
import signal
import sys

import click

from stoker import __version__
from stoker.errors import StokerError, UsageError


class _Verbs(click.Group):
    """Imports a verb's module when the verb is used, so that --help stays quick."""

    _HOMES = {  # noqa: RUF012 - read only
        "prepare": "stoker.cli.prepare",
        "stage": "stoker.cli.stage",
        "checkpoint": "stoker.cli.checkpoint",
        "watch": "stoker.cli.watch",
        "diagnose": "stoker.cli.diagnose",
        "report": "stoker.cli.report",
        "metrics": "stoker.cli.metrics",
        "doctor": "stoker.cli.doctor",
        "plan": "stoker.cli.plan",
        "deploy": "stoker.cli.deploy",
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._HOMES)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self._HOMES:
            return None
        from importlib import import_module

        command: click.Command = import_module(self._HOMES[name]).command
        return command


@click.command(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="%(version)s")
def stoker() -> None:
    """Keep GPUs fed.

    The verbs follow the data: prepare raw text into shards, stage them next to the GPU, look after
    checkpoints. Loading and saving are Python: `stoker.feed`, `stoker.Checkpointer`. Then: watch any
    training job and diagnose why its GPU waits; check a machine, size a job, write its manifests.
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command and end the process with its exit code: 0 fine, 1 failed, 2 wrong usage."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a bar that a locale lacks is no reason to say nothing
    if os.getpid() == 1:
        # the kernel ends no first process of a container by a signal: a pod would stay for its whole grace
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    sys.exit(_run(arguments))


def _run(arguments: list[str] | None) -> int:
    try:
        code = stoker.main(arguments, prog_name="stoker", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()  # its message is the whole help text
        return error.exit_code
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        return _fail(
            error.format_message(), f"see {context.command_path} --help" if context else "", error.exit_code
        )
    except UsageError as error:
        return _fail(error.message, error.hint, 2)
    except StokerError as error:
        return _fail(error.message, error.hint, 1)
    except OSError as error:
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        return _fail(f"{where}{error.strerror or error}", "", 1)
    except (KeyboardInterrupt, click.Abort):
        hint = "run the same command again: prepare and stage go on where they stopped"
        return _fail("interrupted", hint, 130)


def _fail(message: str, hint: str, code: int) -> int:
    click.echo(f"error: {message}", err=True)
    if hint:
        click.echo(f"hint: {hint}", err=True)
    return code
