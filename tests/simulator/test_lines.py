"""From PTX lines to lines of the CuTe DSL source."""

import inspect
import re

import pytest
import torch

from wanfp4.simulator.launch import Interceptor, Launch
from wanfp4.simulator.lines import SourceMap

HANDWRITTEN = """\
.version 8.8
.target sm_100a
.visible .entry first()
{
	mov.b32 %r0, 0;
	.loc	1 3 5
	mov.b32 %r1, 1;
	mov.b32 %r2, 2;
	.loc	2 9 1
	// begin inline asm
	{
	.loc	2 11 1
	LAB_WAIT:
	.loc	2 12 1
	bra LAB_WAIT;
	}
	// end inline asm
	.loc	1 2 0
	mov.b32 %r3, 3;
	.loc	1 0 0
	ret;
}
.visible .entry second()
{
	ret;
}
	.file	1 "FOLDER/program.py"
	.file	2 "FOLDER/missing.py"
"""


def test_a_place_holds_until_the_next(tmp_path):
    (tmp_path / "program.py").write_text("class Kernel:\n    def step(self):\n        return 1\n")
    table = SourceMap(HANDWRITTEN.replace("FOLDER", str(tmp_path)))
    assert table.where(5) is None  # before the first .loc
    assert table.where(7) == "program.py:3 in Kernel.step"
    assert table.where(8) == "program.py:3 in Kernel.step"
    assert table.where(19) == "somewhere under program.py:2 in Kernel.step"  # column 0
    assert table.where(21) is None  # line 0
    assert table.where(25) is None  # another kernel
    source = table.source(7)
    assert source is not None
    assert source.path == tmp_path / "program.py"


def test_inline_assembly_belongs_to_the_line_that_holds_the_call(tmp_path):
    table = SourceMap(HANDWRITTEN.replace("FOLDER", str(tmp_path)))
    assert table.where(11) == "missing.py:9"  # a file that cannot be read has no functions
    assert table.where(15) == "missing.py:9"


def test_without_a_table_nothing_is_known():
    table = SourceMap(".visible .entry kernel()\n{\n\tret;\n}\n")
    assert [table.where(line) for line in range(6)] == [None] * 6


cutlass = pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
cute = cutlass.cute


def squared(value):
    return value * value


@cute.kernel
def square_kernel(x: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    if thread < 16:
        x[thread] = squared(x[thread])
    cute.arch.sync_threads()


@cute.jit
def square(x: cute.Tensor):
    square_kernel(x).launch(grid=(1, 1, 1), block=(32, 1, 1))


def compiled(line_info: bool) -> str:
    launches: list[Launch] = []
    x = cute.runtime.from_dlpack(torch.arange(32.0))
    with Interceptor("sm_100a", launches.append, line_info=line_info):
        cute.compile(square, x)(x)
    return launches[0].ptx


def line_of(function, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


def test_instructions_are_found_in_the_source():
    ptx = compiled(line_info=True)
    table = SourceMap(ptx)
    found = {}
    for number, text in enumerate(ptx.splitlines(), 1):
        for opcode in ("mul.f32", "bar.sync", "ld.global", "st.global"):
            if text.strip().startswith(opcode):
                found[opcode] = table.where(number)
    kernel = square_kernel.__wrapped__
    assert found["mul.f32"] == f"test_lines.py:{line_of(squared, 'value * value')} in squared"
    assert found["bar.sync"] == f"test_lines.py:{line_of(kernel, 'sync_threads')} in square_kernel"
    store = f"test_lines.py:{line_of(kernel, 'x[thread] = ')} in square_kernel"
    assert found["ld.global"] == found["st.global"] == store


def test_a_line_table_leaves_the_instructions_as_they_are():
    def code(ptx: str) -> list[str]:
        lines = (re.sub(r"//.*", "", line).strip() for line in ptx.splitlines())
        return [line for line in lines if line and not line.startswith((".loc", ".file"))]

    plain, with_table = compiled(line_info=False), compiled(line_info=True)
    assert ".loc" not in plain
    assert ".loc" in with_table
    assert code(plain) == code(with_table)
