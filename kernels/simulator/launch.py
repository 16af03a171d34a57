"""Catches what the host code of CuTe DSL launches, in a plain Python process with neither a GPU nor a driver.

`cute.compile` makes host code that calls a small C interface in libcute_dsl_runtime.so. While an `Interceptor` is
active, the functions of that interface answer for a device that is not there, and every launch goes to a Python
function together with the PTX of its module.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import re
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from wanfp4.simulator.calls import DeviceCalls, LoadedKernel, Module, cubin_key
from wanfp4.simulator.errors import HostError
from wanfp4.simulator.patching import PatchedLibrary

INSTALL = 'pip install "wanfp4[simulator]"'


@dataclass(frozen=True)
class Launch:
    """One kernel launch: grid in CTAs, block in threads, `shared_bytes` of dynamic shared memory.

    `params(index, size)` reads the first `size` bytes of the PTX `.param` at `index`, while the handler runs.
    `ptx` is the text of the module that holds the entry `kernel`; `ptx_path` the file it is kept in, if it is.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    params: Callable[[int, int], bytes]
    ptx: str
    ptx_path: Path | None


class Interceptor:
    """While active, launches of CuTe DSL functions go to `handler` instead of a GPU.

    `arch` ("sm_100a", "sm_103a") is what functions are compiled for while it is active. With `line_info` they are
    compiled with a line table (see `wanfp4.simulator.lines`). With `keep`, each module's PTX and cubin stay in that
    folder. `multiprocessors` is what host code is told that asks for the size of a persistent grid.

    A function must be compiled while an Interceptor is active: of one compiled before, the PTX is not known, and
    launching it raises HostError. A later Interceptor can launch it as well; outside of one it must not be called. An
    exception that `handler` raises comes out of the call that launched. Interceptors nest: the innermost gets the
    launches. Whatever was changed in cutlass and its library is put back on exit. The change is for the whole process:
    use one thread.

    Raises HostError when cutlass is not installed, or when this machine does not let its code be changed.
    """

    def __init__(
        self,
        arch: str,
        handler: Callable[[Launch], None],
        *,
        line_info: bool = True,
        keep: Path | None = None,
        multiprocessors: int = 148,
    ) -> None:
        if not re.fullmatch(r"sm_\d{2,3}[af]?", arch):
            raise HostError(f"{arch!r} is no architecture; sm_100a and sm_103a are")
        self.arch = arch
        self.handler = handler
        self.line_info = line_info
        self.keep = keep
        self.multiprocessors = multiprocessors
        self._pending: BaseException | None = None
        self._undo = contextlib.ExitStack()
        self._folder = Path()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            settings = _cutlass("cutlass.cutlass_dsl").CuTeDSL._get_dsl().envar
            self._folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="wanfp4-ptx-")))
            self._change_settings(undo)
            if self.line_info:
                self._ask_for_line_table(undo)
            self._wrap_compiler(undo)
            self._wrap_calls(undo)
            calls = DeviceCalls(self.arch, self.multiprocessors, self._module_of, self._launched, self._failed)
            library = PatchedLibrary(_runtime_library(settings.shared_libs), calls.functions)
            undo.callback(library.restore)
            library.install()
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()
        if error is None:
            self._raise_pending()

    def _change_settings(self, undo: contextlib.ExitStack) -> None:
        """Compile for `arch`, with caches of our own: what others hold has no PTX here."""
        dsl = _cutlass("cutlass.base_dsl.dsl")
        for instance in list(dsl.DSLSingletonMeta._instances.values()):
            _set(undo, instance.envar, "_arch", self.arch)
            _set(undo, instance.envar, "disable_file_caching", True)
            _set(undo, instance, "jit_cache", type(instance.jit_cache)(max_elems=instance.envar.jit_cache_max_elems))
        # What follows asks the driver, which may not be there.
        executor = _cutlass("cutlass.cutlass_dsl.cuda_jit_executor")
        _set(undo, executor.CudaDialectJitCompiledFunction, "num_devices", 1)
        information = _cutlass("cutlass.utils.hardware_info").HardwareInfo
        _set(undo, information, "__init__", lambda this, device_id=0: setattr(this, "device_id", device_id))
        _set(undo, information, "get_device_multiprocessor_count", lambda this: self.multiprocessors)
        _set(undo, information, "get_max_active_clusters", lambda this, size, stream=None: self.multiprocessors // size)

    def _ask_for_line_table(self, undo: contextlib.ExitStack) -> None:
        """With each compilation's own options, for CUTE_DSL_LINEINFO would stay in the options that all calls share."""
        compiler = _cutlass("cutlass.base_dsl.compiler")
        option = compiler.GenerateLineInfo
        original = compiler.CompileOptions.apply_envar_settings
        before: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

        @functools.wraps(original)
        def apply_and_ask(this: Any, *args: Any, **kwargs: Any) -> None:
            original(this, *args, **kwargs)
            before.setdefault(this, this.options[option])
            this.options[option] = option(True)

        def restore() -> None:
            for options, value in before.items():
                options.options[option] = value

        undo.callback(restore)
        _set(undo, compiler.CompileOptions, "apply_envar_settings", apply_and_ask)

    def _wrap_compiler(self, undo: contextlib.ExitStack) -> None:
        """Let each compilation write its PTX and its cubin, and remember that they belong together."""
        compiler = _cutlass("cutlass.base_dsl.compiler").Compiler
        original = compiler.compile

        @functools.wraps(original)
        def compile_and_keep(this: Any, module: Any, pipeline: str, *args: Any, **kwargs: Any) -> Any:
            with tempfile.TemporaryDirectory(dir=self._folder) as folder:
                pipeline, paths = _with_dumps(pipeline, Path(folder) / "module")
                result = original(this, module, pipeline, *args, **kwargs)
                self._remember(paths)
            return result

        _set(undo, compiler, "compile", compile_and_keep)

    def _remember(self, paths: dict[str, Path]) -> None:
        ptx, cubin = paths["ptx"], paths["cubin"]
        if not ptx.exists() or not cubin.exists():
            return  # host code only; if not, loading the module will say that its PTX is missing
        text, code = ptx.read_text(), cubin.read_bytes()
        key = cubin_key(code)
        kept = None
        if self.keep is not None:
            self.keep.mkdir(parents=True, exist_ok=True)
            entry = re.search(r"\.entry\s+(\w+)", text)
            kept = self.keep / f"{entry.group(1)[:100] if entry else 'module'}-{key[:8]}.ptx"
            kept.write_text(text)
            kept.with_suffix(".cubin").write_bytes(code)
        _modules[key] = Module(text, kept)

    def _wrap_calls(self, undo: contextlib.ExitStack) -> None:
        """Let calls raise what went wrong inside of them, and forget the device's handles when it is gone."""
        jit = _cutlass("cutlass.base_dsl.jit_executor")
        executor = _cutlass("cutlass.cutlass_dsl.cuda_jit_executor")
        calls = [
            (jit.JitExecutor, "run_compiled_program"),
            (jit.JitCompiledFunction, "run_compiled_program"),
            (executor.CudaDialectJitCompiledFunction, "to"),
        ]
        with contextlib.suppress(ImportError):  # optional for cutlass, too
            provider = importlib.import_module("cutlass.cutlass_dsl.tvm_ffi_provider")
            calls += [
                (provider.TVMFFIJitCompiledFunction, "__call__"),
                (provider.TVMFFIJitCompiledFunctionWithKwargs, "__call__"),
            ]
        for owner, name in calls:
            _set(undo, owner, name, self._raising(getattr(owner, name)))

        loaded: weakref.WeakSet[Any] = weakref.WeakSet()
        load = executor.CudaDialectJitCompiledFunction._load_cuda_library

        @functools.wraps(load)
        def load_and_note(function: Any) -> list[Any]:
            load(function)
            loaded.add(function)
            return []  # cutlass would give the handle to the driver when the function is deleted

        def forget() -> None:
            for function in loaded:  # its next call loads it again, wherever that is
                function.jit_module = None
                function._default_executor = None

        _set(undo, executor.CudaDialectJitCompiledFunction, "_load_cuda_library", load_and_note)
        undo.callback(forget)

    def _raising(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def call_and_raise(*args: Any, **kwargs: Any) -> Any:
            try:
                result = call(*args, **kwargs)
            except Exception:
                self._raise_pending()
                raise
            self._raise_pending()
            return result

        return call_and_raise

    def _raise_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            raise pending from None  # cutlass only reports that there was an error

    def _failed(self, error: BaseException) -> None:
        if self._pending is None:  # the first one is the cause of the others
            self._pending = error

    def _module_of(self, cubin: bytes) -> Module:
        try:
            return _modules[cubin_key(cubin)]
        except KeyError:
            raise HostError(
                "a function was compiled while the simulator was not active, or comes from another library's cache, "
                "so its PTX is not known; compile it while the simulator is active"
            ) from None

    def _launched(
        self,
        kernel: LoadedKernel,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        cluster: tuple[int, ...],
        shared_bytes: int,
        params: int,
    ) -> None:
        if self._pending is not None:
            raise HostError("an earlier launch failed")

        def read(index: int, size: int) -> bytes:
            return ctypes.string_at(ctypes.c_void_p.from_address(params + 8 * index).value or 0, size)

        module = kernel.module
        x, y, z = grid
        bx, by, bz = block
        cx, cy, cz = cluster
        self.handler(
            Launch(kernel.name, (x, y, z), (bx, by, bz), (cx, cy, cz), shared_bytes, read, module.ptx, module.path)
        )


# What was compiled in any Interceptor of this process, by its machine code: functions live longer than Interceptors.
_modules: dict[str, Module] = {}


def _cutlass(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise HostError(f"the simulator runs functions of CuTe DSL, which is not installed here: {INSTALL}") from error


def _runtime_library(paths: str | None) -> str:
    """The library that host code calls. `paths` is cutlass' setting: CUTE_DSL_LIBS, or what lies beside it."""
    for path in (paths or "").split(os.pathsep):
        if "cute_dsl_runtime" in Path(path).name:
            return path
    raise HostError(
        f"cutlass names no libcute_dsl_runtime ({paths or 'nothing'}); is its installation complete? {INSTALL}"
    )


def _with_dumps(pipeline: str, target: Path) -> tuple[str, dict[str, Path]]:
    """Ask the compiler for PTX and cubin, unless the user has already; returns the files that it will write."""
    chip = re.search(r"\bcubin-chip='?([\w]+)", pipeline)
    paths = {}
    for kind in ("ptx", "cubin"):
        asked = re.search(rf"\bdump-{kind}-path='([^']*)'", pipeline)
        prefix = asked.group(1) if asked else str(target)
        if not asked:
            pipeline = pipeline.replace("cute-to-nvvm{", f"cute-to-nvvm{{dump-{kind}-path='{prefix}' ", 1)
        paths[kind] = Path(f"{prefix}.{chip.group(1) if chip else ''}.{kind}")
    return pipeline, paths


_MISSING = object()


def _set(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until `undo` closes."""
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    if before is _MISSING:
        undo.callback(delattr, owner, name)
    else:
        undo.callback(setattr, owner, name, before)
