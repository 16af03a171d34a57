"""Launches of CuTe DSL functions, caught in this process: no preloaded library, no compiler, no driver."""

import ctypes
import os
import platform
import re
import struct
import subprocess
import sys

import pytest
import torch

from wanfp4.simulator import patching
from wanfp4.simulator.errors import HostError
from wanfp4.simulator.images import cubins_at, static_shared_bytes
from wanfp4.simulator.launch import Interceptor, Launch
from wanfp4.simulator.lines import SourceMap
from wanfp4.simulator.lint import lint

cutlass = pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
cute = cutlass.cute
from_dlpack = cutlass.cute.runtime.from_dlpack


@cute.kernel
def double_kernel(x: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    x[thread] = x[thread] * 2.0


@cute.kernel
def add_kernel(x: cute.Tensor, y: cutlass.Float32):
    thread, _, _ = cute.arch.thread_idx()
    x[thread] = x[thread] + y


@cute.jit
def double_then_add(x: cute.Tensor, y: cutlass.Float32):
    double_kernel(x).launch(grid=(1, 2, 3), block=(32, 1, 1), cluster=(1, 2, 1), smem=1000)
    add_kernel(x, y).launch(grid=(4, 1, 1), block=(16, 2, 1))


@cute.jit
def double(x: cute.Tensor):
    double_kernel(x).launch(grid=(1, 1, 1), block=(32, 1, 1))


def scaling(factor: float):
    """Two of these differ in a constant, not in the name of their kernel."""

    @cute.kernel
    def scale_kernel(x: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        x[thread] = x[thread] * factor

    @cute.jit
    def scale(x: cute.Tensor):
        scale_kernel(x).launch(grid=(1, 1, 1), block=(32, 1, 1))

    return scale


@cute.jit
def cooperative(x: cute.Tensor):
    double_kernel(x).launch(grid=(1, 1, 1), block=(32, 1, 1), cooperative=True)


@pytest.fixture
def launches() -> list[Launch]:
    return []


def tensor(**options):
    data = torch.arange(32.0)
    return data, from_dlpack(data, **options)


def settings() -> list[object]:
    """What an Interceptor changes, as it is now."""
    from cutlass.base_dsl import compiler, jit_executor
    from cutlass.base_dsl.dsl import DSLSingletonMeta
    from cutlass.cutlass_dsl import cuda_jit_executor
    from cutlass.utils import HardwareInfo

    line_info = cute.compile._compile_options.options[compiler.GenerateLineInfo].value
    found: list[object] = [line_info, compiler.CompileOptions.apply_envar_settings]
    found += [compiler.Compiler.compile, HardwareInfo.__init__, HardwareInfo.get_max_active_clusters]
    for owner in (jit_executor.JitExecutor, jit_executor.JitCompiledFunction):
        found.append(dict(vars(owner)))
    found.append(dict(vars(cuda_jit_executor.CudaDialectJitCompiledFunction)))
    for instance in DSLSingletonMeta._instances.values():
        found += [dict(vars(instance.envar)), instance.jit_cache]
    library = ctypes.CDLL(DSLSingletonMeta._instances[cutlass.cutlass_dsl.CuTeDSL].envar.shared_libs)
    for name in ("_cudaLaunchKernelEx", "_cudaLibraryLoadData", "_cudaMalloc", "cuda_dialect_init_library_once"):
        found.append(ctypes.string_at(ctypes.cast(getattr(library, name), ctypes.c_void_p).value, 16))
    return found


def test_every_launch_comes_with_its_sizes_parameters_and_ptx(launches):
    data, x = tensor()
    seen = []

    def handle(launch: Launch) -> None:
        launches.append(launch)
        seen.append(launch.params(0, 8))
        if len(launches) == 2:
            seen.append(launch.params(1, 4))

    with Interceptor("sm_100a", handle):
        cute.compile(double_then_add, x, 1.0)(x, 2.5)
    first, second = launches
    assert (first.grid, first.block, first.cluster, first.shared_bytes) == ((1, 2, 3), (32, 1, 1), (1, 2, 1), 1000)
    assert (second.grid, second.block, second.cluster, second.shared_bytes) == ((4, 1, 1), (16, 2, 1), (1, 1, 1), 0)
    assert seen == [struct.pack("<Q", data.data_ptr())] * 2 + [struct.pack("<f", 2.5)]
    assert "double_kernel" in first.kernel
    assert "add_kernel" in second.kernel
    for launch in launches:
        assert f".entry {launch.kernel}(" in launch.ptx
        assert ".target sm_100a" in launch.ptx
        assert launch.ptx_path is None
    assert torch.equal(data, torch.arange(32.0))  # nothing ran


def test_the_architecture_is_that_of_the_context(launches):
    _, x = tensor()
    with Interceptor("sm_103a", launches.append):
        cute.compile(double, x)(x)
        double(x)
    assert len(launches) == 2
    assert all(".target sm_103a" in launch.ptx for launch in launches)


def test_functions_called_without_compile_are_compiled_once(launches, monkeypatch):
    _, x = tensor()
    from cutlass.base_dsl.compiler import Compiler

    compilations = []
    original = Compiler.compile
    monkeypatch.setattr(Compiler, "compile", lambda *args, **kw: (compilations.append(1), original(*args, **kw))[1])
    with Interceptor("sm_100a", launches.append):
        for _ in range(2):
            double(x)
    assert len(launches) == 2
    assert len(compilations) == 1


def test_modules_whose_kernels_have_one_name_are_told_apart(launches):
    _, x = tensor()
    with Interceptor("sm_100a", launches.append):
        by_three, by_five = (cute.compile(scaling(factor), x) for factor in (3.0, 5.0))
        for function in (by_five, by_three, by_five):
            function(x)
    assert len({launch.kernel for launch in launches}) == 1
    five, three, again = (launch.ptx for launch in launches)
    assert five == again
    assert "0f40A00000" in five
    assert "0f40400000" in three


def test_a_function_can_be_launched_in_a_later_context(launches):
    _, x = tensor()
    with Interceptor("sm_100a", launches.append):
        function = cute.compile(double, x)
    with Interceptor("sm_100a", launches.append):
        function(x)
    with Interceptor("sm_100a", launches.append):
        function(x)
        function.to(0)(x)
    assert len(launches) == 3
    assert all(launch.kernel in launch.ptx for launch in launches)


@pytest.mark.parametrize("tvm", [False, True])
def test_a_function_compiled_outside_is_refused(launches, tvm, monkeypatch):
    if tvm:
        pytest.importorskip("tvm_ffi")
    from cutlass.cutlass_dsl import CuTeDSL

    monkeypatch.setattr(CuTeDSL._get_dsl().envar, "_arch", "sm_100a")
    _, x = tensor(enable_tvm_ffi=tvm)
    function = cute.compile(scaling(7.0), x, options="--enable-tvm-ffi" if tvm else "")
    with Interceptor("sm_100a", launches.append):
        with pytest.raises(HostError, match="compile it while the simulator is active"):
            function(x)
        cute.compile(double, x)(x)  # and the next call is none the worse
    assert len(launches) == 1


@pytest.mark.parametrize("exception", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("way", ["compiled", "called", "executor", "tvm"])
def test_an_exception_of_the_handler_comes_out_of_the_call(way, exception):
    if way == "tvm":
        pytest.importorskip("tvm_ffi")
    _, x = tensor(enable_tvm_ffi=way == "tvm")
    names = []

    def handle(launch: Launch) -> None:
        names.append(launch.kernel)
        raise exception("found something")

    with Interceptor("sm_100a", handle):
        options = "--enable-tvm-ffi" if way == "tvm" else ""
        function = double_then_add if way == "called" else cute.compile(double_then_add, x, 1.0, options=options)
        if way == "executor":
            function = function.to(0)
        for _ in range(2):
            with pytest.raises(exception, match="found something") as caught:
                function(x, 1.0)
            assert caught.value.__suppress_context__  # not cutlass' report of an unknown CUDA error
    assert len(names) == 2  # the second kernel is not launched after the first has failed


def test_an_exception_that_no_wrapped_call_delivers_comes_at_the_end_of_the_context():
    _, x = tensor()

    def handle(launch: Launch) -> None:
        raise ValueError("found something")

    context = Interceptor("sm_100a", handle)
    with context:
        executor = cute.compile(double, x).to(0)
        arguments, _ = executor.generate_execution_args(x)
        executor.capi_func(executor._get_invoke_packed_args(arguments))
        with pytest.raises(ValueError, match="found something"):
            context.__exit__(None, None, None)


def test_contexts_nest(launches):
    _, x = tensor()
    inner: list[Launch] = []
    with Interceptor("sm_100a", launches.append):
        function = cute.compile(double, x)
        function(x)
        with Interceptor("sm_100a", inner.append):
            function(x)
            double(x)
        function(x)
    assert len(launches) == 2
    assert len(inner) == 2


def test_tvm_ffi_functions_are_caught(launches):
    pytest.importorskip("tvm_ffi")
    data, x = tensor(enable_tvm_ffi=True)
    with Interceptor("sm_100a", launches.append):
        function = cute.compile(double, x, options="--enable-tvm-ffi")
        function(x)
        function(data)
    with Interceptor("sm_100a", launches.append):
        function(data)
    assert [launch.kernel in launch.ptx for launch in launches] == [True] * 3


def test_everything_is_as_before_after_the_context(launches):
    _, x = tensor()
    before = settings()
    with Interceptor("sm_100a", launches.append):
        during = settings()
        double(x)
    assert settings() == before
    assert during != before
    with pytest.raises(ZeroDivisionError), Interceptor("sm_100a", launches.append):
        _ = 1 / 0
    assert settings() == before


def test_ptx_and_cubin_can_be_kept(launches, tmp_path):
    _, x = tensor()
    with Interceptor("sm_100a", launches.append, keep=tmp_path / "kept"):
        cute.compile(double, x)(x)
    path = launches[0].ptx_path
    assert path is not None
    assert path.parent == tmp_path / "kept"
    assert path.read_text() == launches[0].ptx
    assert path.with_suffix(".cubin").read_bytes().startswith(b"\x7fELF")


def test_files_that_the_user_keeps_are_left_to_him(launches, tmp_path):
    _, x = tensor()
    with Interceptor("sm_100a", launches.append):
        cute.compile(double, x, options=f"--keep-ptx --dump-dir {tmp_path}")(x)
    (kept,) = tmp_path.iterdir()
    assert kept.read_text() == launches[0].ptx


def test_what_is_not_modelled_is_refused(launches):
    _, x = tensor()
    with Interceptor("sm_100a", launches.append), pytest.raises(HostError, match="cooperative grid"):
        cute.compile(cooperative, x)(x)
    library = ctypes.CDLL(cutlass.cutlass_dsl.CuTeDSL._get_dsl().envar.shared_libs)
    with pytest.raises(HostError, match="calls cudaMalloc"), Interceptor("sm_100a", launches.append):
        assert library._cudaMalloc(None, 4) != 0
    value = ctypes.c_int()
    with pytest.raises(HostError, match="attribute 12345"), Interceptor("sm_100a", launches.append):
        library._cudaDeviceGetAttribute(ctypes.byref(value), 12345, 0)
    assert launches == []
    with pytest.raises(HostError, match="no architecture"):
        Interceptor("blackwell", launches.append)


def test_the_device_answers_for_itself(launches):
    library = ctypes.CDLL(cutlass.cutlass_dsl.CuTeDSL._get_dsl().envar.shared_libs)
    value = ctypes.c_int()
    found = {}
    with Interceptor("sm_103a", launches.append, multiprocessors=4):
        for attribute in (16, 75, 76, 97):
            assert library._cudaDeviceGetAttribute(ctypes.byref(value), attribute, 0) == 0
            found[attribute] = value.value
        information = cutlass.utils.HardwareInfo()
        assert information.get_device_multiprocessor_count() == 4
        assert information.get_max_active_clusters(2) == 2
    assert found == {16: 4, 75: 10, 76: 3, 97: 232448}


@cute.kernel
def reverse_kernel(x: cute.Tensor, dynamic: cutlass.Constexpr[bool]):
    thread, _, _ = cute.arch.thread_idx()
    if cutlass.const_expr(dynamic):
        address = cutlass.memory.SmemAllocator().allocate_array(cutlass.Float32, 32)
    else:
        address = cute.arch.alloc_smem(cutlass.Float32, 32)
    buffer = cute.make_tensor(address, cute.make_layout(32))
    buffer[31 - thread] = x[thread]
    cute.arch.sync_threads()
    x[thread] = buffer[thread]


@cute.jit
def reverse(x: cute.Tensor, dynamic: cutlass.Constexpr[bool]):
    reverse_kernel(x, dynamic).launch(grid=(1, 1, 1), block=(32, 1, 1))


@pytest.mark.parametrize("dynamic", [False, True])
def test_static_shared_memory_is_told_apart_from_dynamic(launches, dynamic, tmp_path):
    _, x = tensor()
    with Interceptor("sm_100a", launches.append, keep=tmp_path):
        cute.compile(reverse, x, dynamic)(x)
    (launch,) = launches
    assert launch.shared_bytes == (128 if dynamic else 0)
    assert launch.ptx_path is not None
    cubin = launch.ptx_path.with_suffix(".cubin").read_bytes()
    assert static_shared_bytes(cubin, launch.kernel) == (0 if dynamic else 128)


SCRIPT = """
import sys
if sys.argv[1] == "before":
    import cutlass
from wanfp4.simulator.launch import Interceptor
with Interceptor("sm_100a", lambda launch: print("caught", launch.grid, ".target sm_100a" in launch.ptx)):
    import torch
    from importlib import util
    spec = util.spec_from_file_location("programs", sys.argv[2])
    programs = util.module_from_spec(spec)
    spec.loader.exec_module(programs)
    _, x = programs.tensor()
    programs.double(x)
"""


@pytest.mark.parametrize("order", ["before", "after"])
def test_cutlass_may_be_imported_before_or_after(order, tmp_path):
    """In a fresh process without any of cutlass' environment variables."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("CUTE_DSL", "LD_"))}
    done = subprocess.run(
        [sys.executable, script, order, __file__], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stdout.splitlines() == ["caught (1, 1, 1) True"], done.stderr


def test_without_cutlass_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cutlass.cutlass_dsl", None)
    with pytest.raises(HostError, match=r'pip install "wanfp4\[simulator\]"'), Interceptor("sm_100a", print):
        pass


def test_the_library_is_found_where_cutlass_says(monkeypatch):
    monkeypatch.setattr(cutlass.cutlass_dsl.CuTeDSL._get_dsl().envar, "shared_libs", "/nowhere/libother.so")
    with pytest.raises(HostError, match=r"names no libcute_dsl_runtime .*libother"), Interceptor("sm_100a", print):
        pass


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Argument aux_data:UserWarning")  # cutlass, of flash-attn-4's arguments
def test_flash_attention_is_caught_with_its_lines(launches, flash_attention_forward):
    """The SM100 forward of flash-attn-4: 512 threads, all shared memory, tensor maps among its parameters."""
    from cuda.bindings import driver

    q, k, v, o = (torch.zeros(1, 128, 1, 128, dtype=torch.bfloat16) for _ in range(4))
    tensors = [
        from_dlpack(t, assumed_align=16).mark_layout_dynamic(leading_dim=t.ndim - 1)
        for t in (q, k, v, o, torch.zeros(1, 1, 128))
    ]
    maps = []

    def handle(launch: Launch) -> None:
        launches.append(launch)
        sizes = re.findall(r"\.param \.align \d+ \.b8 \w+_param_(\d+)\[128\]", launch.ptx)
        maps.extend(int.from_bytes(launch.params(int(index), 8), "little") for index in sizes)

    with Interceptor("sm_100a", handle):
        forward = flash_attention_forward(128, is_causal=False, is_static_persistent=False)
        compiled = cute.compile(forward, *tensors, 0.1, stream=driver.CUstream(0))
        compiled(*tensors, 0.1, stream=driver.CUstream(0))
    (launch,) = launches
    assert (launch.grid, launch.block, launch.cluster) == ((1, 1, 1), (512, 1, 1), (1, 1, 1))
    assert launch.shared_bytes == 227 * 1024
    assert {t.data_ptr() for t in (q, k, v, o)} <= set(maps)
    table = SourceMap(launch.ptx)
    lines = launch.ptx.splitlines()
    loads = {table.source(i).function for i, text in enumerate(lines, 1) if text.strip().startswith("tcgen05.ld")}
    assert "FlashAttentionForwardSm100.softmax_step" in loads
    # It leaves the wait for loads from tensor memory to ptxas, and breaks no other rule.
    assert {finding.rule for finding in lint(launch.ptx)} == {"tmem-load"}


def test_code_is_changed_where_the_process_memory_file_is_closed(launches, monkeypatch):
    def closed(address: int, code: bytes) -> None:
        raise PermissionError("no /proc/self/mem here")

    def refused(address: int, code: bytes) -> None:
        raise PermissionError("no mprotect either")

    _, x = tensor()
    before = settings()
    monkeypatch.setattr(patching, "_write_through_proc", closed)
    if platform.machine() == "x86_64":
        with Interceptor("sm_100a", launches.append):
            double(x)
        assert len(launches) == 1
        assert settings() == before
    monkeypatch.setattr(patching, "_write_through_mprotect", refused)
    with pytest.raises(HostError, match=r"change its own code.*no /proc/self/mem"), Interceptor("sm_100a", print):
        pass
    assert settings() == before


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (b"\x7fELF" + bytes(100), "no fat binary: it begins with 0x464c457f"),
        (struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 32) + struct.pack("<HHIQ", 2, 1, 16, 16) + bytes(16), "compressed"),
    ],
)
def test_device_code_of_another_kind_is_refused(image, message):
    buffer = ctypes.create_string_buffer(image)
    with pytest.raises(HostError, match=message):
        cubins_at(ctypes.addressof(buffer))
