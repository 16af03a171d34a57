"""The tensor core through PTX: products against float64, its memory, and the rules that an instruction may break."""

import numpy as np
import pytest
import tensor_core
from programs import kernel, run
from tensor_core import ALLOCATE, FREE, PRODUCTS, TOP

from wanfp4.simulator.findings import BoundsError, PoisonError, ProtocolError, SimulationError


def test_copies_between_registers_and_tensor_memory():
    tensor_core.copies().run()


@pytest.mark.parametrize(
    "product", PRODUCTS, ids=lambda p: f"{p.kind}{p.suffix}, {p.element}, {p.scale}" + " A in TMEM" * p.a_in_tmem
)
def test_products(product):
    tensor_core.product(product).run()


def fails(body, error, match, at, *, track=False):
    """`at` is the text of the line that is to blame."""
    text = kernel("\n".join(body), threads=128, top=TOP)
    with pytest.raises(error, match=match) as caught:
        run(text, track=track)
    assert text.split("\n")[caught.value.line - 1].strip().startswith(at)
    assert caught.value.place.line == caught.value.line


LOAD = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r2}, "
ALONE = ["setp.eq.u32 %p0, %thread, 0;", "@!%p0 bra SKIP;"]
MMA = "tcgen05.mma.cta_group::1.kind::f16 [%tmem], %d1, %d1, %r1, 0;"
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%bar];"


@pytest.mark.parametrize("track", [False, True])
@pytest.mark.parametrize(
    ("lines", "error", "match", "at"),
    [
        ([f"{LOAD}[%mine+255];"], BoundsError, "column 256 is not allocated", LOAD),
        ([f"{LOAD}[%tmem];"], BoundsError, "reaches tensor memory lanes", LOAD),
        ([*ALONE, f"{LOAD}[%mine];", "SKIP:"], ProtocolError, "needs the whole warp", LOAD),
        (["add.u32 %r3, %mine, %thread;", f"{LOAD}[%r3];"], ProtocolError, "lanes disagree", LOAD),
        ([*ALONE, "tcgen05.wait::ld.sync.aligned;", "SKIP:"], ProtocolError, "needs the whole warp", "tcgen05.wait"),
        (["mov.b64 %d1, 0;", "mov.b32 %r1, 0;", MMA], ProtocolError, "issued by 32 lanes", "tcgen05.mma"),
        ([COMMIT], ProtocolError, "issued by 32 lanes", "tcgen05.commit"),
        (
            ["mov.b64 %d1, 0;", "tcgen05.cp.cta_group::1.32x128b.warpx4 [%tmem], %d1;"],
            ProtocolError,
            "issued by 32",
            "tcgen05.cp",
        ),
        (
            ["@%p10 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%slot], 32;"],
            ProtocolError,
            "after tcgen05.relinq",
            "@%p10",
        ),
        (
            ["@%p10 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tmem, 128;"],
            ProtocolError,
            "allocated is 256",
            "@%p10",
        ),
    ],
)
def test_rules(lines, error, match, at, track):
    fails([*ALLOCATE, *lines, *FREE], error, match, at, track=track)


def test_what_was_allocated_must_be_freed():
    fails([*ALLOCATE, "ret;"], ProtocolError, "256 tensor memory columns at 0 are not deallocated", "tcgen05.alloc")


def test_undefined_cells_come_back_as_undefined_registers():
    """They may be copied and stored again; to use them is an error that names the load."""
    store = ["tcgen05.st.sync.aligned.32x32b.x2.b32 [%mine+8], {%r1, %r2};", "tcgen05.wait::st.sync.aligned;"]
    body = [*ALLOCATE, f"{LOAD}[%mine];", "tcgen05.wait::ld.sync.aligned;", "mov.b32 %r3, %r2;", *store]
    run(kernel("\n".join([*body, *FREE]), threads=128, top=TOP), track=True)
    fails(
        [*body, "add.u32 %r4, %r1, %r3;", *FREE],
        PoisonError,
        "%r1 of lane 0 .*loaded from tensor memory",
        "add.u32",
        track=True,
    )
    fails([*body, f"{LOAD}[%r3];", *FREE], PoisonError, "%r3 of lane 0", LOAD, track=True)
    back = [f"{LOAD}[%mine+8];", "xor.b32 %r5, %r2, %r2;", "setp.eq.u32 %p1, %r5, 0;"]
    fails([*body, *back, *FREE], PoisonError, "%r5", "setp", track=True)


def test_half_a_cell_may_be_undefined():
    """The poison of a cell is kept by bytes."""
    body = [*ALLOCATE, ".reg .b16 %x;", "mov.b16 %h1, 7;", "mov.b32 %r1, {%h1, %x};", "mov.b32 %r2, 5;"]
    body += [
        "tcgen05.st.sync.aligned.32x32b.x2.b32 [%mine], {%r1, %r2};",
        "tcgen05.wait::st.sync.aligned;",
        f"{LOAD}[%mine];",
    ]
    body += ["mov.b32 {%h2, %h3}, %r1;"]
    for use, wrong in (
        ("add.u16 %h4, %h2, 1;", False),
        ("add.u16 %h4, %h3, 1;", True),
        ("add.u32 %r4, %r2, 1;", False),
    ):
        if wrong:
            fails([*body, use, *FREE], PoisonError, "%h3", "add.u16", track=True)
        else:
            run(kernel("\n".join([*body, use, *FREE]), threads=128, top=TOP), track=True)


def test_the_finding_says_kernel_and_text():
    text = kernel("\n".join([*ALLOCATE, MMA, *FREE]), threads=128, top=TOP)
    with pytest.raises(SimulationError) as caught:
        run(text, track=True)
    assert caught.value.kernel == "k"
    assert MMA in str(caught.value)
    assert isinstance(caught.value, PoisonError)
    np.testing.assert_equal(text.split("\n")[caught.value.line - 1], MMA)
