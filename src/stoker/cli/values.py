"""Option values with units."""

from __future__ import annotations

import click

from stoker.errors import UsageError
from stoker.formats.sizes import parse_size


def size(text: str) -> int:
    """Bytes as people write them: 512MiB, 1.5GB, 67108864."""
    try:
        return parse_size(text)
    except UsageError as error:
        raise click.BadParameter(f"{error.message}; {error.hint}") from error
