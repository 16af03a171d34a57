"""`wanfp4 policies`: what there is to choose from, what it is made of, and why."""

from __future__ import annotations

import shutil
import textwrap
from typing import Annotated, Any

import typer

from wanfp4.cli.common import one_line
from wanfp4.cli.explain import explain as explained
from wanfp4.policy import get_policy, policies

app = typer.Typer(
    help="List policies, show one as JSON, or explain each of its constants.",
    rich_markup_mode=None,
    add_completion=False,
)
Name = Annotated[str, typer.Argument(metavar="NAME|FILE", help="A preset, or a policy's .json file.")]


@app.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        listing()


@app.command("list")
def listing() -> None:
    """List the presets."""
    rows = [("policy", "Q, K", "P", "V", "classifier", "row reference")]
    for policy in policies().values():
        n = policy.numerics
        classifier = n.classifier.label if n.p in ("mxfp4-direct", "nvfp4") else "–" if n.is_exact else "exp2"
        rows.append((policy.name, n.qk, n.p, n.v, classifier, "–" if n.is_exact else n.row_reference))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    typer.echo("")
    for policy in policies().values():
        typer.echo(_wrap(f"{policy.name}: {policy.description}", indent="  "))
    typer.echo(
        "\n`wanfp4 policies explain NAME` tells what each constant does; `show NAME` prints JSON for one of your own."
    )


@app.command()
def show(name: Name) -> None:
    """Print a policy as JSON, every constant spelt out."""
    typer.echo(get_policy(name).to_json(), nl=False)


@app.command()
def explain(name: Name) -> None:
    """Explain each constant of a policy, and where it comes from."""
    policy: Any = get_policy(name)
    typer.echo(_wrap(f"{policy.name}: {policy.description}" if policy.description else policy.name))
    for constant in explained(policy):
        typer.echo(f"\n{one_line(f'{constant.name} = {constant.value}')}")
        typer.echo(_wrap(constant.meaning, "    "))
        typer.echo(_wrap(f"from: {constant.source}", "    "))


def _wrap(text: str, indent: str = "") -> str:
    width = min(shutil.get_terminal_size().columns, 110)
    return textwrap.fill(
        one_line(text), width, initial_indent=indent, subsequent_indent=indent + ("  " if not indent else "")
    )
