"""`hawk evaluate`: what serving with prefill and decode apart promises, needs and costs."""

from __future__ import annotations

import click


@click.group(invoke_without_command=True)
@click.pass_context
def evaluate(context: click.Context) -> None:
    """What serving with prefill and decode apart promises, needs and costs."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
