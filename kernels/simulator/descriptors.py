"""The shared-memory matrix descriptor and the instruction descriptor of tcgen05, parsed strictly.

Section names are those of the PTX ISA 9.1, "TensorCore 5th Generation Family Instructions": "Shared memory descriptor",
"Instruction descriptor", "Canonical Layouts", "Valid Combinations of Type-Size, Major-ness and Swizzling". Every
reserved bit must have its fixed value. What exists but is not modelled (M 64, sparsity, sub-byte operands of the 8-bit
kinds, f16 accumulators, base offsets, sm_103a's K 96 and absolute leading dimension) is refused with its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wanfp4.simulator.findings import DescriptorError

Addresses = NDArray[np.int64]

_LAYOUTS = {0: "no swizzle", 1: "128-byte swizzle of 32-byte atoms", 2: "128-byte swizzle", 4: "64-byte swizzle"}
_LAYOUTS[6] = "32-byte swizzle"
_PITCH = {1: 128, 2: 128, 4: 64, 6: 32}  # bytes of a swizzle atom's row
_DEPTH = {1: 4, 2: 8, 4: 8, 6: 8}  # its rows


def swizzle(address: Any, layout: int) -> Any:
    """Byte addresses after the swizzle of a descriptor's layout code (CUTLASS, include/cute/swizzle.hpp).

    It acts on absolute shared-memory addresses, which is why a descriptor may start inside of an atom.
    """
    if layout == 0:
        return address
    if layout == 1:  # Swizzle<2, 5, 2>
        return address ^ ((address >> 2) & 0x60)
    return address ^ ((address >> 3) & {2: 0x70, 4: 0x30, 6: 0x10}[layout])  # Swizzle<3|2|1, 4, 3>


class Gather(NamedTuple):
    """Byte addresses of an operand (read-only) and one past the highest of them."""

    addresses: Addresses
    end: int


@dataclass(frozen=True)
class SharedDescriptor:
    """The 64-bit shared-memory descriptor. Offsets in bytes."""

    value: int
    start: int
    lbo: int
    sbo: int
    layout: int

    @staticmethod
    @lru_cache(maxsize=4096)
    def parse(value: int) -> SharedDescriptor:
        """Raises DescriptorError for reserved bits, unknown layouts and modes that are not modelled."""
        fields = SharedDescriptor(
            value,
            start=(value & 0x3FFF) << 4,
            lbo=(value >> 16 & 0x3FFF) << 4,
            sbo=(value >> 32 & 0x3FFF) << 4,
            layout=value >> 61 & 7,
        )
        wrong = ""
        if value >> 64:
            wrong = "more than 64 bits"
        elif value >> 46 & 7 != 1:
            wrong = f"bits 46-48 are {value >> 46 & 7:#05b}, must be 0b001"
        elif value >> 53 & 0xFF:
            wrong = "bits 53-60 must be 0"
        elif value & 0xC000C000:
            wrong = "bits 14, 15, 30 and 31 belong to no field and must be 0"
        elif fields.layout not in _LAYOUTS:
            wrong = f"swizzle mode {fields.layout} does not exist"
        elif value >> 52 & 1:
            wrong = "an absolute leading-dimension address (bit 52) is for sm_103a only"
        elif value >> 49 & 7:
            wrong = f"matrix base offset {value >> 49 & 7} is not modelled: start the swizzle pattern on its boundary"
        if wrong:
            raise DescriptorError(f"shared-memory descriptor {value:#x}: {wrong}")
        return fields

    def __str__(self) -> str:
        return (
            f"shared-memory descriptor {self.value:#x} (start {self.start:#x}, leading offset {self.lbo}, "
            f"stride offset {self.sbo}, {_LAYOUTS[self.layout]})"
        )

    def k_major(self, rows: int, row_bytes: int, *, strict: bool = True) -> Gather:
        """Addresses [rows, row_bytes] of an operand whose K bytes are contiguous. Cached.

        `strict`: a swizzle pattern must start on its boundary, as the ISA wants it with base offset 0. The hardware
        swizzles absolute addresses, and NVIDIA's tutorial GEMMs start at odd multiples of 128 bytes.
        """
        return _k_major(self, rows, row_bytes, strict)

    def mn_major(self, rows: int, depth: int, size: int, *, strict: bool = True) -> Gather:
        """Addresses [rows, depth, size] of the bytes of an operand whose rows are contiguous. Cached.

        `depth` is its extent along K, `size` the bytes of an element; `strict` as for `k_major`.
        """
        return _mn_major(self, rows, depth, size, strict)

    def _refuse(self, why: str) -> DescriptorError:
        return DescriptorError(f"{self}: {why}")

    def _check_pattern(self, used_of_row: int, strides: dict[str, int], strict: bool) -> None:
        """The swizzle pattern must start on its boundary, base offset 0 ("Shared memory descriptor")."""
        pitch = _PITCH[self.layout]
        pattern = pitch * _DEPTH[self.layout]
        if self.start % pitch + used_of_row > pitch:
            raise self._refuse(f"{used_of_row} bytes from byte {self.start % pitch} of a {pitch}-byte row do not fit")
        if not strict:
            return
        if self.start % pattern >= pitch:
            raise self._refuse(f"starts in row {self.start % pattern // pitch} of a swizzle pattern of {pattern} bytes")
        for name, stride in strides.items():
            if stride % pattern:
                raise self._refuse(f"{name} {stride} takes the swizzle pattern off its boundary of {pattern} bytes")


def _gather(addresses: Any) -> Gather:
    own = np.array(addresses, np.int64, order="C")
    own.flags.writeable = False
    return Gather(own, int(own.max()) + 1)


@lru_cache(maxsize=1024)
def _k_major(self: SharedDescriptor, rows: int, row_bytes: int, strict: bool) -> Gather:
    row, byte = np.arange(rows)[:, None], np.arange(row_bytes)[None, :]
    if self.layout == 0:
        address = (row % 8) * 16 + (row // 8) * self.sbo + (byte // 16) * self.lbo + byte % 16
    elif self.layout == 1:
        raise self._refuse("this swizzle is for MN-major operands of 32-bit elements, not for K-major ones")
    else:
        self._check_pattern(row_bytes, {"stride offset": self.sbo} if rows > 8 else {}, strict)
        address = (row % 8) * _PITCH[self.layout] + (row // 8) * self.sbo + byte
    return _gather(swizzle(self.start + address, self.layout))


@lru_cache(maxsize=1024)
def _mn_major(self: SharedDescriptor, rows: int, depth: int, size: int, strict: bool) -> Gather:
    row, k = np.arange(rows)[:, None], np.arange(depth)[None, :]
    if (self.layout == 1) != (size == 4):
        raise self._refuse(f"MN-major operands of {8 * size}-bit elements do not have this swizzle")
    if self.layout == 0:
        per = 16 // size
        address = (row % per) * size + (row // per) * self.sbo + (k % 8) * 16 + (k // 8) * self.lbo
    else:
        pitch, deep = _PITCH[self.layout], _DEPTH[self.layout]
        per = pitch // size
        strides = {"leading offset": self.lbo} if rows > per else {}
        if depth > deep:
            strides["stride offset"] = self.sbo
        self._check_pattern(min(rows, per) * size, strides, strict)
        address = (row % per) * size + (row // per) * self.lbo + (k % deep) * pitch + (k // deep) * self.sbo
    # A swizzle moves whole 16-byte units, so an element's bytes stay together.
    return _gather(swizzle(self.start + address, self.layout)[:, :, None] + np.arange(size))


_HALF_TYPES = {0: "f16", 1: "bf16"}
_BYTE_TYPES = {0: "e4m3", 1: "e5m2"}
_SUB_BYTE_TYPES = {3: "e2m3", 4: "e3m2", 5: "e2m1"}
_TYPES: dict[str, dict[int, str]] = {
    "f16": _HALF_TYPES,
    "tf32": {2: "tf32"},
    "f8f6f4": _BYTE_TYPES,
    "mxf8f6f4": _BYTE_TYPES,
    "mxf4": {1: "e2m1"},
    "mxf4nvf4": {1: "e2m1"},
}
_K = {"f16": 16, "tf32": 8, "f8f6f4": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}
_BLOCKS = {"mxf8f6f4": (32,), "mxf4": (32,), "mxf4nvf4": (16, 32)}


@dataclass(frozen=True)
class InstructionDescriptor:
    """The 32-bit instruction descriptor of tcgen05.mma with cta_group::1, for one kind (and scale block)."""

    kind: str
    value: int
    m: int
    n: int
    k: int
    a_type: str
    b_type: str
    negate_a: bool
    negate_b: bool
    a_mn_major: bool
    b_mn_major: bool
    block: int | None = None  # elements of K per scale factor
    scale_type: str | None = None
    a_scale_id: int = 0
    b_scale_id: int = 0

    @staticmethod
    @lru_cache(maxsize=1024)
    def parse(kind: str, value: int, block: int | None = None) -> InstructionDescriptor:
        """Raises DescriptorError for whatever the kind does not have, reserved bits included."""
        return _parse(kind, value, block)

    def __str__(self) -> str:
        text = f"instruction descriptor {self.value:#x} (kind {self.kind}, {self.m}x{self.n}x{self.k}, "
        text += f"A {'-' * self.negate_a}{self.a_type} {'M' if self.a_mn_major else 'K'}-major, "
        text += f"B {'-' * self.negate_b}{self.b_type} {'N' if self.b_mn_major else 'K'}-major"
        if self.block is not None:
            text += f", block{self.block} {self.scale_type}, scale ids {self.a_scale_id} and {self.b_scale_id}"
        return text + ")"


def _element_type(kind: str, side: str, code: int) -> str:
    if code in _TYPES[kind]:
        return _TYPES[kind][code]
    if kind in ("f8f6f4", "mxf8f6f4") and code in _SUB_BYTE_TYPES:
        raise DescriptorError(f"type {_SUB_BYTE_TYPES[code]} of {side} in kind {kind} is not modelled")
    known = ", ".join(f"{c} {name}" for c, name in _TYPES[kind].items())
    hint = "; 5 is the E2M1 of f8f6f4 and mxf8f6f4" if kind in ("mxf4", "mxf4nvf4") and code == 5 else ""
    raise DescriptorError(f"type {code} of {side} does not exist in kind {kind} ({known}{hint})")


def _parse(kind: str, value: int, block: int | None) -> InstructionDescriptor:
    if kind not in _TYPES:
        raise DescriptorError(f"tcgen05.mma kind {kind!r} is not modelled ({', '.join(_TYPES)} are)")
    scaled = kind in _BLOCKS
    if scaled and block not in _BLOCKS[kind]:
        raise DescriptorError(f"kind {kind} has no block size {block} ({', '.join(map(str, _BLOCKS[kind]))})")
    if not scaled and block is not None:
        raise DescriptorError(f"kind {kind} has no scale factors")

    def bits(low: int, count: int) -> int:
        return value >> low & ((1 << count) - 1)

    four_bit = kind in ("mxf4", "mxf4nvf4")
    try:
        if value >> 32:
            raise DescriptorError("more than 32 bits")
        if bits(2, 1):
            raise DescriptorError("sparsity (bit 2) is not modelled")
        reserved = [(0, 2), (3, 1), (6, 1)] + ([(24, 3)] if scaled else [(23, 1), (29, 1)])
        reserved += [(31, 1)] if kind == "mxf8f6f4" else []
        for low, count in reserved:
            if bits(low, count):
                raise DescriptorError(f"bits {low}-{low + count - 1} must be 0")
        a_type = _element_type(kind, "A", bits(7, 3))
        b_type = _element_type(kind, "B", bits(10, 3))
        # The two halves may differ in kind f16 by the field's layout, but the ISA's shapes pair equal types only.
        if kind == "f16" and a_type != b_type:
            raise DescriptorError(f"A is {a_type}, B {b_type}: kind f16 takes both of one type")
        if four_bit and bits(15, 2):
            raise DescriptorError(f"kind {kind} has no transposed operands (bits 15, 16)")
        n = bits(17, 6) << 3
        step = 16 if kind in ("f8f6f4", "mxf8f6f4") and bits(16, 1) else 8  # "N shape … for 8bit transpose B"
        if not step <= n <= 256 or n % step:
            raise DescriptorError(f"N {n}: must be a multiple of {step} from {step} to 256")
        m = bits(27, 2) << 7 if scaled else bits(24, 5) << 4
        if m == 64 and not scaled:
            raise DescriptorError("M 64 is not modelled")
        if m != 128:
            raise DescriptorError(f"M {m}: kind {kind} of cta_group::1 has {'' if scaled else '64 and '}128")
        scale: dict[str, Any] = {}
        if scaled:
            scale = _scale_fields(kind, value, block)
        else:
            if bits(4, 2) == 0 and kind != "tf32":
                raise DescriptorError("accumulators in f16 (bits 4-5 are 0) are not modelled")
            if bits(4, 2) != 1:
                raise DescriptorError(f"type {bits(4, 2)} of D does not exist in kind {kind}")
            if bits(30, 2):
                raise DescriptorError("bits 30-31 are for .ws and must be 0")
    except DescriptorError as error:
        raise DescriptorError(f"instruction descriptor {value:#x} of kind {kind}: {error.message}") from None
    negate_a, negate_b, a_mn_major, b_mn_major = (bool(bits(low, 1)) for low in (13, 14, 15, 16))
    return InstructionDescriptor(
        kind, value, m, n, _K[kind], a_type, b_type, negate_a, negate_b, a_mn_major, b_mn_major, **scale
    )


def _scale_fields(kind: str, value: int, block: int | None) -> dict[str, Any]:
    ids = value >> 29 & 3, value >> 4 & 3
    ue8m0 = bool(value >> 23 & 1)
    if value >> 31 and kind != "mxf8f6f4":
        raise DescriptorError("K 96 (bit 31) is for sm_103a only")
    if not ue8m0 and (kind != "mxf4nvf4" or block != 16):
        raise DescriptorError(f"kind {kind} with block{block} takes UE8M0 scales (bit 23 set)")
    # "Scale Factor A ID": bytes for one scale a row, half words for two, the whole word for four.
    allowed = (0, 1, 2, 3) if kind == "mxf8f6f4" else (0,) if block == 16 else (0, 2)
    for side, number in zip("AB", ids, strict=True):
        if number not in allowed:
            raise DescriptorError(f"scale id {number} of {side}: block{block} has {', '.join(map(str, allowed))}")
    return {
        "block": block,
        "scale_type": "ue8m0" if ue8m0 else "ue4m3",
        "a_scale_id": ids[0],
        "b_scale_id": ids[1],
    }
