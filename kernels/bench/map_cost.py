"""What a map costs on a GPU: a run that is watched by `wanfp4.quality.shadow` beside a plain one.

    python kernels/bench/map_cost.py                          sizes of Wan 1.3B and 14B, and a short clip
    python kernels/bench/map_cost.py --size 9x64x96 --heads 2  anywhere

Four blocks of Wan's width, random weights. The policy's attention is stood in for by the pipeline's own, as a native
backend is no slower than that; its codes are counted as the policy's. Medians of passes that take turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from wanfp4.cli.bench import parse_size
from wanfp4.errors import Wanfp4Error
from wanfp4.kernels.blackwell.verify import HEAD_DIM
from wanfp4.policy import get_policy
from wanfp4.processors import bench
from wanfp4.processors.patch import patch
from wanfp4.processors.session import Call
from wanfp4.quality import shadow

LAYERS = 4
# Heads, and frames, height and width of the clip: 480p and a short clip with 1.3B's heads, half of 480p with 14B's.
SIZES = ((12, "81x480x832"), (12, "17x512x768"), (40, "41x480x832"))


def measure(policy: str, heads: int, size: tuple[int, int, int], device: torch.device, rounds: int) -> dict[str, Any]:
    """Milliseconds of a forward pass, plain and mapped."""
    model = bench.build(bench.Shape(heads, LAYERS, heads * HEAD_DIM * 5), None, device)
    given = bench.inputs(size, device)
    numerics = get_policy(policy).numerics
    watcher = shadow.Shadow()

    def watch(call: Call) -> Tensor | None:
        q, k, v = (t.transpose(1, 2) for t in (call.q, call.k, call.v))

        def own() -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)

        return watcher(dataclasses.replace(call, own=own, numerics=numerics))

    def once(mapped: bool) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            if mapped:
                with patch(model, "bf16") as handle, handle.observing(watch):
                    model(**given, return_dict=False)
                watcher.take()
            else:
                model(**given, return_dict=False)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) * 1e3

    ways = {"plain": functools.partial(once, False), "mapped": functools.partial(once, True)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 2):  # two to warm up
        for name, run in ways.items():
            times[name].append(run())
    return {name: statistics.median(measured[2:]) for name, measured in times.items()}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--policy", action="append", help="repeatable; default wan-fast, nvfp4 and fp8-direct")
    parser.add_argument("--size", help="one clip, frames x height x width; with --heads")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        for heads, text in ((arguments.heads, arguments.size),) if arguments.size else SIZES:
            size = parse_size(text)
            tokens = bench.tokens_of(size)
            for policy in arguments.policy or ("wan-fast", "nvfp4", "fp8-direct"):
                made = measure(policy, heads, size, device, arguments.rounds)
                ratio = made["mapped"] / made["plain"]
                print(
                    f"{heads} heads, {tokens:,} tokens, {policy:<12} plain {made['plain']:7.1f} ms, "
                    f"mapped {made['mapped']:7.1f} ms, {ratio:.2f} x",
                    flush=True,
                )
    except Wanfp4Error as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
