"""Receipts: what a patched model ran, per expert, layer and step, and why wherever it was not 4-bit attention.

A `Ledger` counts calls while a model runs; `Ledger.receipt` turns the counts into a frozen `Receipt`. Calls that agree
in everything but layer and step are folded into one `Entry`, so a receipt stays short for 50 steps of 80 layers.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from wanfp4.policy import Policy

SCHEMA_VERSION = 1
PIPELINE = "pipeline"

_K = TypeVar("_K")
_V = TypeVar("_V")


@dataclass(frozen=True)
class Ran:
    """What one attention call was.

    name      the policy's or preset's name, "exact" for attention that rounds nothing.
    numerics  `Numerics.label`.
    backend   who ran it; "pipeline" is the pipeline's own attention ("pipeline/NAME" after `set_attention_backend`).
    emulated  True when 4-bit numerics were emulated, which brings no speed.
    guarded   True when the policy's guard changed the numerics of this call.
    reason    why nothing was rounded, where nothing was.
    fallback  True when the policy asked for 4-bit attention and got the pipeline's own.
    """

    name: str
    numerics: str
    backend: str
    emulated: bool = False
    guarded: bool = False
    reason: str | None = None
    fallback: bool = False


@dataclass(frozen=True)
class Entry:
    """Calls that ran alike: each of `layers` at each of `steps` in each of `branches`.

    expert    component of the pipeline: "transformer" or "transformer_2".
    blocks    the list of blocks in it: "blocks", or "vace_blocks" for VACE's control branch.
    layers    indices in the policy's counting (a VACE block counts as the layer it feeds).
    steps     denoising steps, from 0; None where neither pipeline nor timestep told.
    branches  "cond" and "uncond" as the pipeline names them; "" where it names none.
    sigma     (lowest, highest) noise level among these calls, in [0, 1]; None where unknown.
    calls     how many attention calls this was, over all layers, steps, branches and runs.
    notes     sums over these calls, such as `rows_shifted`.
    """

    expert: str
    blocks: str
    layers: tuple[int, ...]
    steps: tuple[int | None, ...]
    branches: tuple[str, ...]
    ran: Ran
    sigma: tuple[float, float] | None
    calls: int
    notes: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; the fields of `ran` stand beside the others."""
        return {
            "expert": self.expert,
            "blocks": self.blocks,
            "layers": list(self.layers),
            "steps": list(self.steps),
            "branches": list(self.branches),
            "sigma": None if self.sigma is None else list(self.sigma),
            **vars(self.ran),
            "calls": self.calls,
            "notes": dict(self.notes),
        }

    def __str__(self) -> str:
        where = self.expert if self.blocks == "blocks" else f"{self.expert}.{self.blocks}"
        place = f"{where} {_ranges('layer', self.layers)}, {_ranges('step', self.steps)}"
        if self.branches not in (("",), ("cond",), ("cond", "uncond")):
            place += f" ({', '.join(b or 'unnamed' for b in self.branches)})"
        ran = self.ran
        if ran.backend.split("/")[0] == PIPELINE:
            what = "FALLBACK to the pipeline's own attention" if ran.fallback else "the pipeline's own attention"
            implementation = ran.backend.partition("/")[2]
            what += f" ({implementation})" if implementation else ""
        else:
            what = f"{ran.name} on {ran.backend}" + (" (emulated)" if ran.emulated else "")
        what += ", guarded" if ran.guarded else ""
        what += f", {_count(self.calls, 'call')}"
        for name, value in self.notes.items():
            what += f", {value} {name.replace('_', ' ')}"
        return f"{place}: {what}" + (f"; {ran.reason}" if ran.reason else "")


@dataclass(frozen=True)
class Unpatched:
    """A self-attention that was left alone, and why."""

    expert: str
    module: str
    reason: str


@dataclass(frozen=True)
class Receipt:
    """What ran since the patch, or since `Patch.reset`.

    backend  the backend that was asked for by name; None left the choice to each call.
    """

    policy: Policy
    backend: str | None
    strict: bool
    pipeline: str
    entries: tuple[Entry, ...] = ()
    unpatched: tuple[Unpatched, ...] = ()

    @property
    def calls(self) -> int:
        """Attention calls counted, in all."""
        return sum(entry.calls for entry in self.entries)

    @property
    def fallbacks(self) -> tuple[Entry, ...]:
        """Entries that ran the pipeline's own attention although the policy asked for 4-bit attention."""
        return tuple(entry for entry in self.entries if entry.ran.fallback)

    def at(
        self, *, expert: str | None = None, layer: int | None = None, step: int | None = None, branch: str | None = None
    ) -> tuple[Entry, ...]:
        """Entries that cover the given place; None means anywhere. Their counts are those of the whole entry."""
        return tuple(
            entry
            for entry in self.entries
            if (expert is None or entry.expert == expert)
            and (layer is None or layer in entry.layers)
            and (step is None or step in entry.steps)
            and (branch is None or branch in entry.branches)
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, the policy's every constant included."""
        return {
            "schema": SCHEMA_VERSION,
            "pipeline": self.pipeline,
            "policy": self.policy.to_dict(),
            "backend": self.backend,
            "strict": self.strict,
            "calls": self.calls,
            "entries": [entry.to_dict() for entry in self.entries],
            "unpatched": [dict(vars(module)) for module in self.unpatched],
        }

    def summary(self) -> list[str]:
        """Lines for people: what ran where, then what was left alone and why."""
        lines = [str(entry) for entry in self.entries] or ["no self-attention has run yet"]
        reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
        for module in self.unpatched:
            reasons[module.expert, module.reason].append(module.module)
        for (expert, reason), modules in reasons.items():
            names = modules[0] if len(modules) == 1 else f"{modules[0]} to {modules[-1]} ({len(modules)} modules)"
            lines.append(f"{expert} {names}: not patched; {reason}")
        return lines


@dataclass
class _Tally:
    calls: int = 0
    sigmas: tuple[float, float] | None = None
    notes: dict[str, int] = field(default_factory=dict)

    def add(self, calls: int, sigmas: tuple[float, float] | None, notes: Mapping[str, int]) -> None:
        self.calls += calls
        if sigmas is not None:
            low, high = self.sigmas or sigmas
            self.sigmas = (min(low, sigmas[0]), max(high, sigmas[1]))
        for name, value in notes.items():
            self.notes[name] = self.notes.get(name, 0) + value


class Ledger:
    """Counts calls. Its size grows with the places that ran (expert, layer, step, branch), not with the calls."""

    def __init__(self) -> None:
        self._tallies: dict[tuple[str, str, int, int | None, str, Ran], _Tally] = {}

    def add(
        self,
        ran: Ran,
        *,
        expert: str,
        blocks: str,
        layer: int,
        step: int | None,
        branch: str,
        sigma: float | None,
        notes: Mapping[str, int],
    ) -> None:
        """Count one call."""
        tally = self._tallies.setdefault((expert, blocks, layer, step, branch, ran), _Tally())
        tally.add(1, None if sigma is None else (sigma, sigma), notes)

    def clear(self) -> None:
        self._tallies.clear()

    def entries(self) -> tuple[Entry, ...]:
        """The counts, folded: layers that ran alike at the same steps and branches share an entry."""
        cells: dict[tuple[str, str, Ran], list[tuple[int, tuple[int | None, str]]]] = defaultdict(list)
        for expert, blocks, layer, step, branch, ran in self._tallies:
            cells[expert, blocks, ran].append((layer, (step, branch)))
        entries = []
        for (expert, blocks, ran), places in cells.items():
            for moments, layers in _alike(places).items():
                for branches, steps in _alike(moments).items():
                    total = _Tally()
                    for layer, step, branch in itertools.product(layers, steps, branches):
                        tally = self._tallies[expert, blocks, layer, step, branch, ran]
                        total.add(tally.calls, tally.sigmas, tally.notes)
                    entries.append(
                        Entry(
                            expert,
                            blocks,
                            tuple(sorted(layers)),
                            tuple(sorted(steps, key=_step_order)),
                            tuple(sorted(branches)),
                            ran,
                            total.sigmas,
                            total.calls,
                            dict(sorted(total.notes.items())),
                        )
                    )
        return tuple(sorted(entries, key=lambda e: (e.expert, e.blocks, _step_order(e.steps[0]), e.layers, e.branches)))


def _alike(pairs: Iterable[tuple[_K, _V]]) -> dict[frozenset[_V], list[_K]]:
    """Keys that occur with exactly the same values, by those values."""
    values: dict[_K, set[_V]] = defaultdict(set)
    for key, value in pairs:
        values[key].add(value)
    keys: dict[frozenset[_V], list[_K]] = defaultdict(list)
    for key, found in values.items():
        keys[frozenset(found)].append(key)
    return keys


def _step_order(step: int | None) -> int:
    return -1 if step is None else step


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _ranges(noun: str, numbers: Iterable[int | None]) -> str:
    """ "layers 0-3, 7" for 0, 1, 2, 3, 7; unknown ones are said to be."""
    known = sorted({n for n in numbers if n is not None})
    if not known:
        return f"unknown {noun}"
    runs: list[list[int]] = []
    for number in known:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"{noun}{'' if len(known) == 1 else 's'} {text}"
