"""The lint on small PTX programs: each rule with a clean version, and with one broken in the way the rule is about."""

import subprocess
import sys

import pytest

from wanfp4.simulator.findings import UnknownInstruction
from wanfp4.simulator.lint import lint, main

HEAD = """\
.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry kernel(
	.param .u64 kernel_param_0
)
{
	.reg .pred %p<9>;
	.reg .b32 %r<99>;
	.reg .b64 %rd<9>;
"""


def program(body: str) -> str:
    return HEAD + body + "\tret;\n}\n"


def found(body: str) -> list[tuple[str, str]]:
    """Rule and text of the instruction of each finding."""
    return [(finding.rule, finding.text) for finding in lint(program(body))]


LOAD = """
	mov.b32 %r1, 0;
	tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r2, %r3}, [%r1];
	WAIT
	add.f32 %r4, %r2, %r3;
	st.shared.b32 [%r1], %r4;
"""


def test_loaded_registers_are_used_after_the_wait():
    assert found(LOAD.replace("WAIT", "tcgen05.wait::ld.sync.aligned;")) == []
    (finding,) = lint(program(LOAD.replace("WAIT", "")))
    assert (finding.rule, finding.text) == ("tmem-load", "add.f32 %r4, %r2, %r3;")
    assert finding.message == "%r2, loaded by tcgen05.ld (line 14), is used before tcgen05.wait::ld"
    assert program(LOAD.replace("WAIT", "")).splitlines()[finding.line - 1].strip() == finding.text
    assert finding.kernel == "kernel"
    assert found(LOAD.replace("WAIT", "tcgen05.wait::st.sync.aligned;")) == [("tmem-load", "add.f32 %r4, %r2, %r3;")]


def test_moves_carry_a_loaded_value_to_its_use():
    moved = LOAD.replace("WAIT", "mov.b64 %rd1, {%r2, %r3}; AGAIN").replace("add.f32 %r4, %r2, %r3", "USE")
    use = "cvt.u32.u64 %r4, %rd1"
    assert found(moved.replace("AGAIN", "").replace("USE", use)) == [("tmem-load", use + ";")]
    assert found(moved.replace("AGAIN", "tcgen05.wait::ld.sync.aligned;").replace("USE", use)) == []


def test_a_wait_on_one_path_is_not_enough():
    branch = """
	setp.eq.b32 %p1, %r1, 0;
	@%p1 bra $L__after;
	tcgen05.wait::ld.sync.aligned;
$L__after:
"""
    assert found(LOAD.replace("WAIT", branch)) == [("tmem-load", "add.f32 %r4, %r2, %r3;")]
    both = branch.replace("$L__after:", "bra $L__end;\n$L__after:\n\ttcgen05.wait::ld.sync.aligned;\n$L__end:")
    assert found(LOAD.replace("WAIT", both)) == []


def test_a_load_of_the_round_before_is_seen_around_the_loop():
    loop = """
	mov.b32 %r1, 0;
	mov.b32 %r2, 0;
$L__loop:
	add.s32 %r1, %r1, %r2;
	tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [0];
	setp.lt.s32 %p1, %r1, 9;
	@%p1 bra $L__loop;
"""
    assert found(loop) == [("tmem-load", "add.s32 %r1, %r1, %r2;")]
    assert found(loop.replace("setp", "tcgen05.wait::ld.sync.aligned;\n\tsetp")) == []


def test_the_maximum_of_a_load_counts_as_loaded():
    body = """
	tcgen05.ld.red.sync.aligned.32x32b.x2.max.f32 {%r2, %r3}, %r4, [0];
	WAIT
	st.shared.b32 [0], %r4;
"""
    assert found(body.replace("WAIT", "")) == [("tmem-load", "st.shared.b32 [0], %r4;")]
    assert found(body.replace("WAIT", "tcgen05.wait::ld.sync.aligned;")) == []


STORE = """
	mov.b32 %r1, 0;
	tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1], {%r1};
	WAIT
	ARRIVE
"""


@pytest.mark.parametrize(
    "arrive", ["mbarrier.arrive.shared.b64 _, [%r1];", "bar.sync 0;", "barrier.arrive 2, 64;", "barrier.sync 1, 64;"]
)
def test_stores_to_tensor_memory_are_waited_for_before_others_are_told(arrive):
    body = STORE.replace("ARRIVE", arrive)
    assert found(body.replace("WAIT", "tcgen05.wait::st.sync.aligned;")) == []
    assert found(body.replace("WAIT", "tcgen05.wait::ld.sync.aligned;")) == [("tmem-store", arrive)]
    assert found(body.replace("WAIT", "")) == [("tmem-store", arrive)]
    assert "(line 14)" in lint(program(body.replace("WAIT", "")))[0].message


INIT = """
	mov.b32 %r1, dynamic;
	mov.u32 %r2, %tid.x;
	setp.ne.b32 %p1, %r2, 0;
	@%p1 bra $L__after;
	mbarrier.init.shared.b64 [%r1], 1;
	FENCE
$L__after:
	BARRIER
	USE
"""
FENCE, BARRIER = "fence.mbarrier_init.release.cluster;", "bar.sync 0;"


@pytest.mark.parametrize(
    "use",
    [
        "mbarrier.arrive.shared.b64 _, [%r1];",
        "mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;",
        "mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 16;",
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];",
    ],
)
def test_an_mbarrier_is_used_after_fence_and_barrier(use):
    body = INIT.replace("USE", use)
    assert found(body.replace("FENCE", FENCE).replace("BARRIER", BARRIER)) == []
    clustered = "barrier.cluster.arrive.relaxed.aligned;\n\tbarrier.cluster.wait.acquire.aligned;"
    assert found(body.replace("FENCE", FENCE).replace("BARRIER", clustered)) == []
    for fence, barrier, missing in (("", BARRIER, "fence.mbarrier_init"), (FENCE, "", "a barrier"), ("", "", "fence")):
        (finding,) = lint(program(body.replace("FENCE", fence).replace("BARRIER", barrier)))
        assert (finding.rule, finding.text) == ("mbarrier-init", use)
        assert f"without {missing}" in finding.message


def test_the_fence_comes_before_the_barrier():
    body = INIT.replace("FENCE", "").replace("BARRIER", f"{BARRIER}\n\t{FENCE}")
    assert found(body.replace("USE", "mbarrier.arrive.shared.b64 _, [%r1];")) == [
        ("mbarrier-init", "mbarrier.arrive.shared.b64 _, [%r1];")
    ]


ALLOCATION = """
	tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [dynamic], 512;
	RELINQUISH
	mov.b32 %r1, 0;
	DEALLOC
"""
RELINQUISH = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
DEALLOC = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 512;"


def test_tensor_memory_is_given_back():
    clean = ALLOCATION.replace("RELINQUISH", RELINQUISH).replace("DEALLOC", DEALLOC)
    assert found(clean) == []
    alloc = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [dynamic], 512;"
    for broken, message in (
        (clean.replace(DEALLOC, ""), "never given back"),
        (
            clean.replace(DEALLOC, DEALLOC.replace("512", "256")),
            "512 columns are allocated, but dealloc gives 256",
        ),
        (clean.replace(RELINQUISH, ""), "no other CTA can allocate"),
    ):
        (finding,) = lint(program(broken))
        assert (finding.rule, finding.text) == ("tmem-allocation", alloc)
        assert message in finding.message


DIAMOND = """
	ld.param.b64 %rd1, [kernel_param_0];
	mov.u32 %r1, %tid.x;
	setp.eq.b32 %p1, %r1, 0;
	@%p1 bra $L__else;
	mov.b32 %r2, 1;
	bra $L__end;
$L__else:
	OTHER
$L__end:
	st.global.b32 [%rd1], %r2;
"""


def test_every_path_writes_what_is_read():
    assert found(DIAMOND.replace("OTHER", "mov.b32 %r2, 2;")) == []
    (finding,) = lint(program(DIAMOND.replace("OTHER", "")))
    assert (finding.rule, finding.text) == ("undefined", "st.global.b32 [%rd1], %r2;")
    assert finding.message == "%r2 is used, but not written on every path, or made of what is not"
    (finding,) = lint(program("st.shared.b32 [dynamic], %r7;\n"))
    assert finding.message == "%r7 is used, but never written, or made of what is not"
    assert found("@%p8 bra $L__end;\n$L__end:\n") == [("undefined", "@%p8 bra $L__end;")]


def test_a_write_under_a_guard_may_not_happen():
    body = "setp.eq.b32 %p1, 0, 0;\nBEFORE\n@%p1 mov.b32 %r2, 1;\nst.shared.b32 [dynamic], %r2;\n"
    assert found(body.replace("BEFORE", "mov.b32 %r2, 0;")) == []
    assert found(body.replace("BEFORE", "")) == [("undefined", "st.shared.b32 [dynamic], %r2;")]


def test_undefined_values_may_be_moved_but_not_used():
    body = "mov.b32 %r1, 0;\nmov.b64 %rd1, {%r1, %r9};\nmov.b64 {%r2, %r3}, %rd1;\n"
    assert found(body) == []
    assert found(body + "st.shared.b32 [dynamic], %r3;\n") == [("undefined", "st.shared.b32 [dynamic], %r3;")]


def test_scopes_of_inline_assembly_are_kept_apart():
    wait = """
	{
	.reg .pred P1;
	LAB_WAIT:
	mbarrier.try_wait.parity.shared.b64 P1, [dynamic], 0;
	@P1 bra.uni DONE;
	bra.uni LAB_WAIT;
	DONE:
	}
"""
    assert found(wait * 2) == []
    unwritten = "\n\t{\n\t.reg .pred P1;\n\t@P1 bra.uni DONE;\n\tDONE:\n\t}\n"
    assert found(wait + unwritten) == [("undefined", "@P1@2 bra.uni DONE@2;")]


def test_the_command_prints_findings_and_tells_by_its_exit_code(tmp_path, capsys):
    clean, broken, strange = (tmp_path / f"{name}.ptx" for name in ("clean", "broken", "strange"))
    clean.write_text(program(LOAD.replace("WAIT", "tcgen05.wait::ld.sync.aligned;")))
    broken.write_text(program(LOAD.replace("WAIT", "")))
    strange.write_text(program("brx.idx %r1, table;\n"))
    assert main([str(clean)]) == 0
    assert capsys.readouterr().out == ""
    assert main([str(clean), str(broken)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{broken}:16: tmem-load: %r2, loaded by tcgen05.ld")
    assert second == "    add.f32 %r4, %r2, %r3;"
    for path in (strange, tmp_path / "missing.ptx"):
        assert main([str(path)]) == 2
        assert str(path) in capsys.readouterr().err
    command = [sys.executable, "-m", "wanfp4.simulator.lint", broken]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1


def test_what_the_lint_cannot_follow_is_an_error():
    with pytest.raises(UnknownInstruction, match="does not follow"):
        lint(program("brx.idx %r1, table;\n"))


def test_the_line_of_the_source_is_named_where_it_is_known(tmp_path, capsys):
    source = tmp_path / "kernel.py"
    source.write_text("def kernel():\n    return load() + load()\n")
    body = LOAD.replace("WAIT", ".loc 1 2 5")
    path = tmp_path / "broken.ptx"
    path.write_text(program(body) + f'\t.file 1 "{source}"\n')
    assert main([str(path)]) == 1
    assert "add.f32 %r4, %r2, %r3;  // kernel.py:2 in kernel" in capsys.readouterr().out
