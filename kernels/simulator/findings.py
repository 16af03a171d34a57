"""What the simulator finds wrong with a kernel.

SimulationError
├── UnknownInstruction   an opcode, modifier or operand form that is not modelled; never guessed
├── BoundsError          an address in no registered tensor, no shared memory, no allocated tensor memory; alignment
├── PoisonError          a value is used that nobody defined
├── RaceError            two accesses that nothing orders
├── ProtocolError        a rule of an instruction is broken: uniformity, lanes, barrier counts, allocation
├── DescriptorError      a descriptor or tensor map asks for what its instruction does not have
└── DeadlockError        nobody can go on
"""

from __future__ import annotations

from dataclasses import dataclass

from wanfp4.errors import Wanfp4Error


@dataclass(frozen=True)
class Place:
    """A PTX line, its text, and the line of the CuTe DSL source it came from, as far as known."""

    line: int
    text: str = ""
    source: str | None = None

    def __str__(self) -> str:
        source = f", from {self.source}" if self.source else ""
        return f"PTX line {self.line}: {self.text}{source}" if self.text else f"PTX line {self.line}{source}"


class SimulationError(Wanfp4Error):
    """A finding. `line` and `other` are PTX lines (`other` of the second access of a race), `warp` the warp at fault.

    `place` and `other_place` are filled in by the device, which knows the kernel's text.
    """

    def __init__(
        self, message: str, *, line: int | None = None, warp: int | None = None, other: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.line = line
        self.warp = warp
        self.other = other
        self.kernel: str | None = None
        self.place: Place | None = None
        self.other_place: Place | None = None

    def __str__(self) -> str:
        lines = [self.message]
        if self.warp is not None:
            lines[0] += f" (warp {self.warp})"
        if self.kernel is not None:
            lines.append(f"  in kernel {self.kernel}")
        if self.place is not None or self.line is not None:
            lines.append(f"  at {self.place or Place(self.line or 0)}")
        if self.other_place is not None or self.other is not None:
            lines.append(f"  and {self.other_place or Place(self.other or 0)}")
        return "\n".join(lines)


class UnknownInstruction(SimulationError):  # noqa: N818 — it names what was found
    """An opcode, modifier or operand form that is not modelled."""


class BoundsError(SimulationError):
    """An access outside of registered tensors, shared memory or allocated tensor memory, or a misaligned one."""


class PoisonError(SimulationError):
    """A value is used that nobody defined."""


class RaceError(SimulationError):
    """Two accesses of which at least one writes, and that nothing orders."""


class ProtocolError(SimulationError):
    """A rule of an instruction is broken."""


class DescriptorError(SimulationError):
    """A descriptor or tensor map asks for something that its instruction does not have."""


class DeadlockError(SimulationError):
    """No warp can go on, and nothing asynchronous is under way."""
