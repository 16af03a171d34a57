"""Rounding in registers for the Triton kernels: E2M1, E4M3, powers of two, BF16. Importing it imports triton.

`(x + g) - g` rounds x ≥ 0 to multiples of g's unit in the last place, to nearest, ties to even. With g = 2^22·x that is
half the power of two at or below x, E2M1's spacing; with 2^20 times the power of two an eighth of it, E4M3's. g has a
lower bound where the format's spacing has one, so a whole rounding is a product, a maximum and two additions. g's last
bit is 0 wherever x lies halfway, so ties fall as they should. In units of a power of two α, x·α rounds to α times the
rounded x.
"""

import triton
import triton.language as tl

_ALL = tl.constexpr(tl.PropagateNan.ALL)
INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def round_e2m1(x, unit, POSITIVE: tl.constexpr):
    """unit · E2M1(max(x / unit, 0)) for a power of two `unit`, without saturation: right below 7·unit. NaN stays.
    POSITIVE: x ≥ 0 anyway. Within three units in the last place below 2 and 4 it may be a step off, where x + g has
    passed into the next binade: one value in ten million, and none that BF16 numbers divided by their scale can be."""
    grid = tl.maximum(x * 4194304.0, unit * 4194304.0)
    rounded = (x + grid) - grid
    return rounded if POSITIVE else tl.maximum(rounded, 0.0, propagate_nan=_ALL)


@triton.jit
def round_e4m3(x, unit):
    """unit · E4M3(x / unit) for x ≥ 0, a power of two `unit`, without saturation: right below 464·unit. NaN stays.

    Its g is 1.5 · 2^20 times the power of two below x: with x itself in that place, x + g passes into a binade of half
    the precision where x is within 2^-20 of the next power of two, as a row's largest probability always is.
    """
    power = (x.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    grid = tl.maximum(power * 1572864.0, unit * 24576.0)
    return (x + grid) - grid


@triton.jit
def direct_e4m3(x):
    """The number with E4M3 byte round(x), 0 at least; x ends at 126.5. NaN stays.

    The sum's last bits are the byte. At float32's place they are the number times 2^-120, and for the first eight bytes
    a subnormal one, as E4M3 has it.
    """
    byte = (tl.maximum(x, 0.0, propagate_nan=_ALL) + 12582912.0).to(tl.uint32, bitcast=True)
    value = (byte << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    if INTERPRET:
        value = tl.where(x == x, value, x)  # a GPU's NaN has all bits set, those that were shifted, too
    return value


@triton.jit
def at_most(x, largest):
    """min(x, largest) that keeps NaN."""
    return tl.minimum(x, largest, propagate_nan=_ALL)


@triton.jit
def magnitude_bits(x):
    """Bits of |x|. They are ordered as the magnitudes are, with infinity and then NaN above all numbers."""
    return x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def signed(value, like):
    """`value` ≥ 0 with the sign of `like`."""
    return tl.where(like < 0, -value, value)


@triton.jit
def reciprocal(scale):
    """What `divided` needs of an E4M3 scale: 1 / scale as IEEE 754 divides; 0 for 0, so that all quotients are 0."""
    one = tl.full(scale.shape, 1.0, tl.float32)
    return tl.where(scale == 0, 0.0, tl.div_rn(one, tl.where(scale == 0, 1.0, scale)))


@triton.jit
def fma(a, b, c):
    """a · b + c with one rounding. NumPy would round twice; in float64 the product is exact."""
    return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32) if INTERPRET else tl.fma(a, b, c)


@triton.jit
def divided(x, scale, inverse):
    """x / scale as IEEE 754 divides, for |x| < 2^101 and `inverse` = 1 / scale, rounded.

    x · inverse is off by an ulp at most, the residual of that is exact in a fused multiply-add, and the second one
    rounds quotient plus correction once (Markstein): three operations, where a division takes ten and a branch. Where
    the residual is subnormal, the quotient is far below all codes.
    """
    quotient = x * inverse
    return fma(fma(quotient, -scale, x), inverse, quotient)


@triton.jit
def sixth(x):
    """x / 6 as IEEE 754 divides."""
    return divided(x, tl.full(x.shape, 6.0, tl.float32), tl.full(x.shape, 1.0 / 6.0, tl.float32))


@triton.jit
def e4m3_scale(amax):
    """UE4M3 value of amax / 6, as IEEE 754 divides."""
    return round_e4m3(sixth(at_most(amax, 2688.0)), 1.0)


@triton.jit
def direct_amplitude(bits):
    """Direct-P's amplitude: the power of two nearest to the float with `bits`, arithmetic midpoint 1.5. NaN stays.

    Bits of 2^-126 at least, where a subnormal would be lost on the way, and of 2^127 at most, the largest byte.
    """
    power = (bits + 0x400000) & 0x7F800000
    power = tl.minimum(tl.maximum(power, 0x00800000), 0x7F000000)
    return tl.where(bits > 0x7F800000, bits, power).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_block_scale(amax):
    """The smallest power of two s with amax ≤ 448·s, 2^-126 at least, 2^127 for infinity. NaN stays.

    448 is 1.75 · 2^8: a fraction beyond .75 carries into the exponent.
    """
    bits = amax.to(tl.uint32, bitcast=True)
    power = tl.maximum((bits + 0x1FFFFF) & 0x7F800000, 0x04800000) - 0x04000000
    power = tl.where(bits == 0x7F800000, 0x7F000000, power)
    return tl.where(bits > 0x7F800000, bits, power).to(tl.float32, bitcast=True)


@triton.jit
def inverse_power(scale):
    """1 / scale for a power of two from 2^-126 to 2^127, exactly (2^-127 is subnormal). NaN stays NaN."""
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def log2_normal(x):
    """log2 of x > 0 that is not subnormal, within 2^-22: what the hardware has, not the library's polynomial."""
    if INTERPRET:
        result = tl.log2(x)
    else:
        result = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return result


@triton.jit
def to_bf16(x):
    """x in BF16, to nearest, ties to even. The interpreter would cut the lower bits off."""
    if INTERPRET:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) & 0xFFFF0000
        x = tl.where(x == x, rounded, bits).to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def dot(a, b):
    """a · b in float32, of matrices in BF16, FP16, or float32: as three products in TF32, with about its precision. The
    interpreter has no arithmetic for BF16."""
    if INTERPRET:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def bound(x):
    """A number that a loop begins or ends with. The interpreter's loops take no tensors for it (with NumPy 2.4)."""
    return x


if INTERPRET:

    def bound(x):
        return int(x.handle.data.item())
