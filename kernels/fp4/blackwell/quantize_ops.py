"""What one thread of a quantiser does with the values of its blocks: rounding as `wanfp4.kernels.formats` defines it.

Plain functions that CuTe DSL traces into a kernel. Values travel as pairs (two Float32), because SM100 multiplies and
adds them in pairs (`f32x2`), each half rounded as IEEE 754 says. Every rounding step is explicit, but the ptxas in
nvidia-cutlass-dsl 4.8.1 joins `mul.rn.f32x2` and an `add.rn.f32x2` of its result to one FFMA2 all the same, so no such
two may follow each other here.

Divisions. `formats` divides by an E4M3 scale s, and a code depends on the exact quotient. Here x / s becomes
fma(x, r, x·t) with r a few units in the last place below 1/s and t = (1 − s·r)·r the rest: r + t is 1/s to about 45
bits. For all 8 mantissas of E4M3 and every float32 x near one of E2M1's seven thresholds this gives the same code as
the correctly rounded quotient (tests/kernels/blackwell/test_quantize.py goes through all of them); elsewhere both are
on the same side of it. r below 1/s makes t positive, so that infinities keep their sign.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

from cutlass import Float32, Int32, Int64, Uint32, cute

Pair: TypeAlias = tuple[Float32, Float32]

# E4M3 saturates long before: a finite stand-in for infinite amplitudes keeps NaN out of the correction steps below.
LARGEST_AMPLITUDE = 1e30
_SIXTH = struct.unpack("f", struct.pack("f", 1 / 6))[0]


def _asm(code: str, types: list[Any], *arguments: Any) -> Any:
    return cute.arch.inline_ptx(code, write_only_types=types, read_only_args=list(arguments))


def load_16_bytes(address: Int64, valid: Any) -> list[Uint32]:
    """Four words from global memory, zeros unless `valid`."""
    return list(
        _asm(
            "{\n.reg .pred p;\n.reg .b64 a;\nmov.b64 a, {$r0};\nsetp.ne.s32 p, {$r1}, 0;\n"
            "mov.b32 {$w0}, 0;\nmov.b32 {$w1}, 0;\nmov.b32 {$w2}, 0;\nmov.b32 {$w3}, 0;\n"
            "@p ld.global.nc.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [a];\n}",
            [Uint32] * 4,
            address,
            Int32(valid),
        )
    )


def load_floats(address: Int64, count: int) -> list[Float32]:
    """`count` float32 values from 8-byte (2) or 16-byte (4) aligned global memory."""
    names = ", ".join(f"{{$w{i}}}" for i in range(count))
    return list(_asm(f"ld.global.nc.v{count}.f32 {{{names}}}, [{{$r0}}];", [Float32] * count, address))


def store_16_bytes(address: Int64, words: Sequence[Uint32]) -> None:
    """Four words to global memory."""
    _asm("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", [], address, *words)


def store_word(address: Int64, word: Uint32) -> None:
    """One word to global memory."""
    _asm("st.global.b32 [{$r0}], {$r1};", [], address, word)


def load_int(address: Int64) -> Int32:
    """One int32 that this kernel does not write, from global memory."""
    return _asm("ld.global.b32 {$w0}, [{$r0}];", [Int32], address)


def load_float(address: Int64) -> Float32:
    """One float32 value that this kernel does not write, from global memory."""
    return _asm("ld.global.f32 {$w0}, [{$r0}];", [Float32], address)


def store_float(address: Int64, value: Float32) -> None:
    """One float32 value to global memory."""
    _asm("st.global.f32 [{$r0}], {$r1};", [], address, value)


def store_shared(address: Int32, words: Sequence[Uint32]) -> None:
    """Four words to shared memory."""
    _asm("st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", [], address, *words)


def load_shared(address: Int32) -> Uint32:
    """One word from shared memory."""
    return _asm("ld.shared.b32 {$w0}, [{$r0}];", [Uint32], address)


def _pair(values: Any) -> Pair:
    low, high = values
    return low, high


def multiply(a: Pair, b: Pair) -> Pair:
    return _pair(cute.arch.mul_packed_f32x2(a, b, rnd="rn", ftz=False))


def add(a: Pair, b: Pair) -> Pair:
    return _pair(cute.arch.add_packed_f32x2(a, b, rnd="rn", ftz=False))


def fma(a: Pair, b: Pair, c: Pair) -> Pair:
    return _pair(cute.arch.fma_packed_f32x2(a, b, c, rnd="rn", ftz=False))


def widen(word: Uint32, half: bool) -> Pair:
    """The two BF16, or with `half` FP16, values of a word, the lower half first."""
    if half:
        code = "{\n.reg .b16 l, h;\nmov.b32 {l, h}, {$r0};\ncvt.f32.f16 {$w0}, l;\ncvt.f32.f16 {$w1}, h;\n}"
    else:
        code = "shl.b32 {$w0}, {$r0}, 16;\nand.b32 {$w1}, {$r0}, 0xffff0000;"
    low, high = _asm(code, [Float32, Float32], word)
    return low, high


def widen_half(word: Uint32, which: int, half: bool) -> Float32:
    """The lower (0) or upper (1) of the two BF16, or with `half` FP16, values of a word."""
    if half:
        code = f"{{\n.reg .b16 l, h;\nmov.b32 {{l, h}}, {{$r0}};\ncvt.f32.f16 {{$w0}}, {'lh'[which]};\n}}"
    else:
        code = ("shl.b32 {$w0}, {$r0}, 16;", "and.b32 {$w0}, {$r0}, 0xffff0000;")[which]
    return _asm(code, [Float32], word)


def deviation(word: Uint32, which: int, half: bool, mean: Float32) -> Float32:
    """`widen_half` minus `mean`, in one instruction of mixed precision."""
    kind = "f16" if half else "bf16"
    code = f"{{\n.reg .b16 l, h;\nmov.b32 {{l, h}}, {{$r0}};\nsub.rn.f32.{kind} {{$w0}}, {'lh'[which]}, {{$r1}};\n}}"
    return _asm(code, [Float32], word, mean)


def as_float(word: Uint32) -> Float32:
    return _asm("mov.b32 {$w0}, {$r0};", [Float32], word)


def as_word(value: Float32) -> Uint32:
    return _asm("mov.b32 {$w0}, {$r0};", [Uint32], value)


def select(condition: Any, yes: Any, no: Any) -> Any:
    """`yes` where the condition holds, else `no`: both are Uint32 or both Float32."""
    kind = type(yes)
    suffix = "f32" if kind is Float32 else "b32"
    code = f"{{\n.reg .pred p;\nsetp.ne.s32 p, {{$r2}}, 0;\nselp.{suffix} {{$w0}}, {{$r0}}, {{$r1}}, p;\n}}"
    return _asm(code, [kind], yes, no, Int32(condition))


def amplitude(values: Sequence[Float32]) -> Float32:
    """The largest magnitude, or NaN when there is one. Two new values an instruction."""
    result = values[0]
    rest = list(values[1:])
    if len(rest) % 2:
        result = _asm("max.NaN.xorsign.abs.f32 {$w0}, {$r0}, {$r1};", [Float32], result, rest.pop())
    for first, second in zip(rest[::2], rest[1::2], strict=True):
        result = _asm("max.NaN.abs.f32 {$w0}, {$r0}, {$r1}, {$r2};", [Float32], result, first, second)
    return _asm("abs.f32 {$w0}, {$r0};", [Float32], result)


def encode(pairs: Sequence[Pair]) -> Uint32:
    """Eight E2M1 codes from four pairs, the first value in the lowest bits."""
    cvt = "\n".join(
        f"cvt.rn.satfinite.e2m1x2.f32 {name}, {{$r{2 * i + 1}}}, {{$r{2 * i}}};" for i, name in enumerate("abcd")
    )
    flat = [value for pair in pairs for value in pair]
    return _asm(f"{{\n.reg .b8 a, b, c, d;\n{cvt}\nmov.b32 {{$w0}}, {{a, b, c, d}};\n}}", [Uint32], *flat)


def errors(word: Uint32, minus_scale: Uint32, x: Sequence[Pair]) -> list[Pair]:
    """x − scale · value for the values of eight E2M1 codes; `minus_scale` is −scale as FP16, in the lower half.

    scale · value is exact, so each fused subtraction rounds once, as subtracting the product would.
    """
    lines = ["{", ".reg .b8 a, b, c, d;", ".reg .b32 v;", ".reg .b16 l, h, s, u;"]
    lines += ["mov.b32 {a, b, c, d}, {$r0};", "mov.b32 {s, u}, {$r1};"]
    for i, name in enumerate("abcd"):
        lines += [f"cvt.rn.f16x2.e2m1x2 v, {name};", "mov.b32 {l, h}, v;"]
        lines += [f"fma.rn.f32.f16 {{$w{2 * i + k}}}, {half}, s, {{$r{2 + 2 * i + k}}};" for k, half in enumerate("lh")]
    flat = [value for pair in x for value in pair]
    values = _asm("\n".join([*lines, "}"]), [Float32] * 8, word, minus_scale, *flat)
    return list(zip(values[::2], values[1::2], strict=True))


def sixth(amax: Float32) -> Float32:
    """amax / 6 as IEEE 754 divides, for amax of at least 2^-120; less is less than E4M3 can hold either way.

    The product with 1/6 is within a unit in the last place, and one step with its exact remainder rounds correctly
    (Markstein). 1e30 takes the place of what is larger, infinity too: all of it saturates E4M3. NaN stays.
    """
    bounded = _asm("min.NaN.f32 {$w0}, {$r0}, {$r1};", [Float32], amax, Float32(LARGEST_AMPLITUDE))
    return _asm(
        "{\n.reg .f32 q, r;\nmul.rn.f32 q, {$r0}, {$r1};\nfma.rn.f32 r, q, {$r2}, {$r0};\n"
        "fma.rn.f32 {$w0}, r, {$r1}, q;\n}",
        [Float32],
        bounded,
        Float32(_SIXTH),
        Float32(-6.0),
    )


def scales(bases: Pair) -> tuple[Uint32, Pair]:
    """UE4M3 bytes (the first in bits 0-7, the second in 8-15) of two values of at least 0, and what they stand for."""
    code = (
        "{\n.reg .b16 b, l, h;\n.reg .b32 v;\ncvt.rn.satfinite.e4m3x2.f32 b, {$r1}, {$r0};\n"
        "cvt.u32.u16 {$w0}, b;\ncvt.rn.f16x2.e4m3x2 v, b;\nmov.b32 {l, h}, v;\n"
        "cvt.f32.f16 {$w1}, l;\ncvt.f32.f16 {$w2}, h;\n}"
    )
    both, first, second = _asm(code, [Uint32, Float32, Float32], *bases)
    return both, (first, second)


def scale(base: Float32) -> tuple[Uint32, Float32]:
    """UE4M3 byte of a value of at least 0, and what it stands for."""
    code = (
        "{\n.reg .b16 b, l, h;\n.reg .b32 v;\ncvt.rn.satfinite.e4m3x2.f32 b, {$r1}, {$r0};\n"
        "cvt.u32.u16 {$w0}, b;\ncvt.rn.f16x2.e4m3x2 v, b;\nmov.b32 {l, h}, v;\ncvt.f32.f16 {$w1}, l;\n}"
    )
    byte, value = _asm(code, [Uint32, Float32], base, Float32(0))
    return byte, value


def reciprocal(scale: Float32) -> Pair:
    """r and t with r + t = 1/scale, see above; zeros for a scale of 0, NaN for NaN.

    `rcp.approx` is right to a unit in the last place; three steps down are below 1/scale whatever it returned.
    """
    r, t = _asm(
        "{\n.reg .f32 e, n;\n.reg .b32 i;\n.reg .pred p;\nrcp.approx.ftz.f32 e, {$r0};\nmov.b32 i, e;\n"
        "add.s32 i, i, -3;\nmov.b32 e, i;\nsetp.eq.f32 p, {$r0}, 0f00000000;\nselp.f32 n, 0f00000000, e, p;\n"
        "mov.f32 {$w0}, n;\nneg.f32 e, {$r0};\nfma.rn.f32 e, e, n, 0f3F800000;\nmul.rn.f32 {$w1}, e, n;\n}",
        [Float32, Float32],
        scale,
    )
    return r, t


def divide(x: Pair, inverse: Pair) -> Pair:
    """A pair over the scale whose `reciprocal` is given: the E2M1 codes of this are those of the rounded quotient."""
    r, t = inverse
    return fma(x, (r, r), multiply(x, (t, t)))


def encode_block(x: Sequence[Pair], scale: Float32) -> list[Uint32]:
    """E2M1(x / scale) of 8n values, a word for every eight."""
    inverse = reciprocal(scale)
    quotients = [divide(pair, inverse) for pair in x]
    return [encode(quotients[i : i + 4]) for i in range(0, len(quotients), 4)]


def try_scale(x: Sequence[Pair], scale: Float32) -> tuple[Float32, list[Uint32]]:
    """Sum of squared errors of 32 values under one scale, in the order that `formats` fixes, and their codes.

    `x` holds dims 0..15 of one block, then those of its partner: the halves are added first, then what is 8, 4, 2 and
    1 apart. The squares are fused multiply-adds with +0, because ptxas joins `mul.rn.f32x2` and `add.rn.f32x2` to one
    FFMA2 in spite of `.rn`, and the sum must not depend on that; a square plus +0 is the square.
    """
    words = encode_block(x, scale)
    minus_scale = _asm(
        "{\n.reg .f32 n;\n.reg .b16 h;\nneg.f32 n, {$r0};\ncvt.rn.f16.f32 h, n;\nmov.b32 {$w0}, {h, h};\n}",
        [Uint32],
        scale,
    )
    zero = (Float32(0), Float32(0))
    squares = []
    for i, word in enumerate(words):
        squares += [fma(error, error, zero) for error in errors(word, minus_scale, x[4 * i : 4 * i + 4])]
    while len(squares) > 1:
        middle = len(squares) // 2
        squares = [add(a, b) for a, b in zip(squares[:middle], squares[middle:], strict=True)]
    first, second = squares[0]
    total = _asm("add.rn.f32 {$w0}, {$r0}, {$r1};", [Float32], first, second)
    return total, words


def least_error(amax: Float32, scale: Float32) -> Float32:
    """What `try_scale` finds at least where the largest magnitude is `amax`: the square of how far that one saturates.

    From 6 · scale up its code is 6, its error is this, and a rounded sum of squares is no smaller than one of them.
    """
    return _asm(
        "{\n.reg .f32 e;\nfma.rn.f32 e, {$r1}, {$r2}, {$r0};\nmax.f32 e, e, 0f00000000;\nmul.rn.f32 {$w0}, e, e;\n}",
        [Float32],
        amax,
        scale,
        Float32(-6.0),
    )


def direct_scale(amax: Float32) -> tuple[Uint32, Float32]:
    """UE8M0 byte of the power of two nearest to amax, arithmetic midpoint 1.5, and the inverse of that power.

    Adding half an octave to the bits carries into the exponent from 1.5 up. Below 2^-126 the bits are no exponent:
    there the byte is 0 up to 1.5 · 2^-127. Infinity is 254, NaN 255.
    """
    byte, inverse = _asm(
        "{\n.reg .b32 b, i;\n.reg .pred p;\nadd.u32 b, {$r0}, 0x400000;\nshr.u32 b, b, 23;\nmin.u32 b, b, 254;\n"
        "setp.lt.u32 p, {$r0}, 0x600000;\nselp.b32 b, 0, b, p;\nsetp.gt.u32 p, {$r0}, 0x7f800000;\n"
        "selp.b32 b, 255, b, p;\nmov.b32 {$w0}, b;\nsub.s32 i, 254, b;\nshl.b32 i, i, 23;\n"
        "setp.eq.u32 p, b, 254;\nselp.b32 i, 0x400000, i, p;\nsetp.eq.u32 p, b, 255;\n"
        "selp.b32 {$w1}, 0x7fffffff, i, p;\n}",
        [Uint32, Float32],
        as_word(amax),
    )
    return byte, inverse


def encode_direct(x: Sequence[Pair], inverse: Float32) -> list[Uint32]:
    """E2M1(x · inverse · 6), rounded after each product as `formats` rounds, a word for every eight values."""
    six = Float32(6.0)
    scaled = [multiply(multiply(pair, (inverse, inverse)), (six, six)) for pair in x]
    return [encode(scaled[i : i + 4]) for i in range(0, len(scaled), 4)]
