"""Undefined values: what moves them, what cleans them, what may not touch them. Byte by byte, lane by lane."""

from __future__ import annotations

import importlib
import itertools
import re
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import aligned, kernel, run

from wanfp4.simulator import runtime
from wanfp4.simulator.findings import PoisonError

TOP = ".shared .align 128 .b8 memory[4096];\n"
# %u… are never defined. %h0…3, %r0…3, %f0, %d0…3, %p0 and %q are; %q is true in odd lanes.
SETUP = """.reg .b16 %uh; .reg .b32 %u; .reg .f32 %uf; .reg .b64 %ud; .reg .pred %up, %q;
mov.b16 %h0, 1; mov.b16 %h1, 2; mov.b32 %r0, 3; mov.b32 %r1, 0x04030201; mov.b32 %f0, 0f3F800000; mov.b64 %d0, 7;
and.b32 %r2, %thread, 1; setp.eq.u32 %q, %r2, 1; setp.eq.u32 %p0, %thread, %thread; mov.b32 %r3, memory;
shl.b32 %r4, %thread, 3; add.u32 %r3, %r3, %r4; mul.wide.u32 %d1, %thread, 8; add.u64 %d1, %o, %d1;
"""


def execute(body: str) -> None:
    run(kernel(f"{SETUP}{body}\nret;", "o", top=TOP), aligned(np.zeros(64, np.uint64)), track=True)


def poisoned(body: str, register: str, lane: int = 0) -> None:
    """The last statement of the body is to blame, for one register and, first of all lanes, this one."""
    with pytest.raises(PoisonError) as caught:
        execute(body)
    assert re.search(rf"^{re.escape(register)} of lane {lane}\b.*is used, and nothing defined it", str(caught.value))
    text = kernel(f"{SETUP}{body}\nret;", "o", top=TOP).split("\n")[caught.value.line - 1]
    assert body.strip().split("\n")[-1].strip() in text


USES = [
    "add.u32 %r9, %r0, {};",
    "mad.lo.s32 %r9, %r0, %r1, {};",
    "mul.f32 %f9, {}, %f0;",
    "cvt.sat.s16.u32 %h9, {};",
    "cvt.rn.f32.s32 %f9, {};",
    "setp.lt.u32 %p9, {}, %r0;",
    "not.b32 %r9, {};",
    "and.b32 %r9, %r0, {};",
    "shl.b32 %r9, %r0, {};",
    "prmt.b32 %r9, %r0, %r1, {};",
    "bfe.u32 %r9, {}, %r0, 4;",
    "bfe.u32 %r9, %r0, {}, 4;",
    "bfi.b32 %r9, %r0, {}, 3, %r0;",
    "bfi.b32 %r9, %r0, %r1, 3, {};",
    "lop3.b32 %r9, %r0, %r1, {}, 0x80;",
    "st.global.b32 [%d1], {};",
    "st.shared.b32 [{}], %r0;",
    "ld.shared.b32 %r9, [{}+4];",
    "atom.shared.add.u32 %r9, [%r3], {};",
    "red.global.add.u32 [%d1], {};",
    "shfl.sync.idx.b32 %r9, %r0, {}, 31, -1;",
    "vote.sync.ballot.b32 %r9, %p0, {};",
    "redux.sync.add.u32 %r9, {}, -1;",
    "elect.sync %r9|%p9, {};",
    "bar.sync {};",
    "mbarrier.init.shared.b64 [%r3], {};",
    "mbarrier.init.shared.b64 [{}], 1;",
    "nanosleep.u32 {};",
    "tcgen05.dealloc.cta_group::1.sync.aligned.b32 {}, 32;",
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [{}], 32;",
    "tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r9}}, [{}];",
    "tcgen05.st.sync.aligned.32x32b.x1.b32 [{}], {{%r0}};",
    "tcgen05.mma.cta_group::1.kind::f16 [%r0], %d0, %d0, {}, 1;",
    "tcgen05.mma.cta_group::1.kind::f16 [{}], %d0, %d0, %r0, 1;",
    "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d0, {{%r0, {}}}], [%r3];",
    "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r3], [%d1], {}, [%r3];",
    "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r3], [%d1], 16, [{}];",
]
WIDE_USES = [
    "add.u64 %d9, %d0, {};",
    "cvt.sat.u32.s64 %r9, {};",
    "ld.global.b32 %r9, [{}];",
    "st.global.b32 [{}], %r0;",
    "st.global.v2.b64 [%d1], {{%d0, {}}};",
    "tcgen05.mma.cta_group::1.kind::f16 [%r0], {}, %d0, %r0, 1;",
    "tcgen05.mma.cta_group::1.kind::f16 [%r0], %d0, {}, %r0, 1;",
    "tcgen05.cp.cta_group::1.32x128b.warpx4 [%r0], {};",
    "prefetch.tensormap [{}];",
]
FLAG_USES = [
    "@{} mov.b32 %r9, %r0;",
    "@!{} mov.b32 %r9, %r0;",
    "@{} bra END;",
    "@{} ret;",
    "selp.b32 %r9, %r0, %r1, {};",
    "and.pred %p9, %p0, {};",
    "or.pred %p9, {}, %p0;",
    "not.pred %p9, {};",
    "vote.sync.any.pred %p9, {}, -1;",
    "setp.eq.and.u32 %p9, %r0, %r1, {};",
    "tcgen05.mma.cta_group::1.kind::f16 [%r0], %d0, %d0, %r0, {};",
]


@pytest.mark.parametrize(
    ("text", "register"),
    [*((text, "%u") for text in USES), *((text, "%ud") for text in WIDE_USES), *((text, "%up") for text in FLAG_USES)],
)
def test_uses(text, register):
    use = text.format(register)
    with pytest.raises(PoisonError, match=rf"^{re.escape(register)} of lane 0 \(and 31 more\) is used") as caught:
        execute(f"{use}\nEND:")
    assert use in str(caught.value)


# A way to move something; which register is fine to use after it, and which is not.
MOVES = [
    ("mov.b32 %r8, %u;", "", "%r8"),
    ("mov.pred %p8, %up;", "", "%p8"),
    ("mov.pred %p8, !%up;", "", "%p8"),
    ("mov.b64 %d8, {%r0, %u}; mov.b64 {%r8, %r9}, %d8;", "%r8", "%r9"),
    ("mov.b64 %d8, {%u, %r0}; mov.b64 {_, %r9}, %d8;", "%r9", "%d8"),
    ("mov.b32 %r8, {%uh, %h0}; mov.b32 {%h8, %h9}, %r8;", "%h9", "%h8"),
    ("mov.b64 %d8, {%h0, %uh, %h1, %h0}; mov.b64 {%r8, %r9}, %d8;", "%r9", "%r8"),
    ("selp.b32 %r8, %r0, %u, %p0;", "%r8", ""),
    ("selp.b32 %r8, %u, %r0, %p0;", "", "%r8"),
    ("prmt.b32 %r8, %u, %r1, 0x7654;", "%r8", ""),
    ("prmt.b32 %r8, %u, %r1, 0x7604;", "", "%r8"),
    ("mov.b32 %r8, {%h0, %uh}; prmt.b32 %r8, %r8, %r1, 0x1010;", "%r8", ""),
    ("mov.b32 %r8, {%h0, %uh}; and.b32 %r8, %r8, 0xFFFF;", "%r8", ""),
    ("mov.b32 %r8, {%h0, %uh}; and.b32 %r8, %r8, 0x1FFFF;", "", "%r8"),
    ("mov.b32 %r8, {%h0, %uh}; or.b32 %r8, %r8, %r0; and.b32 %r8, %r8, 255;", "%r8", ""),
    ("or.b32 %r8, %r0, %u;", "", "%r8"),
    ("xor.b32 %r8, %u, %u;", "", "%r8"),
    ("mov.b32 %r8, {%h0, %uh}; shl.b32 %r8, %r8, 16;", "%r8", ""),
    ("mov.b32 %r8, {%h0, %uh}; shl.b32 %r8, %r8, 15;", "", "%r8"),
    ("mov.b32 %r8, {%uh, %h0}; shr.u32 %r8, %r8, 16;", "%r8", ""),
    ("mov.b32 %r8, {%uh, %h0}; shr.s32 %r8, %r8, 16;", "%r8", ""),
    ("mov.b32 %r8, {%h0, %uh}; shr.s32 %r8, %r8, 24; and.b32 %r8, %r8, 0xFF00;", "", "%r8"),
    ("shl.b64 %d8, %ud, 64;", "%d8", ""),
    ("mov.b32 %r8, {%h0, %uh}; shl.b32 %r8, %r8, %r0; and.b32 %r8, %r8, 255;", "", "%r8"),
    ("mov.b32 %r8, {%h0, %uh}; st.shared.b32 [%r3], %r8; ld.shared.b16 %r9, [%r3];", "%r9", ""),
    ("mov.b32 %r8, {%h0, %uh}; st.shared.b32 [%r3], %r8; ld.shared.b8 %r9, [%r3+2];", "", "%r9"),
    ("st.shared.b8 [%r3], %r0; ld.shared.u8 %r9, [%r3];", "%r9", ""),
    ("ld.shared.s8 %r9, [%r3]; and.b32 %r9, %r9, 0xFFFFFF00;", "", "%r9"),
    ("ld.shared.u8 %r9, [%r3]; and.b32 %r9, %r9, 0xFFFFFF00;", "%r9", ""),
    ("st.shared.v2.b32 [%r3], {%r0, %u}; ld.shared.v2.b32 {%r8, %r9}, [%r3];", "%r8", "%r9"),
    ("mov.b64 %d8, {%u, %r0}; add.f32x2 %d8, %d8, %d8; mov.b64 {%r8, %r9}, %d8;", "%r9", "%r8"),
    ("mov.b64 %d8, {%r0, %u}; fma.rn.f32x2 %d8, %d0, %d0, %d8; mov.b64 {%r8, %r9}, %d8;", "%r8", "%r9"),
    (
        "mov.b64 %d8, {%uh, %h0, %h0, %h0}; mul.f32x2 %d8, %d8, %d0; mov.b64 {%r8, %r9}, %d8; shr.u32 %r8, %r8, 16;",
        "%r9",
        "%r8",
    ),
    ("cvta.shared.u64 %d8, %ud;", "", "%d8"),
    ("mov.b64 %d8, {%r0, %u}; cvt.u32.u64 %r8, %d8;", "%r8", ""),
    ("mov.b64 %d8, {%u, %r0}; cvt.u32.u64 %r8, %d8;", "", "%r8"),
    ("cvt.u64.u32 %d8, %u;", "", "%d8"),
    ("mov.b32 %r8, {%h0, %uh}; cvt.u16.u32 %h8, %r8; add.u16 %h8, %h8, 1;", "%h8", ""),
    ("mov.b32 %r8, {%h0, %uh}; and.b32 %r8, 0xffff, %r8;", "%r8", ""),
    ("mov.b32 %r8, {%h0, %uh}; bfe.u32 %r8, %r8, 0, 16;", "%r8", ""),
    ("mov.b32 %r8, {%h0, %uh}; bfe.u32 %r8, %r8, 4, 16; and.b32 %r8, %r8, 0xFF00;", "", "%r8"),
    ("mov.b32 %r8, {%h0, %uh}; lop3.b32 %r8, %r8, 0xffff, 0, 0xC0;", "%r8", ""),
    ("bfi.b32 %r8, %r0, %u, 0, 32;", "%r8", ""),
    ("bfi.b32 %r8, %u, %r0, 16, 16; and.b32 %r8, %r8, 0xFFFF;", "%r8", ""),
    ("mbarrier.init.shared.b64 [%r3], 32; bar.warp.sync -1; mov.b64 %d8, 1;", "%d8", ""),
]


def used(register: str) -> str:
    return {
        "h": "add.u16 %h7, {0}, 1;",
        "r": "add.u32 %r7, {0}, 1;",
        "d": "add.u64 %d7, {0}, 1;",
        "p": "@{0} mov.b32 %r7, 1;",
    }[register[1]].format(register)


@pytest.mark.parametrize(("move", "fine", "wrong"), MOVES)
def test_moves(move, fine, wrong):
    if "mbarrier" in move:  # one lane only may make it
        move = move.replace("mbarrier.init", "setp.eq.u32 %p8, %thread, 0; @%p8 mbarrier.init")
    execute(f"{move}\n{used(fine) if fine else ''}")
    if wrong:
        poisoned(f"{move}\n{used(wrong)}", wrong)


def test_the_state_of_an_arrival_is_undefined():
    """It is not modelled; only in lanes that arrived."""
    one = "setp.eq.u32 %p8, %thread, 0; @%p8 mbarrier.init.shared.b64 [%r5], 16; bar.warp.sync -1; mov.b64 %d8, 1;"
    body = f"mov.b32 %r5, memory; {one} @%q mbarrier.arrive.shared.b64 %d8, [%r5];"
    execute(f"{body} @!%q add.u64 %d9, %d8, 1;")
    poisoned(f"{body}\nadd.u64 %d9, %d8, 1;", "%d8", lane=1)


def test_whole_and_lanewise_overwrites():
    execute("mov.b32 %r8, %u; mov.b32 %r8, 1; add.u32 %r9, %r8, 1;")
    execute("@%q mov.b32 %r8, 1; @!%q mov.b32 %r8, 2; add.u32 %r9, %r8, 1;")
    poisoned("@%q mov.b32 %r8, 1;\nadd.u32 %r9, %r8, 1;", "%r8", lane=0)
    poisoned("mov.b32 %r8, 1; @%q mov.b32 %r8, %u;\nadd.u32 %r9, %r8, 1;", "%r8", lane=1)
    execute("mov.b32 %r8, 1; @%q mov.b32 %r8, %u; @%q mov.b32 %r8, 5; add.u32 %r9, %r8, 1;")


def test_lanes_that_do_not_run_do_not_matter():
    execute("@%q mov.b32 %r8, 1; @%q add.u32 %r9, %r8, 1; @%q st.global.b32 [%d1], %r9;")
    poisoned("@%q mov.b32 %r8, 1; @%q add.u32 %r9, %r8, 1;\n@!%q add.u32 %r9, %r8, 1;", "%r8", lane=0)
    execute("@!%q bra L; mov.b32 %r8, 1; add.u32 %r9, %r8, 1; L:")
    execute("@!%q bra L; mov.b32 %r8, 1; L: @!%q bra M; add.u32 %r9, %r8, 1; M:")
    poisoned("@%q bra L; mov.b32 %r8, 1; L:\nadd.u32 %r9, %r8, 1;", "%r8", lane=1)
    execute("@%q bra L; mov.b32 %r8, 1; bra M; L: mov.b32 %r8, 2; M: add.u32 %r9, %r8, 1;")
    execute("@%q ret; mov.b32 %r8, 1; add.u32 %r9, %r8, 1;")


def test_a_loop_that_defines_in_some_lanes_only():
    """Lane l goes round l % 4 times; those that never did have nothing."""
    loop = "and.b32 %r5, %thread, 3; mov.b32 %r6, 0; L: setp.ge.u32 %p5, %r6, %r5; @%p5 bra M; mov.b32 %r8, %r6;"
    loop += " add.u32 %r6, %r6, 1; bra L; M: setp.eq.u32 %p6, %r5, 0;"
    execute(f"{loop} @!%p6 add.u32 %r9, %r8, 1;")
    poisoned(f"{loop}\nadd.u32 %r9, %r8, 1;", "%r8", lane=0)


def test_shuffles_take_the_poison_of_their_source():
    half = "@%q mov.b32 %r8, 1; and.b32 %r5, %thread, 30; or.b32 %r6, %r5, 1;"
    execute(f"{half} shfl.sync.idx.b32 %r9, %r8, %r6, 31, -1; add.u32 %r7, %r9, 1;")
    poisoned(f"{half} shfl.sync.idx.b32 %r9, %r8, %r5, 31, -1;\nadd.u32 %r7, %r9, 1;", "%r9", lane=0)
    poisoned(f"{half} shfl.sync.bfly.b32 %r9, %r8, 1, 31, -1;\nadd.u32 %r7, %r9, 1;", "%r9", lane=1)


def test_the_first_undefined_lane_and_how_many_more():
    with pytest.raises(PoisonError, match=r"%r8 of lane 1 \(and 15 more\) is used"):
        execute("@!%q mov.b32 %r8, 1; add.u32 %r9, %r8, 1;")


def test_plain_runs_do_not_look():
    run(kernel(f"{SETUP} add.u32 %r9, %u, 1; ret;", "o", top=TOP), aligned(np.zeros(64, np.uint64)))


def test_poison_of_clean_registers():
    """Which registers hold poison is known as the kernel runs: any operand may turn out to be clean."""
    poison, lanes = np.full(32, 5, np.uint8), np.arange(32)
    for a, b in ((None, None), (poison, None), (None, poison), (poison, poison)):
        odd = lanes % 2 == 1
        found = {
            "merge": runtime.merge(odd, a, b),
            "union": runtime.union(a, b),
            "spread": runtime.spread(a, b),
            "spoiled": runtime.spoiled(a, b),
            "packed": runtime.packed([a, b], 4),
            "chosen": runtime.chosen(odd, a, b),
            "permuted": runtime.permuted(a, b, np.full(32, 0x7410, np.uint32)),
        }
        x, y = (5 if one is not None else 0 for one in (a, b))
        want = {
            "merge": np.where(odd, x, y),
            "union": x | y,
            "spread": 15 if x | y else 0,
            "spoiled": 255 if x | y else 0,
            "packed": x | y << 4,
            "chosen": np.where(odd, x, y),
            "permuted": (x & 1) | (x >> 1 & 1) << 1 | (y & 1) << 2 | (y >> 3 & 1) << 3,
        }
        for name, value in found.items():
            np.testing.assert_array_equal(np.zeros(32) if value is None else value, want[name], name)
            assert value is None or value.any() or name in ("union", "spread", "spoiled"), name
    for one in (
        runtime.unpacked(None, 1, 4),
        runtime.moved(None, lanes),
        runtime.kept(None, 255),
        runtime.gathered(None, (1, 2)),
        runtime.shifted(None, 8, 4),
        runtime.extended(None, 1),
        runtime.from_bytes(None, 0, 4),
        runtime.to_bytes([None, None], 4),
    ):
        assert one is None


def test_shifts_bit_by_bit():
    """Against each bit's own way, all amounts; a byte with an undefined bit is undefined."""
    for size in (2, 4, 8):
        poison = (np.arange(32) * 7 + 1).astype(np.uint8) & np.uint8((1 << size) - 1)
        bits = np.repeat(np.unpackbits(poison[:, None], axis=1, bitorder="little", count=size), 8, axis=1)
        for by in range(-8 * size, 8 * size + 1):
            for signed in (False, True) if by <= 0 else (False,):
                fill = np.repeat(bits[:, -1:] if signed else np.zeros((32, 1), np.uint8), abs(by), axis=1)
                moved = (
                    np.concatenate([fill, bits], 1)[:, : 8 * size]
                    if by > 0
                    else np.concatenate([bits[:, -by:], fill], 1)
                )
                want = np.packbits(moved.reshape(32, size, 8).any(2), axis=1, bitorder="little")[:, 0]
                got = runtime.shifted(poison, by, size, signed)
                np.testing.assert_array_equal(np.zeros(32) if got is None else got, want)


# Registers %a and %b of these sizes come into %o.
_INTEGER_TYPES = {"u8": 16, "s8": 16, "u16": 16, "s16": 16, "u32": 32, "s32": 32, "u64": 64, "s64": 64}
MOVERS = [
    *(
        (f"cvt.{to}.{source} %o, %a;", wide or _INTEGER_TYPES[to], _INTEGER_TYPES[source])
        for to in _INTEGER_TYPES
        for source in _INTEGER_TYPES
        for wide in ((0, 32) if to in ("u8", "s8", "s16") else (0,))
    ),
    ("cvt.u16.u8 %o, %a;", 16, 32),
    ("cvt.s64.s32 %o, %a;", 64, 64),
    *(
        (f"bfe.{kind} %o, %a, {start}, {length};", int(kind[1:]), int(kind[1:]))
        for kind in ("u32", "s32", "u64", "s64")
        for start, length in itertools.product((0, 4, 13, 31, 64, 259), (0, 1, 8, 19, 33, 255))
    ),
    *(
        (f"bfi.b{size} %o, %a, %b, {start}, {length};", size, size)
        for size in (32, 64)
        for start, length in itertools.product((0, 4, 31, 70), (0, 4, 16, 255))
    ),
    *(
        (f"lop3.b32 %o, {operands}, {table};", 32, 32)
        for operands in ("%a, 0xffff, 0", "0xff0f0000, %a, %b", "%a, %b, 0x00ff00f0", "5, 6, %a")
        for table in (0xC0, 0xFC, 0x3C, 0x96, 0xE8, 0xCA, 0x00, 0xF0)
    ),
    *(
        (f"{opcode}.b{size} %o, {operands};", size, size)
        for opcode, operands in (("and", "0xff0f, %a"), ("and", "%a, 0xf000ff"), ("or", "%a, %b"), ("xor", "%b, %a"))
        for size in (32, 64)
    ),
]


@pytest.mark.parametrize("family", sorted({text.split(".")[0] for text, *_ in MOVERS}))
def test_undefined_bytes_come_as_far_as_they_matter(family, monkeypatch):
    """A byte of a result is undefined if and only if another value of the operands' undefined bytes can change it."""
    rng = np.random.default_rng(7)
    devices = importlib.import_module("wanfp4.simulator.device")  # the package's `device` is a function
    plain = devices.CTA
    for text, to, size in MOVERS:
        if not text.startswith(family):
            continue
        seen = []
        # Ones and zeros in each half of a byte, or a defined operand would hide an undefined one.
        mixed = {name: rng.choice(np.array([0x5A, 0xA5, 0x69, 0x96], np.uint8), (32, 8)) for name in ("%a", "%b")}
        values = {name: data.view(np.uint64)[:, 0] for name, data in mixed.items()}
        poison = {name: rng.integers(0, 1 << size // 8, 32, np.uint8) for name in ("%a", "%b")}
        holes = {
            name: np.unpackbits(p[:, None], axis=1, bitorder="little").repeat(8, axis=1) for name, p in poison.items()
        }
        masks = {
            name: np.packbits(bits, axis=1, bitorder="little").view(np.uint64)[:, 0] for name, bits in holes.items()
        }

        class Prepared(plain):
            def run(self, values=values, poison=poison, masks=masks, size=size, seen=seen):
                (warp,), slots = self.warps, self.code.slots
                for name in values:
                    noise = rng.integers(0, 1 << 64, 32, np.uint64, endpoint=False) & masks[name]
                    warp.R[slots[name]] = (values[name] ^ noise).astype(f"u{size // 8}")
                    warp.P[slots[name]] = poison[name]
                super().run()
                found = warp.P[slots["%o"]]
                seen.append((warp.R[slots["%o"]], np.zeros(32, np.uint8) if found is None else found))

        monkeypatch.setattr(devices, "CTA", Prepared)
        body = f".reg .b{size} %a, %b; .reg .b{to} %o;\n{text}\nret;"
        for _ in range(30):
            run(kernel(body), track=True)
        first, claimed = seen[0]
        changed = np.bitwise_or.reduce([result ^ first for result, _ in seen])
        differs = changed.view(np.uint8).reshape(32, -1) != 0
        claims = np.unpackbits(claimed[:, None], axis=1, bitorder="little", count=to // 8).astype(bool)
        assert (differs == claims).all(), text


# ---- random programs against a plain interpreter ----

LANES = range(32)
SIZES = {"r": 4, "d": 8, "p": 1}
NAMES = {"r": [f"%r{10 + i}" for i in range(5)], "d": [f"%d{10 + i}" for i in range(3)], "p": ["%p10", "%p11", "%p12"]}
DEFINED = ("%r10", "%r11", "%r12", "%d10", "%p10", "%p11")
MASKS = (0, 0xFF, 0xFFFF, 0xFF00FF00, 0x1FFFF, 0xFFFFFFFF)
SELECTORS = (0x3210, 0x5410, 0x7632, 0x0123, 0x4444, 0xC480)


class Undefined(Exception):  # noqa: N818
    """An active lane uses an undefined value."""


@dataclass
class Machine:
    """32 lanes, each with registers as (value, set of undefined bytes) and eight bytes of memory of its own."""

    registers: list[dict[str, tuple[int, frozenset[int]]]]
    memory: list[list[tuple[int, bool]]] = field(default_factory=lambda: [[(0, True)] * 8 for _ in LANES])

    def use(self, lane: int, *names: str) -> list[int]:
        for name in names:
            if self.registers[lane][name][1]:
                raise Undefined
        return [self.registers[lane][name][0] for name in names]

    def run(self, opcode: str, names: list[str], number: int, active: list[int]) -> None:
        old = [dict(lane) for lane in self.registers]
        for lane in active:
            self.one(opcode, names, number, lane, old)

    def one(
        self, opcode: str, names: list[str], number: int, lane: int, old: list[dict[str, tuple[int, frozenset[int]]]]
    ) -> None:
        r = self.registers[lane]
        target, *sources = names
        values = [old[lane][name] for name in sources]
        kind, _, rest = opcode.partition(".")
        if opcode in ("mov.b32", "mov.b64", "mov.pred"):
            r[target] = values[0]
        elif opcode == "constant":
            r[target] = number, frozenset()
        elif opcode == "pack":
            (low, a), (high, b) = values
            r[target] = low | high << 32, a | {i + 4 for i in b}
        elif opcode == "unpack":  # two targets, the source last
            value, bad = old[lane][names[2]]
            r[names[0]] = value & 0xFFFFFFFF, frozenset(i for i in bad if i < 4)
            r[names[1]] = value >> 32, frozenset(i - 4 for i in bad if i >= 4)
        elif kind == "selp":
            (flag,) = self.use(lane, sources[2])
            r[target] = values[0] if flag else values[1]
        elif kind == "prmt":
            pool = [(value >> 8 * i & 255, i in bad) for value, bad in values for i in range(4)]
            picked = [(pool[number >> 4 * i & 7], number >> 4 * i & 8) for i in range(4)]
            value = sum((255 * (b >> 7) if sign else b) << 8 * i for i, ((b, _), sign) in enumerate(picked))
            r[target] = value, frozenset(i for i, ((_, bad), _) in enumerate(picked) if bad)
        elif opcode == "mask":
            value, bad = values[0]
            r[target] = value & number, frozenset(i for i in bad if number >> 8 * i & 255)
        elif opcode in ("or.b32", "xor.b64"):
            (a, x), (b, y) = values
            r[target] = a | b if kind == "or" else a ^ b, x | y
        elif kind in ("shl", "shr"):
            value, bad = values[0]
            marks = sum(255 << 8 * i for i in bad)
            if kind == "shl":
                value, marks = value << number & 0xFFFFFFFF, marks << number & 0xFFFFFFFF
            else:
                high = ~0 << 32 if rest == "s32" else 0
                value = (value | (high if value >> 31 else 0)) >> number & 0xFFFFFFFF
                marks = (marks | (high if marks >> 31 else 0)) >> number & 0xFFFFFFFF
            r[target] = value, frozenset(i for i in range(4) if marks >> 8 * i & 255)
        elif kind == "shfl":
            r[target] = old[lane ^ number][sources[0]]
        elif kind == "add" and rest == "f32x2":
            (a, x), (b, y) = values
            both = [np.array([v], np.uint64).view(np.float32) for v in (a, b)]
            with np.errstate(all="ignore"):
                value = int((both[0] + both[1]).view(np.uint64)[0])
            half = {i // 4 for i in x | y}
            r[target] = value, frozenset(i for i in range(8) if i // 4 in half)
        elif opcode == "st":
            size = SIZES[sources[0][1]]
            value, bad = values[0]
            self.memory[lane][:size] = [(value >> 8 * i & 255, i in bad) for i in range(size)]
        elif opcode == "st.b8":
            self.memory[lane][number] = values[0][0] & 255, 0 in values[0][1]
        elif opcode in ("ld", "ld.s8", "ld.u8"):
            size = SIZES[target[1]] if opcode == "ld" else 1
            cells = self.memory[lane][number : number + size]
            value = sum(b << 8 * i for i, (b, _) in enumerate(cells))
            bad = {i for i, (_, x) in enumerate(cells) if x}
            if opcode == "ld.s8":
                value, bad = value - 256 * (value >> 7) & 0xFFFFFFFF, set(range(4)) if bad else bad
            r[target] = value, frozenset(bad)
        elif opcode == "add.u32":
            a, b = self.use(lane, *sources)
            r[target] = a + b & 0xFFFFFFFF, frozenset()
        elif opcode == "and.b32":
            a, b = self.use(lane, *sources)
            r[target] = a & b, frozenset()
        elif opcode == "setp.lt.u32":
            a, b = self.use(lane, *sources)
            r[target] = int(a < b), frozenset()
        elif opcode == "or.pred":
            a, b = self.use(lane, *sources)
            r[target] = a | b, frozenset()
        else:
            raise NotImplementedError(opcode)


# Name in the interpreter -> (PTX, kinds of the registers, values of the number).
OPCODES = {
    "mov.b32": ("mov.b32 {0}, {1};", "rr", (0,)),
    "mov.b64": ("mov.b64 {0}, {1};", "dd", (0,)),
    "mov.pred": ("mov.pred {0}, {1};", "pp", (0,)),
    "constant": ("mov.b32 {0}, {n};", "r", (0, 5, 0x80FF00FE)),
    "pack": ("mov.b64 {0}, {{{1}, {2}}};", "drr", (0,)),
    "unpack": ("mov.b64 {{{0}, {1}}}, {2};", "rrd", (0,)),
    "selp.b32": ("selp.b32 {0}, {1}, {2}, {3};", "rrrp", (0,)),
    "selp.b64": ("selp.b64 {0}, {1}, {2}, {3};", "dddp", (0,)),
    "prmt.b32": ("prmt.b32 {0}, {1}, {2}, {n};", "rrr", SELECTORS),
    "mask": ("and.b32 {0}, {1}, {n};", "rr", MASKS),
    "or.b32": ("or.b32 {0}, {1}, {2};", "rrr", (0,)),
    "xor.b64": ("xor.b64 {0}, {1}, {2};", "ddd", (0,)),
    "shl.b32": ("shl.b32 {0}, {1}, {n};", "rr", (0, 8, 13, 16, 31, 32)),
    "shr.u32": ("shr.u32 {0}, {1}, {n};", "rr", (0, 8, 13, 16, 31, 32)),
    "shr.s32": ("shr.s32 {0}, {1}, {n};", "rr", (0, 8, 13, 16, 31, 32)),
    "shfl.sync": ("shfl.sync.bfly.b32 {0}, {1}, {n}, 31, -1;", "rr", (1, 2, 16, 31)),
    "add.f32x2": ("add.f32x2 {0}, {1}, {2};", "ddd", (0,)),
    "st": ("st.shared.b32 [%r3], {1};", "rr", (0,)),
    "st wide": ("st.shared.b64 [%r3], {1};", "dd", (0,)),
    "st.b8": ("st.shared.b8 [%r3+{n}], {1};", "rr", (0, 1, 3, 6)),
    "ld": ("ld.shared.b32 {0}, [%r3+{n}];", "r", (0, 4)),
    "ld wide": ("ld.shared.b64 {0}, [%r3];", "d", (0,)),
    "ld.s8": ("ld.shared.s8 {0}, [%r3+{n}];", "r", (0, 3, 5)),
    "ld.u8": ("ld.shared.u8 {0}, [%r3+{n}];", "r", (0, 3, 5)),
    "add.u32": ("add.u32 {0}, {1}, {2};", "rrr", (0,)),
    "and.b32": ("and.b32 {0}, {1}, {2};", "rrr", (0,)),
    "setp.lt.u32": ("setp.lt.u32 {0}, {1}, {2};", "prr", (0,)),
    "or.pred": ("or.pred {0}, {1}, {2};", "ppp", (0,)),
}


@st.composite
def steps(draw):
    opcode = draw(st.sampled_from(sorted(OPCODES)))
    text, kinds, numbers = OPCODES[opcode]
    names = [draw(st.sampled_from(NAMES[kind])) for kind in kinds]
    if opcode == "unpack" and names[0] == names[1]:
        names[1] = next(name for name in NAMES["r"] if name != names[0])
    number = draw(st.sampled_from(numbers))
    guard = (
        "" if opcode == "shfl.sync" else draw(st.sampled_from(["", "", "", "@%p10 ", "@!%p10 ", "@%p11 ", "@%p12 "]))
    )
    return opcode.removesuffix(" wide"), names, number, guard, guard + text.format(*names, n=number)


@given(st.lists(steps(), min_size=1, max_size=14))
@settings(max_examples=120)
def test_random_programs(program):
    """The same values and the same verdict, at the same instruction, as the interpreter's; in two blocks or one."""
    rng = np.random.default_rng(3)
    start = {name: rng.integers(0, 1 << 8 * SIZES[name[1]], 32, np.uint64) for name in DEFINED}
    for name in ("%p10", "%p11"):
        start[name] = rng.integers(0, 2, 32, np.uint64)
    machine = Machine(
        [{n: (0, frozenset(range(SIZES[n[1]]))) for names in NAMES.values() for n in names} for _ in LANES]
    )
    for name, values in start.items():
        for lane in LANES:
            machine.registers[lane][name] = int(values[lane]), frozenset()

    loads = []
    for i, name in enumerate(DEFINED):
        size = 32 if name[1] in "rp" else 64
        into = "%r9" if name[1] == "p" else name
        loads.append(
            f"ld.global.b{size} {into}, [%d1+{256 * i}];" + (f" setp.ne.u32 {name}, %r9, 0;" if name[1] == "p" else "")
        )
    results = [name for kind in "rd" for name in NAMES[kind]]
    stores = [f"st.global.b{8 * SIZES[name[1]]} [%d2+{256 * i}], {name};" for i, name in enumerate(results)]
    body = [*loads, "add.u64 %d2, %d1, 2048;", *(text for *_, text in program), *stores]
    text = kernel("\n".join([SETUP, *body, "ret;"]), "o", top=TOP)
    memory = aligned(np.zeros((16, 32), np.uint64))
    for i, name in enumerate(DEFINED):
        memory[i] = start[name]

    want, blame = np.zeros((8, 32), np.uint64), None
    try:
        for blame in program:
            opcode, names, number, guard, _ = blame
            active = list(LANES)
            if guard:
                flag = guard.strip(" @!")
                active = [lane for lane in LANES if machine.use(lane, flag)[0] != ("!" in guard)]
            machine.run(opcode, names, number, active)
        for i, name in enumerate(results):
            blame = (*[None] * 4, stores[i])
            want[i] = [machine.use(lane, name)[0] for lane in LANES]
        blame = None
    except Undefined:
        pass
    if blame is None:
        run(text, memory, track=True)
    else:
        with pytest.raises(PoisonError) as caught:
            run(text, memory, track=True)
        assert text.split("\n")[caught.value.line - 1] == blame[-1]
    np.testing.assert_array_equal(memory[8:], want)
