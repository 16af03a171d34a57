"""What a user of the simulator can get wrong, and what it is told: never a traceback out of the machinery."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from programs import kernel

from wanfp4 import simulator
from wanfp4.simulator import HostError, ProtocolError, Simulator, UnknownInstruction
from wanfp4.simulator.launch import Launch
from wanfp4.simulator.ptx import read_kernels
from wanfp4.simulator.translate import Code

NOTHING = np.zeros(0, np.uint8)


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        ([1, 2], r"builtins\.list"),
        (None, r"builtins\.NoneType"),
        (5, r"builtins\.int"),
        (np.float32(1), r"numpy\.float32"),
        (torch.zeros(2, device="meta"), "a tensor on meta cannot be simulated; CPU tensors can"),
        (torch.eye(2).to_sparse(), r"layout torch\.sparse_coo .* strided tensors can be registered"),
    ],
)
def test_what_cannot_be_registered(thing, message):
    with pytest.raises(HostError, match=message):
        Simulator().register(thing)
    with pytest.raises(HostError, match=message):
        Simulator().register(name=thing)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Simulator(ordering="strict"), "ordering is 'strict'; it can be 'pipe' or 'isa'"),
        (lambda: simulator.device("sm_90a"), "'sm_90a' is not modelled; sm_100a and sm_103a are"),
        (lambda: simulator.device(ordering="strict"), "ordering is 'strict'"),
        (lambda: simulator.device(accumulation="fast"), "accumulation is 'fast'; it can be 'exact' or 'truncated'"),
        (lambda: Simulator().report(), "nothing was launched"),
        (
            lambda: Simulator(track=True).run(
                Code(read_kernels(kernel("ret;"))["k"], tracked=False), (1, 1, 1), NOTHING
            ),
            "translated with tracked=False, and track is True",
        ),
    ],
)
def test_wrong_options(make, message):
    with pytest.raises(HostError, match=message):
        make()


def without_threads(directive: str = "") -> str:
    return kernel("ret;").replace(".reqntid 32", directive)


def test_a_kernel_that_names_no_threads():
    with pytest.raises(HostError, match=r"kernel k does not say how many threads a CTA has: it needs \.reqntid"):
        Simulator().run(Code(read_kernels(without_threads())["k"], tracked=False), (1, 1, 1), NOTHING)


def launch(text: str, block: tuple[int, int, int] = (32, 1, 1), cluster: tuple[int, int, int] = (1, 1, 1)) -> Launch:
    return Launch("k", (1, 1, 1), block, cluster, 0, lambda index, size: bytes(size), text, None)


@pytest.mark.parametrize(
    ("directive", "block", "message"),
    [
        ("", (64, 1, 1), None),
        (".maxntid 128", (32, 1, 1), None),
        (".maxntid 128", (128, 1, 1), None),
        (".maxntid 8, 16", (64, 2, 1), None),
        (".maxntid 128", (160, 1, 1), r"launched with \(160, 1, 1\) threads, and \.maxntid allows 128"),
        (".reqntid 64", (64, 1, 1), None),
        (".reqntid 64", (32, 1, 1), r"launched with \(32, 1, 1\) threads, and \.reqntid asks for \(64, 1, 1\)"),
        (".reqntid 64", (32, 2, 1), r"launched with \(32, 2, 1\) threads"),
    ],
)
def test_the_threads_of_a_launch(directive, block, message):
    """PTX ISA: .reqntid is exact, .maxntid a bound of the product; without either a launch is free."""
    gpu = simulator.device()
    if message is None:
        gpu._launched(launch(without_threads(directive), block))
        assert gpu.report().threads == block[0] * block[1]
        return
    with pytest.raises(ProtocolError, match=message) as caught:
        gpu._launched(launch(without_threads(directive), block))
    assert caught.value.kernel == "k"


def test_a_kernel_may_be_launched_with_several_sizes():
    gpu, text = simulator.device(), without_threads(".maxntid 128")
    for block in ((32, 1, 1), (96, 1, 1), (32, 1, 1)):
        gpu._launched(launch(text, block))
    assert [report.threads for report in gpu.reports] == [32, 96, 32]


def test_clusters():
    with pytest.raises(HostError, match=r"k is launched in clusters of \(2, 1, 1\); one CTA is modelled"):
        simulator.device()._launched(launch(kernel("ret;"), cluster=(2, 1, 1)))


@pytest.mark.parametrize("statement", ["trap;", "cvt.ftz.f32.bf16 %f1, %h1;", ".local .b8 spill[16];"])
def test_what_cannot_be_translated_is_named_with_kernel_and_place(statement, tmp_path):
    """As a finding of a run is, whether reading or translating stumbles over it."""
    source = tmp_path / "mine.py"
    source.write_text("def kernel():\n    pass\n")
    text = kernel(f".loc 1 2 0\n{statement}\nret;") + f'.file 1 "{source}"\n'
    with pytest.raises(UnknownInstruction) as caught:
        simulator.device()._launched(launch(text))
    line = next(i for i, one in enumerate(text.split("\n"), 1) if one.strip() == statement)
    assert (caught.value.kernel, caught.value.line) == ("k", line)
    assert caught.value.place is not None
    assert caught.value.place.text == statement
    assert "mine.py:2" in str(caught.value.place.source)
