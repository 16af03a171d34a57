"""Single PTX instructions, and short groups of them, as functions of CuTe DSL values.

Addresses of shared and tensor memory are Int32, of global memory Int64. Section names are those of the PTX ISA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Int64, Uint32, Uint64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

_CONSTRAINTS = {Float32: "f", Int32: "r", Uint32: "r", Int64: "l", Uint64: "l"}


def _type(kind: Any) -> Any:
    return {Float32: T.f32, Int32: T.i32, Uint32: T.i32, Int64: T.i64, Uint64: T.i64}[kind]()


def asm(
    text: str,
    inputs: Sequence[Any] = (),
    results: Sequence[Any] = (),
    *,
    volatile: bool = True,
    loc: Any = None,
    ip: Any = None,
) -> Any:
    """Inline PTX with operands $0, $1, …: results first, then inputs. Returns one value, a list of them, or None."""
    outs = [f"={_CONSTRAINTS[kind]}" for kind in results]
    constraints = ",".join(outs + [_CONSTRAINTS[type(x)] for x in inputs])
    kinds = [_type(kind) for kind in results]
    result = kinds[0] if len(kinds) == 1 else llvm.StructType.get_literal(kinds) if kinds else None
    values = [x.ir_value(loc=loc, ip=ip) for x in inputs]
    out = llvm.inline_asm(
        result,
        values,
        text,
        constraints,
        has_side_effects=volatile,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    if not results:
        return None
    if len(results) == 1:
        return results[0](out)
    return [kind(llvm.extractvalue(_type(kind), out, [i], loc=loc, ip=ip)) for i, kind in enumerate(results)]


# Barriers


@dsl_user_op
def barrier_init(barrier: Int32, count: int, *, loc: Any = None, ip: Any = None) -> None:
    """mbarrier.init"""
    asm(f"mbarrier.init.shared::cta.b64 [$0], {count};", [barrier], loc=loc, ip=ip)


@dsl_user_op
def barrier_init_fence(*, loc: Any = None, ip: Any = None) -> None:
    """Makes initialised barriers known to the asynchronous proxy."""
    asm("fence.mbarrier_init.release.cluster;", loc=loc, ip=ip)


@dsl_user_op
def wait(barrier: Int32, parity: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Until the phase of this parity has completed; on a fresh barrier parity 1 has."""
    asm(
        "{\n.reg .pred P1;\nLAB_WAIT:\nmbarrier.try_wait.parity.shared::cta.b64 P1, [$0], $1, 10000000;\n"
        "@P1 bra DONE;\nbra LAB_WAIT;\nDONE:\n}",
        [barrier, parity],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def arrive(barrier: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """One arrival of this thread, with release semantics."""
    asm("mbarrier.arrive.release.cta.shared::cta.b64 _, [$0];", [barrier], loc=loc, ip=ip)


@dsl_user_op
def expect(barrier: Int32, size: int, *, loc: Any = None, ip: Any = None) -> None:
    """Arrive, and let the phase wait for so many bytes of bulk copies."""
    asm(f"mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [$0], {size};", [barrier], loc=loc, ip=ip)


@dsl_user_op
def fence_async(*, loc: Any = None, ip: Any = None) -> None:
    """Before the asynchronous proxy (bulk copies, tcgen05.cp) touches what this thread stored to shared memory."""
    asm("fence.proxy.async.shared::cta;", loc=loc, ip=ip)


# Memory


@dsl_user_op
def bulk_load(target: Int32, source: Int64, size: int, barrier: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """cp.async.bulk: `size` bytes from global to shared memory, 16-byte aligned, counted by an mbarrier."""
    asm(
        f"cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [$0], [$1], {size}, [$2];",
        [target, source, barrier],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def load_shared(address: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """A 32-bit word."""
    return asm("ld.shared.b32 $0, [$1];", [address], [Int32], loc=loc, ip=ip)


@dsl_user_op
def store_shared(address: Int32, value: Any, *, loc: Any = None, ip: Any = None) -> None:
    """A 32-bit word."""
    asm("st.shared.b32 [$0], $1;", [address, value], loc=loc, ip=ip)


@dsl_user_op
def load_global(address: Int64, *, loc: Any = None, ip: Any = None) -> Int32:
    """A 32-bit word."""
    return asm("ld.global.b32 $0, [$1];", [address], [Int32], loc=loc, ip=ip)


@dsl_user_op
def load_global4(address: Int64, *, loc: Any = None, ip: Any = None) -> list[Float32]:
    """Four floats at a 16-byte aligned address."""
    return asm("ld.global.v4.f32 {$0, $1, $2, $3}, [$4];", [address], [Float32] * 4, loc=loc, ip=ip)


@dsl_user_op
def store_global4(address: Int64, values: Sequence[Any], *, loc: Any = None, ip: Any = None) -> None:
    """Four 32-bit words to a 16-byte aligned address."""
    asm("st.global.v4.b32 [$0], {$1, $2, $3, $4};", [address, *values], loc=loc, ip=ip)


@dsl_user_op
def store_global(address: Int64, value: Float32, *, loc: Any = None, ip: Any = None) -> None:
    """A float."""
    asm("st.global.f32 [$0], $1;", [address, value], loc=loc, ip=ip)


# Tensor memory (tcgen05). Loads wait for their registers in the same statement: the compiler moves uses of asm results
# freely, and would move them above a wait of its own.


@dsl_user_op
def tmem_load(address: Int32, columns: int, *, loc: Any = None, ip: Any = None) -> list[Float32]:
    """`columns` (a multiple of 32) 32-bit columns of this warp's lanes, complete."""
    parts = []
    for first in range(0, columns, 32):
        names = ", ".join(f"${i}" for i in range(first, first + 32))
        offset = f"+{first}" if first else ""
        parts.append(f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{names}}}, [${columns}{offset}];")
    text = "\n".join([*parts, "tcgen05.wait::ld.sync.aligned;"])
    return asm(text, [address], [Float32] * columns, loc=loc, ip=ip)


@dsl_user_op
def tmem_store(address: Int32, values: Sequence[Any], *, loc: Any = None, ip: Any = None) -> None:
    """So many 32-bit columns of this warp's lanes (a power of two); not complete before `tmem_wait_store`."""
    count = len(values)
    names = ", ".join(f"${i + 1}" for i in range(count))
    asm(f"tcgen05.st.sync.aligned.32x32b.x{count}.b32 [$0], {{{names}}};", [address, *values], loc=loc, ip=ip)


@dsl_user_op
def tmem_wait_store(*, loc: Any = None, ip: Any = None) -> None:
    """tcgen05.wait::st"""
    asm("tcgen05.wait::st.sync.aligned;", loc=loc, ip=ip)


@dsl_user_op
def fence_before(*, loc: Any = None, ip: Any = None) -> None:
    """Orders this thread's tcgen05 operations before the synchronisation that follows."""
    asm("tcgen05.fence::before_thread_sync;", loc=loc, ip=ip)


@dsl_user_op
def fence_after(*, loc: Any = None, ip: Any = None) -> None:
    """Orders what follows of this thread's tcgen05 operations after the synchronisation before."""
    asm("tcgen05.fence::after_thread_sync;", loc=loc, ip=ip)


@dsl_user_op
def tmem_alloc(target: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """All 512 columns, by a whole warp; the address goes to shared memory."""
    asm("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [$0], 512;", [target], loc=loc, ip=ip)
    asm("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;", loc=loc, ip=ip)


@dsl_user_op
def tmem_dealloc(address: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """By the warp that allocated, when nobody uses it any more."""
    asm("tcgen05.dealloc.cta_group::1.sync.aligned.b32 $0, 512;", [address], loc=loc, ip=ip)


@dsl_user_op
def commit(barrier: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """One arrival when all earlier tcgen05.mma and cp of this thread are done."""
    asm("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [$0];", [barrier], loc=loc, ip=ip)


@dsl_user_op
def copy_page(target: Int32, page: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """A 512-byte scale page into four columns of all four lane quarters."""
    asm("tcgen05.cp.cta_group::1.32x128b.warpx4 [$0], $1;", [target, page], loc=loc, ip=ip)


@dsl_user_op
def mma_scores(
    d: Int32,
    q: Int64,
    k: Int64,
    idesc: int,
    sfa: Int32,
    sfb: Int32,
    accumulate: bool,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """S (+)= Q Kᵀ over 64 elements of the head dimension, one UE4M3 scale for 16."""
    asm(
        f"{{\n.reg .pred p;\nsetp.ne.b32 p, {int(accumulate)}, 0;\n"
        f"tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [$0], $1, $2, {idesc}, [$3], [$4], p;\n}}",
        [d, q, k, sfa, sfb],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def mma_values(
    d: Int32,
    p: Int32,
    v: Int64,
    idesc: int,
    sfa: Int32,
    sfb: Int32,
    accumulate: Int32,
    block: int,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """O (+)= P V over 64 keys, P in tensor memory, one scale for `block` keys (32: UE8M0, 16: UE4M3)."""
    asm(
        "{\n.reg .pred p;\nsetp.ne.b32 p, $5, 0;\n"
        f"tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block{block} [$0], [$1], $2, {idesc}, [$3], [$4], p;\n}}",
        [d, p, v, sfa, sfb, accumulate],
        loc=loc,
        ip=ip,
    )


# Arithmetic


@dsl_user_op
def max3(a: Float32, b: Float32, c: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The largest; NaN if any is."""
    return asm("max.NaN.f32 $0, $1, $2, $3;", [a, b, c], [Float32], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def add_down(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """a + b rounded down."""
    return asm("add.rm.f32 $0, $1, $2;", [a, b], [Float32], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def fma(a: Float32, b: Float32, c: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """a · b + c, rounded once."""
    return asm("fma.rn.f32 $0, $1, $2, $3;", [a, b, c], [Float32], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def exp2(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """2^x"""
    return asm("ex2.approx.ftz.f32 $0, $1;", [x], [Float32], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def log2(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """log2(x)"""
    return asm("lg2.approx.f32 $0, $1;", [x], [Float32], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def reciprocal(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """1 / x"""
    return asm("rcp.approx.f32 $0, $1;", [x], [Float32], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def bits(x: Float32, *, loc: Any = None, ip: Any = None) -> Int32:
    """The same 32 bits as an integer."""
    return asm("mov.b32 $0, $1;", [x], [Int32], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def as_float(x: Int32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The same 32 bits as a float."""
    return asm("mov.b32 $0, $1;", [x], [Float32], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def twice(x: Float32, *, loc: Any = None, ip: Any = None) -> Int64:
    """A pair of equal floats, for `f32x2` instructions."""
    return asm("mov.b64 $0, {$1, $1};", [x], [Int64], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def masked(x: Float32, index: int, length: Int32, value: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """x if index < length, else `value`. As a volatile statement it stays in its branch, which is seldom taken."""
    return asm(
        f"{{\n.reg .pred p;\nsetp.gt.s32 p, $2, {index};\nselp.f32 $0, $1, $3, p;\n}}",
        [x, length, value],
        [Float32],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def any_lane(condition: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """1 in all lanes where `condition` is not 0 in one of them."""
    return asm(
        "{\n.reg .pred p, q;\nsetp.ne.b32 p, $1, 0;\nvote.sync.any.pred q, p, -1;\nselp.b32 $0, 1, 0, q;\n}",
        [condition],
        [Int32],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def sync_warp(*, loc: Any = None, ip: Any = None) -> None:
    """What lanes did before is known to all lanes after."""
    asm("bar.warp.sync -1;", loc=loc, ip=ip)


@dsl_user_op
def codes(
    scores: Sequence[Float32],
    table: Int32,
    maps: Sequence[Int64],
    exponentials: int | None,
    *,
    loc: Any = None,
    ip: Any = None,
) -> list[Int32]:
    """Eight scores → a word of E2M1 codes, the first lowest, and what its lower and upper four codes count.

    table         0x03020100
    maps          a₁, b₁ and perhaps a₂, b₂, each a pair of equal floats; u = a₁·s + b₁
    exponentials  a bit for each pair of scores: u = 2^(a₂·s + b₂) there. None: a second map means the larger of both

    Counts are bytes with the doubled values of the codes, 0 1 2 3 4 6 8 12: `prmt` looks up the four low nibbles of its
    selector.
    """
    lines = ["{\n.reg .b8 q<4>;\n.reg .b32 upper;\n.reg .f32 u<8>, t<2>;\n.reg .b64 x, y;"]
    names = [f"${3 + 9 + i}" for i in range(len(maps))]
    for i in range(4):
        first, second = f"u{2 * i}", f"u{2 * i + 1}"
        lines.append(f"mov.b64 x, {{${3 + 2 * i}, ${4 + 2 * i}}};")
        if exponentials is not None and exponentials >> i & 1:
            lines.append(f"fma.rn.f32x2 y, x, {names[2]}, {names[3]};\nmov.b64 {{{first}, {second}}}, y;")
            lines += [f"ex2.approx.ftz.f32 {u}, {u};" for u in (first, second)]
        else:
            lines.append(f"fma.rn.f32x2 y, x, {names[0]}, {names[1]};\nmov.b64 {{{first}, {second}}}, y;")
            if exponentials is None and len(maps) == 4:
                lines.append(f"fma.rn.f32x2 y, x, {names[2]}, {names[3]};\nmov.b64 {{t0, t1}}, y;")
                lines.append(f"max.f32 {first}, {first}, t0;\nmax.f32 {second}, {second}, t1;")
        lines.append(f"cvt.rn.satfinite.relu.e2m1x2.f32 q{i}, {second}, {first};")
    lines.append("mov.b32 $0, {q0, q1, q2, q3};\nshr.u32 upper, $0, 16;")
    lines += [f"prmt.b32 ${i + 1}, $11, 0x0C080604, {word};" for i, word in enumerate(("$0", "upper"))]
    lines.append("}")
    return asm("\n".join(lines), [*scores, table, *maps], [Int32] * 3, volatile=False, loc=loc, ip=ip)


@dsl_user_op
def byte_sum(words: Sequence[Int32], start: int, *, loc: Any = None, ip: Any = None) -> Int32:
    """start + the sum of all bytes of eight words whose bytes are at most 31."""
    lines = ["{\n.reg .b32 s;\nadd.u32 s, $1, $2;"]
    lines += [f"add.u32 s, s, ${i};" for i in range(3, len(words) + 1)]
    lines.append(f"dp4a.u32.u32 $0, s, 0x01010101, {start};\n}}")
    return asm("\n".join(lines), list(words), [Int32], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def pack_scales(scales: Sequence[Float32], *, loc: Any = None, ip: Any = None) -> Int32:
    """Four floats, none negative, as UE4M3 bytes of a word, the first lowest."""
    text = (
        "{\n.reg .b16 a, b;\ncvt.rn.satfinite.e4m3x2.f32 a, $2, $1;\ncvt.rn.satfinite.e4m3x2.f32 b, $4, $3;\n"
        "mov.b32 $0, {a, b};\n}"
    )
    return asm(text, list(scales), [Int32], volatile=False, loc=loc, ip=ip)


@dsl_user_op
def unpack_scales(word: Int32, *, loc: Any = None, ip: Any = None) -> list[Float32]:
    """The four floats that a word of UE4M3 bytes stands for."""
    lines = ["{\n.reg .b16 a, b, h<4>;\n.reg .b32 x, y;\nmov.b32 {a, b}, $4;"]
    lines.append("cvt.rn.f16x2.e4m3x2 x, a;\ncvt.rn.f16x2.e4m3x2 y, b;")
    lines.append("mov.b32 {h0, h1}, x;\nmov.b32 {h2, h3}, y;")
    lines += [f"cvt.f32.f16 ${i}, h{i};" for i in range(4)]
    return asm("\n".join([*lines, "}"]), [word], [Float32] * 4, volatile=False, loc=loc, ip=ip)


@dsl_user_op
def pack_halves(low: Float32, high: Float32, kind: str, *, loc: Any = None, ip: Any = None) -> Int32:
    """Two floats as BF16 ("bf16") or FP16 ("f16"), the first in the lower half."""
    return asm(f"cvt.rn.{kind}x2.f32 $0, $2, $1;", [low, high], [Int32], volatile=False, loc=loc, ip=ip)
