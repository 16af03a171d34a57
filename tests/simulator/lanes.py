"""Programs that run instructions on registers wherever control flow can bring lanes to them, and check each lane."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from cases import Case, bits_of
from programs import everywhere, kernel

WARPS = 2
THREADS = 32 * WARPS
BATCH = 12  # cases in one kernel
UNTOUCHED = 0xEEEEEEEEEEEEEEEE
CONTEXTS = ("converged", "@p", "@!p", "branch", "loop", "after a return")
VARIANTS: dict[str, dict[str, Any]] = {"plain": {}, "tracked": {"track": True}}


def storage(kind: str) -> str:
    """Type of the register that holds a value: what is smaller than 16 bits lives in 32."""
    return {"u8": "b32", "s8": "b32", "pred": "b32", "f16": "b16", "bf16": "b16", "f32x2": "b64"}.get(
        kind, "b32" if kind.endswith("x2") else kind
    )


def width(kind: str) -> int:
    return bits_of(storage(kind)) // 8


# ---- operands ----


def operands(spec: str, rng: np.random.Generator, number: int) -> np.ndarray:
    """Bits of THREADS operands, uint64: what is special about the type, and random ones."""
    kind, _, pool = spec.partition(":")
    bits = bits_of(kind)
    random = [int.from_bytes(rng.bytes(8), "little") for _ in range(THREADS)]
    if kind == "pred":
        values = [x & 1 for x in random]
    elif kind in ("f32", "f64", "f32x2"):
        values = _floats(kind, pool, rng, random)
    elif kind in ("f16", "bf16", "f16x2", "bf16x2"):
        special = [
            0,
            0x8000,
            0x3C00,
            0x3F80,
            0x7C00,
            0xFC00,
            0x7F80,
            0xFF80,
            0x7E00,
            0x7FC0,
            1,
            0x8001,
            0x7BFF,
            0x4100,
            0x4248,
        ]
        values = [
            special[x % len(special)] | special[(x >> 8) % len(special)] << 16 if x >> 60 < 6 else x for x in random
        ]
    else:
        edges = [
            0,
            1,
            2,
            3,
            (1 << bits) - 1,
            (1 << bits) - 2,
            1 << (bits - 1),
            (1 << (bits - 1)) - 1,
            (1 << (bits - 1)) + 1,
        ]
        values = [edges[x % len(edges)] if x >> 61 < 3 else x >> (x % 60) for x in random]
        if pool == "count":
            counts = (0, 1, 7, 8, 15, 16, 17, 24, 31, 32, 33, 40, 63, 64, 65, 255, 256, 0x80000008, 0xFFFFFFFF)
            values = [counts[x % len(counts)] if x >> 62 else x % 70 for x in random]
        if pool == "divisor":
            values = [x if x & ((1 << bits) - 1) else 3 for x in values]
    # What lies above a narrow value in its register is nobody's business.
    keep = (1 << min(64, 8 * width(kind))) - 1 if kind != "pred" else 1
    return np.array([x & keep for x in values], np.uint64)


def _floats(kind: str, pool: str, rng: np.random.Generator, random: Sequence[int]) -> list[int]:
    special = [
        0.0,
        1.0,
        0.5,
        1.5,
        2.5,
        2.0**-126,
        2.0**-149,
        2.0**-127,
        3.4028234663852886e38,
        math.inf,
        math.nan,
        2.0**126,
        1 / 3,
    ]
    special += [-x for x in special]
    if kind == "f64":
        special += [
            2.0**-1074,
            2.0**1023,
            1 + 2.0**-24,
            1 + 2.0**-24 + 2.0**-52,
            2.0**31,
            -(2.0**63),
            2.0**64,
            2.0**-150,
            1e-46,
        ]
    spread = {"small": 2, "half": 12, "moderate": 3}.get(pool, 40)
    if pool == "small":
        special += [
            0.25,
            0.75,
            1.75,
            3.5,
            5.0,
            6.0,
            6.5,
            7.5,
            7.75,
            28.0,
            30.0,
            448.0,
            464.0,
            465.0,
            57344.0,
            61440.0,
            2.0**-9,
            2.0**-10,
        ]
    if pool == "half":
        special += [
            65504.0,
            65520.0,
            2.0**-24,
            2.0**-25,
            1 + 2.0**-11,
            1 + 2.0**-8,
            255.5,
            127.5,
            -128.5,
            2.0**31,
            2.0**32,
            -(2.0**31),
            2.0**63,
            2.0**64,
        ]
    out = []
    for x in random:
        values = []
        for part in range(2):
            choice = x >> (32 * part)
            if choice & 7 < 3:
                values.append(special[(choice >> 3) % len(special)])
            elif choice & 7 == 3 and not pool:
                values.append(float(np.uint32(choice & 0xFFFFFFFF).view(np.float32)))
            else:
                values.append(float(rng.standard_normal() * 2.0 ** rng.integers(-spread, spread)))
        with np.errstate(all="ignore"):
            if kind == "f64":
                out.append(int(np.float64(values[0]).view(np.uint64)))
            else:
                low, high = (int(np.float32(value).view(np.uint32)) for value in values)
                out.append(low | high << 32 if kind == "f32x2" else low)
    return out


def given(bits: int, kind: str) -> Any:
    """What a truth function gets for a register's bits."""
    if kind == "pred":
        return bool(bits)
    if kind == "f32":
        return float(np.uint32(bits).view(np.float32))
    if kind == "f64":
        return float(np.uint64(bits).view(np.float64))
    bits &= (1 << bits_of(kind)) - 1
    return bits - (1 << bits_of(kind)) if kind[0] == "s" and bits >> (bits_of(kind) - 1) else bits


def expected(value: Any, kind: str) -> int | None:
    """Bits of the register that holds a result: narrow integers are extended by their sign. None: any value will do."""
    if value is None or (isinstance(value, float) and math.isnan(value) and kind in ("f32", "f64")):
        return None
    with np.errstate(all="ignore"):
        if kind == "f32":
            return int(np.float32(value).view(np.uint32))
        if kind == "f64":
            return int(np.float64(value).view(np.uint64))
    if kind == "pred":
        return int(bool(value))
    size = bits_of(kind)
    value = int(value) & ((1 << size) - 1)
    if kind[0] == "s" and value >> (size - 1):
        value -= 1 << size
    return value & ((1 << (8 * width(kind))) - 1)


# ---- programs ----


def batches(cases: Iterable[Case]) -> Iterator[list[Case]]:
    """Cases with the same operands, some at a time."""
    for _, group in groupby(sorted(cases, key=lambda case: case.ins), key=lambda case: case.ins):
        same = list(group)
        for start in range(0, len(same), BATCH):
            yield same[start : start + BATCH]


class Batch:
    """One kernel that runs the cases of a batch in all contexts, each result stored apart."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self.cases = cases
        self.ins = cases[0].ins
        # Every result gets a register: (case, number of the result, type).
        self.results = [(i, n, kind) for i, case in enumerate(cases) for n, kind in enumerate(case.outs)]
        seed = zlib.crc32(" ".join(case.opcode for case in cases).encode())
        rng = np.random.default_rng(seed)
        self.inputs = [operands(spec, rng, i) for i, spec in enumerate(self.ins)]
        self.flags = rng.integers(0, 2, THREADS).astype(np.uint64)
        self.trips = rng.integers(0, 4, THREADS).astype(np.uint64)
        self.text = kernel(self._body(), "flags trips ins outs", threads=THREADS)

    def _declared(self) -> Iterator[str]:
        for i, spec in enumerate(self.ins):
            kind = spec.partition(":")[0]
            yield f".reg .{storage(kind)} %a{i}; " + f".reg .pred %ap{i};" * (kind == "pred")
        for i, n, kind in self.results:
            yield f".reg .{'pred' if kind == 'pred' else storage(kind)} %o{i}_{n};"
        yield ".reg .b8 %b0, %b1;"

    def _run(self, guard: str = "") -> Iterator[str]:
        """The instructions under test."""
        for i, case in enumerate(self.cases):
            names = [f"%o{i}_{n}" for n in range(len(case.outs))]
            names += [f"%ap{j}" if spec == "pred" else f"%a{j}" for j, spec in enumerate(self.ins)]
            for part in case.template.format(*names).split(";"):
                yield f"{guard} {part.strip()};"

    def _preset(self) -> Iterator[str]:
        """Other lanes keep what was there before."""
        for i, n, kind in self.results:
            name = f"%o{i}_{n}"
            yield f"mov.pred {name}, 0;" if kind == "pred" else f"mov.b{8 * width(kind)} {name}, 77;"

    def _store(self, context: int, guard: str = "") -> Iterator[str]:
        for slot, (i, n, kind) in enumerate(self.results):
            name, offset = f"%o{i}_{n}", 8 * THREADS * (context * len(self.results) + slot)
            if kind == "pred":
                yield f"selp.b32 %r0, 1, 0, {name};"
                name = "%r0"
            yield f"st.global.b{8 * width(kind)} [%d3+{offset}], {name};"

    def _body(self) -> str:
        lines = [*self._declared(), "mov.b32 %r1, 0;", "mov.b32 {%b0, %b1, _, _}, %r1;"]
        lines += ["mul.wide.u32 %d0, %thread, 8;", "add.u64 %d1, %flags, %d0;", "ld.global.b32 %r2, [%d1];"]
        lines += ["setp.ne.u32 %p0, %r2, 0;", "add.u64 %d1, %trips, %d0;", "ld.global.b32 %r3, [%d1];"]
        lines += ["add.u64 %d2, %ins, %d0;", "add.u64 %d3, %outs, %d0;"]
        lines += ["and.b32 %r4, %thread, 2;", "setp.eq.u32 %p1, %r4, 0;"]
        for i, spec in enumerate(self.ins):
            kind = spec.partition(":")[0]
            lines.append(f"ld.global.b{8 * width(kind)} %a{i}, [%d2+{8 * THREADS * i}];")
            if kind == "pred":
                lines.append(f"setp.ne.b32 %ap{i}, %a{i}, 0;")
        lines += [*self._run(), *self._store(0)]
        lines += [*self._preset(), *self._run("@%p0"), *self._store(1)]
        lines += [*self._preset(), *self._run("@!%p0"), *self._store(2)]
        lines += [*self._preset(), "@%p0 bra NESTED;", *self._run(), "bra JOIN;"]
        lines += ["NESTED:", "@%p1 bra JOIN;", *self._run(), "JOIN:", *self._store(3)]
        lines += [*self._preset(), "mov.b32 %r5, 0;", "LOOP:", "setp.ge.u32 %p2, %r5, %r3;", "@%p2 bra DONE;"]
        lines += [*self._run(), "add.u32 %r5, %r5, 1;", "bra LOOP;", "DONE:", *self._store(4)]
        lines += [*self._preset(), "@%p0 ret;", *self._run(), *self._store(5), "ret;"]
        return "\n".join(lines)

    def active(self) -> np.ndarray:
        """[contexts, threads]: who comes to the instructions."""
        flag, second = self.flags.astype(bool), (np.arange(THREADS) & 2).astype(bool)
        return np.stack([flag | True, flag, ~flag, ~flag | second, self.trips > 0, ~flag])

    def truths(self) -> tuple[list[list[Any]], list[list[Any]]]:
        """Operands of each lane, and each result's values."""
        kinds = [spec.partition(":")[0] for spec in self.ins]
        rows = [[given(int(x), kind) for x in row] for row, kind in zip(self.inputs, kinds, strict=True)]
        lanes = [list(lane) for lane in zip(*rows, strict=True)] or [[] for _ in range(THREADS)]
        values = [[case.truth(*lane) for lane in lanes] for case in self.cases]
        several = [len(case.outs) > 1 for case in self.cases]
        return lanes, [[v[n] if several[i] else v for v in values[i]] for i, n, _ in self.results]

    def check(self) -> None:
        """Run it in all variants and compare every lane of every context. Raises AssertionError."""
        outs = np.full((len(CONTEXTS), len(self.results), THREADS), UNTOUCHED, np.uint64)
        ins = np.stack(self.inputs) if self.inputs else np.zeros((1, THREADS), np.uint64)
        found = everywhere(self.text, self.flags, self.trips, ins, outs, variants=VARIANTS)[-1]
        lanes, truths = self.truths()
        active, wrong = self.active(), []
        for slot, (i, n, kind) in enumerate(self.results):
            mask = (1 << (8 * width(kind))) - 1
            bits = [expected(value, kind) for value in truths[slot]]
            want = np.array([0 if x is None else x for x in bits], np.uint64)
            kept = np.full((len(CONTEXTS), 1), 0 if kind == "pred" else 77, np.uint64)
            kept[5] = UNTOUCHED & mask
            got = found[:, slot] & np.uint64(mask)
            for context, thread in np.argwhere(got != np.where(active, want, kept)):
                one = int(got[context, thread])
                if active[context, thread] and (
                    _open(one, truths[slot][thread], kind)
                    if bits[thread] is None
                    else _close(one, bits[thread], self.cases[i].slack)
                ):
                    continue
                wrong.append(
                    f"{self.cases[i].opcode} {lanes[thread]} (result {n}, {CONTEXTS[context]}, thread {thread}): "
                    f"{one:#x}, not {bits[thread] if active[context, thread] else kept[context, 0]}"
                )
        assert not wrong, f"{len(wrong)} wrong, of them\n" + "\n".join(wrong[:6])


def _open(got: int, value: Any, kind: str) -> bool:
    """A NaN may have any payload, but it has to be one."""
    if value is None:
        return True
    found = np.uint32(got).view(np.float32) if kind == "f32" else np.uint64(got).view(np.float64)
    return bool(np.isnan(found))


def _close(got: int, want: int, slack: int) -> bool:
    return got == want or (got ^ want < 1 << 31 and abs(got - want) <= slack)
