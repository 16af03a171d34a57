"""What README.md and docs say can be run: commands have the options they are shown with, snippets work."""

import itertools
import re
import shlex
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

import wanfp4
from wanfp4.cli.main import app
from wanfp4.policy import policies

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language):
    for document in DOCUMENTS:
        for block in re.findall(rf"```{language}\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL):
            yield document.name, block


def shell_lines():
    for name, block in [*blocks("sh"), *blocks("console")]:
        for line in block.splitlines():
            yield name, line.removeprefix("$ ").partition("   #")[0].strip()


COMMANDS = sorted({line for _, line in shell_lines() if line.startswith("wanfp4 ")})


def test_there_are_commands_to_check():
    assert len(COMMANDS) > 8


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_shown_has_the_options_it_is_shown_with(line):
    words = shlex.split(line)[1:]
    command = typer.main.get_command(app)
    while words and not words[0].startswith("-") and hasattr(command, "commands"):
        assert words[0] in command.commands, f"there is no command {words[0]}"
        command = command.commands[words.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts}
    for word in words:
        if word.startswith("-"):
            assert word in known, f"{line!r}: {command.name} has no option {word}"


def test_every_make_target_shown_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    shown = {line.split()[1] for _, line in shell_lines() if line.startswith("make ")}
    assert shown
    assert shown <= targets


def test_the_policy_snippet_of_the_readme_makes_a_policy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [snippet] = [block for name, block in blocks("python") if name == "README.md" and "mine.json" in block]
    exec(snippet, {"wanfp4": wanfp4})
    made = CliRunner().invoke(app, ["policies", "explain", "mine.json"])
    assert made.exit_code == 0
    assert "rules[1] = sigma (0.9, 1.0)" in made.stdout


def test_every_python_snippet_is_python():
    for name, block in blocks("python"):
        compile(block, name, "exec")


def table(document, header):
    """Rows of the Markdown table with that first line, their cells by the name in the first one."""
    lines = iter((ROOT / document).read_text(encoding="utf-8").splitlines())
    assert any(line == header for line in lines), f"{document} has no table {header}"
    next(lines)  # the rule
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in itertools.takewhile(str.strip, lines)]
    named = {re.match(r"`([^`]+)`", first)[1]: rest for first, *rest in rows}
    assert len(named) == len(rows)
    return named


README_POLICIES = table("README.md", "| policy | Q, K | P | V | score to code | cosine | rel-L2 |")
# What README.md calls a format, and what a policy calls it. Words after a comma add to it.
FORMATS = {
    "as they are": {"exact"},
    "as it is": {"exact"},
    "NVFP4": {"nvfp4"},
    "NVFP4 folded": {"nvfp4-folded"},
    "MXFP4-direct": {"mxfp4-direct"},
    "FP8": {"fp8"},
    "BF16": {"bf16"},
    "E4M3": {"mxfp8", "fp8-direct", "mxfp8-token-block"},
}


def test_the_readme_lists_every_policy():
    # The one that differs from wan-fast by its guard alone is named below the table.
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert README_POLICIES.keys() == policies().keys() - {"wan-fast-14b"}
    assert "`wan-fast-14b` is `wan-fast` with the guard values of the 14B model" in text
    assert policies()["wan-fast-14b"].numerics == policies()["wan-fast"].numerics


@pytest.mark.parametrize("name", README_POLICIES)
def test_the_readme_gives_each_policy_its_formats(name):
    numerics = policies()[name].numerics
    *formats, code, _, _ = README_POLICIES[name]
    for said, used in zip(formats, (numerics.qk, numerics.p, numerics.v), strict=True):
        assert used in FORMATS[said.partition(",")[0]]
    assert ("smoothed" in formats[0]) is (numerics.smooth_q or numerics.smooth_k)
    classifier = numerics.classifier
    if numerics.is_exact:
        assert code == "–"
    elif numerics.p == "fp8-direct":
        assert code == "affine, 8 bytes an octave"
    elif classifier.kind == "two-piece":
        assert code == "two-piece"
    elif classifier.kind == "mix":
        share = {1: "a quarter", 2: "half", 4: "all"}[classifier.density]
        assert code == f"mix({classifier.A:g}, {classifier.B:g}), {share} exp2"
    else:
        assert code == classifier.label


@pytest.mark.parametrize(("name", "words"), [("direct-p-fast", "[P]; {}, for Wan"), ("wan-fast", "for Wan {} |")])
def test_the_numerics_give_the_affine_maps_of_the_presets(name, words):
    text = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    classifier = policies()[name].numerics.classifier
    assert words.format(f"{classifier.A:.2f}/{classifier.B:.2f}") in text


def test_the_readme_and_the_numerics_give_the_same_figures():
    figures = {name: " / ".join(cells[-2:]) for name, cells in README_POLICIES.items() if name != "bf16"}
    measured = table("docs/numerics.md", "| policy | here: cosine / rel-L2 | published | by |")
    assert figures == {name: cells[0] for name, cells in measured.items()}
    assert README_POLICIES["bf16"][-2:] == ["1", "0"]


def test_links_between_documents_lead_somewhere():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
