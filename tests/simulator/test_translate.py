"""Translation: registers, operands, constants, lanes and blocks."""

from __future__ import annotations

import itertools
import re

import asynchronous
import effects
import numpy as np
import pytest
import tensor_core
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import aligned, everywhere, kernel, parsed, run, translated

from wanfp4.simulator.findings import BoundsError, ProtocolError, UnknownInstruction
from wanfp4.simulator.ptx import SIZES
from wanfp4.simulator.scheduler import SPECIAL
from wanfp4.simulator.translate import Block, Code

BOTH = {"plain": {}, "tracked": {"track": True}}
TO_OUT = "mul.wide.u32 %d0, %thread, 8;\nadd.u64 %d1, %o, %d0;\n"


def out(body, params="o", *args, rows=1, **options):
    """What 32 lanes leave at [%d1], [%d1+256]…, run plain and tracked."""
    array = np.zeros((rows, 32), np.uint64)
    return everywhere(kernel(f"{TO_OUT}{body}\nret;", params), *args, array, variants=BOTH, **options)[-1]


# ---- registers and constants ----


@pytest.mark.parametrize("kind", [kind for kind in SIZES if kind not in ("pred", "b128", "b8", "u8", "s8")])
def test_the_declared_type_of_a_register_is_only_its_size(kind):
    """Written in some lanes first, then read as other types."""
    bits = 8 * SIZES[kind]
    body = f".reg .{kind} %x, %y;\nsetp.lt.u32 %p0, %thread, 9;\n@%p0 mov.b{bits} %x, -2;\n@!%p0 mov.b{bits} %x, 3;\n"
    body += (
        f"not.b{bits} %y, %x;\nadd.u{bits} %y, %y, %x;\nst.global.b{bits} [%d1], %x;\nst.global.b{bits} [%d1+256], %y;"
    )
    found = out(body, rows=2) & np.uint64((1 << bits) - 1)
    np.testing.assert_array_equal(found[0], [(1 << bits) - 2] * 9 + [3] * 23)
    np.testing.assert_array_equal(found[1], (1 << bits) - 1)


CONSTANTS = [
    ("b32", "-1", 0xFFFFFFFF),
    ("b32", "0xFFFFFFFF", 0xFFFFFFFF),
    ("u32", "4000000000U", 4000000000),
    ("b32", "0b101", 5),
    ("s32", "-2147483648", 0x80000000),
    ("b64", "-1", (1 << 64) - 1),
    ("b16", "-2", 0xFFFE),
    ("f32", "0f3F800000", 0x3F800000),
    ("b32", "0F3F800000", 0x3F800000),
    ("f32", "-1.5", 0xBFC00000),
    ("f32", "1.", 0x3F800000),
    ("f64", "0d3FF8000000000000", 0x3FF8000000000000),
    ("b64", "0D3FF8000000000000", 0x3FF8000000000000),
    ("f64", "2.5e-1", 0x3FD0000000000000),
    ("f32", "16777217.0", 0x4B800000),
]


@pytest.mark.parametrize(("kind", "text", "bits"), CONSTANTS)
def test_constants(kind, text, bits):
    size = 8 * SIZES[kind]
    body = (
        f".reg .b{size} %x;\nmov.{kind} %x, {text};\nst.global.b{size} [%d1], %x;\nst.global.{kind} [%d1+256], {text};"
    )
    # A constant may be written first in one block, then in another, for all lanes or some.
    assert set((out(body, rows=2)[:, :1] & np.uint64((1 << size) - 1)).flat) == {np.uint64(bits)}


@pytest.mark.parametrize(
    "line",
    [
        "add.f32 %f1, %f0, 1;",
        "add.f32 %f1, %f0, 0d3FF8000000000000;",
        "add.u64 %d2, %d0, 0f3F800000;",
        "cvt.f64.f32 %d2, 0d3FF8000000000000;",
        "mov.b32 %r0, nothing;",
        "mov.b32 %r0, %nothing;",
        "mov.u32 %r0, %tid.w;",
        "ld.shared.b32 %r0, [%r1-8];",
        "mov.b64 %r0, %d0;",
        "mul.wide.u32 %r0, %r1, %r2;",
        "ld.global.b64 %r0, [%d0];",
        "add.u32 %r0, %r1;",
        "add.u32 %r0, %r1, %r2, %r3;",
        "add.u32 {%r0, %r1}, %r2, %r3;",
        "add.u32 %r0, {%r1, %r2}, %r3;",
        "setp.eq.and.u32 %p0, %r0, %r1;",
        "bra NOWHERE;",
        "ld.global.v2.b32 {%r0, %r1, %r2, %r3}, [%d0];",
        "ld.global.v2.b32 %r0, [%d0];",
        "ld.shared.v4.b64 {%d0, %d1, %d2, %d3}, [%r0];",
        "ld.global.v8.b64 {%d0, %d1, %d2, %d3, %d4, %d5, %d6, %d7}, [%d10];",
        "tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r0, %r1}, [%r2];",
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d0, {%r0}], [%r1];",
        "tcgen05.mma.cta_group::1.kind::f16 [%r0], %d0, %d1, %r1, 1, 3;",
    ],
)
def test_operands_that_are_refused(line):
    text = kernel(f"{line}\nret;")
    with pytest.raises(UnknownInstruction) as caught:
        translated(text, True)
    assert text.split("\n")[caught.value.line - 1] == line
    assert line in str(caught.value)


def test_addresses():
    body = """mov.b32 %r0, second; ld.global.b32 %r1, [%d1+512]; add.u64 %d2, %d1, 1024;
    add.u32 %r2, %r0, 8; mov.b32 %r6, 41; mov.b32 %r3, second+4; cvt.u64.u32 %d3, %r0;
    st.shared.b32 [second+4], %r6; ld.shared.b32 %r4, [%r2+-4]; st.global.b32 [%d2+-1024], %r4;
    ld.shared.b32 %r4, [%r3]; st.global.b32 [%d1+256], %r4; ld.shared.b32 %r4, [%d3 + 4]; st.global.b32 [%d1+512], %r4;
    sub.u32 %r5, %r0, first; st.global.b32 [%d1+768], %r5;"""
    top = ".shared .align 16 .b8 first[20];\n.shared .align 32 .b8 second[16];\n"
    array = np.zeros((4, 32), np.uint64)
    found = everywhere(kernel(f"{TO_OUT}{body}\nret;", "o", top=top), array, variants=BOTH)[0]
    np.testing.assert_array_equal(found[:, 0], [41, 41, 41, 32])


def test_dynamic_shared_memory_lies_behind_the_static_one():
    top = ".extern .shared .align 1024 .b8 dynamic[];\n.shared .b32 x;\n"
    body = "mov.b32 %r0, dynamic; mov.b32 %r1, x; sub.u32 %r2, %r0, %r1; st.global.b32 [%d1], %r2;"
    body += "st.shared.b32 [%r0+4], %r2;"
    text = kernel(f"{TO_OUT}{body}\nret;", "o", top=top)
    array = np.zeros((1, 32), np.uint64)
    assert everywhere(text, array, variants=BOTH, shared=8)[0][0, 0] == 1024
    with pytest.raises(BoundsError):
        run(text, aligned(array), shared=4)


def test_special_registers():
    shape, grid = (8, 4, 2), (2, 3, 2)
    thread = np.arange(64)
    lane = thread % 32
    one = np.uint64(1)
    bit = one << lane.astype(np.uint64)
    want = {
        "%tid.x": thread % 8, "%tid.y": thread // 8 % 4, "%tid.z": thread // 32, "%laneid": lane,
        "%warpid": thread // 32,
        "%ntid.x": 8, "%ntid.y": 4, "%ntid.z": 2, "%nctaid.x": 2, "%nctaid.y": 3, "%nctaid.z": 2, "%nwarpid": 2,
        "%lanemask_eq": bit, "%lanemask_lt": bit - one, "%lanemask_le": 2 * bit - one,
        "%lanemask_ge": (1 << 32) - bit, "%lanemask_gt": (1 << 32) - 2 * bit,
        "%cluster_ctarank": 0, "%cluster_nctarank": 1, "%is_explicit_cluster": 0, "%smid": 0, "%nsmid": 1, "%gridid": 0,
        **{f"%cluster_ctaid.{axis}": 0 for axis in "xyz"}, **{f"%cluster_nctaid.{axis}": 1 for axis in "xyz"},
    }  # fmt: skip
    placed = ["%ctaid.x", "%ctaid.y", "%ctaid.z", "%clusterid.x", "%clusterid.y", "%clusterid.z"]
    assert set(want) | set(placed) | {f"%nclusterid.{axis}" for axis in "xyz"} == {
        n for n in SPECIAL if "clock" not in n and "timer" not in n
    }
    names = [*want, *placed, *(f"%nclusterid.{axis}" for axis in "xyz")]
    body = "mad.lo.u32 %r0, %ctaid.z, 3, %ctaid.y; mad.lo.u32 %r0, %r0, 2, %ctaid.x; mad.lo.u32 %r1, %tid.z, 4, %tid.y;"
    body += f" mad.lo.u32 %r1, %r1, 8, %tid.x; mul.lo.u32 %r0, %r0, {64 * len(names)}; add.u32 %r0, %r0, %r1;"
    body += " mul.wide.u32 %d0, %r0, 8; add.u64 %d1, %o, %d0;\n"
    for i, name in enumerate(names):
        body += f"mov.u32 %r2, {name}; cvt.u64.u32 %d2, {name}; st.global.u64 [%d1+{512 * i}], %d2;\n"
    text = kernel(f"{body}ret;", "o", threads="8, 4, 2")
    assert parsed(text).threads == shape
    found = everywhere(text, np.zeros((2, 3, 2, len(names), 64), np.uint64), variants=BOTH, grid=grid)[0]
    for place in itertools.product(range(2), range(3), range(2)):
        z, y, x = place
        here = dict(zip(placed, (x, y, z, x, y, z), strict=True)) | {
            f"%nclusterid.{a}": n for a, n in zip("xyz", grid, strict=True)
        }
        for i, name in enumerate(names):
            np.testing.assert_array_equal(found[*place, i], (want | here)[name], name)


def test_clocks_only_move_on():
    body = "".join(
        f"mov.u64 %d{2 + i}, %{name}; st.global.u64 [%d1+{256 * i}], %d{2 + i};\n"
        for i, name in enumerate(["clock64", "globaltimer", "clock64", "globaltimer"])
    )
    body += "mov.u32 %r0, %clock; mov.u32 %r1, %clock_hi; mov.u32 %r2, %globaltimer_lo; mov.u32 %r3, %globaltimer_hi;\n"
    body += "st.global.u32 [%d1+1024], %r0;"
    found = out(body, rows=5)[:, 0].astype(np.int64)
    assert found[0] < found[2] < found[4]
    assert found[1] < found[3]


# ---- lanes and blocks ----


def test_a_block_may_end_in_a_guarded_instruction():
    """In whole warps and in parts of them, with all lanes, some or none that run it."""
    body = "mov.b32 %r0, 1; mov.b32 %r9, 7; and.b32 %r1, %thread, 3;\n"
    for i, test in enumerate(("lt.u32 %p0, %thread, 0", "lt.u32 %p0, %thread, 99", "lt.u32 %p0, %thread, 5")):
        body += f"setp.{test};\n@%p0 add.u32 %r0, %r0, %r9;\nA{i}: @!%p0 add.u32 %r0, %r0, 100;\nB{i}:\n"
        body += f"setp.eq.u32 %p1, %r1, {i}; @%p1 bra C{i};\n@%p0 add.u32 %r0, %r0, 1000;\n"
        body += f"D{i}: @!%p0 nanosleep.u32 1;\nC{i}:\n"
    found = out(f"{body}st.global.b32 [%d1], %r0;")[0]
    thread = np.arange(32)
    want = np.full(32, 1)
    for i, runs in enumerate((thread < 0, thread < 99, thread < 5)):
        want += np.where(runs, 7, 100) + 1000 * (runs & (thread % 4 != i))
    np.testing.assert_array_equal(found, want)


def sources(code):
    """(instruction, the Python that it became) of every instruction, for whole warps and for parts."""
    for (index, block), masked in itertools.product(enumerate(code.kernel.blocks), (False, True)):
        made = Block(code, index, block, masked)
        for ins in block:
            lines = [text for text, line in zip(made.source, made.lines, strict=True) if line == ins.line]
            yield index, ins, "\n".join(lines)


def test_whatever_may_have_to_wait_ends_its_block():
    """A warp that must wait goes on only when it is woken up: nothing behind that may run before."""
    texts = [make().text for make in (*effects.PROGRAMS.values(), *asynchronous.PROGRAMS.values())]
    seen = set()
    for text in [*texts, tensor_core.copies().text]:
        code = translated(text, False)
        for index, ins, source in sources(code):
            if re.search(r"\.try_wait\(|\.bar\(.*True\)|\.wait_group\(|\.wait_(ld|st)\(", source):
                assert code.kernel.blocks[index][-1] is ins, str(ins)
                seen.add(ins.opcode.split(".")[0])
    assert seen == {"bar", "barrier", "mbarrier", "cp", "tcgen05"}


@pytest.mark.parametrize("track", [False, True])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bar.sync %thread;", "lanes disagree"),
        ("setp.lt.u32 %p0, %thread, 9; @%p0 bra.uni L;", "bra.uni is taken by some active lanes"),
        ("setp.lt.u32 %p0, %thread, 9; @%p0 bar.sync 0;", "needs the whole warp, and only 9 lanes"),
        ("setp.lt.u32 %p0, %thread, 9; @%p0 shfl.sync.idx.b32 %r0, %thread, 12, 31, 0x1FF;", "reads an inactive lane"),
        ("setp.lt.u32 %p0, %thread, 9; @%p0 vote.sync.any.pred %p1, %p0, 0xFFF;", "names lanes that are not active"),
        ("setp.lt.u32 %p0, %thread, 9; @%p0 vote.sync.any.pred %p1, %p0, 0xFF;", "lacks them"),
        ("setp.lt.u32 %p0, %thread, 9; @%p0 bra L; elect.sync %r0|%p1, -1;", "names lanes that are not active"),
        ("bar.warp.sync 0x7FFFFFFF;", "lacks them"),
        ("mapa.u32 %r0, %thread, 1;", "mapa to CTA 1 of a cluster of one"),
        ("setmaxnreg.inc.sync.aligned.u32 20;", "multiple of 8 from 24 to 256"),
        ("setp.lt.u32 %p0, %thread, 9; @%p0 setmaxnreg.inc.sync.aligned.u32 24;", "needs the whole warp"),
    ],
)
def test_rules_of_lanes(line, message, track):
    text = kernel(f"{line}\nL: ret;")
    with pytest.raises(ProtocolError, match=message) as caught:
        run(text, track=track)
    assert line in text.split("\n")[caught.value.line - 1]
    assert caught.value.kernel == "k"


def test_a_block_can_be_replaced_and_put_back():
    code = Code(parsed(kernel(f"{TO_OUT}L: mov.b32 %r0, 1;\nM: st.global.b32 [%d1], %r0;\nret;", "o")))
    index = code.kernel.targets["L"]
    before = code.full[index], code.part[index]
    changed = next(iter(parsed(kernel("mov.b32 %r0, 2;\nret;")).blocks[0][-2:-1]))
    undo = code.replace(index, [changed])
    assert code.full[index] is not before[0]
    undo()
    assert (code.full[index], code.part[index]) == before


# ---- random control flow ----

ENDS = ("bra", "@ bra", "@! bra", "@ ret", "@! exit", "")


@st.composite
def graphs(draw):
    """Blocks: (factor, addend, bits that the branch looks at, how it ends, where it goes)."""
    count = draw(st.integers(2, 8))
    block = st.tuples(
        st.integers(1, 9),
        st.integers(0, 99),
        st.sampled_from((1, 2, 4, 5, 0)),
        st.sampled_from(ENDS),
        st.integers(0, count),
    )
    return [draw(block) for _ in range(count)]


def follow(graph, x):
    """One lane's way: its value at each step, at most 20."""
    at, path = 0, []
    while at < len(graph) and len(path) < 20:
        factor, addend, bits, end, target = graph[at]
        x = x * factor + addend & 0xFFFFFFFF
        path.append(x)
        flag = x & bits != 0
        taken = {"bra": True, "@ bra": flag, "@! bra": not flag, "@ ret": flag, "@! exit": not flag, "": False}[end]
        if taken and end[-3:] != "bra":
            return path
        at = target if taken else at + 1
    return path


@given(graphs())
@settings(max_examples=60)
def test_random_control_flow(graph):
    """Every lane goes its own way, whatever the others do: branches back and forth, loops, exits."""
    body = "ld.global.b32 %r0, [%d1]; mov.b32 %r1, 0; add.u64 %d2, %d1, 256;\n"
    for i, (factor, addend, bits, end, target) in enumerate(graph):
        body += f"B{i}: mad.lo.u32 %r0, %r0, {factor}, {addend}; st.global.b32 [%d2], %r0; add.u64 %d2, %d2, 256;\n"
        body += f"add.u32 %r1, %r1, 1; setp.ge.u32 %p0, %r1, 20; @%p0 bra B{len(graph)};\n"
        guard, _, opcode = end.rpartition(" ")
        body += f"and.b32 %r2, %r0, {bits}; setp.ne.u32 %p1, %r2, 0;\n"
        if opcode:
            body += f"{guard}{'%p1 ' if guard else ''}{opcode} {f'B{target}' if opcode == 'bra' else ''};\n"
    text = kernel(f"{TO_OUT}{body}B{len(graph)}: ret;", "o")
    array = np.zeros((21, 32), np.uint64)
    array[0] = np.random.default_rng(len(text)).integers(0, 1 << 32, 32)
    found = []
    for options in ({}, {"track": True}):
        found.append(aligned(array))
        run(text, found[-1], **options)
    for lane in range(32):
        path = follow(graph, int(array[0, lane]))
        np.testing.assert_array_equal(found[0][1:, lane], path + [0] * (20 - len(path)))
    np.testing.assert_array_equal(found[0], found[1])
