"""An instruction with too few or too many operands is an error, never half understood."""

import pytest

from wanfp4.simulator import UnknownInstruction
from wanfp4.simulator.grammar import RULES
from wanfp4.simulator.ptx import read_kernels
from wanfp4.simulator.translate import Code


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("add.s32 %r1, %r2, %r3, %r4;", "3 operands, not 4"),
        ("add.s32 %r1, %r2;", "3 operands, not 2"),
        ("cp.async.bulk.commit_group 3;", "0 operands, not 1"),
        ("ld.global.b32 %r1, [%rd1], %rd2;", "2 operands, not 3"),
        ("max.f32 %r1, %r2, %r3, %r1, %r2;", "3 to 4 operands, not 5"),
        ("tcgen05.wait::ld.sync.aligned 0;", "0 operands, not 1"),
        ("st.shared.b32 [%r1], %r2, %r3;", "2 operands, not 3"),
    ],
)
def test_operands_are_counted(text: str, found: str) -> None:
    ptx = f".entry k()\n.reqntid 32\n{{\n.reg .b32 %r<5>;\n.reg .b64 %rd<3>;\n{text}\nret;\n}}\n"
    with pytest.raises(UnknownInstruction, match=found) as error:
        Code(read_kernels(ptx)["k"])
    assert error.value.line == 6


def test_every_opcode_has_a_count() -> None:
    from wanfp4.simulator.arity import BY_NAME

    for rules in RULES.values():
        for rule in rules:
            head = rule.pattern.split()[0]
            names = {".".join(head.split(".")[:n]) for n in range(1, len(head.split(".")) + 1)}
            second = {
                f"{head}.{choice}" for part in rule.pattern.split()[1:2] for choice in part.strip("?.").split("|")
            }
            assert (names | second) & set(BY_NAME), rule.pattern
