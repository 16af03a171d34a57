"""Programs whose instructions reach beyond registers, or beyond a lane: memory and warps. Each with its check."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cases import wrap
from programs import VARIANTS, everywhere, kernel

U64 = np.uint64


@dataclass(frozen=True)
class Program:
    """`check` gets the arrays among `args` as they are after a run. `seeds`: whether to run it with seeds too."""

    text: str
    args: tuple[Any, ...]
    check: Callable[..., None]
    options: dict[str, Any] = field(default_factory=dict)
    seeds: bool = False

    def run(self) -> None:
        """In all variants. Raises AssertionError."""
        variants = VARIANTS if self.seeds else {name: VARIANTS[name] for name in ("plain", "tracked")}
        self.check(*everywhere(self.text, *self.args, variants=variants, **self.options))


def same(got: Any, want: Any) -> None:
    np.testing.assert_array_equal(got, want)


def words(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 64, shape, U64)


# ---- loads and stores ----

TYPES = ("b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")
SCOPES = ("cta", "cluster", "gpu", "sys")


def extended(value: int, kind: str) -> int:
    """A value in memory as a 64-bit register holds it."""
    return wrap(value, kind if kind[0] == "s" else f"u{kind[1:]}") & (1 << 64) - 1


def orders(way: str) -> list[str]:
    named = [f".{order}.{scope}" for order, scope in zip(("relaxed", way, "relaxed", way), SCOPES, strict=True)]
    return ["", ".weak", ".volatile", *named]


L1 = ("evict_normal", "evict_unchanged", "evict_first", "evict_last", "no_allocate")
L2 = ("evict_normal", "evict_first", "evict_last")
LOAD_HINTS = [
    *("." + cache for cache in ("ca", "cg", "cs", "lu", "cv", "nc", "ca.nc")),
    *(f".L1::{hint}" for hint in L1),
    *(f".L2::{size}" for size in ("64B", "128B", "256B")),
    ".L2::cache_hint",
    ".nc.L1::no_allocate.L2::cache_hint.L2::128B",
]
STORE_HINTS = [
    *("." + cache for cache in ("wb", "cg", "cs", "wt")),
    *(f".L1::{hint}" for hint in L1),
    ".L2::cache_hint",
]
SIZE = {kind: int(kind[1:]) // 8 for kind in TYPES}


def accesses(space: str) -> Iterator[tuple[str, str, str, int]]:
    """(store, load, type, registers): every type and vector once, every modifier once."""
    part = f".{space}" if space not in ("generic shared", "generic global") else ""
    room = 16 if space.startswith("shared") else 32
    for kind, count in itertools.product(TYPES, (1, 2, 4, 8)):
        if count * SIZE[kind] <= room and (count < 8 or space == "global"):
            vector = f".v{count}" if count > 1 else ""
            yield f"st{part}{vector}.{kind}", f"ld{part}{vector}.{kind}", kind, count
    for first, second in zip(orders("release"), orders("acquire"), strict=True):
        if "global" in space or not first.startswith(".release"):  # in shared memory: FLAGS
            yield f"st{first}{part}.b32", f"ld{second}{part}.b32", "b32", 1
    if space == "global":
        for one, other in itertools.zip_longest(STORE_HINTS, LOAD_HINTS, fillvalue=""):
            yield f"st.global{one}.v2.b32", f"ld.global{other}.v2.b32", "b32", 2
        for hint in L2:
            yield f"st.global.L1::evict_last.L2::{hint}.v4.b64", f"ld.global.L2::{hint}.v4.b64", "b64", 4


def round_trip(space: str) -> Program:
    """Each thread stores and loads in a place of its own, all lanes and then every other one."""
    body = ["mul.wide.u32 %d0, %thread, 64;", "add.u64 %d1, %a, %d0;", "add.u64 %d2, %o, %d0;"]
    body += [f"ld.global.b64 %d{10 + i}, [%d1+{8 * i}];" for i in range(8)]
    if "global" in space:
        body.append("add.u64 %d3, %scratch, %d0;")
    else:
        body += ["cvt.u32.u64 %r0, %d0;", "mov.b32 %r1, memory;", "add.u32 %r0, %r0, %r1;", "cvt.u64.u32 %d3, %r0;"]
        if space == "generic shared":
            body.append("cvta.shared.u64 %d3, %d3;")
    where = "%r0" if space.startswith("shared") else "%d3"
    body += ["and.b32 %r2, %thread, 1;", "setp.eq.u32 %p0, %r2, 0;", "mov.b64 %d4, 0;"]
    listed = list(accesses(space))
    for slot, (store, load, _, count) in enumerate(listed):
        sources = ", ".join(f"%d{10 + i}" for i in range(count))
        targets = ", ".join(f"%d{20 + i}" for i in range(count))
        if count > 1:
            sources, targets = f"{{{sources}}}", f"{{{targets}}}"
        policy = [", %d4" if "cache_hint" in text else "" for text in (store, load)]
        body += [f"mov.b64 %d{20 + i}, 77;" for i in range(count)]
        guard = "@!%p0 " if slot % 3 == 1 else "@%p0 " if slot % 3 == 2 else ""
        body += [f"{guard}{store} [{where}], {sources}{policy[0]};", f"{guard}{load} {targets}, [{where}]{policy[1]};"]
        body += [f"st.global.b64 [%d2+{8 * i}], %d{20 + i};" for i in range(count)]
        body.append(f"add.u64 %d2, %d2, {64 * 32};")
    a, outs = words(5, 32, 8), np.zeros((len(listed), 32, 8), U64)

    def check(*arrays: np.ndarray) -> None:
        for slot, (store, load, kind, count) in enumerate(listed):
            for thread, i in itertools.product(range(32), range(count)):
                runs = slot % 3 == 0 or (thread % 2 == 0) == (slot % 3 == 2)
                want = extended(int(a[thread, i]), kind) if runs else 77
                assert arrays[1][slot, thread, i] == want, (store, load, thread, i)

    # Global memory has no poison, and the same lane reads what it wrote.
    params = "a o scratch" if "global" in space else "a o"
    args = (a, outs, np.zeros((32, 8), U64))[: len(params.split())]
    top = "" if "global" in space else ".shared .align 64 .b8 memory[2048];\n"
    return Program(kernel("\n".join([*body, "ret;"]), params, top=top), args, check)


def parameters() -> Program:
    """Of all types, through their names and through their addresses; vectors; a generic address."""
    kinds = {f"x{i}": kind for i, kind in enumerate(TYPES) if kind not in ("b8", "u8", "s8")}
    values = {name: int(words(9, 20)[i]) & (1 << 8 * SIZE[kind]) - 1 for i, (name, kind) in enumerate(kinds.items())}
    values["x13"] = int(np.float64(-2.5).view(U64))
    loads = [(name, kind, f"ld.param.{kind}", f"[{name}]") for name, kind in kinds.items()]
    body = ["mul.wide.u32 %d0, %thread, 8;", "add.u64 %d2, %o, %d0;"]
    want: list[int] = []

    def out(register: str, value: int) -> Iterator[str]:
        want.append(value)
        yield f"st.global.b64 [%d2], {register};"
        yield "add.u64 %d2, %d2, 256;"

    for name, kind, opcode, where in loads:
        body += [f"{opcode} %d10, {where};", *out("%d10", extended(values[name], kind))]
    for kind in ("b8", "u8", "s8"):
        body += [f"ld.param.{kind} %d10, [x3+1];", *out("%d10", extended(values["x3"] >> 8, kind))]
    body += [
        "ld.param.v2.b16 {%d10, %d11}, [x6];",
        *out("%d10", values["x6"] & 0xFFFF),
        *out("%d11", values["x6"] >> 16),
    ]
    body += ["ld.param.v4.u8 {%d10, _, %d11, %d12}, [x6];", *out("%d12", values["x6"] >> 24)]
    body += ["mov.b64 %d5, x10;", "ld.param.b32 %d10, [%d5+4];", *out("%d10", values["x10"] >> 32)]
    body += ["cvta.param.u64 %d5, %d5;", "ld.b32 %d10, [%d5];", *out("%d10", values["x10"] & 0xFFFFFFFF)]
    body += ["cvta.to.param.u64 %d5, %d5;", "ld.param.b64 %d10, [%d5];", *out("%d10", values["x10"])]
    outs = np.zeros((len(want), 32), U64)

    def check(*arrays: np.ndarray) -> None:
        same(arrays[-1], np.repeat(np.array(want, U64)[:, None], 32, 1))

    text = kernel("\n".join([*body, "ret;"]), {**kinds, "o": "u64"})
    return Program(text, (*(values[name] for name in kinds), outs), check)


# ---- atomics ----

ATOMICS = [
    *(("add", kind) for kind in ("u32", "s32", "u64", "f32", "f64")),
    *((how, kind) for how in ("min", "max") for kind in ("u32", "s32", "u64", "s64")),
    *((how, kind) for how in ("and", "or", "xor", "exch") for kind in ("b32", "b64")),
    *((how, "u32") for how in ("inc", "dec")),
]


def left(how: str, kind: str, old: Any, value: Any) -> Any:
    """What an atomic operation leaves behind."""
    new = {
        "add": lambda: old + value,
        "min": lambda: min(old, value),
        "max": lambda: max(old, value),
        "and": lambda: old & value,
        "or": lambda: old | value,
        "xor": lambda: old ^ value,
        "exch": lambda: value,
        "inc": lambda: 0 if old >= value else old + 1,
        "dec": lambda: value if old == 0 or old > value else old - 1,
    }[how]()
    return new if kind[0] == "f" else wrap(new, kind)


def value_of(bits: int, kind: str) -> Any:
    size = int(kind[1:]) // 8
    value = np.array([int(bits) & (1 << 8 * size) - 1], f"u{size}")
    return value.view(f"f{size}")[0] if kind[0] == "f" else wrap(int(value[0]), kind)


def bits_of(value: Any, kind: str) -> int:
    size = int(kind[1:]) // 8
    return int(value.view(f"u{size}")) if kind[0] == "f" else value & (1 << 8 * size) - 1


def atomics(space: str, shift: int) -> Program:
    """Lanes of one warp fall upon four places, some of them not taking part; old values and what is left."""
    modifiers = ["", ".relaxed.cta", ".acquire.cluster", ".release.gpu", ".acq_rel.sys"]
    if "global" not in space:  # the others in shared memory: FLAGS
        modifiers = ["", ".relaxed.cta", ".relaxed.cluster", ".relaxed.gpu", ".relaxed.sys"]
    part = {"shared": ".shared", "shared::cta": ".shared::cta", "global": ".global"}.get(space, "")
    rng = np.random.default_rng(11)
    body = ["and.b32 %r0, %thread, 3;", "mul.wide.u32 %d0, %r0, 8;", "mul.wide.u32 %d1, %thread, 8;"]
    body += ["add.u64 %d2, %o, %d1;", "add.u64 %d3, %v, %d1;", "and.b32 %r2, %thread, 5;", "setp.ne.u32 %p0, %r2, 0;"]
    inside = "global" not in space
    if inside:
        body += ["mov.b32 %r1, memory;", "cvt.u32.u64 %r3, %d0;", "add.u32 %r1, %r1, %r3;"]
        body += ["cvt.u64.u32 %d4, %r1;"] + ["cvta.shared.u64 %d4, %d4;"] * (space == "generic shared")
    where = "%r1" if space.startswith("shared") else "%d4"
    listed = list(itertools.product(("atom", "red"), ATOMICS))
    listed = [(opcode, how, kind) for opcode, (how, kind) in listed if (opcode, how) != ("red", "exch")]
    starts, values = np.zeros((len(listed), 4), U64), np.zeros((len(listed), 32), U64)
    for slot, (opcode, how, kind) in enumerate(listed):
        order = modifiers[(slot + shift) % 5]
        if opcode == "red":
            order = order.replace("acq_rel", "release").replace("acquire", "relaxed")
        if kind[0] == "f":
            dtype = np.float32 if kind == "f32" else np.float64
            for array in (starts, values):
                whole = rng.integers(-100, 100, array.shape[1]).astype(dtype)
                array[slot] = whole.view(f"u{whole.itemsize}")
        else:
            starts[slot] = rng.integers(0, 1 << 64, 4, U64)
            values[slot] = rng.integers(0, 1 << 64, 32, U64)
            if how in ("inc", "dec"):
                starts[slot], values[slot] = rng.integers(0, 9, 4), rng.integers(0, 9, 32)
        size = int(kind[1:])
        body.append(f"ld.global.b{size} %d10, [%d3];")
        if inside:  # lanes 0 to 3 lay out the places
            body += ["add.u64 %d5, %m, %d0;", f"ld.global.b{size} %d11, [%d5+{32 * slot}];"]
            body += [
                "setp.lt.u32 %p1, %thread, 4;",
                f"@%p1 st.{'shared' if where == '%r1' else ''}.b{size} [{where}], %d11;".replace("..", "."),
            ]
            body += ["bar.warp.sync -1;"]
        else:
            body += ["add.u64 %d4, %m, %d0;", f"add.u64 %d4, %d4, {32 * slot};"]
        body.append("mov.b64 %d12, 77;")
        result = "%d12, " if opcode == "atom" else ""
        guard = "@%p0 " if slot % 2 else ""
        register = {"f32": "%f0", "f64": "%d10"}.get(kind, "%d10" if size == 64 else "%r10")
        if size == 32:
            body += ["cvt.u32.u64 %r10, %d10;", "mov.b32 %f0, %r10;"]
            result = result.replace("%d12", "%r12")
            body.append("mov.b32 %r12, 77;")
        body.append(f"{guard}{opcode}{order}{part}.{how}.{kind} {result}[{where}], {register};")
        if size == 32 and opcode == "atom":
            body.append("cvt.u64.u32 %d12, %r12;")
        body.append("st.global.b64 [%d2], %d12;")
        if inside:
            body += [
                "bar.warp.sync -1;",
                f"ld.{'shared' if where == '%r1' else ''}.b{size} %d13, [{where}];".replace("..", "."),
            ]
            body += [f"@%p1 st.global.b{size} [%d5+{32 * slot}], %d13;", "bar.warp.sync -1;"]
        body += ["add.u64 %d2, %d2, 256;", "add.u64 %d3, %d3, 256;"]

    def check(m: np.ndarray, v: np.ndarray, o: np.ndarray) -> None:
        for slot, (opcode, how, kind) in enumerate(listed):
            places = [value_of(x, kind) for x in starts[slot]]
            for thread in range(32):
                old = 77
                if not slot % 2 or thread & 5:
                    old = bits_of(places[thread & 3], kind)
                    places[thread & 3] = left(how, kind, places[thread & 3], value_of(values[slot, thread], kind))
                assert o[slot, thread] == (old if opcode == "atom" else 77), (opcode, how, kind, thread)
            same(m[slot] & U64((1 << int(kind[1:])) - 1), [bits_of(x, kind) for x in places])

    top = ".shared .align 64 .b8 memory[64];\n" if inside else ""
    outs = np.zeros((len(listed), 32), U64)
    return Program(kernel("\n".join([*body, "ret;"]), "m v o", top=top), (starts, values, outs), check)


# ---- lanes of a warp ----


def everyone(active: np.ndarray, value: Any) -> np.ndarray:
    return np.full(32, value)


def warp_cases() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """(instruction, type of the result, truth): %r10 holds x, %p3 a flag, %r11 the mask of active lanes.

    The truth gets active lanes (bool), x (uint32), flags (bool), and gives the result's 32 values.
    """

    def mask_of(flags: np.ndarray) -> int:
        return int(sum(1 << int(i) for i in np.flatnonzero(flags)))

    yield "activemask.b32 %r12;", "b32", lambda act, x, p: everyone(act, mask_of(act))
    yield "vote.sync.ballot.b32 %r12, %p3, %r11;", "b32", lambda act, x, p: everyone(act, mask_of(act & p))
    yield "vote.sync.ballot.b32 %r12, !%p3, %r11;", "b32", lambda act, x, p: everyone(act, mask_of(act & ~p))
    yield "vote.sync.all.pred %p4, %p3, %r11;", "pred", lambda act, x, p: everyone(act, p[act].all())
    yield "vote.sync.any.pred %p4, %p3, %r11;", "pred", lambda act, x, p: everyone(act, p[act].any())
    yield "vote.sync.uni.pred %p4, !%p3, %r11;", "pred", lambda act, x, p: everyone(act, len(set(p[act])) == 1)
    first = lambda act: int(np.flatnonzero(act)[0])  # noqa: E731
    yield "elect.sync %r12|%p4, %r11;", "b32", lambda act, x, p: everyone(act, first(act))
    yield "elect.sync _|%p4, %r11;", "pred", lambda act, x, p: np.arange(32) == first(act)
    for how, dtype in itertools.product(("add", "min", "max"), ("u32", "s32")):
        function = {"add": lambda v: sum(map(int, v)), "min": min, "max": max}[how]
        yield (
            f"redux.sync.{how}.{dtype} %r12, %r10, %r11;",
            "b32",
            lambda act, x, p, f=function, d=dtype: everyone(
                act, f(x.view(np.int32 if d == "s32" else np.uint32)[act].tolist()) & 0xFFFFFFFF
            ),
        )
    for how, function in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
        yield (
            f"redux.sync.{how}.b32 %r12, %r10, %r11;",
            "b32",
            lambda act, x, p, f=function: everyone(act, f.reduce(x[act])),
        )
    for how, magnitude, nan in itertools.product(("min", "max"), ("", ".abs"), ("", ".NaN")):

        def extreme(act: Any, x: Any, p: Any, how: str = how, magnitude: str = magnitude, nan: str = nan) -> Any:
            values = x.view(np.float32)[act]
            values = np.abs(values) if magnitude else values
            if (nan and np.isnan(values).any()) or np.isnan(values).all():
                return everyone(act, 0x7FFFFFFF)
            best = (np.nanmin if how == "min" else np.nanmax)(values)
            return everyone(act, int(np.float32(best).view(np.uint32)))

        yield f"redux.sync.{how}{magnitude}{nan}.f32 %r12, %r10, %r11;", "b32", extreme
    # Sources are two apart at most within pairs of lanes of the same parity, so that they are active in all contexts.
    for mode, lane, bounds in (
        ("bfly", 2, 31),
        ("bfly", 4, 0x1818 | 7),
        ("up", 4, 0),
        ("down", 2, 31),
        ("idx", 6, 0x181F),
        ("up", 2, 0x1800),
        ("down", 4, 0x180F),
    ):

        def shuffled(act: Any, x: Any, p: Any, mode: str = mode, lane: int = lane, bounds: int = bounds) -> Any:
            out, inside = np.zeros(32, np.uint32), np.zeros(32, bool)
            for i in range(32):
                segment, clamp = bounds >> 8 & 31, bounds & 31
                low, high = i & segment, (i & segment) | (clamp & ~segment)
                j = {"up": i - lane, "down": i + lane, "bfly": i ^ lane, "idx": low | (lane | i & 1) & ~segment}[mode]
                inside[i] = j >= high if mode == "up" else j <= high
                out[i] = x[j if inside[i] else i]
            return out, inside

        where = "%r13" if mode == "idx" else lane  # 6 for even lanes, 7 for odd ones
        text = f"shfl.sync.{mode}.b32 %r12|%p4, %r10, {where}, {bounds}, %r11;"
        yield text, "b32", lambda act, x, p, f=shuffled: f(act, x, p)[0]
        yield text, "pred", lambda act, x, p, f=shuffled: f(act, x, p)[1]
        yield text.replace("|%p4", ""), "b32", lambda act, x, p, f=shuffled: f(act, x, p)[0]


def warps() -> Program:
    """In a whole warp, guarded, on both sides of a branch, in loops that lanes leave early, after lanes have ended."""
    listed = list(warp_cases())
    rng = np.random.default_rng(17)
    x = rng.integers(0, 1 << 32, (len(listed), 32), np.uint64).astype(np.uint32)
    for slot, (text, _, _) in enumerate(listed):
        if ".f32" in text:
            floats = rng.standard_normal(32).astype(np.float32)
            floats[rng.integers(0, 32, 3)] = np.nan if slot % 2 else -7
            x[slot] = floats.view(np.uint32)
    p = rng.integers(0, 2, 32).astype(np.uint32)
    lane = np.arange(32)
    odd = (lane & 1).astype(bool)
    contexts = [lane >= 0, odd, ~odd, odd, ~odd, lane >= 0, ~odd]
    body = ["mul.wide.u32 %d0, %thread, 4;", "add.u64 %d1, %x, %d0;", "add.u64 %d2, %p, %d0;", "add.u64 %d3, %o, %d0;"]
    body += [
        "ld.global.b32 %r2, [%d2];",
        "setp.ne.u32 %p3, %r2, 0;",
        "and.b32 %r3, %thread, 1;",
        "setp.eq.u32 %p0, %r3, 1;",
        "or.b32 %r13, %r3, 6;",
    ]
    size = 4 * 32

    def one(slot: int, context: int, guard: str = "") -> Iterator[str]:
        text, kind, _ = listed[slot]
        yield f"ld.global.b32 %r10, [%d1+{size * slot}];"
        yield "mov.b32 %r12, 77;"
        yield "mov.pred %p4, 0;"
        yield f"{guard} activemask.b32 %r11;"
        yield f"{guard} {text}"
        if kind == "pred":
            yield "selp.b32 %r12, 1, 0, %p4;"
        yield f"{guard} bar.warp.sync %r11;"
        yield f"st.global.b32 [%d3+{size * (context * len(listed) + slot)}], %r12;"

    for context, guard in enumerate(("", "@%p0", "@!%p0")):
        for slot in range(len(listed)):
            body += one(slot, context, guard)
    body += (
        ["@%p0 bra ODD;"] + [line for slot in range(len(listed)) for line in one(slot, 4)] + ["bra.uni JOIN;", "ODD:"]
    )
    body += [line for slot in range(len(listed)) for line in one(slot, 3)] + ["JOIN:"]
    # Even lanes go round once, odd ones twice: the second time, these are alone.
    body += ["mov.b32 %r20, 0;", "LOOP:"] + [line for slot in range(len(listed)) for line in one(slot, 5)]
    body += ["add.u32 %r20, %r20, 1;", "setp.le.u32 %p1, %r20, %r3;", "@%p1 bra LOOP;"]
    body += ["@%p0 ret;"] + [line for slot in range(len(listed)) for line in one(slot, 6)]
    # All lanes that are left: a mask may name those that have exited (PTX ISA, vote.sync).
    body += ["vote.sync.any.pred %p4, %p0, -1;", "selp.b32 %r12, 1, 0, %p4;"]
    body += [
        f"st.global.b32 [%d3+{size * 7 * len(listed)}], %r12;",
        "elect.sync %r12|%p4, -1;",
        "@%p4 exit;",
        "ret.uni;",
    ]
    outs = np.full((8, len(listed), 32), 0xEEEEEEEE, np.uint32)

    def check(x: np.ndarray, p: np.ndarray, o: np.ndarray) -> None:
        flags = p != 0
        for slot, (_, kind, truth) in enumerate(listed):
            for context, active in enumerate(contexts):
                want = np.asarray(truth(active, x[slot], flags)).astype(np.uint32)
                if context == 5:  # the last that an odd lane stored is from its second time round
                    want = np.where(odd, np.asarray(truth(odd, x[slot], flags)).astype(np.uint32), want)
                rest = 0xEEEEEEEE if context in (3, 4, 6) else 0 if kind == "pred" else 77
                same(o[context, slot], np.where(active, want, rest))
        same(o[7, 0], np.where(odd, 0xEEEEEEEE, 0))

    return Program(kernel("\n".join(body), "x p o"), (x, p, outs), check)


PROGRAMS: dict[str, Callable[[], Program]] = {
    **{
        f"loads and stores, {s}": (lambda s=s: round_trip(s))
        for s in ("shared", "shared::cta", "shared::cluster", "global", "generic shared", "generic global")
    },
    **{
        f"atomics, {s}": (lambda s=s, i=i: atomics(s, i))
        for i, s in enumerate(("shared", "shared::cta", "global", "generic shared", "generic global"))
    },
    "parameters": parameters,
    "lanes of a warp": warps,
}


# Ordered accesses of shared memory, which tracking refuses.
FLAGS = kernel(
    """shl.b32 %r1, %thread, 2; mov.b32 %r2, memory; add.u32 %r1, %r1, %r2; mad.wide.u32 %d1, %thread, 16, %o;
st.release.cluster.shared.b32 [%r1], %thread; ld.acquire.sys.shared.b32 %r3, [%r1];
st.global.b32 [%d1], %r3; add.u32 %r3, %r3, 5;
st.release.sys.shared.b32 [%r1], %r3; ld.acquire.cluster.shared.b32 %r4, [%r1]; st.global.b32 [%d1+4], %r4;
atom.acquire.cta.shared.inc.u32 %r5, [%r1], 20; st.global.b32 [%d1+8], %r5;
ld.shared.b32 %r6, [%r1]; st.global.b32 [%d1+12], %r6; ret;""",
    "o",
    top=".shared .align 128 .b8 memory[128];\n",
)
