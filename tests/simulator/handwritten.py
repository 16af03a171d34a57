"""Hand-written PTX for tests of the judge: the P·V loop of FP4 attention with every kind of synchronisation it needs.

`pv()` is a kernel of six warps. Warps 0-3 quantise a row of P each (blocks of 32, UE8M0 scales, E2M1 codes) into tensor
memory and a page of scales, warp 4 loads V and its scales by TMA, warp 5 copies scales and multiplies, over four
iterations in two stages; then warps 0-3 write O through one shared buffer in two TMA stores. V has fewer rows than its
box and O fewer columns than its boxes, so both TMA directions meet the end of a tensor. Consecutive iterations use the
two scale ids of block32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wanfp4.simulator import Simulator
from wanfp4.simulator.conversions import E2M1
from wanfp4.simulator.ptx import read_kernels
from wanfp4.simulator.report import LaunchReport
from wanfp4.simulator.translate import Code

HEADER = """.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
"""

Array = NDArray[Any]


def tensor_map(array: Array, box: Sequence[int], kind: int, *, bits: int, swizzle: int = 0) -> Array:
    """The 128 bytes that describe a 2-D array [rows, bytes] to TMA; `box` in elements of `bits`, inner dimension first.

    `kind` is the element type's number, `swizzle` 0 none, 1 32 B, 2 64 B, 3 128 B.
    """
    rows, row_bytes = array.shape[0], array.strides[0]
    words = [0] * 16
    words[0] = array.ctypes.data
    words[1] = 1 << 1 | 1 << 4 | kind << 7 | swizzle << 13 | 1 << 18 | row_bytes // 16 << 32
    sizes = [row_bytes * 8 // bits - 1, rows - 1]
    words[4] = sizes[0] | sizes[1] << 32
    words[6] = (box[0] - 1) << 56
    words[7] = box[1] - 1
    return np.array(words, np.uint64).view(np.uint8)


STAGES, ITERATIONS, N, COLUMNS = 2, 4, 32, 24  # COLUMNS: how many of the N columns exist
V, SFV, SFP, OUT, BARRIERS, SLOT = 0, 2048, 3072, 4096, 12288, 12352
SHARED_BYTES = 12544
FULL, EMPTY, READY, DONE = (BARRIERS + offset for offset in (0, 16, 32, 48))
TMEM_P, TMEM_SFA, TMEM_SFB = 32, 48, 56
IDESC = 8 << 24 | N // 8 << 17 | 1 << 23 | 1 << 10 | 1 << 7


def _wait(name: str, barrier: str, parity: str) -> str:
    return f"""{name}:
mbarrier.try_wait.parity.shared.b64 %done, [{barrier}], {parity};
@%done bra {name}_over;
bra {name};
{name}_over:"""


def _descriptor(target: str, start: str, lbo: int, sbo: int, layout: int) -> str:
    constant = (lbo >> 4) << 16 | (sbo >> 4) << 32 | 1 << 46 | layout << 61
    return f"""shr.u32 %e, {start}, 4;
cvt.u64.u32 {target}, %e;
or.b64 {target}, {target}, {constant};"""


def _quantise() -> str:
    """A row of 64 values: codes to %c0-7, the two scales to %sc0 and %sc1."""
    out = []
    for block in range(2):
        values = [f"%x{32 * block + i}" for i in range(32)]
        for j in range(0, 32, 4):
            out.append(f"ld.global.v4.b32 {{{', '.join(values[j : j + 4])}}}, [%row+{4 * (32 * block + j)}];")
        out.append(f"mov.b32 %m, {values[0]};")
        out += [f"max.f32 %m, %m, {value};" for value in values[1:]]
        out.append("mul.f32 %m, %m, 0f3E2AAAAB;")  # 1/6
        out.append("cvt.rp.satfinite.ue8m0x2.f32 %h, %zero, %m;")
        out += [f"cvt.u32.u16 %sc{block}, %h;", f"and.b32 %sc{block}, %sc{block}, 255;"]
        out += [f"sub.s32 %e, 254, %sc{block};", "shl.b32 %m, %e, 23;"]  # the reciprocal power of two
        for j in range(0, 32, 8):
            for k in range(4):
                low, high = values[j + 2 * k], values[j + 2 * k + 1]
                out += [f"mul.f32 %f0, {low}, %m;", f"mul.f32 %f1, {high}, %m;"]
                out.append(f"cvt.rn.satfinite.relu.e2m1x2.f32 %q{k}, %f1, %f0;")
            out.append(f"mov.b32 %c{4 * block + j // 8}, {{%q0, %q1, %q2, %q3}};")
    return "\n".join(out)


def _store_chunk(chunk: int) -> str:
    registers = [f"%o{i}" for i in range(16)]
    stores = "\n".join(
        f"st.shared.v4.b32 [%obuf+{4 * i}], {{{', '.join(registers[i : i + 4])}}};" for i in range(0, 16, 4)
    )
    last = chunk == 1
    return f"""add.s32 %a, %mine, {16 * chunk};
tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{", ".join(registers)}}}, [%a];
tcgen05.wait::ld.sync.aligned;
{stores}
fence.proxy.async.shared::cta;
@%follows bra follow{chunk};
bar.sync 2, 128;
elect.sync %e|%one, -1;
@!%one bra stored{chunk};
cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%mapo, {{{16 * chunk}, 0}}], [%obase];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group{"" if last else ".read"} 0;
stored{chunk}:
bra both{chunk};
follow{chunk}:
bar.arrive 2, 128;
both{chunk}:
{"tcgen05.fence::before_thread_sync;" if last else ""}
bar.sync 1, 128;"""


def pv() -> str:
    """PTX of kernel `pv`, parameters: tensor maps of V and O, addresses of P and V's scale pages."""
    return f"""{HEADER}.visible .entry pv(.param .align 64 .b8 map_v[128], .param .align 64 .b8 map_o[128],
  .param .u64 param_p, .param .u64 param_s)
.reqntid 192, 1, 1
{{
.reg .pred %one, %done, %other, %more, %follows, %odd;
.reg .b8 %q<4>;
.reg .b16 %h;
.reg .b32 %x<64>, %c<8>, %o<16>, %sc<2>, %t, %warp, %s, %base, %mine, %it, %stage, %parity, %flipped, %full, %empty;
.reg .b32 %ready, %finish, %obuf, %obase, %page, %v, %sv, %sp, %k, %a, %b, %p, %e, %m, %zero, %f0, %f1, %id, %idesc;
.reg .b64 %mapv, %mapo, %row, %rows, %pages, %d0, %d1, %d2, %wide;
mov.u32 %t, %tid.x;
shr.u32 %warp, %t, 5;
mov.b32 %s, smem;
mov.b32 %zero, 0;
mov.b64 %mapv, map_v;
mov.b64 %mapo, map_o;
setp.ne.u32 %other, %warp, 0;
@%other bra allocated;
add.s32 %a, %s, {SLOT};
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%a], 64;
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
allocated:
setp.ne.u32 %other, %warp, 4;
@%other bra initialised;
elect.sync %e|%one, -1;
@!%one bra initialised;
mbarrier.init.shared.b64 [%s+{FULL}], 1;
mbarrier.init.shared.b64 [%s+{FULL + 8}], 1;
mbarrier.init.shared.b64 [%s+{EMPTY}], 1;
mbarrier.init.shared.b64 [%s+{EMPTY + 8}], 1;
mbarrier.init.shared.b64 [%s+{READY}], 128;
mbarrier.init.shared.b64 [%s+{READY + 8}], 128;
mbarrier.init.shared.b64 [%s+{DONE}], 1;
fence.mbarrier_init.release.cluster;
initialised:
bar.sync 0;
ld.shared.b32 %base, [%s+{SLOT}];
add.s32 %finish, %s, {DONE};
mov.b32 %it, 0;
setp.eq.u32 %other, %warp, 4;
@%other bra load;
setp.eq.u32 %other, %warp, 5;
@%other bra multiply;

ld.param.b64 %rows, [param_p];
mul.wide.u32 %wide, %t, 256;
add.s64 %row, %rows, %wide;
shl.b32 %a, %warp, 21;
add.s32 %mine, %base, %a;
and.b32 %page, %t, 31;
shl.b32 %page, %page, 4;
shl.b32 %a, %warp, 2;
add.s32 %page, %page, %a;
add.s32 %page, %page, %s;
quantise:
{_quantise()}
and.b32 %stage, %it, 1;
shl.b32 %a, %stage, 3;
add.s32 %empty, %s, %a;
add.s32 %ready, %empty, {READY};
add.s32 %empty, %empty, {EMPTY};
shr.u32 %parity, %it, 1;
and.b32 %parity, %parity, 1;
xor.b32 %flipped, %parity, 1;
{_wait("wait_p", "%empty", "%flipped")}
tcgen05.fence::after_thread_sync;
setp.ne.u32 %odd, %stage, 0;
shl.b32 %b, %sc1, 8;
or.b32 %b, %b, %sc0;
or.b32 %a, %b, 0xFFFF0000;
shl.b32 %b, %b, 16;
or.b32 %b, %b, 0x0000FFFF;
selp.b32 %b, %b, %a, %odd;
shl.b32 %a, %stage, 9;
add.s32 %a, %a, %page;
st.shared.b32 [%a+{SFP}], %b;
shl.b32 %a, %stage, 3;
add.s32 %a, %a, %mine;
add.s32 %a, %a, {TMEM_P};
tcgen05.st.sync.aligned.32x32b.x8.b32 [%a], {{{", ".join(f"%c{i}" for i in range(8))}}};
tcgen05.wait::st.sync.aligned;
fence.proxy.async.shared::cta;
tcgen05.fence::before_thread_sync;
mbarrier.arrive.shared.b64 _, [%ready];
add.s64 %row, %row, 32768;
add.s32 %it, %it, 1;
setp.lt.u32 %more, %it, {ITERATIONS};
@%more bra quantise;
{_wait("wait_o", "%finish", "0")}
tcgen05.fence::after_thread_sync;
setp.ne.u32 %follows, %warp, 0;
add.s32 %obase, %s, {OUT};
shl.b32 %a, %t, 6;
add.s32 %obuf, %obase, %a;
{_store_chunk(0)}
{_store_chunk(1)}
@%follows bra end;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %base, 64;
bra end;

load:
elect.sync %e|%one, -1;
@!%one bra end;
ld.param.b64 %pages, [param_s];
load_next:
and.b32 %stage, %it, 1;
shl.b32 %a, %stage, 3;
add.s32 %full, %s, %a;
add.s32 %empty, %full, {EMPTY};
add.s32 %full, %full, {FULL};
shr.u32 %parity, %it, 1;
and.b32 %parity, %parity, 1;
xor.b32 %flipped, %parity, 1;
{_wait("wait_v", "%empty", "%flipped")}
mbarrier.arrive.expect_tx.shared.b64 _, [%full], 1536;
shl.b32 %v, %stage, 10;
add.s32 %v, %v, %s;
shl.b32 %k, %it, 6;
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%v], [%mapv, {{%k, %zero}}], [%full];
shl.b32 %sv, %stage, 9;
add.s32 %sv, %sv, %s;
add.s32 %sv, %sv, {SFV};
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%sv], [%pages], 512, [%full];
add.s64 %pages, %pages, 512;
add.s32 %it, %it, 1;
setp.lt.u32 %more, %it, {ITERATIONS};
@%more bra load_next;
bra end;

multiply:
elect.sync %e|%one, -1;
@!%one bra end;
multiply_next:
and.b32 %stage, %it, 1;
shl.b32 %a, %stage, 3;
add.s32 %full, %s, %a;
add.s32 %empty, %full, {EMPTY};
add.s32 %ready, %full, {READY};
add.s32 %full, %full, {FULL};
shr.u32 %parity, %it, 1;
and.b32 %parity, %parity, 1;
{_wait("wait_full", "%full", "%parity")}
{_wait("wait_ready", "%ready", "%parity")}
tcgen05.fence::after_thread_sync;
shl.b32 %a, %stage, 9;
add.s32 %sp, %s, %a;
add.s32 %sv, %sp, {SFV};
add.s32 %sp, %sp, {SFP};
{_descriptor("%d0", "%sp", 0, 128, 0)}
{_descriptor("%d1", "%sv", 0, 128, 0)}
shl.b32 %b, %stage, 10;
add.s32 %v, %s, %b;
{_descriptor("%d2", "%v", 16, 256, 6)}
shl.b32 %a, %stage, 2;
add.s32 %a, %a, %base;
add.s32 %b, %a, {TMEM_SFB};
add.s32 %a, %a, {TMEM_SFA};
tcgen05.cp.cta_group::1.32x128b.warpx4 [%a], %d0;
tcgen05.cp.cta_group::1.32x128b.warpx4 [%b], %d1;
shl.b32 %id, %stage, 31;
or.b32 %a, %a, %id;
or.b32 %b, %b, %id;
setp.ne.u32 %odd, %stage, 0;
selp.b32 %idesc, {IDESC | 2 << 29 | 2 << 4}, {IDESC}, %odd;
shl.b32 %p, %stage, 3;
add.s32 %p, %p, %base;
add.s32 %p, %p, {TMEM_P};
setp.ne.u32 %more, %it, 0;
tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block32 [%base], [%p], %d2, %idesc, [%a], [%b], %more;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%empty];
add.s32 %it, %it, 1;
setp.lt.u32 %more, %it, {ITERATIONS};
@%more bra multiply_next;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%finish];
end:
ret;
}}
"""


@dataclass
class Case:
    """A kernel: text, arrays by name, parameter block, dynamic shared memory, and what it should compute."""

    name: str
    text: str
    arrays: dict[str, Array]
    params: Array
    shared_bytes: int = 0
    want: dict[str, Array] = field(default_factory=dict)

    def edited(self, old: str, new: str, *, every: bool = False) -> Case:
        """The same with a place of its text replaced; only with `every` may there be more than one."""
        found = self.text.count(old)
        assert found == 1 or (every and found), f"{old!r} occurs {found} times"
        return Case(self.name, self.text.replace(old, new), self.arrays, self.params, self.shared_bytes, self.want)

    def line(self, text: str) -> int:
        """The line of the one occurrence of a text."""
        assert self.text.count(text) == 1, f"{text!r} occurs {self.text.count(text)} times"
        return self.text.count("\n", 0, self.text.index(text)) + 1

    def code(self, *, tracked: bool = True) -> Code:
        return Code(read_kernels(self.text)[self.name], tracked=tracked)

    def run(self, *, seed: int | None = None, track: bool = True, ordering: str = "pipe") -> LaunchReport:
        simulator = Simulator(seed=seed, track=track, ordering=ordering, limit=100_000)
        simulator.register(**self.arrays)
        return simulator.run(self.code(tracked=track), (1, 1, 1), self.params, self.shared_bytes)

    def check(self) -> None:
        """Whether the arrays hold what they should."""
        for name, want in self.want.items():
            np.testing.assert_array_equal(self.arrays[name], want)


def aligned(shape: Sequence[int], dtype: Any, align: int = 128) -> Array:
    """Zeros, at an address that is a multiple of `align`, with nothing else in the allocation but slack."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + align, np.uint8)
    start = -raw.ctypes.data % align
    return raw[start : start + size].view(dtype).reshape(shape)


def pv_case() -> Case:
    """`pv` with random operands; O in float32 is exact, whatever the order of sums."""
    rng = np.random.default_rng(0)
    p = np.exp(rng.standard_normal((ITERATIONS, 128, 64)) * 2).astype(np.float32)
    v = aligned((COLUMNS, 32 * ITERATIONS), np.uint8)
    v[:] = rng.integers(0, 256, v.shape)
    scales = rng.integers(124, 130, (ITERATIONS, N, 2)).astype(np.uint8)
    pages = aligned((ITERATIONS, 32, 4, 4), np.uint8)
    pages[:] = 0xFF  # NaN wherever the MMA must not look
    for it in range(ITERATIONS):
        pages[it, :, 0, 2 * (it % 2) : 2 * (it % 2) + 2] = scales[it]
    o = aligned((128, COLUMNS), np.float32)
    maps = [
        tensor_map(v, (64, N), 11, bits=4, swizzle=1),
        tensor_map(o.view(np.uint8), (16, 128), 7, bits=32),
    ]
    params = np.concatenate([*maps, np.array([p.ctypes.data, pages.ctypes.data], np.uint64).view(np.uint8)])
    want = sum(_product(p[it], v[:, 32 * it : 32 * it + 32], scales[it, :COLUMNS]) for it in range(ITERATIONS))
    return Case("pv", pv(), {"p": p, "v": v, "pages": pages, "o": o}, params, SHARED_BYTES, {"o": np.asarray(want)})


def _product(p: Array, v: Array, scales: Array) -> Array:
    """Quantised P times V, in float64, by brute-force nearest code, ties to the even one."""
    top = (p.reshape(128, 2, 32).max(2) * np.float32(1 / 6)).astype(np.float64)
    power = 2.0 ** np.ceil(np.log2(top))
    scaled = p.reshape(128, 2, 32).astype(np.float64) / power[:, :, None]
    values = E2M1[:8].astype(np.float64)
    distance = np.abs(scaled[..., None] - values) + np.where(np.arange(8) % 2, 1e-12, 0)
    left = (values[distance.argmin(-1)] * power[:, :, None]).reshape(128, 64)
    codes = np.stack((v & 15, v >> 4), -1).reshape(len(v), 64)
    right = E2M1[codes].astype(np.float64) * np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, axis=1)
    return np.asarray(left @ right.T)


def program(body: str, params: str = "", threads: int = 32, registers: str = "") -> str:
    """A kernel `test` around a few instructions, with %r0-31, %rd0-15, %h0-7, %p0-7 and %t, the thread's number."""
    return f"""{HEADER}.visible .entry test({params})
.reqntid {threads}, 1, 1
{{
.reg .pred %p<8>;
.reg .b16 %h<8>;
.reg .b32 %r<32>, %t, %s;
.reg .b64 %rd<16>;
{registers}
mov.u32 %t, %tid.x;
mov.b32 %s, smem;
{body}
ret;
}}
"""
