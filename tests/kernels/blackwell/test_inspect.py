"""What `inspect` reads out of machine code, on graphs made by hand; and the budget of the kernels, as assertions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from wanfp4.errors import SettingsError, Wanfp4Error
from wanfp4.kernels.blackwell import backend, inspect, layout, sass
from wanfp4.kernels.blackwell.cache import Kernel
from wanfp4.kernels.blackwell.sass import Block, Function, Instruction
from wanfp4.policy import policies

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own

PRESETS = [name for name, policy in policies().items() if backend.limits(policy.numerics) is None]
SHIFTLESS = ("wan-fast", "wan-fast-14b", "wan-two-piece", "direct-p-fast")


# Reading a graph

GRAPH = r"""digraph f {
subgraph "cluster_kernel" {
node [fontname="Courier",fontsize=10,shape=Mrecord];
"kernel"
[label="{<entry>	.global		kernel\lkernel:\l0000:\ \ \ LDC\ R1,\ c\[0x0\]\[0x37c\]\ ;\l|<exit0>0010:\ \ \ @!P0\ BRA\ `(.L_x_1)\ ;\l}"]
"kernel":exit0:e -> ".L_x_1":entry:n [style=solid];
"kernel":exit0:s -> "BB0":entry:n [style=solid];
node [fontname="Courier",fontsize=10,shape=Mrecord];
"BB0"
[label="{<entry>0020:\ \ \ MOV\ R2,\ 0x40\ ;\l|<exit0>0030:\ \ \ CALL.REL.NOINC\ `($trap)\ ;\l}"]
"BB0":exit0:e -> "$trap":entry:n [style=solid];
node [fontname="Courier",fontsize=10,shape=Mrecord];
".L_x_1"
[label="{<entry>.L_x_1:\l0040:\ \ \ F2FP.BF16.F32.PACK_AB\ R2,\ R3,\ R4\ ;\l|<exit0>0050:\ \ \ EXIT\ ;\l}"]
}
subgraph "cluster_$trap" {
"$trap"
[label="{<entry>	.weak		$trap\l$trap:\l0060:\ \ \ BPT.TRAP\ 0x1\ ;\l}"]
}
}
"""  # noqa: E501


def test_a_graph_becomes_functions_blocks_and_instructions():
    found = sass.parse(GRAPH)
    assert list(found) == ["kernel", "$trap"]
    kernel = found["kernel"]
    assert {name: block.next for name, block in kernel.blocks.items()} == {
        "kernel": (".L_x_1", "BB0"),
        "BB0": (".L_x_1",),  # the call comes back, and its edge into the other function is none of this one
        ".L_x_1": (),
    }
    assert kernel.instructions == [
        Instruction(0x00, "", "LDC", "R1, c[0x0][0x37c]"),
        Instruction(0x10, "@!P0", "BRA", "`(.L_x_1)"),
        Instruction(0x20, "", "MOV", "R2, 0x40"),
        Instruction(0x30, "", "CALL.REL.NOINC", "`($trap)"),
        Instruction(0x40, "", "F2FP.BF16.F32.PACK_AB", "R2, R3, R4"),
        Instruction(0x50, "", "EXIT", ""),
    ]
    assert [i.pipe for i in kernel.instructions] == ["other", "other", "ALU", "other", "conversion", "other"]


def made_by_hand(blocks: dict[str, tuple[str, str]]) -> Function:
    """A function from each block's instructions and the blocks after it, as words."""
    made, offset = {}, 0
    for name, (text, following) in blocks.items():
        instructions = []
        for word in text.split():
            instructions.append(Instruction(offset, "", word, ""))
            offset += 16
        made[name] = Block(name, tuple(instructions), tuple(following.split()))
    return Function("kernel", made)


CODE = "F2FP.SATFINITE.RELU.E2M1.F32.PACK_AB_MERGE_C"
LOOPS = {
    "entry": ("S2R", "job"),
    "job": ("LDC BRA", "tile rest"),
    "tile": ("SYNCS.PHASECHK.TRANS64.TRYWAIT BRA", "loaded retry"),
    "retry": ("SYNCS.PHASECHK.TRANS64 NANOSLEEP.SYNCS BRA", "retry loaded"),
    "loaded": ("LDTM.x32 FMNMX3.NAN VOTE.ANY BRA", "rescale flagged"),
    "rescale": ("SYNCS.PHASECHK.TRANS64.TRYWAIT BRA", "scaled again"),
    "again": ("NANOSLEEP.SYNCS BRA", "again scaled"),
    "scaled": ("LDTM.x32 FMUL FMUL STTM.x32", "flagged"),
    "flagged": ("FSETP.GT.AND BRA", "first codes"),
    "first": ("MUFU.EX2 MUFU.EX2", "codes"),
    "codes": (f"FFMA2 {CODE} FFMA2 {CODE} PRMT IDP.4A.U8.U8 STS STTM.x1 R2UR BRA", "tile rest"),
    "rest": ("ISETP.NE.U32.AND BRA", "last out"),
    "last": (f"LDTM.x32 FSEL FFMA2 {CODE} BRA", "masked spin"),
    "spin": ("NANOSLEEP.SYNCS BRA", "spin masked"),
    "masked": (f"FFMA2 {CODE} STTM.x1", "out"),
    "out": ("LDTM.x32 F2FP.BF16.F32.PACK_AB STG.E.128 BRA", "job end"),
    "end": ("EXIT", ""),
}


def test_loops_are_found_by_their_jumps_back():
    loops = {loop.header: loop.blocks for loop in made_by_hand(LOOPS).loops}
    inside = {"tile", "retry", "loaded", "rescale", "again", "scaled", "flagged", "first", "codes"}
    assert loops == {
        "job": set(LOOPS) - {"entry", "end"},
        "tile": inside,
        "retry": {"retry"},
        "again": {"again"},
        "spin": {"spin"},
    }


def test_the_softmax_loop_is_counted_without_what_seldom_happens():
    loop = inspect.softmax_loop(made_by_hand(LOOPS), "E2M1")
    assert loop.pairs == 2
    assert loop.slots == {
        "FMA": 2,
        "ALU": 3,  # FMNMX3, FSETP, PRMT
        "conversion": 2,
        "MUFU": 2,
        "dp4a": 1,
        "tensor memory": 2,
        "shared": 1,
        "sync": 1,
        "other": 6,  # four branches, VOTE and R2UR
    }
    assert loop.total == 20
    assert loop.conditional == 2  # the exponentials of a branch count: it may be taken
    assert loop.exponentials == 2
    assert loop.rescale == 2 + 2 + 4
    assert loop.retries == 3
    assert loop.tail == 5 + 3
    assert loop.per_pair() == 10
    assert loop.per_pair("MUFU") == 1


def test_the_shortest_of_several_loops_is_the_one_without_a_mask():
    longer = {name: (text.replace("FFMA2", "FSEL FFMA2"), following) for name, (text, following) in LOOPS.items()}
    both = {
        **{
            f"{name}-": (text, " ".join(f"{n}-" for n in f.split()))
            for name, (text, f) in longer.items()
            if name != "end"
        },
        **LOOPS,
    }
    both["out-"] = (LOOPS["out"][0], "job- entry")
    assert inspect.softmax_loop(made_by_hand(both), "E2M1").total == 20


def test_a_function_without_such_a_loop_is_refused():
    without = {name: block for name, block in LOOPS.items() if name in ("entry", "end")} | {"entry": ("S2R", "end")}
    with pytest.raises(Wanfp4Error, match="kernel has no loop that converts to E2M1"):
        inspect.softmax_loop(made_by_hand(without), "E2M1")
    with pytest.raises(Wanfp4Error, match="no loop that converts to BF16"):
        inspect.softmax_loop(made_by_hand(LOOPS), "BF16")


def test_cycles_follow_the_formula():
    loop = inspect.softmax_loop(made_by_hand(LOOPS), "E2M1")  # 2 pairs of the 64 of a tile
    assert loop.cycles("sm_100a") == {
        "issue": 20 * 32,
        "FMA": 2 * 32 * 128 / 128,
        "ALU": 3 * 32 * 128 / 64,
        "conversion": 2 * 32 * 128 / 57,
        "MUFU": 2 * 32 * 128 / 16,
        "dp4a": 1 * 32 * 128 / 64,
    }
    assert loop.cycles("sm_103a")["MUFU"] == loop.cycles("sm_100a")["MUFU"] / 2


@pytest.mark.parametrize(
    ("ptx", "columns"),
    [
        ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 512;", 512),
        ("mov.b32 %r7, 256;\ntcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 \t[%r1+280], %r7;", 256),
        ("ret;", 0),
    ],
)
def test_columns_of_tensor_memory(ptx, columns):
    assert inspect.tensor_columns(ptx) == columns


def test_columns_that_are_no_constant_are_not_guessed():
    with pytest.raises(Wanfp4Error, match="no constant: %r7"):
        inspect.tensor_columns("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], %r7;")


# NVIDIA's tools


def test_a_missing_disassembler_is_said_with_the_extra_that_brings_it(monkeypatch, tmp_path):
    monkeypatch.setattr(sass.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Wanfp4Error, match=r"nvdisasm, which is neither .* pip install \"wanfp4\[inspect\]\""):
        sass.tool("nvdisasm")
    program = tmp_path / "nvdisasm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert sass.tool("nvdisasm") == program


def test_a_file_that_is_no_cubin_is_one_sentence(tmp_path):
    broken = tmp_path / "broken.cubin"
    broken.write_bytes(b"no cubin")
    with pytest.raises(Wanfp4Error, match=r"nvdisasm failed with exit code \d+: nvdisasm fatal"):
        sass.functions(broken)


def test_other_architectures_are_refused():
    with pytest.raises(SettingsError, match="'sm_120a' is no architecture of these kernels; sm_100a and sm_103a are"):
        inspect.Compiler("sm_120a")


# The budget


@pytest.fixture(scope="module")
def compiler() -> Iterator[inspect.Compiler]:
    with inspect.Compiler("sm_100a") as compiler:
        yield compiler


@pytest.fixture(scope="module")
def forwards(compiler: inspect.Compiler) -> dict[str, inspect.KernelFigures]:
    """Figures of the forward kernel of every preset that there is one for."""
    made: dict[Kernel, inspect.KernelFigures] = {}
    found = {}
    for name in PRESETS:
        kernel = backend.plan(policies()[name].numerics, policies()[name].guard, torch.bfloat16, False).forward
        if kernel not in made:
            [made[kernel]] = compiler.figures(kernel)
        found[name] = made[kernel]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_the_forward_kernel_keeps_to_the_hardware(forwards, name):
    figures = forwards[name]
    assert figures.faults == []
    assert figures.tensor_columns == 512
    assert figures.threads == layout.THREADS
    assert figures.setmaxnreg == (layout.SOFTMAX_REGISTERS, layout.OTHER_REGISTERS)
    registers = (128 * (2 * layout.SOFTMAX_REGISTERS + layout.OTHER_REGISTERS), figures.registers * figures.threads)
    assert max(registers) <= 64 * 1024
    # Q·Kᵀ with a scale for 16, P·V with a scale for 32 or, in NVFP4, for 16 as well: two instructions a tile each.
    nvfp4 = policies()[name].numerics.p == "nvfp4"
    assert set(figures.tensor_core) == {"UTCCP.T.S.4x32dp128bit", "UTCOMMA.4X"} | (set() if nvfp4 else {"UTCOMMA"})


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_the_softmax_loop_makes_a_whole_tile(forwards, name):
    loop = forwards[name].loop
    assert loop.pairs == 64
    # Two independent looks at the same: words that are stored, and words that are counted by two look-ups each.
    stores = [(int(op.removeprefix("STTM.x")), n) for op, n in loop.names.items() if op.startswith("STTM.x")]
    assert sum(words * n for words, n in stores) == 16
    assert loop.names["PRMT"] == 2 * 16
    assert loop.names["LDTM.x32"] * 32 == 128
    assert loop.rescale > 128  # O's 128 columns
    assert loop.tail > loop.total  # the mask


@pytest.mark.slow
def test_issue_slots_for_two_elements(forwards):
    slots = {name: figures.loop.per_pair() for name, figures in forwards.items()}
    assert slots["wan-fast"] <= 6
    assert slots["direct-p-fast"] <= 6
    assert slots["wan-two-piece"] <= 9
    assert slots["wan-two-piece-nv"] <= 10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["direct-p-fast", "wan-fast", "wan-two-piece"])
def test_the_page_gives_these_figures(forwards, name):
    page = (Path(__file__).resolve().parents[3] / "docs" / "sm100.md").read_text(encoding="utf-8")
    [line] = [line for line in page.splitlines() if line.startswith("|") and f"(`{name}`)" in line]
    slots, limit = (float(cell) for cell in line.strip("|").split("|")[1:])
    assert slots == pytest.approx(forwards[name].loop.per_pair(), abs=0.1)
    assert slots <= limit


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_exponentials(forwards, name):
    """None in the shiftless loops; of the others, one for each score that the classifier gives to exp2, in whole pairs.

    The row maximum of `wan-two-piece-nv` takes one to rescale, and its eight blocks of 16 one each.
    """
    classifier = policies()[name].numerics.classifier
    share = {"exp2": 128, "mix": 32}.get(classifier.kind, 0)
    expected = 0 if name in SHIFTLESS else share + (1 + 8 if policies()[name].numerics.p == "nvfp4" else 0)
    assert forwards[name].loop.exponentials == expected


def test_every_other_kernel_keeps_to_the_hardware(compiler):
    kernels = {kernel for kernel in backend.preset_kernels() if kernel.kind != "forward"}
    kernels = {
        kernel for kernel in kernels if torch.float16 not in (kernel.options, getattr(kernel.options, "dtype", None))
    }
    assert {kernel.kind for kernel in kernels} == {"guard", "quantize-qk", "quantize-v"}
    for kernel in {*kernels, Kernel("mean", torch.bfloat16)}:
        figures = compiler.figures(kernel)
        assert len(figures) == (2 if kernel.kind == "mean" else 1)
        for made in figures:
            assert made.faults == [], inspect.describe(kernel)
            assert made.tensor_columns == 0
            assert made.loop is None


def test_spills_are_noticed(monkeypatch):
    monkeypatch.setattr(layout, "SOFTMAX_REGISTERS", 176)
    options = backend.plan(policies()["wan-two-piece"].numerics, None, torch.bfloat16, False).forward
    with inspect.Compiler("sm_100a") as compiler:
        [figures] = compiler.figures(options)
    assert figures.spills > 10
    assert figures.stack > 0
    assert any("spills" in fault for fault in figures.faults)


def test_limits_are_noticed(compiler):
    [figures] = compiler.figures(Kernel("guard", torch.bfloat16))
    assert figures.faults == []
    worse = dataclasses.replace(figures, dynamic_shared=inspect.SHARED_LIMIT, tensor_columns=1024, registers=600)
    assert worse.faults == [
        f"{inspect.SHARED_LIMIT + figures.static_shared} bytes of shared memory, over 232448",
        "1024 columns of tensor memory, over 512",
        f"600 registers for {figures.threads} threads, over 65536 in all",
    ]


def test_code_is_kept_where_it_is_wanted(tmp_path: Path):
    with inspect.Compiler("sm_103a", keep=tmp_path / "code") as compiler:
        compiler.figures(Kernel("mean", torch.bfloat16))
    kept = sorted((tmp_path / "code").iterdir())
    assert [path.suffix for path in kept] == [".cubin", ".ptx", ".sass"]
    assert ".target sm_103a" in kept[1].read_text()
    assert "FADD" in kept[2].read_text()


@pytest.mark.slow
def test_flash_attention_is_counted_the_same_way(compiler):
    """Its softmax warps make 128 keys a pass; part of their exponentials are polynomials."""
    figures = compiler.flash_attention()
    assert figures is not None
    assert figures.faults == []
    assert figures.tensor_columns == 512
    assert set(figures.tensor_core) == {"UTCHMMA"}
    assert figures.loop.pairs == 64
    assert 64 < figures.loop.exponentials <= 128
    assert 7 < figures.loop.per_pair() < 9


def test_without_flash_attention_there_is_nothing_to_compare_with(compiler, monkeypatch):
    monkeypatch.setattr(inspect.importlib.util, "find_spec", lambda name: None)
    assert compiler.flash_attention() is None
