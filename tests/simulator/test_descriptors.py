"""Descriptors that real kernels use parse; anything reserved, unknown or not modelled is refused by name."""

import re

import numpy as np
import pytest

from wanfp4.simulator.descriptors import InstructionDescriptor, SharedDescriptor, swizzle
from wanfp4.simulator.findings import DescriptorError

PLAIN = 1 << 4 | 8 << 24 | 16 << 17  # M 128, N 128, f32 accumulators
SCALED = 1 << 7 | 1 << 10 | 16 << 17 | 1 << 23 | 1 << 27  # e2m1, N 128, UE8M0


def test_shared_descriptors_of_real_kernels():
    """Constants of NVIDIA's NVFP4 GEMM: operands with the 128-byte swizzle, scale pages without."""
    operand = SharedDescriptor.parse(0x4000404000010000 | 0x12400 >> 4)
    assert (operand.start, operand.lbo, operand.sbo, operand.layout) == (0x12400, 16, 1024, 2)
    assert str(operand) == (
        "shared-memory descriptor 0x4000404000011240 (start 0x12400, leading offset 16, stride offset 1024, "
        "128-byte swizzle)"
    )
    page = SharedDescriptor.parse(0x0000400800010000)
    assert (page.sbo, page.layout) == (128, 0)
    assert (page.k_major(32, 16).addresses.reshape(-1) == np.arange(512)).all()


GOOD = 1 << 46 | 2 << 61 | 64 << 32


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (GOOD & ~(7 << 46), "bits 46-48 are 0b000, must be 0b001"),
        (GOOD | 1 << 47, "bits 46-48 are 0b011"),
        (GOOD | 1 << 53, "bits 53-60 must be 0"),
        (GOOD | 1 << 60, "bits 53-60 must be 0"),
        (GOOD | 1 << 14, "bits 14, 15, 30 and 31"),
        (GOOD | 1 << 31, "bits 14, 15, 30 and 31"),
        (GOOD | 1 << 61, "swizzle mode 3 does not exist"),
        (GOOD | 5 << 61, "swizzle mode 7 does not exist"),
        (GOOD | 1 << 52, "absolute leading-dimension address (bit 52) is for sm_103a"),
        (GOOD | 3 << 49, "matrix base offset 3 is not modelled"),
        (GOOD | 1 << 64, "more than 64 bits"),
    ],
)
def test_refused_shared_descriptors(value, text):
    with pytest.raises(DescriptorError, match=re.escape(text)) as error:
        SharedDescriptor.parse(value)
    assert f"{value:#x}" in str(error.value)


@pytest.mark.parametrize(
    ("layout", "start", "sbo", "text"),
    [
        (2, 0x480, 1024, "starts in row 1 of a swizzle pattern of 1024 bytes"),
        (4, 0x4C0, 512, "starts in row 3 of a swizzle pattern of 512 bytes"),
        (6, 0x420, 256, "starts in row 1 of a swizzle pattern of 256 bytes"),
        (2, 0x400, 1152, "stride offset 1152 takes the swizzle pattern off its boundary of 1024 bytes"),
        (2, 0x470, 1024, "32 bytes from byte 112 of a 128-byte row do not fit"),
        (6, 0x410, 256, "32 bytes from byte 16 of a 32-byte row do not fit"),
        (1, 0x400, 1024, "for MN-major operands of 32-bit elements, not for K-major ones"),
    ],
)
def test_refused_patterns(layout, start, sbo, text):
    descriptor = SharedDescriptor.parse(1 << 46 | layout << 61 | sbo >> 4 << 32 | start >> 4)
    with pytest.raises(DescriptorError, match=re.escape(text)) as error:
        descriptor.k_major(128, 32)
    assert str(descriptor) in str(error.value)


def test_patterns_may_start_anywhere_unless_strict():
    """NVIDIA's tutorial GEMMs do so; the swizzle acts on absolute addresses. Rows must still not be left."""
    descriptor = SharedDescriptor.parse(1 << 46 | 2 << 61 | 1152 >> 4 << 32 | 0x480 >> 4)
    addresses = descriptor.k_major(16, 32, strict=False).addresses
    row, byte = np.arange(16)[:, None], np.arange(32)[None, :]
    line = row % 8 * 128 + row // 8 * 1152 + 0x480  # the pattern's phase is the 128-byte line's own number
    assert (addresses == line + ((byte // 16 ^ line // 128 % 8) * 16 + byte % 16)).all()
    with pytest.raises(DescriptorError, match="do not fit"):
        SharedDescriptor.parse(GOOD | 0x470 >> 4).k_major(128, 32, strict=False)


def test_refused_leading_offset():
    descriptor = SharedDescriptor.parse(GOOD | 0x410 >> 4 << 16)
    descriptor.mn_major(64, 16, 2)  # one atom: the leading offset is not used
    with pytest.raises(DescriptorError, match="leading offset 1040 takes the swizzle pattern off"):
        descriptor.mn_major(128, 16, 2)


@pytest.mark.parametrize("layout", [0, 1, 2, 4, 6])
def test_swizzle_permutes_its_pattern(layout):
    address = np.arange(4096)
    moved = swizzle(address, layout)
    assert (np.sort(moved) == address).all()
    assert (swizzle(moved, layout) == address).all()  # its own inverse
    assert (moved // 128 == address // 128).all()
    assert (moved % 16 == address % 16).all()
    assert (moved != address).any() == (layout != 0)
    assert swizzle(0b11_1000_0000, layout) == {0: 0x380, 1: 0x3E0, 2: 0x3F0, 4: 0x3B0, 6: 0x390}[layout]


def test_addresses_are_cached_and_read_only():
    first = SharedDescriptor.parse(GOOD).k_major(128, 32)
    again = SharedDescriptor.parse(GOOD).k_major(128, 32)
    assert first.addresses is again.addresses
    assert not first.addresses.flags.writeable
    assert first.end == int(first.addresses.max()) + 1


def test_instruction_descriptors_of_real_kernels():
    """NVIDIA's FMHA (Q·K and P·V), NVIDIA's NVFP4 GEMM, and the paper's FP4 P·V with scale ids 0 and 2."""
    qk, pv = (InstructionDescriptor.parse("f16", value) for value in (0x8200490, 0x8210490))
    assert (qk.m, qk.n, qk.k, qk.a_type, qk.b_type, qk.b_mn_major) == (128, 128, 16, "bf16", "bf16", False)
    assert (pv.a_mn_major, pv.b_mn_major) == (False, True)
    gemm = InstructionDescriptor.parse("mxf4nvf4", 0x8400480, 16)
    assert (gemm.n, gemm.k, gemm.a_type, gemm.scale_type, gemm.block) == (256, 64, "e2m1", "ue4m3", 16)
    first, tail = (InstructionDescriptor.parse("mxf4nvf4", value, 32) for value in (0x8A00480, 0x48A004A0))
    assert (first.scale_type, first.a_scale_id, first.b_scale_id) == ("ue8m0", 0, 0)
    assert (tail.n, tail.a_scale_id, tail.b_scale_id) == (128, 2, 2)
    assert str(tail) == (
        "instruction descriptor 0x48a004a0 (kind mxf4nvf4, 128x128x64, A e2m1 K-major, B e2m1 K-major, block32 ue8m0, "
        "scale ids 2 and 2)"
    )
    negated = InstructionDescriptor.parse("f8f6f4", PLAIN | 1 << 13 | 1 << 16 | 1 << 10)
    assert "A -e4m3 K-major, B e5m2 N-major" in str(negated)


@pytest.mark.parametrize(
    ("kind", "value", "block", "text"),
    [
        ("f16", PLAIN | 1, None, "bits 0-1 must be 0"),
        ("f16", PLAIN | 1 << 2, None, "sparsity (bit 2) is not modelled"),
        ("f16", PLAIN | 1 << 3, None, "bits 3-3 must be 0"),
        ("f16", PLAIN | 1 << 6, None, "bits 6-6 must be 0"),
        ("f16", PLAIN | 1 << 23, None, "bits 23-23 must be 0"),
        ("f16", PLAIN | 1 << 29, None, "bits 29-29 must be 0"),
        ("f16", PLAIN | 2 << 30, None, "bits 30-31 are for .ws"),
        ("f16", PLAIN | 1 << 32, None, "more than 32 bits"),
        ("f16", PLAIN & ~(3 << 4), None, "accumulators in f16 (bits 4-5 are 0) are not modelled"),
        ("f16", PLAIN | 2 << 4, None, "type 3 of D does not exist in kind f16"),
        ("f16", PLAIN | 2 << 7, None, "type 2 of A does not exist in kind f16 (0 f16, 1 bf16)"),
        ("f16", PLAIN | 1 << 7, None, "A is bf16, B f16"),
        ("f16", PLAIN & ~(63 << 17), None, "N 0: must be a multiple of 8 from 8 to 256"),
        ("f16", PLAIN | 63 << 17, None, "N 504: must be a multiple of 8"),
        ("f16", PLAIN & ~(31 << 24) | 4 << 24, None, "M 64 is not modelled"),
        ("f16", PLAIN | 1 << 24, None, "M 144: kind f16 of cta_group::1 has 64 and 128"),
        ("f16", PLAIN, 32, "kind f16 has no scale factors"),
        ("tf32", PLAIN, None, "type 0 of A does not exist in kind tf32 (2 tf32)"),
        ("f8f6f4", PLAIN | 5 << 7, None, "type e2m1 of A in kind f8f6f4 is not modelled"),
        ("f8f6f4", PLAIN | 2 << 10, None, "type 2 of B does not exist in kind f8f6f4"),
        ("f8f6f4", PLAIN ^ 1 << 17 | 1 << 16, None, "N 136: must be a multiple of 16 from 16 to 256"),
        ("i8", PLAIN, None, "tcgen05.mma kind 'i8' is not modelled"),
        ("mxf8f6f4", SCALED & ~(7 << 7 | 7 << 10 | 1 << 23), 32, "kind mxf8f6f4 with block32 takes UE8M0 scales"),
        ("mxf8f6f4", SCALED | 2 << 7, 32, "type e2m3 of A in kind mxf8f6f4 is not modelled"),
        ("mxf8f6f4", SCALED, 16, "kind mxf8f6f4 has no block size 16 (32)"),
        ("mxf8f6f4", SCALED | 1 << 31, 32, "bits 31-31 must be 0"),
        ("mxf4", SCALED, 16, "kind mxf4 has no block size 16 (32)"),
        ("mxf4", SCALED & ~(1 << 23), 32, "kind mxf4 with block32 takes UE8M0 scales (bit 23 set)"),
        ("mxf4nvf4", SCALED, None, "kind mxf4nvf4 has no block size None (16, 32)"),
        ("mxf4nvf4", SCALED & ~(1 << 23), 32, "kind mxf4nvf4 with block32 takes UE8M0 scales"),
        (
            "mxf4nvf4",
            SCALED & ~(1 << 7) | 5 << 7,
            16,
            "type 5 of A does not exist in kind mxf4nvf4 (1 e2m1; 5 is the E2M1 of f8f6f4",
        ),
        ("mxf4nvf4", SCALED | 1 << 12, 16, "type 5 of B does not exist in kind mxf4nvf4"),
        ("mxf4nvf4", SCALED | 1 << 15, 16, "kind mxf4nvf4 has no transposed operands"),
        ("mxf4nvf4", SCALED | 1 << 24, 16, "bits 24-26 must be 0"),
        ("mxf4nvf4", SCALED | 2 << 27, 16, "M 384: kind mxf4nvf4 of cta_group::1 has 128"),
        ("mxf4nvf4", SCALED | 1 << 31, 16, "K 96 (bit 31) is for sm_103a only"),
        ("mxf4nvf4", SCALED | 2 << 29, 16, "scale id 2 of A: block16 has 0"),
        ("mxf4nvf4", SCALED | 1 << 4, 32, "scale id 1 of B: block32 has 0, 2"),
    ],
)
def test_refused_instruction_descriptors(kind, value, block, text):
    with pytest.raises(DescriptorError, match=re.escape(text)):
        InstructionDescriptor.parse(kind, value, block)


def test_largest_shapes():
    for kind, value, block in [("f16", PLAIN, None), ("mxf4nvf4", SCALED, 32)]:
        for n in (8, 24, 256):
            assert InstructionDescriptor.parse(kind, value & ~(63 << 17) | n >> 3 << 17, block).n == n
