"""Proof that the kernels check the model: with one rule of it broken, a kernel that is right goes wrong.

Where no kernel on hand can tell, the table says so, and the test that nothing changes keeps it honest.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from proof import FlashAttention, HandWritten, Kernel

from wanfp4.simulator import SimulationError, conversions, descriptors, engines, mma, tma
from wanfp4.simulator.barriers import Barriers, Mbarrier
from wanfp4.simulator.descriptors import Gather, SharedDescriptor
from wanfp4.simulator.judge import KNOWN, Judge
from wanfp4.simulator.machine import CTA

Patch = pytest.MonkeyPatch
CACHES = (tma._span, tma.decode, descriptors._k_major, descriptors._mn_major)


def no_swizzle(address: Any, layout: int) -> Any:
    return address


def later_bits(address: Any, layout: int) -> Any:
    """The same on both sides of a copy and a multiplication: address bits 8-10 instead of 7-9."""
    return address if layout == 0 else address ^ ((address >> 4) & {2: 0x70, 4: 0x30, 6: 0x10, 1: 0x60}[layout])


def both_swizzles(rule: Callable[[Any, int], Any]) -> Callable[[Patch], None]:
    def apply(patch: Patch) -> None:
        patch.setattr(tma, "swizzle", rule)
        patch.setattr(descriptors, "swizzle", rule)

    return apply


def mma_swizzle(patch: Patch) -> None:
    patch.setattr(descriptors, "swizzle", no_swizzle)


def offsets_swapped(which: str) -> Callable[[Patch], None]:
    old: Callable[..., Gather] = getattr(SharedDescriptor, which)

    def swapped(self: SharedDescriptor, *rest: int, **more: bool) -> Gather:
        return old(SharedDescriptor(self.value, self.start, self.sbo, self.lbo, self.layout), *rest, **more)

    return lambda patch: patch.setattr(SharedDescriptor, which, swapped)


def scale_id_ignored(patch: Patch) -> None:
    old = mma._scales
    patch.setattr(mma, "_scales", lambda cta, what, column, rows, first, *rest: old(cta, what, column, rows, 0, *rest))


def scale_lanes_other(patch: Patch) -> None:
    """Row r's scales in lane r // 4 % 32, column r % 4, instead of lane r % 32, column r // 32."""

    def other(cta: Any, what: str, column: int, rows: int, first: int, count: int, kind: str) -> NDArray[np.float64]:
        row = np.arange(rows)
        words = cta.tensor.take((row // 4 % 32)[:, None], (column + row % 4)[:, None])
        used = np.ascontiguousarray(words).view(np.uint8).reshape(rows, 4)[:, first : first + count]
        return mma._SCALES[kind].take(used)

    patch.setattr(mma, "_scales", other)


def outside_not_counted(patch: Patch) -> None:
    """complete_tx counts only the bytes of a box that lie inside of the tensor."""

    def load(self: CTA, w: Any, destination: int, map_address: int, coordinates: Any, barrier: int) -> None:
        box = self.tensor_map(w, map_address)
        span = self._box_span(w, box, destination, "cp.async.bulk.tensor")
        at = list(coordinates)
        _, inside = box.window(at)
        size = 0 if inside is None else math.prod(part.stop - part.start for part in inside)
        self._load(w, span, size, barrier, "cp.async.bulk.tensor", lambda: box.read(self.memory, at))

    patch.setattr(engines.Engines, "tma_load", load)


def boxes_not_cut(patch: Patch) -> None:
    """What is outside of the tensor is read and written like the rest."""
    old = tma.TensorMap.window

    def window(self: tma.TensorMap, coordinates: Any) -> Any:
        first, inside = old(self, coordinates)
        return first, inside if inside is None else [slice(0, self.row), *(slice(0, n) for n in self.box[1:])]

    patch.setattr(tma.TensorMap, "window", window)


def nibbles_swapped_in_mma(patch: Patch) -> None:
    pairs = mma._PAIRS.view(np.float64).reshape(256, 2)[:, ::-1]
    patch.setattr(mma, "_PAIRS", np.ascontiguousarray(pairs).view(np.complex128).reshape(256))


def nibbles_swapped_in_cvt(patch: Patch) -> None:
    old = conversions.to_e2m1x2
    patch.setattr(conversions, "to_e2m1x2", lambda high, low, relu: old(low, high, relu))


def ue8m0_rounds_down(patch: Patch) -> None:
    old = conversions.to_ue8m0x2
    patch.setattr(conversions, "to_ue8m0x2", lambda high, low, rounding: old(high, low, "rz"))


def operand_columns_reversed(patch: Patch) -> None:
    """A in tensor memory: its eight columns of K in the other order."""
    old = mma.decode

    def decode(raw: NDArray[np.uint8], element: str) -> NDArray[np.float64]:
        if raw.shape == (128, 32) and raw.base is not None and raw.base.dtype == np.uint32:  # straight from a take
            raw = np.ascontiguousarray(raw.reshape(128, 8, 4)[:, ::-1]).reshape(128, 32)
        return old(raw, element)

    patch.setattr(mma, "decode", decode)


def load_registers_reversed(patch: Patch) -> None:
    """tcgen05.ld: register i is column n - 1 - i."""
    old = CTA.tmem_load

    def load(self: CTA, *rest: Any) -> Any:
        values, poison = old(self, *rest)
        return values[::-1], None if poison is None else poison[:, ::-1]

    patch.setattr(CTA, "tmem_load", load)


def fresh_barrier_blocks(patch: Patch) -> None:
    """A barrier starts as if a phase were complete, so parity 0 passes instead of 1."""
    old = Mbarrier.__init__

    def init(self: Mbarrier, *rest: Any) -> None:
        old(self, *rest)
        self.phase = 1

    patch.setattr(Mbarrier, "__init__", init)


def one_arrival_a_warp(patch: Patch) -> None:
    """An arrive that 32 lanes execute counts once."""
    old = Barriers.arrive

    def arrive(self: Any, w: Any, addresses: Any, count: int, expect: int = 0) -> None:
        old(self, w, addresses, min(count, 1), expect)

    patch.setattr(Barriers, "arrive", arrive)


def commit_does_not_wait(patch: Patch) -> None:
    """tcgen05.commit arrives at once, whatever is still in the pipe."""
    old = CTA.commit

    def commit(self: CTA, w: Any, *rest: Any) -> None:
        old(self, w, *rest)
        if self.pipe:
            self.pipe.pop().step()

    patch.setattr(CTA, "commit", commit)


def accumulator_cleared(patch: Patch) -> None:
    old = mma.mma

    def fresh(
        cta: Any,
        kind: str,
        d: int,
        a: int,
        inside: bool,
        b: int,
        idesc: int,
        accumulate: bool,
        *rest: Any,
        **options: Any,
    ) -> None:
        old(cta, kind, d, a, inside, b, idesc, False, *rest, **options)

    patch.setattr(mma, "mma", fresh)


def commit_releases_nothing(patch: Patch) -> None:
    """The judge's rule, not the machine's: a completed commit tells its waiters of no MMA."""

    def commit(self: Judge, warp: int) -> Any:
        return np.zeros_like(self.clock[warp])

    patch.setattr(Judge, "commit", commit)


def barriers_release_nothing(patch: Patch) -> None:
    old = Judge.release

    def release(self: Judge, warp: int) -> Any:
        return old(self, warp) * 0

    patch.setattr(Judge, "release", release)


def proxy_fence_does_nothing(patch: Patch) -> None:
    patch.setattr(Judge, "fence_proxy", lambda self, warp: None)


def pipe_is_not_in_order(patch: Patch) -> None:
    """tcgen05.mma and cp of a thread know of each other only through waits, with "pipe" ordering too."""
    old = Judge._issue

    def issue(self: Judge, action: Any, agent: int, issuer: Any, *rest: Any) -> Any:
        known = issuer.copy()
        action = old(self, action, agent, issuer, *rest)
        if agent == self.pipe:
            action.known = action.tensor = action.shared_read = action.shared_write = known[KNOWN]
        return action

    patch.setattr(Judge, "_issue", issue)


OWN, FA4 = "own", "fa4"
# What is broken -> how, which kernels go wrong, whether the judge is needed to see it, under which seed.
ABLATIONS: dict[str, tuple[Callable[[Patch], None], set[str], bool, int | None]] = {
    "no swizzle, TMA and MMA": (both_swizzles(no_swizzle), {FA4}, False, None),
    "other swizzle, TMA and MMA": (both_swizzles(later_bits), {FA4}, False, None),
    "no swizzle in MMA": (mma_swizzle, {OWN, FA4}, False, None),
    "LBO and SBO swapped, MN-major": (offsets_swapped("mn_major"), {FA4}, False, None),
    "LBO and SBO swapped, K-major": (offsets_swapped("k_major"), {OWN, FA4}, False, None),
    "scale id ignored": (scale_id_ignored, {OWN}, False, None),
    "scales in other lanes": (scale_lanes_other, {OWN}, False, None),
    "UE8M0 rounds down": (ue8m0_rounds_down, {OWN}, False, None),
    "nibbles swapped in MMA": (nibbles_swapped_in_mma, set(), False, None),
    "nibbles swapped in cvt": (nibbles_swapped_in_cvt, {OWN}, False, None),
    "A in tensor memory: columns reversed": (operand_columns_reversed, {OWN, FA4}, False, None),
    "tcgen05.ld: registers reversed": (load_registers_reversed, {OWN, FA4}, False, None),
    "accumulator cleared by each MMA": (accumulator_cleared, {OWN, FA4}, False, None),
    "bytes outside not counted": (outside_not_counted, {OWN, FA4}, False, None),
    "boxes not cut at the end of a tensor": (boxes_not_cut, {OWN, FA4}, False, None),
    "fresh barrier passes parity 0": (fresh_barrier_blocks, {OWN, FA4}, False, None),
    "an arrive of 32 lanes counts once": (one_arrival_a_warp, {OWN, FA4}, False, None),
    "commit arrives at once": (commit_does_not_wait, {OWN, FA4}, False, 1),
    "judge: commit releases nothing": (commit_releases_nothing, {OWN, FA4}, True, None),
    "judge: barriers release nothing": (barriers_release_nothing, {OWN, FA4}, True, None),
    "judge: fence.proxy.async does nothing": (proxy_fence_does_nothing, {OWN, FA4}, True, None),
    "judge: the tensor pipe is not in order": (pipe_is_not_in_order, {OWN, FA4}, True, None),
}
TOLERANCE = {OWN: 0.0, FA4: 3e-3}


def forget() -> None:
    """Addresses are cached: a broken rule must neither use the old ones nor leave its own."""
    for cache in CACHES:
        cache.cache_clear()


@pytest.fixture(scope="session")
def own() -> Kernel:
    return HandWritten()


@pytest.fixture(scope="session")
def fa4(flash_attention_forward: Any) -> Kernel:
    """Ragged in both lengths, so that boxes reach beyond tensors."""
    return FlashAttention(flash_attention_forward, 200, 333, 64, False)


@pytest.fixture
def fresh_caches() -> Iterator[None]:
    forget()
    yield
    forget()


def outcome(kernel: Kernel, name: str, track: bool, seed: int | None) -> str | None:
    """What is wrong, or None. Only the FP4 kernel has conversions that are broken, which translated code binds."""
    try:
        error = kernel.rerun(track=track, seed=seed, anew=name == OWN)
    except SimulationError as finding:
        return f"`{type(finding).__name__}`: {finding.message.splitlines()[0]}"
    return None if error <= TOLERANCE[name] else f"relative error {error:.2g}"


def check(rule: str, name: str, kernel: Kernel, patch: Patch) -> None:
    apply, breaks, track, seed = ABLATIONS[rule]
    apply(patch)
    found = outcome(kernel, name, track, seed)
    assert (found is not None) == (name in breaks), found
    print(f"| {rule} | {name} | {found or 'no difference'} |")


@pytest.mark.parametrize("rule", ABLATIONS)
def test_a_broken_rule_breaks_the_fp4_kernel(rule: str, own: Kernel, monkeypatch: Patch, fresh_caches: None) -> None:
    check(rule, OWN, own, monkeypatch)


@pytest.mark.parametrize("rule", ABLATIONS)
def test_a_broken_rule_breaks_flash_attention(rule: str, fa4: Kernel, monkeypatch: Patch, fresh_caches: None) -> None:
    check(rule, FA4, fa4, monkeypatch)


@pytest.mark.parametrize(("track", "seed"), sorted({how[2:] for how in ABLATIONS.values()}, key=str))
def test_unbroken_they_are_right(own: Kernel, fa4: Kernel, track: bool, seed: int | None) -> None:
    """As they are run above."""
    assert outcome(own, OWN, track, seed) is None
    assert outcome(fa4, FA4, track, seed) is None


def test_every_rule_has_a_kernel_that_checks_it_but_one() -> None:
    """The order of two codes in a byte cancels in a product if A and B have the same; cvt against a packer tells."""
    assert [rule for rule, (_, breaks, _, _) in ABLATIONS.items() if not breaks] == ["nibbles swapped in MMA"]
