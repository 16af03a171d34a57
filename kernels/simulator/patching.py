"""Puts Python functions in the place of exported functions of a loaded shared library, and takes them out again.

Host code that was compiled beforehand (or is compiled by another library) has the addresses of these functions built
in, so the functions themselves must jump to us. No preloaded library and no C compiler is needed: the first bytes of
each function become an absolute jump to a ctypes callback.
"""

import ctypes
import mmap
import platform
from collections.abc import Callable, Mapping
from typing import Any

from wanfp4.simulator.errors import HostError

# jmp *[rip+0] / ldr x16, #8; br x16: both use no register that carries an argument. The target's address follows.
JUMPS = {"x86_64": bytes.fromhex("ff2500000000"), "aarch64": bytes.fromhex("5000005800021fd6")}
FUNCTION_ALIGNMENT = (
    16  # what compilers align functions to; a jump is at most this long, so it cannot reach the next one
)


class PatchedLibrary:
    """The functions of one loaded library that are replaced at the moment.

    `functions` maps a symbol to a ctypes callback. A symbol that the library does not export is passed over.
    """

    def __init__(self, path: str, functions: Mapping[str, Any]) -> None:
        machine = platform.machine()
        if machine not in JUMPS:
            raise HostError(f"launches can be caught on {' and '.join(JUMPS)} only; this machine is {machine}")
        self._jump = JUMPS[machine]
        self._library = ctypes.CDLL(path)  # keeps it loaded, too
        self._functions = dict(functions)  # a callback must live as long as something can jump to it
        self._original: dict[int, bytes] = {}

    def install(self) -> None:
        """Let the functions jump to their replacements. Raises HostError, with nothing changed, if they cannot."""
        jumps: dict[int, bytes] = {}
        for name, function in self._functions.items():
            address = self._address(name)
            if address is None:
                continue
            if address % FUNCTION_ALIGNMENT or address in jumps:
                raise HostError(f"cannot replace {name}: its code is laid out in a way this version does not know")
            target = ctypes.cast(function, ctypes.c_void_p).value or 0
            jumps[address] = self._jump + target.to_bytes(8, "little")
        self._original = {address: ctypes.string_at(address, len(jump)) for address, jump in jumps.items()}
        try:
            for address, jump in jumps.items():
                _write(address, jump)
        except HostError:
            self.restore()
            raise

    def restore(self) -> None:
        """Put the original code back."""
        for address, code in self._original.items():
            if ctypes.string_at(address, len(code)) != code:
                _write(address, code)
        self._original = {}

    def _address(self, name: str) -> int | None:
        try:
            return ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value
        except AttributeError:
            return None


def _write(address: int, code: bytes) -> None:
    """Write into code of this process. The kernel copies the page first: the file and other processes keep theirs."""
    attempts: list[Callable[[int, bytes], None]] = [_write_through_proc]
    if (
        platform.machine() == "x86_64"
    ):  # elsewhere the instruction cache needs a flush, which only the kernel's way includes
        attempts.append(_write_through_mprotect)
    reasons = []
    for attempt in attempts:
        try:
            attempt(address, code)
            return
        except OSError as error:
            reasons.append(str(error))
    raise HostError(
        f"this system does not let a process change its own code, so launches cannot be caught: {'; '.join(reasons)}"
    )


def _write_through_proc(address: int, code: bytes) -> None:
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(address)
        if memory.write(code) != len(code):
            raise OSError("/proc/self/mem took only part of the code")


def _write_through_mprotect(address: int, code: bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    length = address + len(code) - start
    read, write, execute = 1, 2, 4
    if libc.mprotect(start, length, read | write | execute):
        raise OSError(ctypes.get_errno(), "mprotect refused")
    ctypes.memmove(address, code, len(code))
    libc.mprotect(start, length, read | execute)
