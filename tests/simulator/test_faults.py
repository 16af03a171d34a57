"""Seeded faults: each must be reported with the right class, in the right words, at the right PTX line."""

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from handwritten import BARRIERS, DONE, EMPTY, FULL, IDESC, OUT, READY, SFP, Case, aligned, program, pv_case, tensor_map

from wanfp4.simulator import (
    BoundsError,
    DeadlockError,
    DescriptorError,
    PoisonError,
    ProtocolError,
    RaceError,
    SimulationError,
    Simulator,
    UnknownInstruction,
)


@dataclass(frozen=True)
class Fault:
    """`edits` are pairs (old, new) of text that occurs once; the finding is at the line that holds `at`.

    `also`: what the second place of the finding holds.
    """

    edits: tuple[tuple[str, str], ...]
    error: type[SimulationError]
    message: str
    at: str | None = None
    also: str | None = None
    ordering: str = "pipe"
    track: bool = True
    seed: int | None = None


CP_SFA = "tcgen05.cp.cta_group::1.32x128b.warpx4 [%a], %d0;"
MMA = "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block32 [%base], [%p], %d2, %idesc, [%a], [%b], %more;"
ARRIVE = "mbarrier.arrive.shared.b64 _, [%ready];\n"
ST = "tcgen05.st.sync.aligned.32x32b.x8.b32 [%a], {%c0, %c1, %c2, %c3, %c4, %c5, %c6, %c7};"
WAIT_ST = "tcgen05.wait::st.sync.aligned;\n"
STORE_SCALES = f"st.shared.b32 [%a+{SFP}], %b;\n"
FENCE_SCALES = f"{WAIT_ST}fence.proxy.async.shared::cta;\n"
ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%a], 64;"
DEALLOC = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %base, 64;"
ELECT_MMA = "multiply:\nelect.sync %e|%one, -1;"
TWO_LANES = "and.b32 %e, %t, 31;\nsetp.lt.u32 %one, %e, 2;"
LOAD_V = "cp.async.bulk.tensor.2d.shared::cta.global.tile"
LOAD_S = "cp.async.bulk.shared::cta.global.mbarrier"
INIT_READY = f"mbarrier.init.shared.b64 [%s+{READY}], 128;"
INIT_DONE = f"mbarrier.init.shared.b64 [%s+{DONE}], 1;"
V_CONSTANT = 1 << 16 | 16 << 32 | 1 << 46 | 6 << 61
SELECT = f"selp.b32 %idesc, {IDESC | 2 << 29 | 2 << 4}, {IDESC}, %odd;"
FIRST_STORE = "st.shared.v4.b32 [%obuf+0], {%o0, %o1, %o2, %o3};\n"
FIRST_CHUNK = f"""add.s32 %a, %mine, 0;
tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{", ".join(f"%o{i}" for i in range(16))}}}, [%a];
tcgen05.wait::ld.sync.aligned;
"""

FAULTS = {
    # The faults of issue 4.
    "scale ids swapped": Fault(
        ((SELECT, f"selp.b32 %idesc, {IDESC}, {IDESC | 2 << 29 | 2 << 4}, %odd;"),),
        DescriptorError,
        r"scales of A at 0x80000034: id 2, the descriptor says 0",
        MMA,
    ),
    "P published before tcgen05.st": Fault(
        ((ARRIVE, ""), (STORE_SCALES, STORE_SCALES + "fence.proxy.async.shared::cta;\n" + ARRIVE)),
        RaceError,
        r"the tensor pipe reads tensor memory column 32 of lanes 0-31, which tcgen05.st of warp 0 wrote, with no wait",
        MMA,
        ST,
    ),
    "P published before tcgen05.wait::st": Fault(
        ((ARRIVE, ""), (FENCE_SCALES, "fence.proxy.async.shared::cta;\n" + ARRIVE + WAIT_ST)),
        RaceError,
        r"the tensor pipe reads tensor memory column 32 of lanes 0-31, which tcgen05.st of warp 0 wrote, with no wait",
        MMA,
        ST,
    ),
    "scales of P published before they are written": Fault(
        ((ARRIVE, ""), (STORE_SCALES, ARRIVE + STORE_SCALES)),
        RaceError,
        r"the tensor pipe reads shared memory 0x1000, which warp 0 wrote, with no wait between",
        CP_SFA,
        STORE_SCALES,
    ),
    "one warp does not arrive": Fault(
        ((ARRIVE, "setp.ne.u32 %other, %warp, 3;\n@%other " + ARRIVE),),
        DeadlockError,
        rf"warp 5: line \d+, waits for parity 0 of mbarrier {1024 + READY:#x} "
        r"\(phase 0, 32 of 128 arrivals pending, tx-count 0\)",
    ),
    "O buffer written past its end": Fault(
        (("add.s32 %obase, %s, 4096;", "add.s32 %obase, %s, 4160;"),),
        ProtocolError,
        rf"store of the live mbarrier at {1024 + BARRIERS:#x}",
    ),
    "no dealloc": Fault(
        ((DEALLOC, ""),), ProtocolError, r"64 tensor memory columns at 0 are not deallocated at the end", ALLOC
    ),
    # Undefined values.
    "register nobody wrote": Fault(
        (("mov.b32 %zero, 0;\n", ""),),
        PoisonError,
        r"%zero of lane 0 \(and 31 more\) is used, and nothing defined it",
    ),
    "shared memory nobody wrote, tcgen05.cp": Fault(
        ((STORE_SCALES, ""),),
        PoisonError,
        r"tcgen05.cp.32x128b.warpx4 reads shared memory 0x1000, which nobody defined",
        CP_SFA,
    ),
    "shared memory nobody wrote, TMA store": Fault(
        ((FIRST_CHUNK + FIRST_STORE, FIRST_CHUNK),),
        PoisonError,
        rf"cp.async.bulk.tensor reads shared memory {1024 + OUT:#x}, which nobody defined",
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%mapo, {0, 0}], [%obase];",
    ),
    "P nobody stored": Fault(
        ((ST, ""),), PoisonError, r"reads tensor memory lane 0, column 32, which nobody defined", MMA
    ),
    "accumulator nobody cleared": Fault(
        (("setp.ne.u32 %more, %it, 0;", "setp.ge.u32 %more, %it, 0;"),),
        PoisonError,
        r"reads tensor memory lane 0, column 0, which nobody defined",
        MMA,
    ),
    # Tensor memory.
    "tensor memory beyond the allocation": Fault(
        ((ALLOC, ALLOC.replace("64", "32")), (DEALLOC, DEALLOC.replace("64", "32"))),
        BoundsError,
        r"tcgen05.st of tensor memory columns 32-39: column 32 is not allocated",
        ST,
        track=False,
    ),
    "wrong lane quarter": Fault(
        (("shl.b32 %a, %warp, 21;", "shl.b32 %a, %warp, 20;"),),
        BoundsError,
        r"tcgen05.st at 0x100020: warp 1 reaches tensor memory lanes 32-63, not 16",
        ST,
        track=False,
    ),
    "allocation of 48 columns": Fault(
        ((ALLOC, ALLOC.replace("64", "48")),),
        ProtocolError,
        r"tcgen05.alloc of 48 columns: must be a power of two from 32 to 512",
        ALLOC.replace("64", "48"),
        track=False,
    ),
    "allocation after the permit is given up": Fault(
        (
            (ALLOC + "\n", ""),
            ("cta_group::1.sync.aligned;\nallocated", f"cta_group::1.sync.aligned;\n{ALLOC}\nallocated"),
        ),
        ProtocolError,
        r"tcgen05.alloc after tcgen05.relinquish_alloc_permit",
        ALLOC,
        track=False,
    ),
    "dealloc of another size": Fault(
        ((DEALLOC, DEALLOC.replace("64", "32")),),
        ProtocolError,
        r"tcgen05.dealloc of 32 columns at column 0: allocated is 64 at column 0",
        DEALLOC.replace("64", "32"),
        track=False,
    ),
    "lanes disagree on a tensor memory address": Fault(
        ((ST, "add.s32 %a, %a, %t;\n" + ST),),
        ProtocolError,
        r"lanes disagree on an operand that must be the same in the whole warp",
        ST,
        track=False,
    ),
    "D over P": Fault(
        ((MMA, MMA.replace("[%p]", "[%base]")),),
        ProtocolError,
        r"D, columns 0-31, overlaps A, from column 0 on",
        MMA.replace("[%p]", "[%base]"),
        track=False,
    ),
    # Who issues.
    "two lanes copy and multiply": Fault(
        ((ELECT_MMA, f"multiply:\n{TWO_LANES}"),), ProtocolError, r"issued by 2 lanes", CP_SFA, track=False
    ),
    "two lanes multiply": Fault(
        (
            (ELECT_MMA + "\n@!%one bra end;", "multiply:"),
            (
                "tcgen05.cp.cta_group::1.32x128b.warpx4 [%a]",
                "elect.sync %e|%one, -1;\n@%one tcgen05.cp.cta_group::1.32x128b.warpx4 [%a]",
            ),
            ("tcgen05.cp.cta_group::1.32x128b.warpx4 [%b]", "@%one tcgen05.cp.cta_group::1.32x128b.warpx4 [%b]"),
            (MMA, f"{TWO_LANES}\n@%one {MMA}"),
        ),
        ProtocolError,
        r"issued by 2 lanes",
        MMA,
        track=False,
    ),
    "a whole warp loads by TMA": Fault(
        (
            ("load:\nelect.sync %e|%one, -1;\n@!%one bra end;", "load:"),
            ("mbarrier.arrive.expect_tx", "elect.sync %e|%one, -1;\n@%one mbarrier.arrive.expect_tx"),
        ),
        ProtocolError,
        r"issued by 32 lanes",
        LOAD_V,
        track=False,
    ),
    "barrier with half a warp": Fault(
        (("bar.sync 0;", "and.b32 %e, %t, 31;\nsetp.lt.u32 %one, %e, 16;\n@%one bar.sync 0;"),),
        ProtocolError,
        r"needs the whole warp, and only 16 lanes are active",
        "bar.sync 0;",
        track=False,
    ),
    # Descriptors.
    "descriptor beyond shared memory": Fault(
        ((f"or.b64 %d2, %d2, {V_CONSTANT};", f"or.b64 %d2, %d2, {V_CONSTANT | 1 << 41};"),),
        DescriptorError,
        r"B, 32 rows, reaches up to 0x6\w+, shared memory ends at 0x34ff",
        MMA,
        track=False,
    ),
    "instruction descriptor with M 256": Fault(
        ((SELECT, f"mov.b32 %idesc, {IDESC ^ 3 << 27};"),),
        DescriptorError,
        r"M 256: kind mxf4nvf4 of cta_group::1 has 128",
        MMA,
        track=False,
    ),
    "swizzle mode that does not exist": Fault(
        ((f"or.b64 %d2, %d2, {V_CONSTANT};", f"or.b64 %d2, %d2, {V_CONSTANT | 1 << 61};"),),
        DescriptorError,
        r"swizzle mode 7 does not exist",
        MMA,
        track=False,
    ),
    # Proxies.
    "scales written generically, copied without a proxy fence": Fault(
        ((FENCE_SCALES, WAIT_ST),),
        RaceError,
        r"reads shared memory 0x1000, which warp 0 wrote, with no fence.proxy.async between",
        CP_SFA,
        STORE_SCALES,
    ),
    "O written generically, stored by TMA without a proxy fence": Fault(
        (("fence.proxy.async.shared::cta;\n@%follows bra follow0;", "@%follows bra follow0;"),),
        RaceError,
        r"the bulk stores of warp 0 reads shared memory 0x1400, which warp 0 wrote, with no fence.proxy.async between",
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%mapo, {0, 0}], [%obase];",
        FIRST_STORE,
    ),
    "mbarriers initialised without a fence": Fault(
        (("fence.mbarrier_init.release.cluster;\n", ""),),
        RaceError,
        r"reports to mbarrier 0x3400, which warp 4 initialised, with no fence.mbarrier_init or fence.proxy.async",
        LOAD_V,
        f"mbarrier.init.shared.b64 [%s+{FULL}], 1;",
    ),
    # Barriers.
    "count too high": Fault(
        ((INIT_READY, INIT_READY.replace("128", "129")),),
        DeadlockError,
        rf"mbarrier {1024 + READY:#x} \(phase 0, 1 of 129 arrivals pending",
        track=False,
    ),
    "count too low": Fault(
        ((INIT_READY, INIT_READY.replace("128", "127")),),
        ProtocolError,
        rf"mbarrier {1024 + READY:#x}: 1 arrivals more than the 127 of its phase 0",
        ARRIVE,
        track=False,
    ),
    "more bytes expected than come": Fault(
        (("[%full], 1536;", "[%full], 1552;"),),
        DeadlockError,
        rf"mbarrier {1024 + FULL:#x} \(phase 0, 0 of 1 arrivals pending, tx-count 16\)",
        track=False,
    ),
    "fewer bytes expected than come": Fault(
        (("[%full], 1536;", "[%full], 1024;"),),
        RaceError,
        r"reads shared memory 0xc00, which the bulk loads that report to mbarrier 0x3400 wrote, with no wait",
        "tcgen05.cp.cta_group::1.32x128b.warpx4 [%b], %d1;",
        LOAD_S,
    ),
    "no init": Fault(
        ((INIT_DONE + "\n", ""),),
        ProtocolError,
        rf"mbarrier.try_wait at {1024 + DONE:#x}: no mbarrier",
        track=False,
    ),
    "initialised twice": Fault(
        ((INIT_DONE, INIT_DONE + "\nmbarrier.init.shared.b64 [%s+12336], 2;"),),
        ProtocolError,
        rf"mbarrier.init of the live mbarrier at {1024 + DONE:#x}; it needs mbarrier.inval first",
        "mbarrier.init.shared.b64 [%s+12336], 2;",
        INIT_DONE,
        track=False,
    ),
    "mbarrier read like a number": Fault(
        (("quantise:\n", f"ld.shared.b32 %e, [%s+{EMPTY}];\nquantise:\n"),),
        ProtocolError,
        rf"load of the live mbarrier at {1024 + EMPTY:#x}",
        f"ld.shared.b32 %e, [%s+{EMPTY}];",
        track=False,
    ),
    "named barrier with two counts": Fault(
        (("bar.arrive 2, 128;\nboth0", "bar.arrive 2, 96;\nboth0"),),
        ProtocolError,
        r"barrier 2 for 96 threads, but warps \[0\] are at it for 128",
        "bar.arrive 2, 96;",
        track=False,
    ),
    "O read before the last product": Fault(
        (("[%finish], 0;", "[%finish], 1;"),),
        RaceError,
        r"overwrites tensor memory column 0 of lanes 0-31, which warp 0 reads, with no wait between",
        MMA,
    ),
    # Bounds and alignment.
    "global load past a tensor": Fault(
        (("add.s64 %row, %row, 32768;", "add.s64 %row, %row, 65536;"),),
        BoundsError,
        r"load of 16 bytes at global 0x\w+: \d+ bytes past the end of tensor 'p' \(131072 bytes\)",
        "ld.global.v4.b32 {%x0, %x1, %x2, %x3}, [%row+0];",
        track=False,
    ),
    "shared store past the end": Fault(
        (("add.s32 %obase, %s, 4096;", "add.s32 %obase, %s, 8192;"),),
        BoundsError,
        r"store of shared memory 0x3500..0x350f: the CTA has 0x400..0x34ff",
        track=False,
    ),
    "misaligned shared store": Fault(
        (("add.s32 %obase, %s, 4096;", "add.s32 %obase, %s, 4100;"),),
        BoundsError,
        r"store of 16 bytes at shared memory 0x1404: not aligned",
        FIRST_STORE,
        track=False,
    ),
    "misaligned global load": Fault(
        (("add.s64 %row, %rows, %wide;", "add.s64 %row, %rows, %wide;\nadd.s64 %row, %row, 4;"),),
        BoundsError,
        r"load of 16 bytes at global 0x\w+4: not aligned",
        "ld.global.v4.b32 {%x0, %x1, %x2, %x3}, [%row+0];",
        track=False,
    ),
    "misaligned mbarrier": Fault(
        ((INIT_DONE, INIT_DONE.replace("12336", "12340")),),
        BoundsError,
        r"mbarrier.init at 0x3434: not a multiple of 8",
        INIT_DONE.replace("12336", "12340"),
        track=False,
    ),
    "box at a misaligned place": Fault(
        (("add.s32 %v, %v, %s;\nshl.b32 %k", "add.s32 %v, %v, %s;\nadd.s32 %v, %v, 64;\nshl.b32 %k"),),
        BoundsError,
        r"cp.async.bulk.tensor to shared memory 0x440: not a multiple of 128",
        LOAD_V,
        track=False,
    ),
    "bulk copy of an odd size": Fault(
        (("[%pages], 512, [%full]", "[%pages], 520, [%full]"),),
        BoundsError,
        r"cp.async.bulk of 520 bytes.*not multiples of 16",
        LOAD_S,
        track=False,
    ),
}


def raised(case: Case, **how: Any) -> SimulationError:
    with pytest.raises(SimulationError) as caught:
        case.run(**how)
    return caught.value


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_fp4_kernel_is_reported(name: str) -> None:
    fault = FAULTS[name]
    case = pv_case()
    for old, new in fault.edits:
        case = case.edited(old, new)
    error = raised(case, seed=fault.seed, track=fault.track, ordering=fault.ordering)
    assert type(error) is fault.error, str(error)
    assert re.search(fault.message, str(error)), str(error)
    lines = case.text.split("\n")
    for text, place in ((fault.at, error.place), (fault.also, error.other_place)):
        if text is not None:
            assert place is not None
            assert text.strip() in lines[place.line - 1], str(error)
            assert f"PTX line {place.line}: " in str(error)


def test_the_kernel_without_faults_is_right_under_every_seed_and_ordering() -> None:
    case = pv_case()
    for ordering in ("pipe", "isa"):
        for seed in (None, *range(10)):
            case.arrays["o"][:] = np.nan
            case.run(seed=seed, ordering=ordering)
            case.check()


def test_scale_ids_swapped_in_descriptor_and_address_give_other_numbers() -> None:
    """Nothing in the ISA forbids it, so only the result tells: the other bytes of the page are NaN."""
    case = pv_case().edited(
        "setp.ne.u32 %odd, %stage, 0;\nselp.b32 %idesc", "setp.eq.u32 %odd, %stage, 0;\nselp.b32 %idesc"
    )
    case = case.edited("shl.b32 %id, %stage, 31;", "xor.b32 %id, %stage, 1;\nshl.b32 %id, %id, 31;")
    case.run()
    assert np.isnan(case.arrays["o"]).all()


def test_a_box_past_a_tensor_names_it() -> None:
    """The map says that O has more rows than its memory."""
    case = pv_case()
    o = case.arrays["o"]
    tall = np.lib.stride_tricks.as_strided(o.view(np.uint8), (256, o.shape[1] * 4), (*o.strides[:1], 1))
    case.params[128:256] = tensor_map(tall, (16, 128), 7, bits=32)
    case = case.edited("[%mapo, {16, 0}]", "[%mapo, {16, 8}]")
    error = raised(case, track=False)
    assert type(error) is BoundsError
    assert re.search(r"box of f32 tensor \[24, 256\].*bytes past the end of tensor 'o'", str(error)), str(error)
    assert error.line == case.line("[%mapo, {16, 8}]")


def test_a_read_only_tensor_is_not_written() -> None:
    case = pv_case()
    case.arrays["o"].flags.writeable = False
    root: Any = case.arrays["o"]
    while root is not None:
        if isinstance(root, np.ndarray):
            root.flags.writeable = False
        root = root.base
    error = raised(case, track=False)
    assert type(error) is BoundsError
    assert "tensor 'o' is read-only" in str(error)


def test_too_little_shared_memory() -> None:
    error = raised(replace(pv_case(), shared_bytes=BARRIERS), track=False)
    assert type(error) is BoundsError
    assert re.search(r"outside of shared memory|the CTA has 0x400", str(error)), str(error)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tcgen05.relinquish_alloc_permit", "tcgen05.relinquish_everything"),
        ("cvt.rp.satfinite.ue8m0x2.f32 %h", "cvt.rp.satfinite.ue8m0x4.f32 %h"),
        ("max.f32 %m, %m, %x1;", "max.sat.f32 %m, %m, %x1;"),
        (".block32 [%base]", ".block64 [%base]"),
        (MMA, MMA.replace("cta_group::1", "cta_group::2")),
        ("tcgen05.cp.cta_group::1.32x128b.warpx4 [%a]", "tcgen05.cp.cta_group::1.32x128b.warpx4.b8x16.b4x16_p64 [%a]"),
    ],
)
def test_what_is_not_known_is_named_and_never_guessed(old: str, new: str) -> None:
    case = pv_case()
    case = case.edited(old, new, every=True)
    with pytest.raises(UnknownInstruction) as caught:
        case.code()
    line = case.text.count("\n", 0, case.text.index(new)) + 1
    assert caught.value.line == line
    opcode = case.text.split("\n")[line - 1].split()[0]
    assert opcode in str(caught.value)


def small(body: str, *, threads: int = 32, params: str = "", data: bytes = b"", **arrays: Any) -> Case:
    values = np.frombuffer(data, np.uint8) if data else np.zeros(0, np.uint8)
    return Case("test", program(body, params, threads), arrays, values, 1024)


def test_an_undefined_value_may_be_moved_and_packed_but_not_used() -> None:
    moved = "mov.b32 %r1, %r0;\nmov.b64 %rd0, {%r1, %t};\nmov.b64 {%r2, %r3}, %rd0;\nst.shared.b32 [%s+0], %r2;\n"
    small(moved + "add.s32 %r4, %r3, 1;").run()
    used = small(moved + "ld.shared.b32 %r5, [%s+0];\nadd.s32 %r4, %r5, 1;")
    error = raised(used)
    assert type(error) is PoisonError
    assert "%r5 of lane 0 (and 31 more)" in str(error)
    assert error.line == used.line("add.s32 %r4, %r5, 1;")


def test_shared_memory_nobody_wrote_is_undefined_until_used() -> None:
    out = aligned((32,), np.uint32)
    case = small(
        "ld.param.b64 %rd0, [p];\nmul.wide.u32 %rd1, %t, 4;\nadd.s64 %rd0, %rd0, %rd1;\nld.shared.b32 %r0, [%s+64];\n"
        "st.global.b32 [%rd0], %r0;",
        params=".param .u64 p",
        data=np.array([out.ctypes.data], np.uint64).tobytes(),
        out=out,
    )
    error = raised(case)
    assert type(error) is PoisonError
    assert error.line == case.line("st.global.b32 [%rd0], %r0;")


def test_two_warps_that_share_without_a_barrier_race() -> None:
    body = "setp.eq.u32 %p0, %t, 0;\n@%p0 st.shared.b32 [%s+0], %t;\n{}ld.shared.b32 %r0, [%s+0];"
    small(body.format("bar.sync 0;\n"), threads=64).run()
    case = small(body.format(""), threads=64)
    error = raised(case)
    assert type(error) is RaceError
    assert "warp 1 reads shared memory 0x400, which warp 0 wrote, with no wait between" in str(error)
    assert (error.line, error.other) == (case.line("ld.shared.b32"), case.line("@%p0 st.shared.b32"))


def test_a_loop_without_end_is_reported_with_a_limit() -> None:
    case = small("again:\nadd.s32 %t, %t, 1;\nbra again;")
    simulator = Simulator(limit=50)
    with pytest.raises(DeadlockError, match="no end after 50 turns"):
        simulator.run(case.code(tracked=False), (1, 1, 1), case.params, 0)


def test_no_seed_hides_an_arrival_that_is_early() -> None:
    """Clocks, not luck with the schedule: every seed reports it."""
    fault = FAULTS["P published before tcgen05.wait::st"]
    case = pv_case()
    for old, new in fault.edits:
        case = case.edited(old, new)
    for seed in (None, *range(12)):
        error = raised(case, seed=seed)
        assert isinstance(error, RaceError | PoisonError), str(error)
