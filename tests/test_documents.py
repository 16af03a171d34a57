"""What README.md and docs say can be run: commands have the options they are shown with, snippets work."""

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


def test_the_readme_lists_every_policy_with_its_formats():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in policies():
        assert f"`{name}`" in text


def test_links_between_documents_lead_somewhere():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
