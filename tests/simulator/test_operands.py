"""Operands and options that an instruction refuses: generic addresses, who may issue, orders, counts of lanes, sums."""

from __future__ import annotations

import numpy as np
import pytest
import tensor_core
from programs import aligned, kernel, run
from tensors import STORES, Tensor

from wanfp4.simulator import BoundsError, ProtocolError, SimulationError, Simulator, UnknownInstruction
from wanfp4.simulator.errors import HostError

TOP = ".shared .align 128 .b8 s[1024];\n"
SETUP = """
setp.eq.u32 %p0, %thread, 0;
mov.b32 %r0, s; cvt.u64.u32 %d0, %r0; cvta.shared.u64 %d1, %d0;
or.b64 %d2, %d1, 0x0000000100000000; or.b64 %d3, %d0, 0x00007F0000000000;
"""


def fails(
    error: type[SimulationError], match: str, body: str, params: str = "", *args: object, **options: object
) -> None:
    with pytest.raises(error, match=match):
        run(kernel(f"{SETUP}{body}\nret;", params, top=TOP), *args, **options)


GENERIC = [
    "@%p0 mbarrier.init.b64 [{}], 1;",
    "@%p0 mbarrier.inval.b64 [{}];",
    "mbarrier.arrive.b64 _, [{}];",
    "mbarrier.arrive.b64 _, [{}+8];",
    "mbarrier.arrive.expect_tx.b64 _, [{}], 16;",
    "@%p0 mbarrier.expect_tx.relaxed.cta.b64 [{}], 16;",
    "mbarrier.try_wait.parity.b64 %p1, [{}], 0;",
    "mbarrier.test_wait.parity.b64 %p1, [{}], 0;",
    "tcgen05.alloc.cta_group::1.sync.aligned.b32 [{}], 32;",
    "@%p0 tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [{}];",
]


@pytest.mark.parametrize("opcode", GENERIC)
@pytest.mark.parametrize("address", ["%r0", "%d0", "%d2", "%d3"])
def test_generic_addresses_lie_in_the_window(opcode, address):
    """An address in the state space, one beyond the window, one of global memory with the same low half."""
    fails(BoundsError, "generic address 0x[0-9a-f]+ is not one of shared memory", opcode.format(address))


NAMED = [
    "@%p0 mbarrier.init.shared::cta.b64 [{}], 1;",
    "@%p0 mbarrier.inval.shared.b64 [{}];",
    "mbarrier.arrive.shared::cta.b64 _, [{}];",
    "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [{}], 16;",
    "@%p0 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [{}], 16;",
    "mbarrier.try_wait.parity.shared::cta.b64 %p1, [{}], 0;",
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [{}], 32;",
    "@%p0 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{}];",
    "ld.shared.b32 %r1, [{}];",
    "st.shared.b32 [{}], %r0;",
    "atom.shared.add.u32 %r1, [{}], 1;",
    "red.shared.add.u32 [{}], 1;",
    "@%p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [{}], [%a], 16, [%r0];",
    "@%p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r0], [%a], 16, [{}];",
    "@%p0 cp.async.bulk.global.shared::cta.bulk_group [%a], [{}], 16;",
]


@pytest.mark.parametrize("opcode", NAMED)
@pytest.mark.parametrize("address", ["%d1", "%d2", "%d3"])
def test_addresses_of_the_state_space_have_32_bits(opcode, address):
    match = r"outside of shared memory|the CTA has 0x400\.\."
    fails(BoundsError, match, opcode.format(address), "a", aligned(np.zeros(64, np.uint8)))


@pytest.mark.parametrize("opcode", ["ld.b32 %r1, [{}];", "st.b32 [{}], %r0;", "atom.add.u32 %r1, [{}], 1;"])
def test_the_window_has_32_bits(opcode):
    fails(BoundsError, "at global 0x7d00000100000400", opcode.format("%d2"))


ORDERED = [
    ("st.release.cta{0}.b32 [{1}], %r0;", "release"),
    ("ld.acquire.gpu{0}.b32 %r1, [{1}];", "acquire"),
    ("atom.acquire.cta{0}.add.u32 %r1, [{1}], 1;", "acquire"),
    ("atom.release.cta{0}.exch.b32 %r1, [{1}], 1;", "release"),
    ("atom.acq_rel.sys{0}.or.b32 %r1, [{1}], 1;", "acq_rel"),
    ("red.release.cluster{0}.add.u32 [{1}], 1;", "release"),
]


@pytest.mark.parametrize(("opcode", "order"), ORDERED)
def test_flags_in_shared_memory_are_refused_where_accesses_are_judged(opcode, order):
    start = "setp.lt.u32 %p2, %thread, 1;\n@%p2 st.shared.b32 [s], 0;\n"
    a = aligned(np.zeros(64, np.uint32))
    for space, address in ((".shared", "%r0"), (".shared::cta", "%r0"), ("", "%d1")):
        use = start + f"@%p0 {opcode.format(space, address)}"
        fails(UnknownInstruction, rf"\.{order} on shared memory is not modelled", use, track=True)
        run(kernel(f"{SETUP}{use}\nret;", top=TOP))
    for space in (".global", ""):
        run(kernel(f"{SETUP}@%p0 {opcode.format(space, '%a')}\nret;", "a", top=TOP), a, track=True)
    for way in ("relaxed.cta", "volatile"):
        for text in (f"ld.{way}.shared.b32 %r1, [s];", f"st.{way}.shared.b32 [s], %r0;"):
            run(kernel(f"{SETUP}{start}@%p0 {text}\nret;", top=TOP), track=True)


@pytest.mark.parametrize(
    ("lanes", "pipe", "isa"), [(1, True, True), (7, False, False), (31, False, False), (32, True, False)]
)
@pytest.mark.parametrize("rank", [1, 2, 5])
def test_who_may_issue_a_tensor_store(rank, lanes, pipe, isa):
    rng = np.random.default_rng(rank)
    tensor = Tensor(rng, "u8", "none", rank)
    text = STORES[rank].replace("setp.lt.u32 %p0, %thread, 32;", f"setp.lt.u32 %p0, %thread, {lanes};")
    place = np.zeros(5, np.int32)
    image = rng.integers(0, 256, 1 << 15, np.uint8)
    for ordering, right in (("pipe", pipe), ("isa", isa)):
        arrays = aligned(tensor.data), aligned(place), aligned(image)
        args = (arrays[0], lambda found: tensor.map_at(found[0]), *arrays[1:], 0)
        if right:
            run(text, *args, ordering=ordering, track=True)
        else:
            with pytest.raises(ProtocolError, match=f"cp.async.bulk.tensor is issued by {lanes} lanes"):
                run(text, *args, ordering=ordering)


def test_each_lane_arrives_with_its_count():
    """PTX ISA, mbarrier.arrive: every thread that runs it arrives on, by its own count."""
    init = "@%p0 mbarrier.init.shared::cta.b64 [s], {};\n@%p0 mbarrier.init.shared::cta.b64 [s+8], {};\n"
    waits = "mbarrier.test_wait.parity.shared::cta.b64 %p1, [s], 0;\n"
    out = "selp.b32 %r9, 1, 0, %p1;\nst.global.b32 [%a], %r9;\n"
    a = np.zeros(1, np.uint32)
    for count, want in ((528, 1), (529, 0)):
        body = init.format(count, 1) + "add.u32 %r1, %thread, 1;\nmbarrier.arrive.shared::cta.b64 _, [s], %r1;\n"
        run(kernel(f"{SETUP}{body}{waits}{out}ret;", "a", top=TOP), a)
        assert a[0] == want
    # Two barriers: odd lanes at the second; what the even ones bring is 1 + 3 + … + 31.
    body = init.format(256, 272) + "add.u32 %r1, %thread, 1;\nand.b32 %r2, %thread, 1;\nshl.b32 %r2, %r2, 3;\n"
    body += "add.u32 %r3, %r0, %r2;\nmbarrier.arrive.shared::cta.b64 _, [%r3], %r1;\n"
    run(kernel(f"{SETUP}{body}{waits}{out}ret;", "a", top=TOP), a)
    assert a[0] == 1


@pytest.mark.parametrize("element", ["bf16", "e2m1"])
def test_truncated_sums_through_ptx(element):
    """The option reaches every MMA: sums are cut, and close to those that are rounded."""
    kinds = {"bf16": ("f16", "bf16"), "e2m1": ("mxf4nvf4", "e2m1", ".block_scale.block16", 16, "ue4m3")}
    program = tensor_core.product(tensor_core.Product(*kinds[element]))
    found = {}
    for accumulation in ("exact", "truncated"):
        args = [aligned(arg) for arg in program.args]
        run(program.text, *args, accumulation=accumulation)
        found[accumulation] = args[-1]
        np.testing.assert_allclose(args[-1], found["exact"], rtol=1e-5, atol=1e-4)
    if element == "bf16":  # FP4 products with 35 bits kept come out the same
        assert (found["exact"] != found["truncated"]).any()
        sizes = {name: np.abs(values).sum(dtype=np.float64) for name, values in found.items()}
        assert sizes["truncated"] < sizes["exact"]  # cut toward zero
    with pytest.raises(HostError, match="accumulation is 'rounded'; it can be 'exact' or 'truncated'"):
        Simulator(accumulation="rounded")
