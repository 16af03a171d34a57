"""Compiled kernels on disk: stores, what names an entry, and everything that can be wrong with a file or a folder."""

from __future__ import annotations

import concurrent.futures
import ctypes
import errno
import inspect
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from wanfp4 import simulator
from wanfp4.errors import OutputError, Wanfp4Error
from wanfp4.kernels.blackwell import backend, cache
from wanfp4.kernels.blackwell.cache import Function, Kernel, Kernels
from wanfp4.policy import get_policy

MEAN = Kernel("mean", torch.bfloat16)  # quick to compile, and its result is plain to see

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own


@pytest.fixture(scope="module")
def device() -> Iterator[simulator.Device]:
    with simulator.device("sm_100a") as gpu:
        yield gpu


@pytest.fixture(scope="module")
def compiled(device: simulator.Device) -> Any:
    return MEAN.compile("sm_100a")


@pytest.fixture
def store(tmp_path: Path, compiled: Any) -> Path:
    """With one entry."""
    cache.save(tmp_path, "sm_100a", MEAN, compiled)
    return tmp_path


def entry(store: Path) -> Path:
    (found,) = store.rglob("*.o")
    return found


def works(device: simulator.Device, function: Function) -> bool:
    x = torch.randn(1, 40, 2, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    sums, means = torch.zeros(2, 1, 128), torch.zeros(2, 128)
    device.register(x, sums, means)
    function(x.data_ptr(), sums.data_ptr(), means.data_ptr(), *x.stride()[:3], 1, 40, 2, 0)
    return torch.allclose(means, x.float().mean(1)[0], atol=1e-6)


def test_a_stored_kernel_runs_without_compiling(device: simulator.Device, store: Path) -> None:
    kernels = Kernels("sm_100a", [store])
    function = kernels.get(MEAN)
    assert kernels.compiled == 0
    assert kernels.get(MEAN) is function
    assert works(device, function)


def test_what_is_compiled_is_kept(
    device: simulator.Device, compiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Kernel, "compile", lambda self, arch: compiled)
    first = Kernels("sm_100a", cache=tmp_path)
    assert works(device, first.get(MEAN))
    assert first.compiled == 1
    second = Kernels("sm_100a", cache=tmp_path)
    assert works(device, second.get(MEAN))
    assert second.compiled == 0
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]
    other = Kernels("sm_103a", cache=tmp_path)
    other.get(MEAN)
    assert other.compiled == 1


def test_stores_come_before_the_cache(
    compiled: Any, store: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    load = cache.load
    monkeypatch.setattr(cache, "load", lambda store, *what: asked.append(store) or load(store, *what))
    empty, kept = tmp_path_factory.mktemp("empty"), tmp_path_factory.mktemp("kept")
    Kernels("sm_100a", [empty, store], kept).get(MEAN)
    assert asked == [empty, store]
    assert not list(kept.iterdir())


@pytest.mark.parametrize("damage", ["cut short", "one bit", "empty", "no object"])
def test_a_damaged_entry_is_replaced(
    device: simulator.Device, compiled: Any, store: Path, damage: str, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = entry(store)
    code = path.read_bytes()
    middle = len(code) // 2
    broken = {
        "cut short": code[:middle],
        "one bit": code[:middle] + bytes([code[middle] ^ 1]) + code[middle + 1 :],
        "empty": b"",
        "no object": b"hello",
    }[damage]
    path.write_bytes(broken)
    monkeypatch.setattr(Kernel, "compile", lambda self, arch: compiled)
    kernels = Kernels("sm_100a", cache=store)
    assert works(device, kernels.get(MEAN))
    assert kernels.compiled == 1
    assert "is not used: ValueError: its content is not what its name says" in caplog.text
    assert path.read_bytes() == code
    again = Kernels("sm_100a", cache=store)
    again.get(MEAN)
    assert again.compiled == 0


def test_an_entry_that_cannot_be_loaded_is_passed_over(
    compiled: Any, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole, but not what it should be."""
    path = entry(store)
    digest = cache.hashlib.sha256(b"hello").hexdigest()[:20]
    path.with_name(f"mean-{MEAN.key}.{digest}.o").write_bytes(b"hello")
    path.unlink()
    assert cache.load(store, "sm_100a", MEAN) is None
    assert f"{digest}.o is not used: " in caplog.text


def test_folders_that_cannot_be_written(
    device: simulator.Device, compiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The kernel runs, one warning says why it is not kept, and nothing is left behind."""
    monkeypatch.setattr(Kernel, "compile", lambda self, arch: compiled)
    file = tmp_path / "file"
    file.write_text("not a folder")
    kernels = Kernels("sm_100a", cache=file)
    assert works(device, kernels.get(MEAN))
    assert "compiled SM100 kernels are not kept: NotADirectoryError" in caplog.text
    assert "set WANFP4_CACHE to another folder" in caplog.text
    caplog.clear()
    kernels.get(Kernel("mean", torch.float16))
    assert not caplog.text

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache.os, "replace", full)
    kernels = Kernels("sm_100a", cache=tmp_path / "full")
    assert works(device, kernels.get(MEAN))
    assert "No space left on device" in caplog.text
    assert not [path for path in (tmp_path / "full").rglob("*") if path.is_file()]


def test_many_at_once(device: simulator.Device, compiled: Any, tmp_path: Path) -> None:
    """Writers and readers of one entry: whoever finds it finds all of it."""

    def write_and_read(_: int) -> bool:
        path = cache.save(tmp_path, "sm_100a", MEAN, compiled)
        return cache.hashlib.sha256(path.read_bytes()).hexdigest()[:20] == path.suffixes[-2][1:]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(write_and_read, range(8)))
    assert entry(tmp_path)
    assert cache.load(tmp_path, "sm_100a", MEAN) is not None


def test_one_compilation_for_all_threads(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Barrier(4)

    def get(kernels: Kernels) -> Function:
        started.wait()
        return kernels.get(MEAN)

    kernels = Kernels("sm_100a")
    monkeypatch.setattr(Kernel, "compile", lambda self, arch: compiled)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        functions = set(pool.map(get, [kernels] * 4))
    assert len(functions) == kernels.compiled == 1


def test_keys() -> None:
    """Everything that changes code changes the name of the entry, or of the environment."""
    plans = [
        backend.plan(get_policy(name).numerics, None, dtype, lse)
        for name in ("wan-fast", "wan-two-piece", "direct-p-exp2", "wan-two-piece-nv")
        for dtype in (torch.bfloat16, torch.float16)
        for lse in (False, True)
    ]
    kernels = {kernel for plan in plans for kernel in plan.kernels}
    assert len({kernel.key for kernel in kernels}) == len(kernels)
    assert Kernel("mean", torch.bfloat16).key == MEAN.key
    code = "from wanfp4.kernels.blackwell.cache import *; import torch; print(Kernel('mean', torch.bfloat16).key)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == MEAN.key


def test_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {cache._environment_key()}
    environment = cache.environment()
    assert environment["nvidia-cutlass-dsl"].startswith("4.")
    assert set(environment) == {"wanfp4", "nvidia-cutlass-dsl", "source", "machine"}
    for name in environment:
        monkeypatch.setattr(cache, "environment", lambda name=name: environment | {name: "other"})
        keys.add(cache._environment_key())
    assert len(keys) == 5


def test_source_that_was_edited_is_not_what_was_compiled(
    compiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    for path in cache._FOLDER.glob("*.py"):
        (folder / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(cache, "_FOLDER", folder)
    monkeypatch.setattr(cache, "_SOURCE", cache._source_digest())
    cache.save(tmp_path / "store", "sm_100a", MEAN, compiled)
    with (folder / "forward.py").open("a") as file:
        file.write("\n")
    with pytest.raises(OSError, match="was edited while this process ran"):
        cache.save(tmp_path / "store", "sm_100a", MEAN, compiled)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANFP4_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / ".cache/wanfp4/kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.cache_folder() == Path("/somewhere/wanfp4/kernels")
    monkeypatch.setenv("WANFP4_CACHE", "/here")
    assert cache.cache_folder() == Path("/here/kernels")
    monkeypatch.setenv("WANFP4_CACHE", "")
    assert cache.cache_folder() is None


def test_stores_of_the_environment(
    store: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """WANFP4_KERNELS, and why a folder in it is of no use."""
    caplog.set_level(logging.WARNING)
    kernels = cache.kernels.__wrapped__
    monkeypatch.setenv("WANFP4_CACHE", "")
    monkeypatch.setenv("WANFP4_KERNELS", os.pathsep.join([str(store), ""]))
    found = kernels("sm_100a")
    assert found.stores == (cache._PREBUILT, store)
    assert found.cache is None
    found.get(MEAN)
    assert found.compiled == 0
    assert not caplog.text
    kernels("sm_103a")
    assert "it holds none for sm_103a" in caplog.text
    old = tmp_path_factory.mktemp("old")
    (old / "abc").mkdir()
    (old / "abc/about.json").write_text(json.dumps(cache.environment() | {"wanfp4": "0.0.1"}))
    empty = tmp_path_factory.mktemp("empty")
    monkeypatch.setenv("WANFP4_KERNELS", os.pathsep.join([str(old), str(empty), "/nowhere"]))
    kernels("sm_100a")
    assert f"kernels in {old} are not used, and will be compiled: it was made for wanfp4 0.0.1, not " in caplog.text
    assert f"kernels in {empty} are not used, and will be compiled: it holds no kernels" in caplog.text
    assert "kernels in /nowhere are not used, and will be compiled: there is no such folder" in caplog.text


@pytest.mark.slow
def test_export_from_the_command_line(tmp_path: Path) -> None:
    """In a process with neither GPU nor simulator. What it wrote is all that the policy needs."""
    command = [sys.executable, "-m", "wanfp4.kernels.blackwell.cache", "export", "--policies", "direct-p-fast"]
    done = subprocess.run([*command, "--arch", "sm_103a", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    wanted = backend.preset_kernels(["direct-p-fast"])
    assert f"{len(wanted)} kernels, " in done.stdout
    assert f"export WANFP4_KERNELS={tmp_path}" in done.stdout
    kernels = Kernels("sm_103a", [tmp_path])
    for kernel in wanted:
        kernels.get(kernel)
    assert kernels.compiled == 0


def test_export_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for arguments, why in (
        (["--arch", "sm_90a", str(tmp_path)], "unknown architecture 'sm_90a'; there are sm_100a, sm_103a"),
        (["--policies", "nothing", str(tmp_path)], "unknown policy 'nothing'"),
        (["--policies", "nvfp4", str(tmp_path)], "policy 'nvfp4' has no SM100 kernels"),
    ):
        assert cache.main(["export", *arguments]) == 1
        assert why in capsys.readouterr().err
    with pytest.raises(OutputError, match=f"cannot write kernels to {file}: NotADirectoryError"):
        cache.export(file, ["sm_100a"], [MEAN])
    with pytest.raises(Wanfp4Error, match="unknown architecture"):
        cache.export(tmp_path, ["sm_120a"], [MEAN])


def test_code_is_for_the_architecture_that_was_asked_for() -> None:
    for arch in ("sm_100a", "sm_103a"):
        code = cache._object(MEAN, MEAN.compile(arch))
        assert f"-arch {arch} ".encode() in code  # what ptxas was called with, as the cubin says


def test_functions_pass_numbers_by_type_and_thread() -> None:
    """Each thread has its own place for them."""
    seen: dict[int, list[Any]] = {}
    together = threading.Barrier(2)

    class Compiled:
        def run_compiled_program(self, addresses: list[int]) -> None:
            together.wait()
            types = (ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_void_p)
            values = [t.from_address(a).value for t, a in zip(types, addresses, strict=True)]
            seen[threading.get_ident()] = values

    function = Function(Compiled(), "qifs")
    calls = [(2**40, -5, 0.5, 2**47 - 1), (-(2**50), 7, -1.5, 1)]
    threads = [threading.Thread(target=function, args=arguments) for arguments in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(tuple, seen.values())) == sorted(calls)
    with pytest.raises(ValueError, match="shorter"):
        function(1, 2)


def test_types_are_those_of_the_kernels() -> None:
    """What this module says of arguments is what the classes declare."""
    letters = {"Int64": "q", "Int32": "i", "Float32": "f", "CUstream": "s", "driver.CUstream": "s"}
    for module, name, types in cache._KINDS.values():
        made = getattr(cache.importlib.import_module(f"{cache.__package__}.{module}"), name)
        call = inspect.unwrap(made.__call__)
        declared = [p.annotation for p in list(inspect.signature(call).parameters.values())[1:]]
        names = [a if isinstance(a, str) else a.__name__ for a in declared]
        assert "".join(letters[n] for n in names) == types
