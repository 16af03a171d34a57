"""The reader of PTX."""

import re

import pytest

from wanfp4.simulator.findings import UnknownInstruction
from wanfp4.simulator.ptx import read_kernels, split_operands

HEAD = ".version 8.8\n.target sm_100a\n.address_size 64\n"


def read(body, *, params="", before="", directives=".reqntid 32"):
    return read_kernels(f"{HEAD}{before}\n.visible .entry k({params})\n{directives}\n{{\n{body}\n}}\n")["k"]


def shown(kernel):
    return [[str(ins) for ins in block] for block in kernel.blocks]


def test_instructions_operands_and_lines():
    kernel = read(
        """.reg .pred %p<3>; .reg .b32 %r<6>; .reg .b64 %rd<4>;
        @!%p1 mad.lo.s32 %r1, %r2, -7, %r3;
        mov.b64 {%r1, _}, %rd1; st.shared.v4.b32 [%r1+16], {%r1, %r2,
              %r3, 0f3F800000};
        cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd2, {%r2, %r3}], [%r4];
        ret;"""
    )
    ins = list(kernel.instructions)
    assert [str(i) for i in ins] == [
        "@!%p1 mad.lo.s32 %r1, %r2, -7, %r3;",
        "mov.b64 {%r1, _}, %rd1;",
        "st.shared.v4.b32 [%r1+16], {%r1, %r2, %r3, 0f3F800000};",
        "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd2, {%r2, %r3}], [%r4];",
        "ret;",
    ]
    assert (ins[0].guard, ins[0].negated, ins[0].opcode) == ("%p1", True, "mad.lo.s32")
    assert ins[1].operands == (("%r1", "_"), "%rd1")
    assert ins[3].operands == ("[%r1]", "[%rd2, {%r2, %r3}]", "[%r4]")
    assert [i.line - ins[0].line for i in ins] == [0, 1, 1, 3, 4]
    assert kernel.registers["%r5"] == "b32"
    assert "%r6" not in kernel.registers


def test_split_operands():
    assert split_operands("%r1, [%rd1, {%r2, %r3}], {a, b}, L") == ["%r1", "[%rd1, {%r2, %r3}]", ("a", "b"), "L"]
    assert split_operands("") == []
    assert split_operands(" {%r1} ") == [("%r1",)]


def test_scopes_rename_registers_and_labels():
    """Every wait that CuTe DSL emits is a scope with the same names, labels used before they stand."""
    wait = """{
        .reg .pred P1;
        LAB_WAIT:
        mbarrier.try_wait.parity.shared.b64 P1, [%r1], %r2;
        @P1 bra DONE;
        bra LAB_WAIT;
        DONE:
        }
        """
    kernel = read(f".reg .b32 %r<3>;\n{wait}{wait}bra DONE;\nDONE: ret;")
    assert len({name for name in kernel.registers if name.startswith("P1")}) == 2
    waits = [i for i, block in enumerate(kernel.blocks) if "try_wait" in block[-1].opcode]
    assert len(waits) == 2
    for index in waits:
        assert kernel.blocks[index][-1].operands[0] == kernel.blocks[index + 1][0].guard
        assert kernel.targets[kernel.blocks[index + 1][0].operands[0]] == index + 3
        assert kernel.targets[kernel.blocks[index + 2][0].operands[0]] == index
    assert kernel.targets["DONE"] == len(kernel.blocks) - 1  # the outer one is another label


def test_scopes_nest_and_end():
    kernel = read(
        """.reg .b32 x, y;
        { .reg .b32 x; mov.b32 x, y; { .reg .b32 x, y; mov.b32 x, y; L: bra L; } mov.b32 x, y; bra L; L: }
        mov.b32 x, y; A: B: bra B;"""
    )
    pairs = [ins.operands for ins in kernel.instructions if ins.opcode == "mov.b32"]
    assert pairs[0] == pairs[2]
    assert pairs[3] == ("x", "y")
    assert len({x for x, _ in pairs}) == 3
    assert [y == "y" for _, y in pairs] == [True, False, True, True]
    assert kernel.targets["A"] == kernel.targets["B"]
    inner = [ins.operands[0] for ins in kernel.instructions if ins.opcode == "bra"]
    assert len(set(inner)) == 3


def test_names_of_a_scope_touch_nothing_else():
    """Not parts of special registers, not the end of a number, not longer names."""
    kernel = read(
        """.reg .b32 %r<4>, xFF_; {
        .reg .b32 x, xFF, f3F800000, U, tid;
        mov.u32 %r1, %tid.x; mov.b32 %r2, 0xFF; mov.b32 %r2, 0f3F800000; mov.b32 %r3, 7U; mov.b32 xFF_, x;
        ld.shared.b32 xFF, [x+8]; mov.b64 {xFF, U}, %r1; }"""
    )
    texts = [str(ins) for ins in kernel.instructions]
    assert texts[:4] == ["mov.u32 %r1, %tid.x;", "mov.b32 %r2, 0xFF;", "mov.b32 %r2, 0f3F800000;", "mov.b32 %r3, 7U;"]
    assert [re.sub(r"@\d+", "@", text) for text in texts[4:]] == [
        "mov.b32 xFF_, x@;",
        "ld.shared.b32 xFF@, [x@+8];",
        "mov.b64 {xFF@, U@}, %r1;",
    ]


def test_comments_strings_and_directives():
    kernel = read(
        """.reg .b32 %r<3>; // one /* is no start of
        mov.b32 %r1, 1; /* two ; { // three
        L9: mov.b32 %r1, 2; */ mov.b32 %r2, 3; // */ }
        .loc 1 23 4, function_name $L__info0, inlined_at 1 5 6
        .pragma "nounroll; { .entry x";
        .file 1 "a;b.entry.py"
        ret;""",
        before='.file 1 "/x/y.entry.py"\n// .entry no(\n/* .entry no( */',
    )
    assert shown(kernel) == [["mov.b32 %r1, 1;", "mov.b32 %r2, 3;", "ret;"]]
    lines = [ins.line for ins in kernel.instructions]
    assert [line - lines[0] for line in lines] == [0, 1, 5]
    assert not kernel.targets


def test_blocks_end_at_branches_labels_and_waits():
    kernel = read(
        """.reg .pred %p<2>; .reg .b32 %r<3>;
        mov.b32 %r1, 0; @%p1 bra L; mov.b32 %r1, 1; L: $M_1: mov.b32 %r1, 2; bar.sync 0; mov.b32 %r1, 3;
        bar.cta.sync 0; tcgen05.wait::ld.sync.aligned; cp.async.bulk.wait_group 0; @%p1 ret; exit; END:"""
    )
    assert [len(block) for block in kernel.blocks] == [2, 1, 2, 2, 1, 1, 1, 1]
    assert kernel.targets == {"L": 2, "$M_1": 2, "END": 8}


def test_parameters():
    kernel = read(
        "ret;",
        params=".param .u8 a,\n .param .align 64 .b8 map[128], .param .u64 .ptr .global .align 16 p, .param .b16 q,"
        "\n.param .u64 .ptr.align 8 r, .param .f32 s[3], .param .align 4 .b8 t[6], .param .u64 .ptr .shared u",
    )
    assert kernel.params == {
        "a": (0, 1),
        "map": (64, 128),
        "p": (192, 8),
        "q": (200, 2),
        "r": (208, 8),
        "s": (216, 12),
        "t": (228, 6),
        "u": (240, 8),
    }


@pytest.mark.parametrize(
    ("directives", "threads"),
    [
        (".reqntid 128", (128, 1, 1, ".reqntid")),
        (".reqntid 16, 8, 2\n    .minnctapersm 1", (16, 8, 2, ".reqntid")),
        (".maxntid 64,2", (64, 2, 1, ".maxntid")),
        (".maxntid 128 .reqntid 64", (64, 1, 1, ".reqntid")),
        ("  .minnctapersm 2 .reqntid 96", (96, 1, 1, ".reqntid")),
        ("", (1, 1, 1, "")),
    ],
)
def test_threads(directives, threads):
    kernel = read("ret;", directives=directives)
    assert (*kernel.threads, kernel.threads_by) == threads


def test_an_entry_in_any_spelling():
    text = f"{HEAD}.entry a{{ ret; }} .visible .entry b() .reqntid 32 {{ exit; }}\n.weak .entry c(\n)\n\n{{\nret;\n}}"
    kernels = read_kernels(text)
    assert {name: shown(kernel) for name, kernel in kernels.items()} == {
        "a": [["ret;"]],
        "b": [["exit;"]],
        "c": [["ret;"]],
    }
    assert kernels["b"].threads == (32, 1, 1)


def test_shared_symbols():
    kernel = read(
        ".shared .align 16 .b8 inner[100];\n.shared .b64 bar; ret;",
        before=".extern .shared .align 128 .b8 dynamic[];\n.shared .b32 mic;\n.shared .f32 floats[ 4 ];",
    )
    found = {symbol.name: (symbol.size, symbol.align) for symbol in kernel.shared}
    assert found == {"dynamic": (None, 128), "mic": (4, 4), "floats": (16, 4), "inner": (100, 16), "bar": (8, 8)}


@pytest.mark.parametrize(
    ("body", "message", "line"),
    [
        (".local .align 4 .b8 x[16];", "local memory", 8),
        (".global .b32 x;", "directive '.global .b32 x' is not modelled", 8),
        (".reg .v4 .f32 x;", "registers of type .v4", 8),
        (".reg .b32 x;\n\nmov.b32 x, {1, 2;\nret;", "cannot read PTX near", None),
        ("L: ret; L: ret;", "label L stands at two places", None),
        (".shared .b8 x[4][4];", "shared variable cannot be read: .shared .b8 x[4][4]", None),
        (".shared .v2 .b32 x;", "shared variable cannot be read: .shared .v2 .b32 x", None),
    ],
)
def test_what_cannot_be_read(body, message, line):
    with pytest.raises(UnknownInstruction, match=re.escape(message)) as caught:
        read(body)
    if line:
        assert caught.value.line == line


def test_parameters_and_entries_that_cannot_be_read():
    with pytest.raises(UnknownInstruction, match=r"parameter '\.param \.texref x' of kernel k cannot be read"):
        read("ret;", params=".param .texref x")
    with pytest.raises(UnknownInstruction, match=r"cannot read PTX near '\.entry k") as caught:
        read_kernels(f"{HEAD}.entry k(.param .u64 x;")
    assert caught.value.line == 4
