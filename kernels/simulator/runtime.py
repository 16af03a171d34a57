"""What translated blocks call besides arithmetic: lanes, masks, bytes, and the poison of registers.

`mask` is None for a whole warp. Poison of a register: None, or uint8 [32] whose bit i says that byte i of the lane's
register is undefined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from wanfp4.simulator.findings import PoisonError, ProtocolError

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_] | None
Poison = npt.NDArray[np.uint8] | None

LANES = 32
_SPREAD = np.array([(15 if i & 15 else 0) | (240 if i >> 4 else 0) for i in range(256)], np.uint8)
_ANY = np.array([255 if i else 0 for i in range(256)], np.uint8)


def lead(array: Array, mask: Mask) -> int:
    """The value that all active lanes must share. Raises ProtocolError when they do not."""
    value = array[0 if mask is None else mask.argmax()]
    same = array == value
    if not (same if mask is None else same | ~mask).all():
        raise ProtocolError("lanes disagree on an operand that must be the same in the whole warp")
    return int(value)


def one(mask: Mask) -> None:
    """For operations that every active lane would issue once. Raises ProtocolError unless one lane is active."""
    count = LANES if mask is None else int(mask.sum())
    if count != 1:
        raise ProtocolError(f"issued by {count} lanes; each would issue it, so one must be elected")


def whole(mask: Mask) -> None:
    """For `.sync.aligned`. Raises ProtocolError when lanes are missing."""
    if mask is not None and not mask.all():
        raise ProtocolError(f"needs the whole warp, and only {int(mask.sum())} lanes are active")


def elect(mask: Mask) -> Array:
    """True in the lowest active lane (PTX ISA, elect.sync: which one is up to the hardware)."""
    out = np.zeros(LANES, np.bool_)
    out[0 if mask is None else mask.argmax()] = True
    return out


def active(w: Any, members: int, mask: Mask, block: Mask) -> None:
    """For `.sync` with a member mask; `block` are the lanes that are in the block, `mask` those that run it.

    PTX ISA, vote.sync: all lanes named that have not exited execute it together, and a lane that is not named must not.
    Raises ProtocolError.
    """
    if mask is None and members == 0xFFFFFFFF:
        return
    here = _bits(mask)
    alive = 0xFFFFFFFF if block is None else _bits(np.logical_or.reduce([block, *w.groups.values()]))
    if members & alive & ~here:
        raise ProtocolError(f"member mask {members:#010x} names lanes that are not active ({here:#010x} are)")
    if here & ~members:
        raise ProtocolError(f"lanes {here & ~members:#010x} are active, and member mask {members:#010x} lacks them")


def _bits(mask: Mask) -> int:
    return 0xFFFFFFFF if mask is None else int(np.packbits(mask, bitorder="little").view(np.uint32)[0])


def joined(arrays: Sequence[Array]) -> Array:
    """The bytes of registers of one size, [32, n · size]."""
    if len(arrays) == 1:
        return np.ascontiguousarray(arrays[0]).view(np.uint8).reshape(LANES, -1)
    return np.stack(arrays, 1).view(np.uint8).reshape(LANES, -1)


def pair(low: Array, high: Array) -> Array:
    """Two registers as one of twice the size."""
    out = np.empty((LANES, 2), low.dtype)
    out[:, 0], out[:, 1] = low, high
    return out.view(f"u{2 * low.dtype.itemsize}")[:, 0]


def column(data: Array, offset: int, dtype: Any) -> Array:
    """One value per lane out of loaded bytes [32, n]."""
    size = np.dtype(dtype).itemsize
    part = data if data.shape[1] == size else np.ascontiguousarray(data[:, offset : offset + size])
    values: Array = part.view(dtype)[:, 0]
    return values


# ---- poison ----


def used(w: Any, slots: Sequence[int], mask: Mask) -> None:
    """Raises PoisonError when an active lane's register holds undefined bytes."""
    for slot in slots:
        poison = w.P[slot]
        if poison is None:
            continue
        bad = poison != 0
        if mask is not None:
            bad = bad & mask
        if bad.any():
            lane = int(bad.argmax())
            more = int(bad.sum()) - 1
            what = f"{w.cta.code.names[slot]} of lane {lane}" + (f" (and {more} more)" if more else "")
            raise PoisonError(f"{what} is used, and nothing defined it{w.origin(slot)}", warp=w.index)


def merge(mask: Mask, new: Poison, old: Poison) -> Poison:
    """Poison of a register written in the lanes of `mask`."""
    if new is None and old is None:
        return None
    out = np.where(mask, 0 if new is None else new, 0 if old is None else old).astype(np.uint8)  # type: ignore[arg-type]
    return out if out.any() else None


def union(*poisons: Poison) -> Poison:
    """Bytes that are poison in any."""
    out = None
    for poison in poisons:
        if poison is not None:
            out = poison if out is None else out | poison
    return out


def spread(*poisons: Poison) -> Poison:
    """Of 64-bit pairs: a half is poison where any byte of it is in any operand."""
    out = union(*poisons)
    return None if out is None else _SPREAD[out]


def spoiled(*poisons: Poison) -> Poison:
    """All bytes where any is."""
    out = union(*poisons)
    return None if out is None else _ANY[out]


def packed(parts: Sequence[Poison], size: int) -> Poison:
    """Of a register made of parts of `size` bytes."""
    out = None
    low = (1 << size) - 1
    for i, part in enumerate(parts):
        if part is not None:
            piece = ((part & low).astype(np.uint32) << (i * size)).astype(np.uint8)
            out = piece if out is None else out | piece
    return out if out is not None and out.any() else None


def unpacked(poison: Poison, index: int, size: int) -> Poison:
    """Of part `index` of `size` bytes."""
    if poison is None:
        return None
    piece = ((poison >> (index * size)) & ((1 << size) - 1)).astype(np.uint8)
    return piece if piece.any() else None


def chosen(condition: Array, first: Poison, second: Poison) -> Poison:
    """Of selp."""
    return merge(condition, first, second)


def moved(poison: Poison, lanes: Array) -> Poison:
    """Of shfl: lane l takes over that of `lanes[l]`."""
    return None if poison is None else poison[lanes]


def permuted(a: Poison, b: Poison, selector: Array) -> Poison:
    """Of prmt in its plain mode."""
    if a is None and b is None:
        return None
    both = np.zeros(LANES, np.uint16)
    if a is not None:
        both |= a & 15
    if b is not None:
        both |= (b & 15).astype(np.uint16) << 4
    out = np.zeros(LANES, np.uint8)
    for i in range(4):
        out |= ((both >> (selector >> (4 * i) & 7) & 1) << i).astype(np.uint8)
    return out if out.any() else None


def kept(poison: Poison, constant: int) -> Poison:
    """Of `and` with a constant: bytes that it clears are defined."""
    if poison is None:
        return None
    bits = sum(1 << i for i in range(8) if constant >> (8 * i) & 255)
    out = poison & np.uint8(bits)
    return out if out.any() else None


def gathered(poison: Poison, sources: Sequence[int]) -> Poison:
    """Of a register whose byte i depends on the bytes in the mask `sources[i]`."""
    if poison is None:
        return None
    out = np.zeros(LANES, np.uint8)
    for i, source in enumerate(sources):
        if source:
            out |= ((poison & np.uint8(source)) != 0).astype(np.uint8) << np.uint8(i)
    return out if out.any() else None


def from_bytes(poison: Any, offset: int, size: int) -> Poison:
    """Of a register loaded from bytes [32, n], of which `poison` says which are."""
    if poison is None:
        return None
    part = poison[:, offset : offset + size]
    if not part.any():
        return None
    bits: Array = np.packbits(part, axis=1, bitorder="little")[:, 0]
    return bits


def to_bytes(parts: Sequence[Poison], size: int) -> Any:
    """Of the bytes of registers of `size` bytes, [32, n · size] or None."""
    if all(part is None for part in parts):
        return None
    columns = [np.zeros(LANES, np.uint8) if part is None else part for part in parts]
    bits = np.unpackbits(np.stack(columns, 1)[:, :, None], axis=2, bitorder="little", count=size)
    return bits.reshape(LANES, -1).astype(np.bool_)


def shifted(poison: Poison, by: int, size: int, signed: bool = False) -> Poison:
    """Of a register of `size` bytes shifted left by `by` bits, or right; `signed`: with copies of the sign."""
    if poison is None:
        return None
    wide = (poison & ((1 << size) - 1)).astype(np.uint32)
    if signed:
        wide |= np.where(wide >> (size - 1) & 1, np.uint32(0xFFFF << size), np.uint32(0))
    whole, rest = divmod(abs(by), 8)
    moved = wide << whole if by >= 0 else wide >> whole
    if rest:  # a byte comes to lie in two
        moved = moved | (wide << (whole + 1) if by >= 0 else wide >> (whole + 1))
    out = (moved & ((1 << size) - 1)).astype(np.uint8)
    return out if out.any() else None


def extended(poison: Poison, size: int) -> Poison:
    """Of a value of `size` bytes extended by its sign."""
    if poison is None:
        return None
    return poison | np.where(poison >> (size - 1) & 1, np.uint8(255 << size & 255), np.uint8(0))


def lane_bits(words: Sequence[int]) -> Array:
    """Four 32-bit words → 128 flags, lowest bit first."""
    return np.unpackbits(np.array(words, np.uint32).view(np.uint8), bitorder="little").astype(np.bool_)
