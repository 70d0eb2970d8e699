"""`hawk demo`: the demonstration, for an installed HAWK; `scripts/demo` is the same from a clone."""

from __future__ import annotations

import runpy
import sys

import click


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
)
@click.pass_context
def demo(context: click.Context) -> None:
    """Moves a cache between two agents on this machine and checks every byte."""
    sys.argv = ["hawk demo", *context.args]
    runpy.run_module("hawk.demo", run_name="__main__", alter_sys=True)
