"""Bulk copies of the asynchronous proxy: TMA (PTX ISA: cp.async.bulk, cp.async.bulk.tensor)."""

from __future__ import annotations

from wanfp4.simulator.grammar import op
from wanfp4.simulator.ptx import Instruction, Operand
from wanfp4.simulator.translate import Block

_DIMENSIONS = ".1d|2d|3d|4d|5d"


@op(
    f"cp.async.bulk.tensor {_DIMENSIONS} .shared::cta|shared::cluster .global .tile? "
    ".mbarrier::complete_tx::bytes .cta_group::1? .L2::cache_hint?",
    targets=0,
    effects=True,
)
def load(b: Block, ins: Instruction, dimensions: str, *parts: str) -> None:
    target, source, barrier = ins.operands[:3]
    b.emit(f"one({b.mask})")
    box, coordinates = _tensor(b, source, dimensions)
    b.emit(f"w.cta.tma_load(w, {b.lead(b.address(target))}, {box}, {coordinates}, {b.lead(b.address(barrier))})")


@op(
    f"cp.async.bulk.tensor {_DIMENSIONS} .global .shared::cta .tile? .bulk_group .L2::cache_hint?",
    targets=0,
    effects=True,
)
def store(b: Block, ins: Instruction, dimensions: str, *parts: str) -> None:
    """NVIDIA's kernels have a whole converged warp issue it, which is one store: `UTMASTG` is a uniform instruction."""
    target, source = ins.operands[:2]
    b.emit(f"w.cta.store_lanes(w, {b.mask})")
    box, coordinates = _tensor(b, target, dimensions)
    b.emit(f"w.cta.tma_store(w, {b.lead(b.address(source))}, {box}, {coordinates}, None)")


@op(
    f"cp.reduce.async.bulk.tensor {_DIMENSIONS} .global .shared::cta .add|min|max .tile? .bulk_group .L2::cache_hint?",
    targets=0,
    effects=True,
)
def reduce(b: Block, ins: Instruction, dimensions: str, how: str, *parts: str) -> None:
    target, source = ins.operands[:2]
    b.emit(f"one({b.mask})")
    box, coordinates = _tensor(b, target, dimensions)
    b.emit(f"w.cta.tma_store(w, {b.lead(b.address(source))}, {box}, {coordinates}, {how!r})")


@op(
    "cp.async.bulk .shared::cta|shared::cluster .global .mbarrier::complete_tx::bytes .L2::cache_hint?",
    targets=0,
    effects=True,
)
def copy_in(b: Block, ins: Instruction, *parts: str) -> None:
    target, source, size, barrier = ins.operands[:4]
    b.emit(f"one({b.mask})")
    b.emit(
        f"w.cta.bulk_load(w, {b.lead(b.address(target))}, {b.lead(b.address(source))}, {b.uniform(size, 'u32')}, "
        f"{b.lead(b.address(barrier))})"
    )


@op("cp.async.bulk .global .shared::cta .bulk_group .L2::cache_hint?", targets=0, effects=True)
def copy_out(b: Block, ins: Instruction, *parts: str) -> None:
    target, source, size = ins.operands[:3]
    b.emit(f"one({b.mask})")
    b.emit(f"w.cta.bulk_store(w, {b.lead(b.address(source))}, {b.lead(b.address(target))}, {b.uniform(size, 'u32')})")


@op("cp.async.bulk.commit_group", targets=0, effects=True)
def commit_group(b: Block, ins: Instruction) -> None:
    b.emit("w.cta.commit_group(w)")


@op("cp.async.bulk.wait_group .read?", targets=0, effects=True)
def wait_group(b: Block, ins: Instruction, read: str) -> None:
    b.emit(f"w.cta.wait_group(w, {b.uniform(ins.operands[0], 'u32')}, {bool(read)})")


@op(
    "prefetch .param|const? .tensormap",
    "prefetch .global? .L1|L2",
    f"cp.async.bulk.prefetch.tensor {_DIMENSIONS} .L2 .global .tile? .L2::cache_hint?",
    "cp.async.bulk.prefetch.L2.global .L2::cache_hint?",
    targets=0,
)
def prefetch(b: Block, ins: Instruction, *parts: str) -> None:
    """A hint for a cache that is not modelled."""


def _tensor(b: Block, operand: Operand, dimensions: str) -> tuple[str, str]:
    """Expressions for the tensor map's address and the list of coordinates in `[map, {x, y}]`."""
    base, _, rest = str(operand)[1:-1].partition(",")
    texts = [text.strip() for text in rest.strip().strip("{}").split(",")]
    if len(texts) != int(dimensions[0]):
        raise ValueError(f"{len(texts)} coordinates for {dimensions}")
    return b.lead(b.read(base.strip(), "u64")), f"[{', '.join(b.uniform(text, 's32') for text in texts)}]"
