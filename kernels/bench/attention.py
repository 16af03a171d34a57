"""Times every launch configuration of the backends "triton" and "sm90", their quantisers, and PyTorch's attention.

    python kernels/bench/attention.py --shape 32760x12 --policy wan-fast --policy nvfp4 --json configs.json

What `emulated.configs` and `hopper.backend.BUILDS` list first is what runs: this script says whether it still should.
Variants take turns; medians are told. Without a GPU it runs in Triton's interpreter (TRITON_INTERPRET=1), toy sizes.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from wanfp4.errors import BackendError, Wanfp4Error
from wanfp4.kernels import emulated
from wanfp4.kernels.blackwell import verify
from wanfp4.kernels.hopper import backend as sm90
from wanfp4.policy import Policy, get_policy
from wanfp4.processors import environment


def measure(policy: Policy, tokens: int, heads: int, device: torch.device, rounds: int) -> dict[str, Any]:
    """Seconds of the quantisers, of the forward with each configuration, and of SDPA, by name."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(1, tokens, heads, 128, device=device, generator=generator).bfloat16() for _ in range(3))
    n, guard = policy.numerics, policy.guard
    rounded = emulated.quantize(q, k, v, n, guard, verify.SCALE, False)
    variants: dict[str, Callable[[], object]] = {
        "quantize": functools.partial(emulated.quantize, q, k, v, n, guard, verify.SCALE, False)
    }
    for config in emulated.configs(n, torch.cuda.get_device_capability(device) if q.is_cuda else (9, 0)):
        label = f"{config.queries}x{config.keys}, {config.warps} warps, {config.stages} stages"
        variants[label + (", TMA" if config.tma else "")] = functools.partial(
            emulated.multiply, rounded, q, k, v, n, guard, verify.SCALE, False, config
        )
    if sm90.missing() is None and sm90.refuses(n, device) is None:
        images = sm90.quantize(q, k, v, n, verify.SCALE)
        variants["quantize for sm90"] = functools.partial(sm90.quantize, q, k, v, n, verify.SCALE)
        for build in sm90.BUILDS[n.p == "fp8-direct"]:
            label = f"sm90, {build.groups} groups, {build.stages} stages" + (", overlap" if build.overlap else "")
            variants[label] = functools.partial(sm90.multiply, images, q, k, False, build)
    variants |= verify.sdpa_contenders(q, k, v)
    clock: verify.Clock = verify.CudaClock() if q.is_cuda else verify.HostClock()
    times = verify.interleaved(variants, clock, rounds, warm_up=3 if q.is_cuda else 1)
    baseline = times["sdpa cudnn"].get("median") or times["sdpa"].get("median")
    for row in times.values():
        if "median" in row and baseline:
            row["speed"] = baseline / row["median"]
    return {"policy": policy.name, "tokens": tokens, "heads": heads, "gpu": verify.smi(device), "times": times}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", action="append", help="tokens x heads, repeatable; default 32760x12")
    parser.add_argument("--policy", action="append", help="preset or .json file, repeatable; default wan-fast")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report: dict[str, Any] = {
        "versions": environment.versions(), "machine": environment.machine(device), "measurements": []
    }  # fmt: skip
    try:
        for shape in arguments.shape or ["32760x12"]:
            for name in arguments.policy or ["wan-fast"]:
                policy = get_policy(name)
                why = emulated.missing() or emulated.refuses(policy.numerics, device)
                if why:
                    raise BackendError(f"nothing to time: {why}")
                row = measure(policy, *verify.parse_timing(shape), device, arguments.rounds)
                report["measurements"].append(row)
                print(f"{policy.name}, {shape}")
                for label, times in row["times"].items():
                    figure = times.get("error") or f"{times['median'] * 1e3:10.3f} ms  {times.get('speed', 0):.2f}"
                    print(f"  {label:<32}{figure}")
    except Wanfp4Error as error:
        parser.exit(2, f"error: {error}\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
