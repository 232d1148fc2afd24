"""Options of `stoker prepare` that are about media."""

from __future__ import annotations

import click

from stoker.cli.values import Command, Finite, choice

_OPTIONS = (
    choice(
        "--labels",
        among=["auto", "folders", "none"],
        help="Media: folders are classes; auto: where all lie in some and none has a caption.",
    ),
    choice(
        "--check", among=["decode", "header"], help="Media: decode every image, or look at headers alone."
    ),
    click.option("--longest-side", default=0, metavar="PIXELS", help="Media: make larger images so large."),
    click.option(
        "--shortest-side", default=0, metavar="PIXELS", help="Media: the same, by the shorter side."
    ),
    click.option(
        "--jpeg-quality",
        default=0,
        metavar="1-100",
        help="Media: encode JPEGs anew where that shrinks them.  [default: 95 for what is resized]",
    ),
    click.option("--min-side", default=0, metavar="PIXELS", help="Media: drop images with a shorter side."),
    click.option(
        "--max-aspect",
        type=Finite(min=0),
        default=0.0,
        metavar="RATIO",
        help="Media: drop longer, thinner images.",
    ),
    click.option(
        "--max-pixels",
        default=178_956_970,
        show_default=True,
        help="Media: refuse larger images before any memory is taken.",
    ),
)


def media_options(command: Command) -> Command:
    """Add them to a command, in their order."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
