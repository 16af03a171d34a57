"""`wanfp4 report`: what can be done with drift reports that are there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wanfp4.errors import OutputError

app = typer.Typer(
    help="Compare two drift reports, save a report's plots, or put all results on one page.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A drift report: its folder, or its report.json.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.md", help="The comparison as Markdown, too.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="The comparison as JSON, every figure.")
    ] = None,
    pair: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME_A=NAME_B", help="Compare these two policies, not those of one name; repeat it for several."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILEs that are there.")] = False,
) -> None:
    """Compare two finished drift reports: how they were made, and whether their policies differ.

    Runs are paired by prompt and seed. A difference is called one when its 95 % bootstrap interval leaves out zero and
    it is larger than the noise floor.

    \b
    wanfp4 report compare before after
    wanfp4 report compare before after -o comparison.md --json comparison.json
    wanfp4 report compare before after --pair wan-fast=mine    two policies of different names
    """
    outputs = [path for path in (output, json_file) if path is not None]
    if len(outputs) == 2 and outputs[0].absolute() == outputs[1].absolute():
        raise OutputError(f"--output and --json name one file, {str(output)!r}; choose two")

    from wanfp4.quality.comparison import check_outputs, compare_reports
    from wanfp4.quality.comparison_pages import markdown_text, text_lines
    from wanfp4.quality.files import write
    from wanfp4.quality.report import json_text

    found = compare_reports(a, b, pair or [])
    check_outputs(outputs, a, b, force=force)
    if output is not None:
        write(output, markdown_text(found))
    if json_file is not None:
        write(json_file, json_text(found))
    for line in text_lines(found):
        typer.echo(_one(line))


@app.command()
def plots(
    report: Annotated[Path, typer.Argument(metavar="FOLDER", help="A drift report: its folder, or its report.json.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where the files go.")] = Path("plots"),
    kind: Annotated[str, typer.Option("--format", metavar="NAME", help="svg or png.")] = "svg",
) -> None:
    """Save each plot of a finished drift report as a file, on white and with its legend.

    \b
    wanfp4 report plots drift-report -o figures
    wanfp4 report plots drift-report -o figures --format png
    """
    from wanfp4.quality.plot_files import save_plots

    for path in save_plots(report, output, kind):
        typer.echo(str(path))


@app.command()
def page(
    report: Annotated[Path, typer.Argument(metavar="REPORT", help="A drift report: its folder, or its report.json.")],
    maps: Annotated[
        list[Path] | None,
        typer.Option("--map", metavar="DIR", help="A map of the same model, from `wanfp4 map`; repeatable."),
    ] = None,
    task: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A task table of the same model, from `wanfp4 drift --task`.")
    ] = None,
    bench: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Timings of the policies, from `wanfp4 bench --json`.")
    ] = None,
    search: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A search on the same model, from `wanfp4 search`.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.html", help="Where the page goes.")] = Path(
        "lab.html"
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace a page that is there.")] = False,
) -> None:
    """Put a drift report and what goes with it on one page: verdict, policies, curves, maps, clips, receipts.

    One file that opens offline, of 5 MB at most. Nothing is measured anew. Unfinished results are taken and marked;
    results of another model, other weights or otherwise defined policies are refused.

    \b
    wanfp4 report page drift-report
    wanfp4 report page drift-report --map attention-map --task task --bench bench.json -o lab.html
    """
    from wanfp4.quality.lab import read_lab
    from wanfp4.quality.lab_page import save_page, verdict

    lab = read_lab(report, maps or [], task, bench, search)
    made = save_page(lab, output, force=force)
    for line in (str(made), "", *verdict(lab), *lab.notes):
        typer.echo(_one(line))


def _one(line: str) -> str:
    """A line whose columns stay in place, and whose names of policies cannot break it."""
    indent = len(line) - len(line.lstrip())
    return line[:indent] + "".join(c if c.isprintable() else " " for c in line[indent:])
