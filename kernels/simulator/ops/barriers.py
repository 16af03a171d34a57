"""Barriers of the CTA, mbarriers and fences (PTX ISA: parallel synchronization and communication)."""

from __future__ import annotations

import numpy as np

from wanfp4.simulator.grammar import op
from wanfp4.simulator.ops.places import shared
from wanfp4.simulator.ptx import Instruction
from wanfp4.simulator.translate import Block

_OWN, _SHARED = ".shared|shared::cta?", ".shared|shared::cta|shared::cluster?"
_SCOPE = ".cta|cluster?"


@op("bar.sync", "barrier.sync .aligned?", "barrier.cta.sync .aligned?", "bar.cta.sync", targets=0, effects=True)
def bar_sync(b: Block, ins: Instruction, aligned: str = "") -> None:
    _converged(b, ins)
    threads = b.uniform(ins.operands[1], "u32") if len(ins.operands) > 1 else "None"
    b.emit(f"w.cta.bar(w, {b.uniform(ins.operands[0], 'u32')}, {threads}, True)")


@op("bar.arrive", "bar.cta.arrive", "barrier.arrive .aligned?", "barrier.cta.arrive .aligned?", targets=0, effects=True)
def bar_arrive(b: Block, ins: Instruction, aligned: str = "") -> None:
    _converged(b, ins)
    b.emit(f"w.cta.bar(w, {b.uniform(ins.operands[0], 'u32')}, {b.uniform(ins.operands[1], 'u32')}, False)")


def _converged(b: Block, ins: Instruction) -> None:
    """PTX ISA, bar: `bar` is `barrier.aligned`. Only .aligned promises that all lanes of a warp run the same one."""
    aligned = ins.opcode.startswith("bar.") or ins.opcode.endswith(".aligned")
    b.emit(f"whole({b.mask})" if aligned else f"w.cta.whole_barrier(w, {b.mask})")


@op(f"mbarrier.init {_OWN} .b64", targets=0, effects=True)
def mbarrier_init(b: Block, ins: Instruction, space: str) -> None:
    b.emit(f"one({b.mask})")
    b.emit(f"w.cta.mbarrier_init(w, {shared(b, ins.operands[0], space)}, {b.uniform(ins.operands[1], 'u32')})")


@op(f"mbarrier.inval {_OWN} .b64", targets=0, effects=True)
def mbarrier_inval(b: Block, ins: Instruction, space: str) -> None:
    b.emit(f"one({b.mask})")
    b.emit(f"w.cta.mbarrier_inval(w, {shared(b, ins.operands[0], space)})")


@op(f"mbarrier.arrive .expect_tx? .release|relaxed? {_SCOPE} {_SHARED} .b64", uses=False, effects=True)
def mbarrier_arrive(b: Block, ins: Instruction, expect: str, *parts: str) -> None:
    """Every active lane arrives, each with its count. The state that it returns is not modelled: it stays undefined."""
    operands = ins.operands if not str(ins.operands[0]).startswith("[") else ("_", *ins.operands)
    state, address, *rest = operands
    b.use(address, *rest)
    b.undefine(state)
    active = f"[{b.mask}]" if b.mask else ""
    b.emit(f"a = {b.address(address)}{active}.tolist()")
    if not any(parts[-1:]):
        b.emit("a = [w.cta.shared_address(w, x) for x in a]")
    amount = b.read(rest[0], "u32") if rest else b.code.constant(1, np.uint32)
    b.emit(f"n = {amount}{active}.tolist()")
    counts, many = ("1, y", "len(n), sum(n)") if expect else ("y, 0", "sum(n), 0")
    b.emit(f"if a.count(a[0]) == len(a): w.cta.arrive(w, a[0], {many})")
    b.emit("else:")
    b.emit(f" for x, y in zip(a, n): w.cta.arrive(w, x, {counts})")


@op(f"mbarrier.expect_tx .relaxed? {_SCOPE} {_SHARED} .b64", targets=0, effects=True)
def mbarrier_expect(b: Block, ins: Instruction, *parts: str) -> None:
    b.emit(f"one({b.mask})")
    b.emit(f"w.cta.expect_tx(w, {shared(b, ins.operands[0], parts[-1])}, {b.uniform(ins.operands[1], 'u32')})")


@op(
    f"mbarrier.try_wait .parity .acquire|relaxed? {_SCOPE} {_OWN} .b64",
    f"mbarrier.test_wait .parity .acquire|relaxed? {_SCOPE} {_OWN} .b64",
    effects=True,
)
def mbarrier_wait(b: Block, ins: Instruction, *parts: str) -> None:
    """In a loop on itself it waits; elsewhere it looks, and "no" is an answer."""
    address, parity = shared(b, ins.operands[1], parts[-1]), b.uniform(ins.operands[2], "u32")
    b.emit(f"p = w.cta.try_wait(w, {address}, {parity}, {_loops(b)})")
    b.write(ins.operands[0], "np.full(32, p)")


def _loops(b: Block) -> bool:
    """Whether a branch right after the wait, or the one after that, goes back to the block of the wait."""
    for block in b.kernel.blocks[b.index + 1 : b.index + 3]:
        last = block[0]
        if last.opcode.startswith("bra") and b.kernel.targets.get(str(last.operands[0])) == b.index:
            return True
    return False


@op("fence.mbarrier_init.release.cluster", targets=0, effects=True)
def fence_mbarrier_init(b: Block, ins: Instruction) -> None:
    b.emit("w.cta.fence_mbarrier_init(w)")


@op("fence.proxy.async .shared::cta|shared::cluster|global?", targets=0, effects=True)
def fence_proxy(b: Block, ins: Instruction, space: str) -> None:
    if space != "global":
        b.emit("w.cta.fence_proxy(w)")


@op("fence .sc|acq_rel|acquire|release? .cta|cluster|gpu|sys", "membar .cta|gl|sys", targets=0)
def fence(b: Block, ins: Instruction, *parts: str) -> None:
    """Orders memory operations of one thread; only barriers carry that order to others here."""
