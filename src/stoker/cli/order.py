"""`stoker order`: the documents of any step, from the order alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stoker.cli.values import existing, given_path, json_option
from stoker.errors import UsageError

if TYPE_CHECKING:
    from stoker.load.ledger import Document, Row
    from stoker.load.loader import Loader

_SHOWN = 160  # characters of a document
_STEPS = 10_000  # at once: more would be a list nobody reads


def _steps(text: str) -> range:
    """A step, or FIRST:STOP."""
    first, _, stop = text.partition(":")
    try:
        steps = range(int(first), int(stop) if stop else int(first) + 1)
    except ValueError:
        raise click.BadParameter(f"{text} is neither a step nor FIRST:STOP") from None
    if not 0 < len(steps) <= _STEPS or steps.start < 0:
        raise click.BadParameter(f"{text} names no steps, or more than {_STEPS:,}; steps count from 0")
    return steps


def _weights(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(one) for one in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text} are no weights such as 0.7,0.3") from None


@click.command()
@click.argument("datasets", nargs=-1, required=True, metavar="DATASET...", type=existing)
@click.option("--step", "steps", required=True, type=_steps, metavar="N|FIRST:STOP", help="Which, from 0 on.")
@click.option("--rank", type=click.IntRange(min=0), help="Only this rank's rows.")
@click.option(
    "--state",
    type=given_path(exists=True),
    help="What the job saved: a checkpoint of stoker's, a torch.save file or JSON that holds the loader's "
    "state. It knows the options below, and how many ranks took which steps.",
)
@click.option("--world", type=click.IntRange(min=1), help="Ranks of the job.  [default: 1]")
@click.option("--nodes", type=click.IntRange(min=1), default=1, help="Nodes that it began on.  [default: 1]")
@click.option("--batch-size", type=click.IntRange(min=1), help="Rows in a batch of one rank.")
@click.option("--seq-len", type=click.IntRange(min=0), help="Tokens in a row.")
@click.option("--seed", type=int, help="Of the order.  [default: 0]")
@click.option("--shuffle", type=click.Choice(["full", "blocks", "off"]), help="[default: full]")
@click.option(
    "--packing", type=click.Choice(["concat", "best-fit", "pad", "buckets"]), help="[default: concat]"
)
@click.option("--tail", type=click.Choice(["drop", "pad"]), help="[default: drop]")
@click.option("--weights", type=_weights, metavar="W,W...", help="Shares of several datasets in a blend.")
@click.option("--window", type=click.IntRange(min=1), help="If the job was given it.")
@click.option("--chunk-bytes", type=click.IntRange(min=1), help="If the job was given it.")
@click.option("--lanes", type=click.IntRange(min=1), help="If the job was given it.")
@click.option("--bin-dtype", help="Of the ids in a raw .bin.  [default: uint16]")
@click.option(
    "--tokenizer", metavar="T", help="Show text: a tokenizer.json, its folder, a name, tiktoken:NAME."
)
@json_option
def command(
    datasets: tuple[str, ...],
    steps: range,
    rank: int | None,
    state: Path | None,
    tokenizer: str | None,
    as_json: bool,
    **said: Any,
) -> None:
    """Name the documents of any step of a job, past or future.

    \b
    stoker order corpus --step 12345 --state checkpoints --tokenizer gpt2
    stoker order corpus --step 12345 --rank 3 --world 8 --batch-size 8 --seq-len 2048

    Nothing was noted while the job ran: the order is computed again. The options are those that the loop
    gave to `stoker.feed`; a saved state knows them. A step is a batch of each rank, counted from 0; with
    gradient accumulation over 4 batches, optimizer step n is --step 4n:4n+4. The names are what
    `stoker.feed(skip=...)` takes.
    """
    loader = _loader(datasets, state, said)
    with loader:
        decode = _decoder(tokenizer)
        rows = [row for step in steps for row in loader.samples(step, rank=rank)]
        shown = [(row, [_text(loader, one, decode) for one in row.documents]) for row in rows]
    if as_json:
        click.echo(json.dumps([_plain(row, texts) for row, texts in shown], indent=1))
        return
    for row, texts in shown:
        for line in _lines(row, texts):
            click.echo(line)


def _loader(datasets: tuple[str, ...], state: Path | None, said: dict[str, Any]) -> Loader:
    from stoker.load.loader import Loader
    from stoker.load.recall import options_of_state
    from stoker.world import World

    ranks, nodes = said.pop("world"), said.pop("nodes")
    given = {name: value for name, value in said.items() if value is not None}
    saved = _saved_state(state) if state else None
    known = options_of_state(saved) if saved else {}
    ranks = ranks or known.pop("ranks", 1)
    known.pop("ranks", None)
    options = {**known, **given}
    if "batch_size" not in options:
        raise UsageError("how many rows a batch has is not known", hint="give --batch-size, or --state")
    if ranks % nodes:
        raise UsageError(
            f"{ranks} ranks on {nodes} nodes are uneven", hint="give --world as all ranks together"
        )
    world = World(size=ranks, nodes=nodes, local_size=ranks // nodes)
    loader = Loader(list(datasets), world=world, workers="inline", output="numpy", **options)
    if saved:
        loader.load_state_dict(dict(saved))
    return loader


def _saved_state(path: Path) -> Mapping[str, Any]:
    """Out of a file, or out of the newest whole checkpoint in a folder."""
    from stoker.checkpoint.saved.reader import Checkpoint
    from stoker.checkpoint.saved.tiers import LocalFolder, Tiers
    from stoker.checkpoint.saved.values import decode
    from stoker.load.recall import read_state, the_state_in

    if path.is_file():
        return read_state(path)
    names = Tiers(root=path.parent, remote=None).names()
    one = Checkpoint(LocalFolder(path)) if path.name in names else None
    found = one or Tiers(root=path, remote=None).latest(skipped=[])
    if found is None:
        raise UsageError(
            f"{path} holds no whole checkpoint", hint="`stoker checkpoint ls` says what is there"
        )
    held: dict[Any, Any] = {}
    for place, value in found.part(0).values:
        inside = held
        for name in place[:-1]:
            inside = inside.setdefault(name, {})
        inside[place[-1]] = decode(value)
    return the_state_in(held, str(path))


def _decoder(name: str | None) -> Callable[[Any], str] | None:
    if name is None:
        return None
    from stoker.prepare.tokens import decoder_of, load_tokenizer

    return decoder_of(load_tokenizer(name))


def _text(loader: Loader, document: Document, decode: Callable[[Any], str] | None) -> str | None:
    if decode is None or not document.tokens:
        return None
    return decode(loader.read(document))


def _plain(row: Row, texts: list[str | None]) -> dict[str, Any]:
    plain = asdict(row)
    for document, text in zip(plain["documents"], texts, strict=True):
        if text is not None:
            document["text"] = text
    return plain


def _lines(row: Row, texts: list[str | None]) -> Iterator[str]:
    padding = "" if row.real else "  (padding of the epoch's end)"
    yield f"step {row.step}  epoch {row.epoch}  rank {row.rank}  row {row.row}{padding}"
    for document, text in zip(row.documents, texts, strict=True):
        yield f"  {document.name}{_where(document)}"
        if text is not None:
            yield f"    {_short(text)}"


def _where(document: Document) -> str:
    parts = [f"key {document.key}"] if document.key else []
    if document.tokens:
        parts.append(f"tokens {document.first_token:,}:{document.first_token + document.tokens:,}")
    if document.stop_byte:
        parts.append(f"bytes {document.first_byte:,}:{document.stop_byte:,}")
    return "".join(f"  {part}" for part in parts)


def _short(text: str) -> str:
    """On one line, without what would move a terminal's cursor."""
    line = "".join(letter if letter.isprintable() else " " for letter in text[: _SHOWN + 1])
    return line if len(text) <= _SHOWN else f"{line[:_SHOWN]}…"
