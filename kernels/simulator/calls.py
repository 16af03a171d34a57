"""Answers the C interface through which CuTe DSL's host code reaches the CUDA runtime, for a device that is not there.

Names and arguments: the declarations in the modules that nvidia-cutlass-dsl 4.8 generates. They are those of the CUDA
runtime with an underscore in front; numbers of attributes and layouts are those of its headers (driver_types.h,
cuda.h).
"""

import ctypes
import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wanfp4.simulator.errors import HostError
from wanfp4.simulator.images import RESERVED_SHARED, cubins_at, static_shared_bytes

SUCCESS = 0
FAILURE = 999  # cudaErrorUnknown; the exception that explains it is raised once the host code has returned

# cudaLaunchConfig_t: grid, block, dynamic shared bytes, stream, attributes, number of attributes
CONFIG = struct.Struct("<3I3IQQQI")
ATTRIBUTE_BYTES = 72  # cudaLaunchAttribute: id, 4 bytes of padding, 64 bytes of value
# cudaLaunchAttributeID; the last is programmatic dependent launch
COOPERATIVE, CLUSTER_DIMENSION, OVERLAP_WITH_PREVIOUS = 2, 4, 6

MAX_DYNAMIC_SHARED, NON_PORTABLE_CLUSTER = 8, 14  # cudaFuncAttribute
STATIC_SHARED = 1  # CUfunction_attribute

# cudaDeviceAttr of compute capability 10 (CUDA programming guide, technical specifications)
DEVICE_ATTRIBUTES = {
    1: 1024,  # threads per block
    2: 1024,  # block
    3: 1024,
    4: 64,
    5: 2**31 - 1,  # grid
    6: 65535,
    7: 65535,
    8: 48 * 1024,  # shared memory per block without opting in
    10: 32,  # threads per warp
    81: 228 * 1024,  # shared memory per multiprocessor
    97: 227 * 1024,  # shared memory per block at most
    111: RESERVED_SHARED,
}
MULTIPROCESSORS, CAPABILITY_MAJOR, CAPABILITY_MINOR = 16, 75, 76


@dataclass(frozen=True)
class Module:
    """The PTX of one compiled module, and the file it is kept in, if it is."""

    ptx: str
    path: Path | None = None


@dataclass(frozen=True)
class LoadedKernel:
    name: str
    module: Module
    static_shared: int
    handle: Any = field(repr=False)


@dataclass(frozen=True)
class LoadedLibrary:
    module: Module
    cubin: bytes
    handle: Any = field(repr=False)


def cubin_key(cubin: bytes) -> str:
    """Identifies a module by its machine code."""
    return hashlib.sha256(cubin).hexdigest()


# Host code keeps handles for as long as it lives, which may be longer than one Interceptor. A handle is the address of
# a block of zeros of our own, so that a driver that is given one after all (when the process ends) reads no stray
# memory.
_libraries: dict[int, LoadedLibrary] = {}
_kernels: dict[int, LoadedKernel] = {}


def _new_handle() -> tuple[int, Any]:
    block = ctypes.create_string_buffer(4096)
    return ctypes.addressof(block), block


Launched = Callable[[LoadedKernel, tuple[int, ...], tuple[int, ...], tuple[int, ...], int, int], None]


class DeviceCalls:
    """`functions` maps each symbol to a ctypes callback that answers it.

    `find` gives the module of a cubin, `launched(kernel, grid, block, cluster, shared_bytes, address of params)` gets
    each launch, `failed` each exception, for the host code knows error codes only.
    """

    def __init__(
        self,
        arch: str,
        multiprocessors: int,
        find: Callable[[bytes], Module],
        launched: Launched,
        failed: Callable[[BaseException], None],
    ) -> None:
        digits = arch.removeprefix("sm_").rstrip("af")
        self._attributes = DEVICE_ATTRIBUTES | {
            MULTIPROCESSORS: multiprocessors,
            CAPABILITY_MAJOR: int(digits[:-1]),
            CAPABILITY_MINOR: int(digits[-1]),
        }
        self._find = find
        self._launched = launched
        self._failed = failed
        pointer, integer, size, text = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_char_p
        answers: dict[str, tuple[Callable[..., None], list[Any]]] = {
            "_cudaLibraryLoadData": (self._load, [pointer, pointer]),  # its options are never given
            "_cudaLibraryUnload": (self._unload, [pointer]),
            "_cudaLibraryGetKernel": (self._get_kernel, [pointer, pointer, text]),
            "_cuKernelGetAttribute": (self._kernel_attribute, [pointer, integer, pointer, integer]),
            "_cudaKernelSetAttributeForDevice": (self._set_attribute, [pointer, integer, integer, integer]),
            "_cudaFuncSetAttribute": (self._set_attribute, [pointer, integer, integer]),
            "_cudaDeviceGetAttribute": (self._device_attribute, [pointer, integer, integer]),
            "_cudaGetDeviceCount": (lambda count: _store(count, 1), [pointer]),
            "_cudaGetDevice": (lambda device: _store(device, 0), [pointer]),
            "_cuDeviceGet": (lambda device, index: _store(device, 0), [pointer, integer]),
            "_cudaSetDevice": (self._set_device, [integer]),
            "_cudaStreamSynchronize": (lambda stream: None, [pointer]),  # a launch has ended when it returns
            "_cudaDeviceSynchronize": (lambda: None, []),
            "cuda_dialect_init_library_once": (self._init_once, [pointer] * 4),
            "_cudaLaunchKernelEx": (self._launch_config, [pointer, pointer, pointer]),
            "_cudaLaunchKernel": (self._launch, [pointer, *[ctypes.c_uint32] * 6, pointer, size, pointer]),
        }
        self.functions = {name: self._callback(answer, types) for name, (answer, types) in answers.items()}
        for name in UNANSWERED:
            self.functions[name] = self._callback(self._refuse(name), [])

    def _callback(self, answer: Callable[..., None], types: list[Any]) -> Any:
        def call(*arguments: Any) -> int:
            try:
                answer(*arguments)
            except BaseException as error:  # noqa: BLE001 - raised again once the host code has returned
                self._failed(error)
                return FAILURE
            return SUCCESS

        return ctypes.CFUNCTYPE(ctypes.c_int, *types)(call)

    def _refuse(self, name: str) -> Callable[[], None]:
        def refuse() -> None:
            raise HostError(f"the host code calls {name.removeprefix('_')}, which the simulator's device does not have")

        return refuse

    def _load(self, library: int, image: int) -> None:
        cubins = cubins_at(image)
        if len(cubins) != 1:
            raise HostError(f"the host code loads {len(cubins)} cubins in one image; only one is supported")
        address, handle = _new_handle()
        _libraries[address] = LoadedLibrary(self._find(cubins[0]), cubins[0], handle)
        ctypes.c_void_p.from_address(library).value = address

    def _init_once(self, state: int, init: int, load: int, set_error: int) -> None:
        """What TVM-FFI functions begin with. The library's own would count the driver's devices.

        `state` stays zero, which means "not yet": so every call loads (which costs little), and once this device is
        gone the library's own function loads for the device that is there.
        """
        library = ctypes.c_void_p()
        integer, pointer = ctypes.c_int, ctypes.c_void_p
        if ctypes.CFUNCTYPE(integer, pointer)(init)(ctypes.addressof(library)) == SUCCESS:
            ctypes.CFUNCTYPE(integer, pointer, integer)(load)(ctypes.addressof(library), 0)

    def _unload(self, library: int | None) -> None:
        _libraries.pop(library or 0, None)

    def _get_kernel(self, kernel: int, library: int | None, name: bytes) -> None:
        loaded = _libraries.get(library or 0)
        if loaded is None:
            raise HostError(f"the host code takes kernel {name.decode()} from a library that was not loaded here")
        address, handle = _new_handle()
        _kernels[address] = LoadedKernel(
            name.decode(), loaded.module, static_shared_bytes(loaded.cubin, name.decode()), handle
        )
        ctypes.c_void_p.from_address(kernel).value = address

    def _kernel(self, address: int | None) -> LoadedKernel:
        try:
            return _kernels[address or 0]
        except KeyError:
            raise HostError(
                "the host code uses a kernel that was loaded before the simulator became active; "
                "compile the function while it is active"
            ) from None

    def _kernel_attribute(self, value: int, attribute: int, kernel: int | None, _: int) -> None:
        if attribute != STATIC_SHARED:
            raise HostError(f"the host code asks for attribute {attribute} of a kernel, which is not modelled")
        _store(value, self._kernel(kernel).static_shared)

    def _set_attribute(self, kernel: int | None, attribute: int, value: int, _: int = 0) -> None:
        self._kernel(kernel)
        if attribute not in (MAX_DYNAMIC_SHARED, NON_PORTABLE_CLUSTER):
            raise HostError(f"the host code sets attribute {attribute} of a kernel to {value}, which is not modelled")

    def _device_attribute(self, value: int, attribute: int, device: int) -> None:
        if attribute not in self._attributes:
            raise HostError(f"the host code asks for attribute {attribute} of device {device}, which is not modelled")
        _store(value, self._attributes[attribute])

    def _set_device(self, device: int) -> None:
        if device != 0:
            raise HostError(f"the host code switches to device {device}; the simulator has device 0 only")

    def _launch_config(self, config: int, kernel: int | None, params: int) -> None:
        values = CONFIG.unpack(ctypes.string_at(config, CONFIG.size))
        shared, attributes, count = values[6], values[8], values[9]
        cluster: tuple[int, ...] = (1, 1, 1)
        for index in range(count):
            attribute = ctypes.string_at(attributes + index * ATTRIBUTE_BYTES, ATTRIBUTE_BYTES)
            (kind,) = struct.unpack_from("<I", attribute)
            numbers = struct.unpack_from("<3I", attribute, 8)
            if kind == CLUSTER_DIMENSION:
                cluster = numbers
            elif kind == COOPERATIVE and numbers[0]:
                raise HostError("the host code launches a cooperative grid, which is not modelled")
            elif kind not in (COOPERATIVE, OVERLAP_WITH_PREVIOUS):  # overlap is allowed, never demanded
                raise HostError(f"the host code launches with attribute {kind}, which is not modelled")
        self._launched(self._kernel(kernel), values[:3], values[3:6], cluster, shared, params)

    def _launch(self, kernel: int | None, *arguments: int) -> None:
        self._launched(self._kernel(kernel), arguments[:3], arguments[3:6], (1, 1, 1), arguments[7], arguments[6])


def _store(address: int, value: int) -> None:
    ctypes.c_int.from_address(address).value = value


UNANSWERED = (
    *("_cuLibraryGetGlobal", "_cuLibraryGetKernel", "_cuLibraryGetKernelCount", "_cuLibraryGetManaged"),
    *("_cuLibraryGetModule", "_cuLibraryGetUnifiedFunction", "_cuLibraryLoadData", "_cuLibraryLoadFromFile"),
    *("_cuLibraryUnload", "_cuTensorMapEncodeTiled", "_cudaEventCreate", "_cudaEventDestroy", "_cudaEventElapsedTime"),
    *("_cudaEventRecord", "_cudaFree", "_cudaFreeAsync", "_cudaFreeHost", "_cudaGetDeviceProperties"),
    *("_cudaGraphDestroy", "_cudaGraphExecDestroy", "_cudaGraphInstantiate", "_cudaGraphLaunch"),
    *("_cudaLibraryGetGlobal", "_cudaLibraryGetKernelCount", "_cudaLibraryGetManaged"),
    *("_cudaLibraryGetUnifiedFunction", "_cudaLibraryLoadFromFile", "_cudaMalloc", "_cudaMallocAsync"),
    *("_cudaMallocHost", "_cudaMallocManaged", "_cudaMemcpy", "_cudaMemcpyAsync", "_cudaMemset", "_cudaMemsetAsync"),
    *("_cudaOccupancyMaxActiveBlocksPerMultiprocessor", "_cudaProfilerStart", "_cudaProfilerStop"),
    *("_cudaStreamAddCallback", "_cudaStreamBeginCapture", "_cudaStreamCreate", "_cudaStreamDestroy"),
    *("_cudaStreamEndCapture", "_cudaStreamWaitEvent"),
)
