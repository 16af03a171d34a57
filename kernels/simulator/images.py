"""Reads the device code that host code hands over: a fat binary, and the sections of the cubin inside.

Layouts: the fat binary's as seen in what nvidia-cutlass-dsl 4.8 emits (header of 16 bytes with magic number and the
length of what follows; each entry a header with kind, its own size and the size of the code); ELF64 as in the System V
ABI.
"""

import ctypes
import struct
from collections.abc import Iterator

from wanfp4.simulator.errors import HostError

FATBIN_MAGIC = 0xBA55ED50
FATBIN_HEADER = struct.Struct("<IHHQ")  # magic, version, size of this header, size of all entries
ENTRY_HEADER = struct.Struct("<HHIQ")  # kind, version, size of this header, size of the code
KIND_ELF = 2
ELF_MAGIC = b"\x7fELF"
RESERVED_SHARED = 1024  # bytes of each block that belong to the system, from compute capability 9 on
SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, info, alignment, entry size


def cubins_at(address: int) -> list[bytes]:
    """The cubins of the fat binary at `address`. Raises HostError for any other kind of image."""
    magic, _, header, length = FATBIN_HEADER.unpack(ctypes.string_at(address, FATBIN_HEADER.size))
    if magic != FATBIN_MAGIC:
        raise HostError(
            f"the device code handed over is no fat binary: it begins with {magic:#010x}, not {FATBIN_MAGIC:#010x}"
        )
    entries = ctypes.string_at(address + header, length)
    cubins, position = [], 0
    while position < length:
        kind, _, size, code = ENTRY_HEADER.unpack_from(entries, position)
        start = position + size
        if kind == KIND_ELF:
            cubin = entries[start : start + code]
            if not cubin.startswith(ELF_MAGIC):
                raise HostError("the device code handed over is compressed, which is not supported")
            cubins.append(cubin)
        position = start + code
    return cubins


def sections(elf: bytes) -> Iterator[tuple[str, int]]:
    """Name and size in bytes of each section."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [SECTION.unpack_from(elf, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    for header in headers:
        start = names + header[0]
        yield elf[start : elf.index(b"\0", start)].decode(), header[5]


def static_shared_bytes(cubin: bytes, kernel: str) -> int:
    """Shared memory that the kernel declares, in bytes; its section also holds what the system reserves."""
    return sum(size - RESERVED_SHARED for name, size in sections(cubin) if name == f".nv.shared.{kernel}")
