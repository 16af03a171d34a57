"""Launches for the proof that the judge judges, and its tables.

`python tests/simulator/proof.py` prints the tables of docs/simulator-proof.md; it takes minutes.
"""

from __future__ import annotations

import math
import sys
import types
import warnings
from collections import Counter
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wanfp4.simulator import Simulator
from wanfp4.simulator.mutate import Experiment, Launch, Recorder, Verdict
from wanfp4.simulator.translate import Code

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
from handwritten import Case, pv_case


class Kernel:
    """A launch that can be repeated, and how far its results are from the truth."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.codes: dict[bool, Code] = {}

    def error(self) -> float:
        """Relative L2 of the results as they are; NaN where a result is."""
        raise NotImplementedError

    def rerun(self, *, seed: int | None = None, track: bool = False, anew: bool = False) -> float:
        """Run it from the tensors of the launch, `anew` translated; the error."""
        launch = self.launch
        for region, before in zip(launch.memory.regions, launch.before, strict=True):
            region.data[:] = before
        simulator = Simulator(seed=seed, track=track, limit=20_000)
        simulator.memory = launch.memory
        if anew or track not in self.codes:
            self.codes[track] = Code(launch.code.kernel, tracked=track)
        simulator.run(self.codes[track], launch.grid, launch.params, launch.shared_bytes)
        return self.error()


class HandWritten(Kernel):
    """The P·V kernel."""

    def __init__(self, case: Case | None = None) -> None:
        self.case = pv_case() if case is None else case
        simulator = Simulator()
        simulator.register(**self.case.arrays)
        self.case.arrays["o"][:] = np.nan
        super().__init__(
            Launch(self.case.code(), (1, 1, 1), self.case.params, self.case.shared_bytes, simulator.memory)
        )

    def error(self) -> float:
        got, want = self.case.arrays["o"].astype(np.float64), self.case.want["o"]
        return float(np.linalg.norm(got - want) / np.linalg.norm(want))


class FlashAttention(Kernel):
    """flash-attn-4's SM100 forward; its results in exact numerics are the truth."""

    def __init__(self, forward: Any, queries: int, keys: int, dim: int, causal: bool) -> None:
        import cutlass.cute as cute
        from cuda.bindings import driver
        from cutlass.cute.runtime import from_dlpack

        generator = torch.Generator().manual_seed(queries + keys + dim)
        q, k, v, out = (
            torch.randn(1, n, 1, dim, generator=generator).to(torch.bfloat16) for n in (queries, keys, keys, queries)
        )
        self.out, self.lse = out.fill_(math.nan), torch.full((1, 1, queries), math.nan)
        scores = q[0, :, 0].double() @ k[0, :, 0].double().T / math.sqrt(dim)
        if causal:
            below = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
            scores = scores.masked_fill(~below, -math.inf)
        self.want = torch.softmax(scores, -1) @ v[0, :, 0].double()
        tensors = {"q": q, "k": k, "v": v, "out": self.out, "lse": self.lse}
        with warnings.catch_warnings(), Recorder() as gpu:
            warnings.simplefilter("ignore")  # the compiler's own
            gpu.register(**tensors)
            wrapped = [
                from_dlpack(x, assumed_align=16).mark_layout_dynamic(leading_dim=x.ndim - 1) for x in tensors.values()
            ]
            arguments = (*wrapped, 1 / math.sqrt(dim))
            kernel = forward(dim, is_causal=causal, is_static_persistent=False)
            compiled = cute.compile(kernel, *arguments, stream=driver.CUstream(0))
            compiled(*arguments, stream=driver.CUstream(0))
        super().__init__(gpu.launches[-1])

    def error(self) -> float:
        return float((self.out[0, :, 0].double() - self.want).norm() / self.want.norm())


def table(verdicts: Iterable[Verdict]) -> str:
    """Markdown: one row a kind of synchronisation, one column an outcome."""
    counts = Counter((v.site.kind, "caught" if v.caught else str(v.reason)) for v in verdicts)
    outcomes = ["caught", *sorted({outcome for _, outcome in counts} - {"caught"})]
    kinds = list(dict.fromkeys(kind for kind, _ in counts))
    rows = [["dropped", *outcomes], ["---"] * (len(outcomes) + 1)]
    rows += [[f"`{kind}`", *(str(counts[kind, outcome] or "") for outcome in outcomes)] for kind in kinds]
    rows.append(["all", *(str(sum(counts[kind, outcome] for kind in kinds)) for outcome in outcomes)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def forward_class() -> Any:
    """flash-attn-4's kernel without Triton, which its import of a tuner needs."""
    if find_spec("triton") is None:
        stand_in = types.ModuleType("quack.autotuner")
        vars(stand_in).update(AutotuneConfig=lambda *a, **b: None, autotune=lambda *a, **b: lambda f: f)
        sys.modules[stand_in.__name__] = stand_in
    warnings.simplefilter("ignore")
    from flash_attn.cute.flash_fwd_sm100 import FlashAttentionForwardSm100

    return FlashAttentionForwardSm100


def main() -> None:
    import time

    torch.set_num_threads(1)
    forward = forward_class()
    kernels: list[tuple[str, Kernel, str]] = [
        ("own FP4 P·V", HandWritten(), "pipe"),
        ("own FP4 P·V", HandWritten(), "isa"),
        ("flash-attn-4, 256 x 256, D 64", FlashAttention(forward, 256, 256, 64, False), "pipe"),
        ("flash-attn-4, 256 x 700, D 64", FlashAttention(forward, 256, 700, 64, False), "pipe"),
        ("flash-attn-4, 300 x 333, D 128, causal", FlashAttention(forward, 300, 333, 128, True), "pipe"),
    ]
    for name, kernel, ordering in kernels:
        started = time.perf_counter()
        verdicts = Experiment(kernel.launch, ordering=ordering).run()
        found = Counter(v.finding.split(":")[0].split(" in ")[0] for v in verdicts if v.finding is not None)
        seeds = Counter(str(v.seed) for v in verdicts if v.caught)
        print(f'\n{name}, "{ordering}", {time.perf_counter() - started:.0f} s\n\n{table(verdicts)}\n')
        print(f"caught by: {dict(found)}; under seed: {dict(seeds)}\n")
        for verdict in verdicts:
            if not verdict.caught and verdict.reason not in ("never executed", "granted"):
                print(f"- {verdict}")


if __name__ == "__main__":
    main()
