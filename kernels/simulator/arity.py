"""How many operands an opcode has: the longest entry that its parts begin with counts, one more with a cache hint."""

from __future__ import annotations

from wanfp4.simulator.findings import UnknownInstruction
from wanfp4.simulator.ptx import Instruction

_COUNTS = {
    (0, 0): "ret exit fence membar griddepcontrol cp.async.bulk.commit_group tcgen05.relinquish_alloc_permit "
    "tcgen05.wait::ld tcgen05.wait::st tcgen05.fence::before_thread_sync tcgen05.fence::after_thread_sync",
    (
        1,
        1,
    ): "bra activemask nanosleep setmaxnreg bar.warp mbarrier.inval cp.async.bulk.wait_group tcgen05.commit prefetch "
    "prefetchu cp.async.bulk.prefetch.tensor",
    (1, 2): "bar.sync barrier.sync barrier.cta.sync bar.cta.sync createpolicy",
    (1, 3): "mbarrier.arrive",
    (2, 2): "mov neg abs not cnot rcp sqrt ex2 lg2 rsqrt sin cos tanh testp cvta popc clz brev bfind ld st red elect "
    "bar.arrive barrier.arrive barrier.cta.arrive bar.cta.arrive mbarrier.init mbarrier.expect_tx tcgen05.alloc "
    "tcgen05.dealloc tcgen05.ld tcgen05.st tcgen05.cp cp.reduce.async.bulk.tensor cp.async.bulk.prefetch.L2",
    (2, 3): "cvt mbarrier.arrive.expect_tx cp.async.bulk.tensor",
    (3, 3): "add sub mul mul24 div rem and or xor shl shr copysign vote redux atom mapa",
    (3, 4): "min max setp mbarrier.try_wait mbarrier.test_wait cp.async.bulk",
    (4, 4): "mad fma selp prmt shf bfe sad dp4a dp2a",
    (5, 5): "bfi lop3 shfl",
    (5, 7): "tcgen05.mma",
}
BY_NAME = {name: counts for counts, names in _COUNTS.items() for name in names.split()}


def check(ins: Instruction) -> None:
    """Raises UnknownInstruction for a number of operands that the opcode does not have."""
    parts = ins.opcode.split(".")
    for length in range(len(parts), 0, -1):
        counts = BY_NAME.get(".".join(parts[:length]))
        if counts is None:
            continue
        low, high = counts
        if "L2::cache_hint" in parts:
            high += 1
        found = len(ins.operands)
        if not low <= found <= high:
            wanted = str(low) if low == high else f"{low} to {high}"
            raise UnknownInstruction(f"{ins.opcode} has {wanted} operands, not {found}: {ins}", line=ins.line)
        return
