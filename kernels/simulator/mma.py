"""tcgen05.mma and tcgen05.cp of one CTA: what the tensor core computes and moves.

PTX ISA, "TensorCore 5th Generation Matrix Multiply and accumulate Operations", and "tcgen05.cp". Operands are read and
results written through `cta.shared` and `cta.tensor`, which check bounds, allocation, poison and ordering.

Arithmetic. Products are exact. With `accumulation="exact"`, the default, the products of one instruction are summed in
float64 by NumPy's BLAS, the accumulator is added in float64, and the result is rounded to float32, to nearest. The sum
of the products is exact, in any order, where all partial sums fit 53 bits:

    E2M1 with UE4M3 scales       always (multiples of 2^−20 below 2^29)
    E2M1 with UE8M0 scales       if the two blocks' scale products are within a factor of 2^40
    E4M3, also with UE8M0        always (multiples of 2^−18 below 2^23, times one scale for each element of D)
    E5M2, also times E4M3        unless values span nearly its whole range (69 and 55 bits at most)

For f16, bf16 and tf32, and where the accumulator is added, float64 sums may round at their 53rd bit, in the order that
BLAS takes: usually far below the last bit of the float32 result, but where large terms cancel what is left is as
uncertain as 2^−52 of the largest (2^100 + 1 − 2^100 in BF16 may give 0), and a sum close to a tie may be rounded the
other way. BLAS must be held to one thread (OPENBLAS_NUM_THREADS=1), or it costs more than it saves.

`accumulation="truncated"` follows the published models of NVIDIA's tensor cores: P. Xie et al., "MMA-Sim: Bit-Accurate
Reference Model of Tensor Cores and Matrix Cores", arXiv 2511.10909 (2025), and its code (microsoft/MMA-Sim), which
agree with hardware bit by bit where they were checked. On Blackwell all products of an instruction and the accumulator
are cut (toward zero) at 25 fraction bits below the largest exponent among them, added, and the sum is truncated to
float32. For FP4 the sums of 16 code products are exact, multiplied by the significands of their two scales, and cut at
35 fraction bits below the largest sum of the scales' exponents. It takes some milliseconds per instruction.

Tensor memory. D[m, n] is lane m, column n (M 128, "Layout D"). A in tensor memory is lane = row and eight columns of 32
bits, elements in order, lowest bits first: two for f16, one for tf32, four for 8-bit, eight for 4-bit types. For f16
that is what NVIDIA's FMHA relies on; for 4-bit types the ISA says "two 4-bit elements in an 8-bit container", and two
public FP4 attention kernels whose errors were measured on B200 and GB200 give the same figures with this layout.
Nothing tells whether the first element of a byte is the low one: only that it is the same one in A and B.

Scale factors. Row r's are in lane r % 32, column r // 32 from the base, replicated in all four lane quarters ("need to
be duplicated to all 32 lane partitions"); the scale id is the first byte of the 32-bit word that is used. UE4M3 ignores
the sign bit. A NaN scale makes its rows or columns NaN.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from wanfp4.simulator.conversions import E2M1, E4M3, E5M2, UE4M3, UE8M0
from wanfp4.simulator.descriptors import Addresses, Gather, InstructionDescriptor, SharedDescriptor
from wanfp4.simulator.findings import DescriptorError, ProtocolError, UnknownInstruction
from wanfp4.simulator.truncation import truncated

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Bytes = NDArray[np.uint8]
Words = NDArray[np.uint32]
Index = NDArray[Any] | slice


class Shared(Protocol):
    """What is used of the CTA's shared memory (memory.py)."""

    end: int  # one past its last byte

    def take(self, addresses: Addresses) -> Bytes: ...


class Tensor(Protocol):
    """What is used of the CTA's tensor memory (memory.py)."""

    def take(self, lanes: Index, columns: Index) -> Words: ...
    def put(self, lanes: Index, columns: Index, values: Words) -> None: ...


class Cta(Protocol):
    """What is used of a CTA (machine.py)."""

    isa: bool  # only what the ISA promises; else also what NVIDIA's kernels rely on

    @property
    def shared(self) -> Shared: ...
    @property
    def tensor(self) -> Tensor: ...


_ALL_LANES = slice(0, 128)
_NAN = np.array(0x7FFFFFFF, np.uint32).view(np.float32)  # what the tensor core gives for NaN (MMA-Sim)
# Values of a byte's two 4-bit codes, low nibble first, as one 16-byte item: a quarter of the time of a [256, 2] table.
_PAIRS = np.stack((np.tile(E2M1, 16), np.repeat(E2M1, 16)), 1).astype(np.float64).view(np.complex128).reshape(256)
_BYTE_VALUES = {"e4m3": E4M3.astype(np.float64), "e5m2": E5M2.astype(np.float64)}
_SCALES = {"ue4m3": UE4M3.astype(np.float64), "ue8m0": UE8M0.astype(np.float64)}
_SIZES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}


def decode(raw: Bytes, element: str) -> F64:
    """Values [rows, K] of the raw bytes [rows, 32] of an operand, the first element in the lowest bits."""
    if element == "e2m1":
        return _PAIRS.take(raw).view(np.float64)
    if element in _BYTE_VALUES:
        return _BYTE_VALUES[element].take(raw)
    if element == "f16":
        return raw.view(np.float16).astype(np.float64)
    if element == "bf16":
        return (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return (raw.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)  # tf32 is truncated


def _shared_operand(cta: Cta, side: str, value: int, rows: int, k: int, element: str, mn_major: bool) -> F64:
    descriptor = SharedDescriptor.parse(value)
    if mn_major:
        gather = descriptor.mn_major(rows, k, _SIZES[element], strict=cta.isa)
    else:
        gather = descriptor.k_major(rows, 32, strict=cta.isa)
    _inside(cta, descriptor, gather, f"{side}, {rows} rows,")
    return decode(cta.shared.take(gather.addresses).reshape(rows, 32), element)


def _inside(cta: Cta, descriptor: SharedDescriptor, gather: Gather, what: str) -> None:
    if gather.end > cta.shared.end:
        raise DescriptorError(
            f"{what} reaches up to {gather.end - 1:#x}, shared memory ends at {cta.shared.end - 1:#x}: {descriptor}"
        )


def _column(address: int, what: str) -> int:
    """The column of a tensor-memory address whose lane must be 0 (M 128 uses all lanes)."""
    if address >> 16:
        raise ProtocolError(f"{what} at tensor memory {address:#x}: the lane must be 0")
    return address


def _scale_column(address: int, scale_id: int, what: str) -> int:
    """The column. CuTe repeats the scale id in bits 30 and 31 of the address; another id there is a contradiction."""
    if address >> 30 not in (0, scale_id):
        raise DescriptorError(f"scales of {what} at {address:#x}: id {address >> 30}, the descriptor says {scale_id}")
    return _column(address & 0x3FFFFFFF, f"scales of {what}")


def _scales(cta: Cta, what: str, column: int, rows: int, first: int, count: int, kind: str) -> F64:
    """[rows, count] scale factors from the bytes first, … of the words."""
    whole, rest = divmod(rows, 32)
    parts = []
    if whole:
        words = cta.tensor.take(_ALL_LANES, slice(column, column + whole))
        parts.append(words.reshape(4, 32, whole).transpose(0, 2, 1).reshape(4, 32 * whole))
    if rest:
        lanes = (np.arange(rest) + 32 * np.arange(4)[:, None]).reshape(-1, 1)
        parts.append(cta.tensor.take(lanes, np.array([[column + whole]])).reshape(4, rest))
    words = np.ascontiguousarray(np.concatenate(parts, 1) if len(parts) > 1 else parts[0])
    used = words.view(np.uint8).reshape(4, rows, 4)[:, :, first : first + count]
    same = used == used[:1]
    if np.count_nonzero(same) != same.size:
        quarter, row, byte = (int(i) for i in np.argwhere(~same)[0])
        raise ProtocolError(
            f"scales of {what}, row {row}, byte {first + byte}: {used[0, row, byte]:#04x} in lane {row % 32}, "
            f"{used[quarter, row, byte]:#04x} in lane {row % 32 + 32 * quarter} of column {column + row // 32}; "
            "all four lane quarters must hold the same"
        )
    values: F64 = _SCALES[kind].take(used[0])
    return values


def mma(
    cta: Cta,
    kind: str,
    d: int,
    a: int,
    a_in_tmem: bool,
    b: int,
    idesc: int,
    accumulate: bool,
    keep_lanes: NDArray[np.bool_] | None = None,
    sfa: int | None = None,
    sfb: int | None = None,
    block: int | None = None,
    accumulation: str = "exact",
) -> None:
    """tcgen05.mma.cta_group::1.kind::`kind`: D = A·B, or D = A·B + D with `accumulate`.

    `d`, `sfa`, `sfb` and, with `a_in_tmem`, `a` are tensor-memory addresses, `b` and otherwise `a` shared-memory
    descriptors. `keep_lanes` (disable-output-lane) are 128 bools: true lanes of D are left alone. `block` is 16 or 32
    for the block-scaled kinds.

    Raises DescriptorError, ProtocolError, and what the memories raise.
    """
    inst = InstructionDescriptor.parse(kind, idesc, block)
    column = _column(d, "D")
    reads = []
    if a_in_tmem:
        if inst.a_mn_major:
            raise DescriptorError(f"A in tensor memory cannot be transposed (bit 15): {inst}")
        start = _column(a, "A")
        reads.append(("A", start, 8))
        left = decode(cta.tensor.take(_ALL_LANES, slice(start, start + 8)).view(np.uint8), inst.a_type)
    else:
        left = _shared_operand(cta, "A", a, inst.m, inst.k, inst.a_type, inst.a_mn_major)
    right = _shared_operand(cta, "B", b, inst.n, inst.k, inst.b_type, inst.b_mn_major)
    if inst.negate_a != inst.negate_b:
        left = -left
    scale_a = scale_b = None
    if inst.block is not None and inst.scale_type is not None:
        if sfa is None or sfb is None:
            raise DescriptorError(f"no addresses of scale factors: {inst}")
        count = inst.k // inst.block
        at_a = _scale_column(sfa, inst.a_scale_id, "A")
        at_b = _scale_column(sfb, inst.b_scale_id, "B")
        reads += [("the scales of A", at_a, inst.m // 32), ("the scales of B", at_b, -(-inst.n // 32))]
        scale_a = _scales(cta, "A", at_a, inst.m, inst.a_scale_id, count, inst.scale_type)
        scale_b = _scales(cta, "B", at_b, inst.n, inst.b_scale_id, count, inst.scale_type)
    for what, first, columns in reads:
        if first < column + inst.n and column < first + columns:
            raise ProtocolError(f"D, columns {column}-{column + inst.n - 1}, overlaps {what}, from column {first} on")
    lanes: Index = _ALL_LANES
    if keep_lanes is not None and keep_lanes.any():
        lanes = np.flatnonzero(~keep_lanes)[:, None]
        if not lanes.size:
            return
        left = left[lanes[:, 0]]
        scale_a = None if scale_a is None else scale_a[lanes[:, 0]]
    columns_d = slice(column, column + inst.n)
    before = cta.tensor.take(lanes, columns_d).view(np.float32) if accumulate else None
    if accumulation == "truncated":
        result = truncated(left, right, before, inst, scale_a, scale_b)
    elif accumulation == "exact":
        result = _exact(left, right, before, scale_a, scale_b)
    else:
        raise KeyError(accumulation)
    cta.tensor.put(lanes, columns_d, result.view(np.uint32))


@lru_cache(maxsize=64)
def _scratch(rows: int, columns: int) -> tuple[F64, F32]:
    """Buffers for a product and its rounding: fresh ones of this size cost more than the arithmetic (page faults)."""
    return np.empty((rows, columns)), np.empty((rows, columns), np.float32)


def _exact(left: F64, right: F64, before: F32 | None, scale_a: F64 | None, scale_b: F64 | None) -> F32:
    if scale_a is not None and scale_b is not None:
        left, right = _scaled(left, scale_a), _scaled(right, scale_b)
    total, result = _scratch(len(left), len(right))
    np.matmul(left, right.T, out=total)
    if before is not None:
        total += before
    result[...] = total
    number = result == result
    if np.count_nonzero(number) != number.size:
        result[~number] = _NAN
    return result


def _scaled(values: F64, scale: F64) -> F64:
    rows, count = scale.shape
    product: F64 = (values.reshape(rows, count, -1) * scale[:, :, None]).reshape(rows, -1)
    return product


def copy_scales(cta: Cta, taddr: int, desc: int, shape: str = "32x128b.warpx4") -> None:
    """tcgen05.cp.cta_group::1.`shape`: rows of shared memory, as the descriptor lays them out K-major, to lanes.

    32x128b.warpx4 takes 32 rows of 16 bytes to four columns of lanes 0–31, and again to each other quarter (as NVIDIA's
    block-scaled GEMMs rely on). No other shape is modelled.
    """
    if shape != "32x128b.warpx4":
        raise UnknownInstruction(f"tcgen05.cp.{shape} is not modelled")
    descriptor = SharedDescriptor.parse(desc)
    gather = descriptor.k_major(32, 16, strict=cta.isa)
    _inside(cta, descriptor, gather, f"tcgen05.cp.{shape}")
    words = cta.shared.take(gather.addresses).view(np.uint32)
    column = _column(taddr & 0x3FFFFFFF, "destination of tcgen05.cp")
    cta.tensor.put(_ALL_LANES, slice(column, column + 4), np.tile(words, (4, 1)))
