"""From a line of PTX to the line of the CuTe DSL source that it was made from.

PTX that was compiled with `--generate-line-info` (or CUTE_DSL_LINEINFO=1, or in an `Interceptor`, which asks for it)
names files in `.file`, and in `.loc file line column` the place of what follows: one place, in the innermost frame
outside of cutlass itself. Operations without a place of their own get the function that was compiled, in column 0:
constants, branches of `if`, and inline assembly that was made without `loc`.
"""

import ast
import functools
import re
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

_FILE = re.compile(r'\s*\.file\s+(\d+)\s+"([^"]*)"')
_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)")
_ASM = re.compile(r"\s*//\s*(begin|end) inline asm")


@dataclass(frozen=True)
class SourceLine:
    """A place in a source file; `function` is the qualified name of the function around it, if the file can be read.

    When `exact` is false, the instruction comes from that function or from what it calls.
    """

    path: Path
    line: int
    function: str | None
    exact: bool

    def __str__(self) -> str:
        place = f"{self.path.name}:{self.line}" + (f" in {self.function}" if self.function else "")
        return place if self.exact else f"somewhere under {place}"


class SourceMap:
    """The line table of a PTX module; empty when it was compiled without one."""

    def __init__(self, ptx: str) -> None:
        self._files: dict[int, Path] = {}
        self._starts: list[int] = []  # PTX lines from which a place holds
        self._places: list[tuple[int, int, bool] | None] = []
        inside = False
        for number, text in enumerate(ptx.splitlines(), 1):
            if match := _FILE.match(text):
                self._files[int(match.group(1))] = Path(match.group(2))
            elif match := _ASM.match(text):
                inside = match.group(1) == "begin"
            elif match := _LOC.match(text):
                # Within inline assembly the compiler counts on from the line of the Python call, once per line of
                # assembly.
                if not inside:
                    file, line, column = (int(part) for part in match.groups())
                    self._add(number, (file, line, column > 0) if line else None)
            elif ".entry" in text:
                self._add(number, None)

    def _add(self, start: int, place: tuple[int, int, bool] | None) -> None:
        self._starts.append(start)
        self._places.append(place)

    def source(self, ptx_line: int) -> SourceLine | None:
        """Where the instruction at `ptx_line` (counted from 1) comes from; None when the table does not say."""
        index = bisect_right(self._starts, ptx_line) - 1
        place = self._places[index] if index >= 0 else None
        if place is None or place[0] not in self._files:
            return None
        file, line, exact = place
        path = self._files[file]
        return SourceLine(path, line, _function_at(path, line), exact)

    def where(self, ptx_line: int) -> str | None:
        """The same as text: "file.py:123 in function"."""
        source = self.source(ptx_line)
        return None if source is None else str(source)


def _function_at(path: Path, line: int) -> str | None:
    """Name of the innermost function around a line, with the classes and functions it stands in."""
    best = None
    for first, last, name in _functions(path):
        if first <= line <= last:
            best = name  # inner ones come later
    return best


@functools.cache
def _functions(path: Path) -> tuple[tuple[int, int, str], ...]:
    """First line (with decorators), last line and qualified name of each function of a file, outer ones first."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ()
    found: list[tuple[int, int, str]] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                found.append((first, child.end_lineno or child.lineno, prefix + child.name))
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")
            else:
                visit(child, prefix)

    visit(tree, "")
    return tuple(found)
