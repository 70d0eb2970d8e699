"""`hawk evaluate`: the paper's evaluation as one report; below it, what a cluster would promise, need and cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from hawk.cli.ended import put_away


@click.group(invoke_without_command=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Folder of the report: report.html, a CSV behind every figure and table, what was measured.",
)
@click.option(
    "--from",
    "given",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE|FOLDER",
    help="Figures measured elsewhere: JSON of `hawk bench` or `scripts/bench gpu`; may be given again.",
)
@click.option("--quick", is_flag=True, help="Under a minute: does it work, not how fast is it.")
@click.option(
    "--measure/--no-measure", default=True, help="Whether this machine is measured.  [default: yes]"
)
@click.option(
    "--devices",
    help='As of `hawk bench transfer`: "cuda:0,cuda:1", or "host,host".  [default: the GPUs that are there]',
)
@click.option("--overwrite", is_flag=True, help="Replaces the report that DIR has.")
@click.option(
    "--seed",
    type=click.IntRange(0, (1 << 32) - 1),
    default=0,
    show_default=True,
    help="Of all that is random.",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 1024),
    help="Processes that simulate.  [default: one for each processor]",
)
@click.option("--json", "as_json", is_flag=True, help="Prints a summary as one JSON object.")
@click.pass_context
def evaluate(
    context: click.Context, /, out: Path | None, given: tuple[Path, ...], as_json: bool, **options: Any
) -> None:
    """The paper's evaluation: what this machine can measure, what others have, and serving, simulated.

    With --out it writes one report, a page that needs nothing but itself.  Commands below answer other questions.
    """
    if context.invoked_subcommand is not None:
        name = context.invoked_subcommand
        for option in context.command.params:
            if context.get_parameter_source(option.name or "") is click.core.ParameterSource.COMMANDLINE:
                raise click.UsageError(f"{option.opts[0]} is for the report; `{name}` has options of its own")
        return
    if out is None:
        if given or as_json:
            raise click.UsageError("a report needs --out DIR")
        click.echo(context.get_help())
        return
    if options["devices"] is not None and not options["measure"]:
        raise click.UsageError("--devices says what is measured, --no-measure that nothing is")
    from hawk.evaluate import Options
    from hawk.evaluate import evaluate as run

    with put_away():
        outcome = run(Options(out, given, **options))
    if as_json:
        click.echo(json.dumps(outcome.to_dict(), indent=2))
        return
    for sentence in outcome.summary:
        click.echo(f"- {sentence}")
    for absent in outcome.absent:
        click.echo(f"- not run here: {absent.what} ({absent.why})")
    click.echo(f"{outcome.out / 'report.html'}: {outcome.facts['seconds']:.0f} s")
