"""`stoker metrics`: what Prometheus and Grafana need to show runs."""

from __future__ import annotations

import click

from stoker.cli.groups import Group


@click.group(cls=Group)
def command() -> None:
    """Dashboard and alert rules for `stoker watch --metrics`.

    \b
    stoker metrics rules > stoker-rules.yml
    stoker metrics dashboard > stoker-dashboard.json
    """


@command.command()
def rules() -> None:
    """Print alert rules for Prometheus."""
    from stoker.report.dashboard import alert_rules

    click.echo(alert_rules(), nl=False)


@command.command()
def dashboard() -> None:
    """Print a dashboard for Grafana."""
    from stoker.report.dashboard import dashboard as made

    click.echo(made(), nl=False)
