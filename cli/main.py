"""`wanfp4`: the command. Each subcommand has a file of its own; heavy libraries load when one of them runs."""

from __future__ import annotations

import signal
import sys
from typing import Annotated, NoReturn

import typer

import wanfp4
from wanfp4.cli.bench import bench
from wanfp4.cli.calibrate import app as calibrate_app
from wanfp4.cli.common import Commands
from wanfp4.cli.decode import decode
from wanfp4.cli.doctor import doctor
from wanfp4.cli.drift import drift
from wanfp4.cli.generate import generate
from wanfp4.cli.inspect import inspect
from wanfp4.cli.map import attention_map
from wanfp4.cli.policies import app as policies_app
from wanfp4.cli.report import app as report_app
from wanfp4.cli.search import search
from wanfp4.cli.verify import verify

app = typer.Typer(
    name="wanfp4",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"wanfp4 {wanfp4.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """4-bit attention for Wan video diffusion, and what it costs in quality."""


app.command()(generate)
app.command()(drift)
app.add_typer(report_app, name="report")
app.command("map")(attention_map)
app.command()(search)
app.add_typer(calibrate_app, name="calibrate")
app.command()(decode)
app.add_typer(policies_app, name="policies")
app.command()(doctor)
app.command()(inspect)
app.command()(verify)
app.command()(bench)


def _terminate(signum: int, frame: object) -> NoReturn:
    sys.exit(128 + signum)


def main() -> None:
    """Entry point. Exit codes: 0 ok, 1 failure, 2 bad input, 3 over budget, 130 interrupted, 143 terminated."""
    # As an exception it unwinds the stack, so temporary files go and half-written ones do not appear.
    signal.signal(signal.SIGTERM, _terminate)
    app()


if __name__ == "__main__":
    main()
