"""Compiled kernels: from a folder where one is, else from the compiler, and kept on disk for the next process.

A kernel is named by what makes it (`Kernel`), an environment by what else its code depends on: versions of wanfp4 and
nvidia-cutlass-dsl, the source of this package, the machine. A store is a folder

    ENVIRONMENT/ARCH/NAME-KEY.SHA.o     an object of `cute.compile`, host code and cubin in one
    ENVIRONMENT/about.json              what the environment is, in words

where KEY is a digest of the kernel and SHA one of the file's own content: a file that is not whole is not loaded.
Files come into being under another name and are renamed, so any number of processes may share a store, and a process
that cannot write (read-only or full disk) just compiles.

Stores, first to last: what a wheel carries (`prebuilt` beside this file), the folders of WANFP4_KERNELS, and the cache,
which is the only one written to: WANFP4_CACHE, else XDG_CACHE_HOME/wanfp4, else ~/.cache/wanfp4. WANFP4_CACHE= (empty)
keeps nothing on disk.

    python -m wanfp4.kernels.blackwell.cache export --arch sm_100a,sm_103a FOLDER

writes a store with every kernel of every preset, with or without a GPU. Point WANFP4_KERNELS at it, and nothing is
compiled at run time; nvidia-cutlass-dsl is still needed, because its library launches the kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.metadata
import json
import logging
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import wanfp4
from wanfp4.errors import OutputError, Wanfp4Error, brief

ARCHITECTURES = {(10, 0): "sm_100a", (10, 3): "sm_103a"}  # by compute capability; such code runs on no other

log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_PREBUILT = _FOLDER / "prebuilt"
_DIGITS = 20  # of digests in file names

# What makes each kernel: module, class (called with the options), and its arguments' types: q Int64, i Int32,
# f Float32, s stream.
_KINDS = {
    "forward": ("forward", "Forward", "qqqqqqqiiiiqqqffis"),
    "quantize-qk": ("quantize", "QuantizeQK", "qqqqqqqiiis"),
    "quantize-v": ("quantize", "QuantizeV", "qqqqqqqiiis"),
    "mean": ("quantize", "TokenMean", "qqqqqqiiis"),
    "guard": ("guard", "SampleLogits", "qqqqqqqqqiiiiffs"),
}
_C_TYPES = {"q": ctypes.c_int64, "i": ctypes.c_int32, "f": ctypes.c_float, "s": ctypes.c_void_p}


@dataclass(frozen=True)
class Kernel:
    """A kernel by what makes it: a kind of `_KINDS`, and the options that its class takes (their repr is the key)."""

    kind: str
    options: Any

    @property
    def key(self) -> str:
        return hashlib.sha256(f"{self.kind} {self.options!r}".encode()).hexdigest()[:_DIGITS]

    @property
    def symbol(self) -> str:
        """Name of the function in an object file."""
        return f"wanfp4_{self.kind.replace('-', '_')}_{self.key}"

    def compile(self, arch: str) -> Any:
        """The compiled function, on a machine with or without a GPU."""
        import cutlass
        from cuda.bindings.driver import CUstream
        from cutlass import cute

        module, name, types = _KINDS[self.kind]
        make = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        example = {"q": cutlass.Int64(0), "i": cutlass.Int32(1), "f": cutlass.Float32(1.0), "s": CUstream(0)}
        started = time.perf_counter()
        compiled = cute.compile(make(self.options), *(example[t] for t in types), options=f"--gpu-arch {arch}")
        log.info("compiled %s for %s in %.1f s", self.symbol, arch, time.perf_counter() - started)
        return compiled


class Function:
    """A compiled kernel as a function of Python numbers: addresses, lengths, factors, and the stream's address.

    cutlass would look at the type of every argument at every call, 30 µs for ten of them. Types are fixed here, so
    each thread has one place for the values, whose addresses the host code reads.
    """

    def __init__(self, compiled: Any, types: str) -> None:
        self._compiled = compiled
        self._types = types
        self._threads = threading.local()

    def __call__(self, *arguments: float) -> None:
        try:
            values, addresses = self._threads.places
        except AttributeError:
            values = [_C_TYPES[t]() for t in self._types]
            addresses = [ctypes.addressof(value) for value in values]
            self._threads.places = values, addresses
        for place, argument in zip(values, arguments, strict=True):
            place.value = argument
        self._compiled.run_compiled_program(addresses)


class Kernels:
    """Functions for one architecture, each made at its first use and kept.

    stores  folders to look in; cache the one to write to, which is looked in last; None for none of them.
    """

    def __init__(self, arch: str, stores: Sequence[Path] = (), cache: Path | None = None) -> None:
        self.arch = arch
        self.stores = tuple(stores)
        self.cache = cache
        self.compiled = 0  # kernels that no store had
        self._functions: dict[Kernel, Function] = {}
        self._lock = threading.Lock()

    def get(self, kernel: Kernel) -> Function:
        """The function of a kernel."""
        function = self._functions.get(kernel)
        if function is None:
            with self._lock:  # threads that need the same one wait for its only compilation
                function = self._functions.get(kernel)
                if function is None:
                    function = self._functions[kernel] = Function(self._find(kernel), _KINDS[kernel.kind][2])
        return function

    def _find(self, kernel: Kernel) -> Any:
        for store in (*self.stores, *((self.cache,) if self.cache is not None else ())):
            loaded = load(store, self.arch, kernel)
            if loaded is not None:
                return loaded
        self.compiled += 1
        compiled = kernel.compile(self.arch)
        path = None
        if self.cache is not None:
            try:
                path = save(self.cache, self.arch, kernel, compiled)
            except OSError as error:
                log.warning("compiled SM100 kernels are not kept: %s; set WANFP4_CACHE to another folder", brief(error))
                self.cache = None
        # Of a GPU that is not the machine's first, cutlass compiles code and does not load it.
        if compiled.engine is None:
            if path is not None:
                return load(path.parents[2], self.arch, kernel)
            with tempfile.TemporaryDirectory(prefix="wanfp4-kernels-") as folder:
                save(Path(folder), self.arch, kernel, compiled)
                return load(Path(folder), self.arch, kernel)
        return compiled


@functools.cache
def kernels(arch: str) -> Kernels:
    """The process's kernels of an architecture, with the stores of the environment."""
    others = [Path(p) for p in os.environ.get("WANFP4_KERNELS", "").split(os.pathsep) if p]
    for store in (_PREBUILT, *others) if _PREBUILT.is_dir() else others:
        _explain(store, arch)
    return Kernels(arch, [_PREBUILT, *others], cache_folder())


def cache_folder() -> Path | None:
    """Where compiled kernels are kept, None for nowhere."""
    chosen = os.environ.get("WANFP4_CACHE")
    if chosen is not None:
        return Path(chosen) / "kernels" if chosen else None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "wanfp4" / "kernels"
    except RuntimeError:  # a user without a home
        return None


def _source_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(_FOLDER.glob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:_DIGITS]


_SOURCE = _source_digest()  # before kernels are imported: what is imported after is this, or `save` notices


@functools.cache
def environment() -> dict[str, str]:
    """What compiled code depends on, besides the kernel's own options."""
    return {
        "wanfp4": wanfp4.__version__,
        "nvidia-cutlass-dsl": importlib.metadata.version("nvidia-cutlass-dsl"),
        "source": _SOURCE,
        "machine": f"{sys.platform}-{platform.machine()}",
    }


def _environment_key() -> str:
    return hashlib.sha256(json.dumps(environment(), sort_keys=True).encode()).hexdigest()[:_DIGITS]


def _place(store: Path, arch: str) -> Path:
    return store / _environment_key() / arch


def load(store: Path, arch: str, kernel: Kernel) -> Any:
    """The function that a store has for a kernel, or None. A file that is damaged counts as none."""
    for path in sorted(_place(store, arch).glob(f"{kernel.kind}-{kernel.key}.*.o")):
        try:
            if hashlib.sha256(path.read_bytes()).hexdigest()[:_DIGITS] != path.suffixes[-2][1:]:
                raise ValueError("its content is not what its name says")
            from cutlass import cute

            return getattr(cute.runtime.load_module(str(path)), kernel.symbol)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the file, compiling puts it right
            log.warning("%s is not used: %s", path, brief(error))
    return None


def save(store: Path, arch: str, kernel: Kernel, compiled: Any) -> Path:
    """Put a compiled function into a store. Raises OSError when it cannot be written, or would get a wrong name."""
    if _source_digest() != _SOURCE:
        raise OSError(f"{_FOLDER} was edited while this process ran")
    code = _object(kernel, compiled)
    folder = _place(store, arch)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kernel.kind}-{kernel.key}.{hashlib.sha256(code).hexdigest()[:_DIGITS]}.o"
    _write(path, code)
    about = folder.parent / "about.json"
    if not about.exists():
        _write(about, json.dumps(environment(), indent=2).encode() + b"\n")
    return path


def _object(kernel: Kernel, compiled: Any) -> bytes:
    """An object file with host code and cubin."""
    from cutlass import cute

    # For another architecture than this machine's, cutlass has not loaded what the object's symbols refer to.
    for library in cute.runtime.find_runtime_libraries(enable_tvm_ffi=False):
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    code: bytes = compiled.dump_to_object(kernel.symbol)
    return code


def _write(path: Path, content: bytes) -> None:
    """All of it or nothing, whatever happens meanwhile."""
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)  # mkstemp's is for its owner alone; an exported store is for everybody
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _explain(store: Path, arch: str) -> None:
    """Say why a store that was asked for has nothing for this environment, if that is so."""
    if _place(store, arch).is_dir():
        return
    made = []
    for about in sorted(store.glob("*/about.json")):
        with contextlib.suppress(OSError, ValueError):
            made.append(json.loads(about.read_text()))
    ours = environment()
    if not made:
        why = "it holds no kernels" if store.is_dir() else "there is no such folder"
    else:
        differences = [f"{k} {made[-1].get(k)}, not {v}" for k, v in ours.items() if made[-1].get(k) != v]
        why = f"it was made for {'; '.join(differences)}" if differences else f"it holds none for {arch}"
    log.warning("kernels in %s are not used, and will be compiled: %s", store, why)


def export(folder: Path, architectures: Iterable[str], wanted: Sequence[Kernel]) -> list[Path]:
    """Compile kernels into a store. Raises OutputError when it cannot be written, Wanfp4Error for an unknown arch."""
    paths = []
    for arch in architectures:
        if arch not in ARCHITECTURES.values():
            raise Wanfp4Error(f"unknown architecture {arch!r}; there are {', '.join(ARCHITECTURES.values())}")
        for kernel in wanted:
            try:
                paths.append(save(folder, arch, kernel, kernel.compile(arch)))
            except OSError as error:
                raise OutputError(f"cannot write kernels to {folder}: {brief(error)}") from None
    return paths


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see the module's text."""
    from wanfp4.kernels.blackwell import backend

    parser = argparse.ArgumentParser("python -m wanfp4.kernels.blackwell.cache", description="Compiled SM100 kernels.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("export", help="compile every kernel of every preset into FOLDER")
    command.add_argument("--arch", default=",".join(ARCHITECTURES.values()), help="default: %(default)s")
    command.add_argument("--policies", default="", help="only these presets, with commas between them")
    command.add_argument("folder", type=Path, metavar="FOLDER")
    chosen = parser.parse_args(arguments)
    try:
        found = backend.not_installed()
        if found:
            raise Wanfp4Error(found)
        wanted = backend.preset_kernels([name for name in chosen.policies.split(",") if name])
        started = time.perf_counter()
        paths = export(chosen.folder, chosen.arch.split(","), wanted)
    except Wanfp4Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    size = sum(path.stat().st_size for path in paths)
    print(
        f"{len(paths)} kernels, {size / 2**20:.1f} MiB, in {time.perf_counter() - started:.0f} s; "
        f"export WANFP4_KERNELS={chosen.folder.resolve()}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
