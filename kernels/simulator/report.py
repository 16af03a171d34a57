"""What a launch did: instructions, waits, memory, copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wanfp4.simulator.machine import CTA
    from wanfp4.simulator.translate import Code

Json = dict[str, Any]


@dataclass
class Waits:
    """Of one barrier: how often somebody came to wait, and how often it had to."""

    waits: int = 0
    blocked: int = 0


@dataclass
class LaunchReport:
    """Sums over the CTAs of a launch, high-water marks over all of them. Instructions are warp instructions.

    opcodes  by opcode; roles: by group of warps that ran the same blocks ("0-3"), by opcode.
    waits    by barrier, named as in findings.
    tma      copies and bytes, in and out; mma: by kind; scale_copies: tcgen05.cp.
    """

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    seconds: float = 0.0
    ctas: int = 0
    opcodes: Counter[str] = field(default_factory=Counter)
    roles: dict[str, Counter[str]] = field(default_factory=dict)
    waits: dict[str, Waits] = field(default_factory=dict)
    tma: Counter[str] = field(default_factory=Counter)
    mma: Counter[str] = field(default_factory=Counter)
    scale_copies: int = 0
    shared_bytes: int = 0
    tensor_columns: int = 0

    @property
    def instructions(self) -> int:
        """Warp instructions in all."""
        return sum(self.opcodes.values())

    def add(self, code: Code, cta: CTA) -> None:
        """Take in a CTA that has ended."""
        self.ctas += 1
        tallies = [Counter(ins.opcode for ins in block) for block in code.kernel.blocks]
        groups: dict[tuple[int, ...], list[Any]] = {}
        for warp in cta.warps:
            groups.setdefault(tuple(i for i, n in enumerate(warp.hits) if n), []).append(warp)
        for warps in groups.values():
            count: Counter[str] = Counter()
            for warp in warps:
                for index, hits in enumerate(warp.hits):
                    for opcode, n in tallies[index].items() if hits else ():
                        count[opcode] += n * hits
            self.roles.setdefault(_ranges([warp.index for warp in warps]), Counter()).update(count)
            self.opcodes.update(count)
        statistics = cta.statistics
        for name, (waits, blocked) in statistics.waits.items():
            seen = self.waits.setdefault(name, Waits())
            seen.waits += waits
            seen.blocked += blocked
        self.tma.update(statistics.tma)
        self.mma.update(statistics.mma)
        self.scale_copies += statistics.scale_copies
        self.shared_bytes = max(self.shared_bytes, statistics.shared_bytes)
        self.tensor_columns = max(self.tensor_columns, statistics.tensor_columns)

    def to_dict(self) -> Json:
        """JSON values."""
        return {
            "kernel": self.kernel,
            "grid": list(self.grid),
            "threads": self.threads,
            "seconds": round(self.seconds, 3),
            "ctas": self.ctas,
            "instructions": self.instructions,
            "opcodes": dict(self.opcodes.most_common()),
            "roles": {name: dict(count.most_common()) for name, count in self.roles.items()},
            "waits": {name: {"waits": w.waits, "blocked": w.blocked} for name, w in self.waits.items()},
            "tma": dict(self.tma),
            "mma": dict(self.mma),
            "scale_copies": self.scale_copies,
            "shared_bytes": self.shared_bytes,
            "tensor_columns": self.tensor_columns,
        }

    def __str__(self) -> str:
        rate = self.instructions / self.seconds if self.seconds else 0.0
        lines = [
            f"{self.kernel}: grid {self.grid}, {self.threads} threads, {self.ctas} CTAs, "
            f"{self.instructions:,} warp instructions in {self.seconds:.2f} s ({rate:,.0f}/s)",
            f"  shared memory {self.shared_bytes:,} bytes, tensor memory {self.tensor_columns} columns",
            f"  TMA: {_listed(self.tma)}; MMA: {_listed(self.mma)}; scale copies: {self.scale_copies}",
        ]
        for name, count in self.roles.items():
            top = ", ".join(f"{opcode} {n:,}" for opcode, n in count.most_common(6))
            lines.append(f"  warps {name}: {count.total():,} ({top})")
        for name, waits in self.waits.items():
            lines.append(f"  {name}: {waits.waits} waits, {waits.blocked} of them blocked")
        return "\n".join(lines)


def _listed(count: Counter[str]) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in count.items()) or "none"


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] → "0-2,5"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
