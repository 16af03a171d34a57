"""Programs of several warps: barriers, fences, hints and bulk copies. Each with its check."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
from effects import Program, same
from programs import kernel

# A first thread initialises mbarriers and issues; everyone else comes after barrier 0.
START = "setp.eq.u32 %p0, %thread, 0;"


MORE = ("shared.b64", "relaxed.cta.shared::cta.b64", "relaxed.cluster.shared::cluster.b64", "b64")


def wait(address: str, parity: int | str, name: str, opcode: str = "mbarrier.try_wait.parity.shared.b64") -> str:
    return f"{name}: {opcode} %p31, [{address}], {parity};\n@!%p31 bra {name};"


def named_barriers() -> Program:
    """Warps read what the next warp wrote, across each way to meet; then two warps what two others left."""
    meets = ["bar.sync 0", "bar.sync 1, 128", "bar.sync %r8, %r9", "barrier.sync 2", "barrier.sync 2, 128"]
    meets += ["barrier.sync.aligned 3", "barrier.cta.sync 4", "barrier.cta.sync.aligned 4, 128", "bar.cta.sync 5"]
    pairs = [
        ("bar.arrive", "bar.sync"),
        ("barrier.arrive", "barrier.sync"),
        ("barrier.arrive.aligned", "barrier.sync.aligned"),
    ]
    pairs += [("barrier.cta.arrive", "barrier.cta.sync"), ("barrier.cta.arrive.aligned", "barrier.cta.sync.aligned")]
    pairs += [("bar.cta.arrive", "bar.cta.sync")]
    body = ["shl.b32 %r0, %thread, 2;", "mov.b32 %r1, memory;", "add.u32 %r1, %r1, %r0;", "add.u32 %r2, %r0, 128;"]
    body += [
        "and.b32 %r2, %r2, 511;",
        "mov.b32 %r3, memory;",
        "add.u32 %r2, %r2, %r3;",
        "mul.wide.u32 %d0, %thread, 4;",
    ]
    body += ["add.u64 %d1, %o, %d0;", "mov.b32 %r8, 7;", "mov.b32 %r9, 128;"]
    for step, meet in enumerate(meets):
        body += [
            f"mad.lo.u32 %r4, %thread, 100, {step};",
            "st.shared.b32 [%r1], %r4;",
            f"{meet};",
            "ld.shared.b32 %r5, [%r2];",
        ]
        body += [f"st.global.b32 [%d1+{512 * step}], %r5;", f"{meet};"]
    body += ["setp.lt.u32 %p0, %thread, 64;", "xor.b32 %r6, %r0, 256;", "add.u32 %r6, %r6, %r3;"]
    for step, (arrive, sync) in enumerate(pairs):
        at = len(meets) + step
        body += [f"@!%p0 bra TAKE{step};", f"mad.lo.u32 %r4, %thread, 100, {at};", "st.shared.b32 [%r1], %r4;"]
        body += [f"{arrive} {8 + step}, 128;", f"bra MEET{step};", f"TAKE{step}: {sync} {8 + step}, 128;"]
        body += ["ld.shared.b32 %r5, [%r6];", f"st.global.b32 [%d1+{512 * at}], %r5;", f"MEET{step}: bar.sync 0;"]
    steps = len(meets) + len(pairs)

    def check(o: np.ndarray) -> None:
        thread = np.arange(128)
        for step in range(steps):
            if step < len(meets):
                same(o[step], (thread + 32) % 128 * 100 + step)
            else:
                same(o[step], np.where(thread < 64, 0, (thread - 64) * 100 + step))

    text = kernel("\n".join([*body, "ret;"]), "o", threads=128, top=".shared .align 16 .b8 memory[512];\n")
    return Program(text, (np.zeros((steps, 128), np.uint32),), check, seeds=True)


def mbarriers() -> Program:
    """All threads arrive, wait and read what the next warp wrote; the mbarrier is made anew for each way to do it."""
    arrivals = [
        ("mbarrier.arrive.shared.b64 %d9, [%r7]", 128),
        ("mbarrier.arrive.shared.b64 %d9, [%r7], 3", 384),
        ("mbarrier.arrive.shared.b64 _, [%r7], %r10", 256),
        ("mbarrier.arrive.shared::cta.b64 _, [%r7]", 128),
        ("mbarrier.arrive.shared::cluster.b64 _, [%r7]", 128),
        ("mbarrier.arrive.release.cta.shared::cta.b64 _, [%r7]", 128),
        ("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r7]", 128),
        ("mbarrier.arrive.b64 %d9, [%d7]", 128),
        ("mbarrier.arrive.expect_tx.shared.b64 %d9, [%r7], 16", 128),
        ("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r7], 16", 128),
        ("@%p1 mbarrier.arrive.shared.b64 %d9, [%r7]", 64),
        ("@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r7], 32", 64),
        ("mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r7], 16", 128),
    ]
    waits = ["shared.b64", "shared::cta.b64", "acquire.cta.shared::cta.b64", "acquire.cluster.shared.b64", "b64"]
    waits += ["shared.b64", "acquire.cta.b64"]
    body = [
        START,
        "shl.b32 %r0, %thread, 2;",
        "mov.b32 %r3, memory;",
        "add.u32 %r1, %r3, %r0;",
        "add.u32 %r2, %r0, 128;",
    ]
    body += [
        "and.b32 %r2, %r2, 511;",
        "add.u32 %r2, %r2, %r3;",
        "mul.wide.u32 %d0, %thread, 4;",
        "add.u64 %d1, %o, %d0;",
    ]
    body += ["add.u32 %r7, %r3, 512;", "cvt.u64.u32 %d7, %r7;", "cvta.shared.u64 %d7, %d7;", "mov.b32 %r10, 2;"]
    body += ["and.b32 %r11, %thread, 1;", "setp.eq.u32 %p1, %r11, 0;", "add.u32 %r12, %r7, 32;", "mov.b64 %d5, 0;"]
    forms = iter(MORE)
    places = ["shared.b64 [%r7]", "shared::cta.b64 [%r7]", "b64 [%d7]"]
    for step, (arrive, count) in enumerate(arrivals):
        place, kind = places[step % 3], waits[step % 7]
        expects = "expect_tx" in arrive
        body += [
            f"@%p0 mbarrier.init.{place}, {count + expects};",
            "@%p0 fence.mbarrier_init.release.cluster;",
            "bar.sync 0;",
        ]
        body += [f"mad.lo.u32 %r4, %thread, 100, {step};", "st.shared.b32 [%r1], %r4;", f"{arrive};"]
        if expects:  # the bytes that all of them wait for
            form = ("shared::cta", "shared::cluster")[step % 2]
            hint = (".L2::cache_hint", ", %d5") if step % 2 else ("", "")
            more = next(forms)
            where = "%d7" if more == "b64" else "%r7"
            body += [f"@!%p0 bra ISSUED{step};", f"mbarrier.expect_tx.{more} [{where}], 64;"]
            body += [
                f"cp.async.bulk.{form}.global.mbarrier::complete_tx::bytes{hint[0]} [%r12], [%a], 2048, [%r7]{hint[1]};"
            ]
            body += ["cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r12+2048], [%a+2048], 64, [%r7];"]
            body += ["mbarrier.arrive.shared.b64 _, [%r7];", f"ISSUED{step}:"]
        where = "%r7" if "shared" in kind else "%d7"
        look = "test_wait" if step % 2 else "try_wait"
        body += [
            wait(where, "0" if step % 4 else "%r13", f"WAIT{step}", f"mbarrier.{look}.parity.{kind}"),
            "ld.shared.b32 %r5, [%r2];",
        ]
        if expects:
            body += [
                "shl.b32 %r14, %thread, 4;",
                "add.u32 %r14, %r14, %r12;",
                "ld.shared.b32 %r15, [%r14];",
                "add.u32 %r5, %r5, %r15;",
            ]
            body += ["ld.shared.b32 %r15, [%r12+2060];", "add.u32 %r5, %r5, %r15;"]
        body += [f"st.global.b32 [%d1+{512 * step}], %r5;", "bar.sync 0;", f"@%p0 mbarrier.inval.{place};"]
    body.insert(0, "mov.b32 %r13, 0;")
    data = np.arange(3, 3 + 1024, dtype=np.uint32)

    def check(a: np.ndarray, o: np.ndarray) -> None:
        thread = np.arange(128)
        for step, (arrive, _) in enumerate(arrivals):
            want = (thread + 32) % 128 * 100 + step
            same(o[step], want + data[4 * thread] + data[515] if "expect_tx" in arrive else want)

    top = ".shared .align 128 .b8 memory[4096];\n"
    text = kernel("\n".join([*body, "ret;"]), "a o", threads=128, top=top)
    return Program(text, (data, np.zeros((len(arrivals), 128), np.uint32)), check, seeds=True)


def peeks() -> Program:
    """A wait outside of a loop only looks, whatever the phase; every memory order."""
    orders = ["", ".acquire.cta", ".acquire.cluster", ".relaxed.cta", ".relaxed.cluster"]
    body = [START, "mov.b32 %r7, memory;", "mul.wide.u32 %d0, %thread, 4;", "add.u64 %d1, %o, %d0;"]
    body += ["@%p0 mbarrier.init.shared.b64 [%r7], 1;", "bar.warp.sync -1;"]
    looks = 2 * [*itertools.product(("try_wait", "test_wait"), orders)]
    for at, (look, order) in enumerate(looks):
        if at == 10:
            body += ["@%p0 mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%r7];"]
        for parity in (0, 1):
            hint = ", 1000" if look == "try_wait" and parity else ""
            body += [
                f"mbarrier.{look}.parity{order}.shared::cta.b64 %p1, [%r7], {parity}{hint};",
                "selp.b32 %r1, 1, 0, %p1;",
            ]
            body += [f"st.global.b32 [%d1+{128 * (2 * at + parity)}], %r1;"]

    def check(o: np.ndarray) -> None:
        same(o[:, 0], np.repeat([[0], [1]], 10, 0) * np.ones(32))
        same(o[:, 1], np.repeat([[1], [0]], 10, 0) * np.ones(32))

    text = kernel("\n".join([*body, "ret;"]), "o", top=".shared .align 8 .b64 memory;\n")
    return Program(text, (np.zeros((20, 2, 32), np.uint32),), check)


def hints() -> Program:
    """What changes nothing here: fences of one thread, prefetches, register budgets, dependent launches."""
    body = ["mov.b64 %d1, m;", "mov.b32 %r1, 0;", "mov.b64 %d5, 0;", START, "mov.b32 %r2, 100;"]
    body += [
        "griddepcontrol.wait;",
        "griddepcontrol.launch_dependents;",
        "nanosleep.u32 20;",
        "@%p0 nanosleep.u32 %r2;",
    ]
    scopes = ("cta", "cluster", "gpu", "sys")
    body += [
        f"fence{order}.{scope};"
        for order, scope in itertools.product(("", ".sc", ".acq_rel", ".acquire", ".release"), scopes)
    ]
    body += [f"membar.{scope};" for scope in ("cta", "gl", "sys")]
    body += [f"fence.proxy.async{space};" for space in ("", ".shared::cta", ".shared::cluster", ".global")]
    body += ["@%p0 fence.proxy.async.shared::cta;", "prefetch.tensormap [%m];", "prefetch.param.tensormap [m];"]
    body += [
        "prefetch.const.tensormap [%d1];",
        "prefetch.global.L1 [%o];",
        "prefetch.global.L2 [%o];",
        "prefetch.L1 [%o];",
        "prefetch.L2 [%o];",
    ]
    for rank in range(1, 6):
        at = ", ".join(["%r1"] * rank)
        tile, hint = (".tile" * (rank % 2), (".L2::cache_hint", ", %d5") if rank > 2 else ("", ""))
        body.append(f"cp.async.bulk.prefetch.tensor.{rank}d.L2.global{tile}{hint[0]} [%m, {{{at}}}]{hint[1]};")
    body += [
        "cp.async.bulk.prefetch.L2.global [%o], 64;",
        "cp.async.bulk.prefetch.L2.global.L2::cache_hint [%o], 64, %d5;",
    ]
    body += ["setmaxnreg.dec.sync.aligned.u32 40;", "setmaxnreg.inc.sync.aligned.u32 232;", "bar.sync 0;"]
    body += ["mul.wide.u32 %d0, %thread, 4;", "add.u64 %d1, %o, %d0;", "st.global.b32 [%d1], %thread;", "ret;"]
    text = kernel("\n".join(body), {"m": "map", "o": "u64"}, threads=128)
    return Program(text, (bytes(128), np.zeros(128, np.uint32)), lambda o: same(o, np.arange(128)), seeds=True)


def linear_stores() -> Program:
    """Threads fill shared memory, one hands it to bulk stores in three groups and overwrites it once they have read."""
    body = [
        START,
        "shl.b32 %r0, %thread, 2;",
        "mov.b32 %r3, memory;",
        "add.u32 %r1, %r3, %r0;",
        "mov.b64 %d5, 0;",
        "mov.b32 %r4, 256;",
    ]
    body += [
        "mul.lo.u32 %r2, %thread, 7;",
        "st.shared.b32 [%r1], %r2;",
        "fence.proxy.async.shared::cta;",
        "bar.sync 0;",
    ]
    body += [
        "@!%p0 bra END;",
        "cp.async.bulk.global.shared::cta.bulk_group [%o], [%r3], %r4;",
        "cp.async.bulk.commit_group;",
    ]
    body += [
        "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%o+256], [%r3+256], 256, %d5;",
        "cp.async.bulk.commit_group;",
    ]
    body += [
        "cp.async.bulk.wait_group 1;",
        "cp.async.bulk.wait_group.read 0;",
        "mov.b32 %r5, 1;",
        "st.shared.b32 [%r3], %r5;",
    ]
    body += ["st.shared.b32 [%r3+256], %r5;", "fence.proxy.async.shared::cta;"]
    body += ["cp.async.bulk.global.shared::cta.bulk_group [%o+512], [%r3], 512;", "cp.async.bulk.commit_group;"]
    body += ["cp.async.bulk.wait_group 0;", "END: ret;"]

    def check(o: np.ndarray) -> None:
        want = np.arange(128, dtype=np.uint32) * 7
        same(o[0], want)
        want[[0, 64]] = 1
        same(o[1], want)

    text = kernel("\n".join(body), "o", threads=128, top=".shared .align 128 .b8 memory[512];\n")
    return Program(text, (np.zeros((2, 128), np.uint32),), check, seeds=True)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "named barriers": named_barriers,
    "mbarriers": mbarriers,
    "looks at an mbarrier": peeks,
    "hints and fences": hints,
    "linear bulk stores": linear_stores,
}
