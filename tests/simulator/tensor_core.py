"""Programs for the tensor core and its memory: their operands in shared memory, and the products in float64."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from asynchronous import START, wait
from effects import Program, same
from programs import kernel
from tensors import BASE, swizzled

N = 32
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
D, SFA, SFB, A = 0, 64, 96, 128  # columns of tensor memory
PAGE = 512  # bytes of a page of scales: 128 rows, 4 of each
AT_A, AT_B, AT_SFA, AT_SFB, SIZE = 0, 32768, 40960, 43008, 45056  # bytes from the start of shared memory

ALLOCATE = [
    ".reg .b32 %slot, %tmem, %base, %bar, %lane, %mine;",
    "mov.b32 %base, memory;",
    "mov.b32 %slot, slot;",
    "cvt.u64.u32 %d6, %slot;",
    "cvta.shared.u64 %d6, %d6;",
    "mov.b32 %bar, barrier;",
    "cvt.u64.u32 %d7, %bar;",
    "cvta.shared.u64 %d7, %d7;",
    "setp.lt.u32 %p10, %thread, 32;",
    "@!%p10 bra ALLOCATED;",
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%slot], 256;",
    "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
    "ALLOCATED: bar.sync 0;",
    "ld.shared.b32 %tmem, [%slot];",
    "shr.u32 %lane, %thread, 5;",
    "shl.b32 %lane, %lane, 21;",
    "add.u32 %mine, %tmem, %lane;",
]
GENERIC = (".shared::cta.b32 [%slot]", ".b32 [%d6]")
FREE = [
    "tcgen05.fence::before_thread_sync;",
    "bar.sync 0;",
    "tcgen05.fence::after_thread_sync;",
    "@!%p10 bra FREED;",
    "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tmem, 256;",
    "FREED: ret;",
]
TOP = f".shared .align 1024 .b8 memory[{SIZE}];\n.shared .align 8 .b64 barrier;\n.shared .align 8 .b32 slot;\n"


def listed(name: str, count: int, start: int = 0) -> str:
    return "{" + ", ".join(f"%{name}{start + i}" for i in range(count)) + "}"


def copies() -> Program:
    """tcgen05.st and ld of every size, each warp in its quarter of the lanes; a store changes what it should only."""
    body = [
        *(line.replace(*GENERIC) for line in ALLOCATE),
        ".reg .b32 %t<128>, %u<128>;",
        "mul.wide.u32 %d0, %thread, 4;",
        "add.u64 %d1, %o, %d0;",
    ]
    body += [f"mad.lo.u32 %t{i}, %thread, 1000, {i};" for i in range(128)]
    body += [f"tcgen05.st.sync.aligned.32x32b.x128.b32 [%mine+{at}], {listed('t', 128)};" for at in (0, 128)]
    row = 0
    for index, count in enumerate(COUNTS):
        at = 3 * index + 1
        body += [
            "tcgen05.wait::st.sync.aligned;",
            f"tcgen05.st.sync.aligned.32x32b.x{count}.b32 [%mine+{at}], {listed('t', count)};",
        ]
        body += [
            "tcgen05.wait::st.sync.aligned;",
            f"tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {listed('u', count)}, [%mine+{at + 1}];",
        ]
        body += ["tcgen05.wait::ld.sync.aligned;"]
        body += [f"st.global.b32 [%d1+{512 * (row + i)}], %u{i};" for i in range(count)]
        row += count
    text = kernel("\n".join([*body, *FREE]), "o", threads=128, top=TOP)
    memory = np.tile(np.arange(128) * 1000, (256, 1)).T + np.tile(np.arange(128), 2)
    want = []
    for index, count in enumerate(COUNTS):
        at = 3 * index + 1
        memory[:, at : at + count] = np.arange(128)[:, None] * 1000 + np.arange(count)
        want.append(memory[:, at + 1 : at + 1 + count].T.copy())
    rows = np.concatenate(want)
    return Program(text, (np.zeros((row, 128), np.uint32),), lambda o: same(o, rows), seeds=True)


# ---- tcgen05.mma ----


@dataclass(frozen=True)
class Product:
    """One way to multiply: `steps` MMAs along K. A may be MN-major (`a_mn`) or in tensor memory; B may be MN-major."""

    kind: str
    element: str
    suffix: str = ""
    block: int = 0
    scale: str = ""
    a_mn: bool = False
    b_mn: bool = False
    a_in_tmem: bool = False
    masked: bool = False
    steps: int = 2

    @property
    def bits(self) -> int:
        return {"e2m1": 4, "e4m3": 8, "e5m2": 8, "tf32": 32}.get(self.element, 16)

    @property
    def k(self) -> int:
        """Elements along K of one MMA: 32 bytes."""
        return 256 // self.bits

    @property
    def idesc(self) -> int:
        codes = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1, "e2m1": 1}
        code = codes[self.element]
        value = code << 7 | code << 10 | self.a_mn << 15 | self.b_mn << 16 | N // 8 << 17 | 8 << 24
        return value | ((self.scale == "ue8m0") << 23 if self.block else 1 << 4)


TYPES: dict[str, Any] = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
SCALES: dict[str, Any] = {"ue4m3": ml_dtypes.float8_e4m3fn, "ue8m0": ml_dtypes.float8_e8m0fnu}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def operand(rng: np.random.Generator, element: str, rows: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Random values [rows, k] in float64, and their bytes [rows, k, bytes of an element]; E2M1: [rows, k / 2, 1]."""
    if element == "e2m1":
        codes = rng.integers(0, 16, (rows, k), np.uint8)
        return E2M1[codes], (codes[:, 0::2] | codes[:, 1::2] << 4)[:, :, None]
    if element == "tf32":
        words = rng.standard_normal((rows, k)).astype(np.float32).view(np.uint32)
        return (words & 0xFFFFE000).view(np.float32).astype(np.float64), words.view(np.uint8).reshape(rows, k, 4)
    values = rng.standard_normal((rows, k)).astype(TYPES[element])
    return values.astype(np.float64), values.view(np.uint8).reshape(rows, k, -1)


def lay(memory: np.ndarray, at: int, raw: np.ndarray, mn_major: bool) -> tuple[int, int]:
    """Bytes of an operand into shared memory, 128-byte swizzle. (descriptor, what to add for the next MMA along K)."""
    rows, _, size = raw.shape
    row, col, byte = np.indices(raw.shape)
    if mn_major:  # 128 bytes of rows, then 8 of K, then the next rows, then the next 8 of K
        wide = 128 // size
        groups = -(-rows // wide)
        lbo, sbo = 1024, 1024 * groups
        place = (row % wide) * size + byte + (row // wide) * lbo + (col % 8) * 128 + (col // 8) * sbo
        step = sbo * (256 // (8 * size) // 8)
    else:
        lbo, sbo = 16, 1024
        place = (row % 8) * 128 + (row // 8) * sbo + col * size + byte
        step = 32
    memory[swizzled(BASE + at + place, "128") - BASE] = raw
    return (BASE + at) // 16 | lbo // 16 << 16 | sbo // 16 << 32 | 1 << 46 | 2 << 61, step // 16


def lay_scales(memory: np.ndarray, at: int, raw: np.ndarray) -> None:
    """[rows, scales] into pages of four scales a row."""
    row, col = np.indices(raw.shape)
    memory[at + col // 4 * PAGE + row % 32 * 16 + row // 32 * 4 + col % 4] = raw


def product(p: Product) -> Program:
    """`steps` MMAs that add up, between a load of operands and a store of D by all threads."""
    rng = np.random.default_rng(zlib.crc32(repr(p).encode()))
    depth = p.k * p.steps
    left, raw_a = operand(rng, p.element, 128, depth)
    right, raw_b = operand(rng, p.element, N, depth)
    memory = np.zeros(SIZE, np.uint8)
    desc_a, step_a = lay(memory, AT_A, raw_a, p.a_mn)
    desc_b, step_b = lay(memory, AT_B, raw_b, p.b_mn)
    if p.block:
        made = [rng.uniform(0.5, 4, (rows, depth // p.block)).astype(SCALES[p.scale]) for rows in (128, N)]
        lay_scales(memory, AT_SFA, made[0].view(np.uint8))
        lay_scales(memory, AT_SFB, made[1].view(np.uint8))
        left, right = (
            x * np.repeat(s.astype(np.float64), p.block, 1) for x, s in zip((left, right), made, strict=True)
        )

    body = [
        *ALLOCATE,
        START,
        "mul.wide.u32 %d0, %thread, 16;",
        "mov.b32 %r1, 0;",
        "shl.b32 %r2, %thread, 4;",
        "add.u32 %r2, %r2, %base;",
    ]
    body += [
        "add.u64 %d1, %image, %d0;",
        "FILL: ld.global.v4.b32 {%r3, %r4, %r5, %r6}, [%d1];",
        "st.shared.v4.b32 [%r2], {%r3, %r4, %r5, %r6};",
    ]
    body += [
        "add.u64 %d1, %d1, 2048;",
        "add.u32 %r2, %r2, 2048;",
        "add.u32 %r1, %r1, 2048;",
        f"setp.lt.u32 %p1, %r1, {SIZE};",
        "@%p1 bra FILL;",
    ]
    body += ["mul.wide.u32 %d0, %thread, 4;"]
    if p.a_in_tmem:
        body += ["add.u64 %d1, %a, %d0;"]
        for step in range(p.steps):
            body += [f"ld.global.b32 %r{10 + i}, [%d1+{512 * (8 * step + i)}];" for i in range(8)]
            body += [f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%mine+{A + 8 * step}], {listed('r', 8, 10)};"]
        body += ["tcgen05.wait::st.sync.aligned;", "tcgen05.fence::before_thread_sync;"]
    body += [
        "@%p0 mbarrier.init.shared.b64 [%bar], 1;",
        "fence.proxy.async.shared::cta;",
        "bar.sync 0;",
        "tcgen05.fence::after_thread_sync;",
    ]
    body += ["@!%p0 bra ISSUED;", f"add.u32 %r30, %tmem, {A};", f"mov.b32 %r31, {p.idesc:#x};", "mov.pred %p2, 0;"]
    for step in range(p.steps):
        body += [f"mov.b64 %d10, {desc_a + step * step_a:#x};", f"mov.b64 %d11, {desc_b + step * step_b:#x};"]
        a = f"[%r30+{8 * step}]" if p.a_in_tmem else "%d10"
        keep = ", {%r32, %r33, %r34, %r35}" if p.masked else ""
        body += [f"mov.b32 %r{32 + i}, {word:#x};" for i, word in enumerate((0xF0F0F0F0, 0, 0xFFFFFFFF, 1))]
        scales = ""
        if p.block:
            per = p.k // p.block  # scales that one MMA uses of a row
            page, first = divmod(per * step, 4)
            if not first:
                for name, at, column in (("12", AT_SFA, SFA), ("13", AT_SFB, SFB)):
                    body += [f"mov.b64 %d{name}, {(BASE + at + PAGE * page) // 16 | 1 << 16 | 8 << 32 | 1 << 46:#x};"]
                    body += [
                        f"add.u32 %r36, %tmem, {column + 4 * page};",
                        f"tcgen05.cp.cta_group::1.32x128b.warpx4 [%r36], %d{name};",
                    ]
            body += [f"mov.b32 %r31, {p.idesc | first << 29 | first << 4:#x};"]
            body += [
                f"add.u32 %r37, %tmem, {SFA + 4 * page | first << 30:#x};",
                f"add.u32 %r38, %tmem, {SFB + 4 * page | first << 30:#x};",
            ]
            scales = ", [%r37], [%r38]"
        body += [
            f"tcgen05.mma.cta_group::1.kind::{p.kind}{p.suffix} [%tmem], {a}, %d11, %r31{scales}{keep}, %p2;",
            "mov.pred %p2, 1;",
        ]
    target = ".shared::cluster.b64 [%bar]" if p.steps == 2 else ".b64 [%d7]"
    body += [
        f"tcgen05.commit.cta_group::1.mbarrier::arrive::one{target};",
        "ISSUED:",
        wait("%bar", 0, "WAIT"),
    ]
    body += [
        "tcgen05.fence::after_thread_sync;",
        f"tcgen05.ld.sync.aligned.32x32b.x{N}.b32 {listed('r', N, 40)}, [%mine];",
    ]
    body += ["tcgen05.wait::ld.sync.aligned;", "tcgen05.fence::before_thread_sync;", "add.u64 %d1, %o, %d0;"]
    if p.masked:  # nothing defines the other lanes of D
        body += ["ld.global.b32 %r1, [%d1];", "setp.ne.u32 %p1, %r1, 0;", "@%p1 bra SKIP;"]
    body += [f"st.global.b32 [%d1+{512 * i}], %r{40 + i};" for i in range(N)]
    body += ["SKIP:" * p.masked, *FREE]

    words = raw_a.reshape(128, -1).view(np.uint32)
    kept = (
        np.unpackbits(np.array([0xF0F0F0F0, 0, 0xFFFFFFFF, 1], np.uint32).view(np.uint8), bitorder="little") * p.masked
    )
    outs = np.zeros((N, 128), np.float32)
    outs.view(np.uint32)[0] = kept
    total = np.zeros((128, N))
    for step in range(p.steps):
        part = slice(step * p.k, (step + 1) * p.k)
        total = (total + left[:, part] @ right[:, part].T).astype(np.float32).astype(np.float64)

    def check(*arrays: np.ndarray) -> None:
        live = kept == 0
        np.testing.assert_allclose(arrays[-1].T[live], total[live], rtol=1e-6, atol=1e-6)
        if p.masked:
            same(arrays[-1].T[~live][:, 1:], 0)

    params = "image a o" if p.a_in_tmem else "image o"
    args = (memory, np.ascontiguousarray(words.T), outs) if p.a_in_tmem else (memory, outs)
    text = kernel("\n".join(line for line in body if line), params, threads=128, top=TOP)
    return Program(text, args, check, seeds=True)


PRODUCTS = [
    *(
        Product("f16", element, a_mn=a, b_mn=b)
        for element, (a, b) in itertools.product(("f16", "bf16"), itertools.product((False, True), repeat=2))
    ),
    Product("f16", "bf16", ".collector::a::fill", a_in_tmem=True),
    Product("f16", "f16", a_in_tmem=True, b_mn=True),
    Product("f16", "f16", ".collector::a::discard", masked=True),
    Product("tf32", "tf32"),
    Product("tf32", "tf32", a_in_tmem=True),
    *(
        Product("f8f6f4", element, a_mn=a, b_mn=b)
        for element, (a, b) in itertools.product(("e4m3", "e5m2"), ((False, False), (True, True)))
    ),
    Product("f8f6f4", "e4m3", a_in_tmem=True),
    Product("mxf8f6f4", "e4m3", ".block_scale", 32, "ue8m0", steps=4),
    Product("mxf8f6f4", "e5m2", ".block_scale.scale_vec::1X", 32, "ue8m0", steps=4),
    Product("mxf8f6f4", "e5m2", ".block_scale.block32", 32, "ue8m0", a_in_tmem=True),
    Product("mxf4", "e2m1", ".block_scale", 32, "ue8m0", steps=4),
    Product("mxf4", "e2m1", ".block_scale.scale_vec::2X.collector::a::discard", 32, "ue8m0"),
    Product("mxf4", "e2m1", ".block_scale.block32", 32, "ue8m0", a_in_tmem=True),
    Product("mxf4nvf4", "e2m1", ".block_scale.scale_vec::4X", 16, "ue4m3", steps=4),
    Product("mxf4nvf4", "e2m1", ".block_scale.block16.collector::a::fill", 16, "ue8m0"),
    Product("mxf4nvf4", "e2m1", ".block_scale.block16", 16, "ue4m3", a_in_tmem=True),
    Product("mxf4nvf4", "e2m1", ".block_scale.scale_vec::2X", 32, "ue8m0", steps=4),
    Product("mxf4nvf4", "e2m1", ".block_scale.block32", 32, "ue8m0", a_in_tmem=True, steps=4),
]
