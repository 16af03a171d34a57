"""How a kernel ends, or never does: loops in which nothing can change, what is left over, and who came too few."""

from __future__ import annotations

import time

import numpy as np
import pytest
from programs import aligned, kernel, run

from wanfp4.simulator import DeadlockError, ProtocolError, UnknownInstruction

TOP = ".shared .align 128 .b8 s[1024];\n"
INIT = """
setp.ne.u32 %p9, %thread, 0;
@%p9 bra READY;
mbarrier.init.shared::cta.b64 [s], 1;
mbarrier.init.shared::cta.b64 [s+8], 1;
READY: bar.sync 0;
"""
TRY = "mbarrier.try_wait.parity.shared::cta.b64 %p0, [s], 0;"

# Ways to wait for what never comes. All look at the mbarrier or at a word of shared memory.
WAITS = {
    "on itself": f"L: {TRY}\n@!%p0 bra L;",
    "with a way out": f"L: {TRY}\n@%p0 bra OUT;\nbra L;\nOUT:",
    "with a nap": f"L: {TRY}\n@%p0 bra OUT;\nnanosleep.u32 20;\nbra L;\nOUT:",
    "by a number": f"L: {TRY}\nselp.b32 %r0, 1, 0, %p0;\nsetp.eq.s32 %p1, %r0, 0;\n@%p1 bra L;",
    "from far": "L: " + TRY + "\n@%p0 bra OUT;\n" + "bra N{0};\nN{0}:\n" * 9 + "bra L;\nOUT:",
    "by test_wait": f"L: {TRY.replace('try', 'test')}\n@!%p0 bra L;",
    "one of two": f"L: {TRY}\n@%p0 bra OUT;\n{TRY.replace('[s]', '[s+8]')}\n@!%p0 bra L;\nOUT:",
    "for a flag": "L: ld.volatile.shared.b32 %r0, [s+64];\nsetp.eq.u32 %p1, %r0, 0;\n@%p1 bra L;",
    "for an atomic's flag": "L: atom.shared.or.b32 %r0, [s+64], 0;\nsetp.eq.u32 %p1, %r0, 0;\n@%p1 bra L;",
    "for ever": "L: bra L;",
    "with NaN in a register": "mov.b32 %f1, 0f7FC00000;\nL: mov.b32 %f2, %f1;\nmov.b32 %r0, %f2;\nbra L;",
    "a counter that comes back": (
        f"mov.u32 %r0, 0;\nL: add.u32 %r0, %r0, 1;\nand.b32 %r0, %r0, 63;\n{TRY}\n@!%p0 bra L;"
    ),
}


def waiting(text: str) -> str:
    while "{0}" in text:
        for i in range(9):
            text = text.replace("N{0}", f"N{i}", 2)
    return f"st.shared.b32 [s+64], 0;\nbar.sync 0;\n{INIT}\n{text}\nret;"


def stuck(body: str, threads: int = 32, **options: object) -> DeadlockError:
    with pytest.raises(DeadlockError) as caught:
        run(kernel(body, threads=threads, top=TOP), limit=None, **options)
    return caught.value


@pytest.mark.parametrize("options", [{}, {"track": True}, {"seed": 1}, {"seed": 2, "track": True}], ids=str)
@pytest.mark.parametrize("name", WAITS)
def test_a_loop_in_which_nothing_can_change_ends(name, options):
    started = time.perf_counter()
    error = stuck(waiting(WAITS[name]), **options)
    assert time.perf_counter() - started < 10  # of which nearly all is a busy machine: it takes some milliseconds
    assert re_match(error) or "waits for parity 0 of mbarrier 0x400" in str(error)
    text = str(error)
    assert "s]" in text or "s+" in text or "bra " in text
    assert error.line


def re_match(error: DeadlockError) -> bool:
    return str(error).startswith("deadlock: all warps that can go on are in loops that change nothing")


@pytest.mark.parametrize("options", [{}, {"seed": 3}], ids=str)
def test_loops_and_waits_of_several_warps(options):
    """One warp goes round, one sleeps, one has ended."""
    body = f"""{INIT}
setp.lt.u32 %p1, %thread, 32; setp.ge.u32 %p2, %thread, 64;
@%p2 ret;
@%p1 bra A;
bar.sync 1, 64;
ret;
A: {TRY}
@%p0 ret;
nanosleep.u32 5;
bra A;"""
    text = str(stuck(body, 96, **options))
    assert "warp 0: line 2" in text
    assert "can go on; has looked for parity 0 of mbarrier 0x400 (phase 0, 1 of 1" in text
    assert "warp 1: line 2" in text
    assert "waits at barrier 1 (32 of 64 threads arrived: warps [1])" in text
    assert "warp 2: has ended" in text


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_loops_that_others_end(seed):
    """Long work of another warp, in registers only, is no deadlock; nor is a wait for it of any form."""
    out = np.zeros(1, np.uint32)
    for name in ("with a nap", "by a number", "from far", "by test_wait", "for a flag"):
        body = f"""{waiting(WAITS[name]).removesuffix("ret;")}
st.global.b32 [%out], 7;
ret;
"""
        head, loop = body.split("READY: bar.sync 0;")
        work = """READY: bar.sync 0;
setp.ge.u32 %p5, %thread, 32;
@!%p5 bra WAIT;
mov.u32 %r9, 0;
W: add.u32 %r9, %r9, 1;
setp.lt.u32 %p6, %r9, 3000;
@%p6 bra W;
setp.ne.u32 %p6, %thread, 32;
@%p6 ret;
st.shared.b32 [s+64], 1;
mbarrier.arrive.shared::cta.b64 _, [s];
ret;
WAIT:"""
        out[0] = 0
        run(kernel(head + work + loop, "out", threads=64, top=TOP), out, limit=None, seed=seed)
        assert out[0] == 7


def test_a_loop_that_counts_is_given_up(monkeypatch):
    monkeypatch.setattr("wanfp4.simulator.scheduler.CALM", 20_000)
    counts = f"mov.u32 %r0, 0;\nL: add.u32 %r0, %r0, 1;\n{TRY}\n@!%p0 bra L2;\nret;\nL2: nanosleep.u32 1;\nbra L;"
    assert "no end: nothing but registers changed over 20000 blocks" in str(stuck(waiting(counts)))
    clock = f"L: mov.u64 %d0, %clock64;\n{TRY}\n@%p0 ret;\nnanosleep.u32 1;\nbra L;"
    assert "no end" in str(stuck(waiting(clock), seed=1))
    gives_up = f"mov.u32 %r0, 0;\nL: add.u32 %r0, %r0, 1;\n{TRY}\n@%p0 ret;\nsetp.lt.u32 %p1, %r0, 1000;\n@%p1 bra L;"
    run(kernel(waiting(gives_up), top=TOP), limit=None)


# Left over at the end


def ends(body: str, threads: int = 64, **options: object) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        run(kernel(body, threads=threads, top=TOP), **options)
    return caught.value


ARRIVES = "setp.ge.u32 %p0, %thread, 32;\n@%p0 ret;\nbar.arrive 1, 64;\nret;"
EXPECTS = f"{INIT}\n@%p9 ret;\nmbarrier.arrive.expect_tx.shared::cta.b64 _, [s], 64;\nret;"


# More bytes come than were announced, so their phase never ends.
SURPLUS = f"""{INIT}
@%p9 ret;
fence.proxy.async.shared::cta;
mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [s], 32;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [s+64], [%a], 64, [s];
ret;"""


def test_leftovers_at_the_end():
    error = ends(ARRIVES, track=True)
    assert error.message == "the CTA ends, and only warps [0] have come to barrier 1 for 64 threads"
    assert "bar.arrive 1, 64" in str(error)
    text = kernel(SURPLUS, "a", top=TOP)
    with pytest.raises(ProtocolError) as caught:
        run(text, aligned(np.zeros(64, np.uint8)), track=True)
    error = caught.value
    assert error.message == "the CTA ends, and mbarrier 0x400 got 32 bytes that nobody expected (phase 0)"
    assert "mbarrier.init.shared::cta.b64 [s], 1" in str(error)
    run(kernel(ARRIVES, threads=64, top=TOP))  # found only where it is judged
    run(kernel(EXPECTS, threads=64, top=TOP), track=True)  # as pipelines of NVIDIA's end


@pytest.mark.parametrize("threads", [64, 128, 160])
def test_setmaxnreg_of_some_warps(threads):
    some = "setp.ge.u32 %p0, %thread, 32;\n@%p0 ret;\nsetmaxnreg.inc.sync.aligned.u32 240;\nret;"
    error = ends(some, threads)
    assert error.message == "setmaxnreg 240, and warp 1 of the same warpgroup never comes to it"
    assert "setmaxnreg.inc" in str(error)
    run(kernel("setmaxnreg.inc.sync.aligned.u32 240;\nret;", threads=threads))
    # Warpgroups may differ.
    run(kernel("setp.ge.u32 %p0, %thread, 128;\n@%p0 ret;\nsetmaxnreg.dec.sync.aligned.u32 24;\nret;", threads=256))


@pytest.mark.parametrize("opcode", ["barrier.sync", "barrier.cta.sync", "barrier.arrive", "barrier.cta.arrive"])
def test_barriers_of_some_lanes(opcode):
    """Without .aligned it may be right; with it, it is not."""
    body = "setp.lt.u32 %p0, %thread, 16;\n@%p0 bra A;\n{0} 1, 32;\nret;\nA: {0} 1, 32;\nret;"
    with pytest.raises(UnknownInstruction, match="barrier by 16 lanes of a warp"):
        run(kernel(body.format(opcode)))
    assert "needs the whole warp" in str(ends(body.format(f"{opcode}.aligned"), 32))


@pytest.mark.parametrize(
    ("static", "dynamic", "fits"),
    [(0, 232_448, True), (1024, 231_424, True), (0, 232_449, False), (1024, 231_425, False), (232_449, 0, False)],
)
def test_shared_memory_of_a_cta(static, dynamic, fits):
    top = f".shared .align 16 .b8 s[{static}];\n" if static else ""
    text = kernel("ret;", top=top)
    if fits:
        run(text, shared=dynamic)
        return
    with pytest.raises(ProtocolError, match=f"{static + dynamic} bytes of shared memory .* 232448 at most"):
        run(text, shared=dynamic)
