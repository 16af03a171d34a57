"""`wanfp4 doctor`: what is installed, what can run here, and whether it computes what it should."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from typing import Annotated, Any

import typer

from wanfp4.cli import common
from wanfp4.errors import BackendError, ModelError
from wanfp4.policy import policies

# rel-L2 against exact softmax attention on the data of `self_test`, as the torch reference gave it when this was
# written. The data is fixed, so a backend or another machine may differ by accumulation order only.
EXPECTED = {
    "bf16": 0.0022,
    "wan-fast": 0.3412,
    "wan-fast-14b": 0.3412,
    "wan-two-piece": 0.2398,
    "wan-two-piece-nv": 0.1961,
    "direct-p-fast": 0.3292,
    "direct-p-accurate": 0.3181,
    "direct-p-exp2": 0.2385,
    "nvfp4": 0.1858,
    "sage3": 0.1848,
    "nvfp4-fp8": 0.1369,
    "nvfp4-bf16": 0.1325,
    "mxfp8-token-block": 0.0525,
    "fp8-direct": 0.0550,
}
TOLERANCE = 0.001
NOT_HERE = (
    "On any other hardware than Blackwell's, every 4-bit policy runs by emulation, which shows quality and brings no "
    "speed."
)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show versions, devices and backends, and test the numerics; exit code 1 when something is wrong."""
    with common.quiet_libraries():
        report = examine()
    typer.echo(json.dumps(report, indent=2) if as_json else "\n".join(_lines(report)))
    if report["faults"]:
        raise typer.Exit(common.FAILURE)


def examine() -> dict[str, Any]:
    """The report as plain JSON values; `faults` lists what is wrong in sentences."""
    import torch

    from wanfp4.processors import environment

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tests = self_test(device)
    parts = {"ffmpeg": _ffmpeg(), "bundled sample": _sample()}
    faults = [f"{name}: {part['problem']}" for name, part in parts.items() if part["problem"]]
    faults += [f"policy {test['policy']}: {test['verdict']}" for test in tests if test["verdict"] != "ok"]
    return {
        "versions": environment.versions(),
        "devices": _devices(),
        "backends": _backends(device),
        "not_in_this_version": NOT_HERE,
        "parts": parts,
        "self_test": {"device": str(device), "tolerance": TOLERANCE, "policies": tests},
        "faults": faults,
    }


def self_test(device: Any) -> list[dict[str, Any]]:
    """Every preset through `wanfp4.attention` on seeded N(0,1) q, k, v [1, 512, 2, 128] in BF16, against exact FP32."""
    import torch

    import wanfp4

    generator = torch.Generator("cpu").manual_seed(0)
    q, k, v = (torch.randn(1, 512, 2, 128, generator=generator).bfloat16().to(device) for _ in range(3))
    weights = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()).div(math.sqrt(128)).softmax(-1)
    exact = torch.einsum("bhqk,bkhd->bqhd", weights, v.double())
    results = []
    for name in policies():
        result: dict[str, Any] = {"policy": name, "expected": EXPECTED.get(name), "rel_l2": None, "seconds": None}
        started = time.perf_counter()
        try:
            out = wanfp4.attention(q, k, v, policy=name)
        except BackendError as error:
            results.append({**result, "verdict": f"does not run: {error}"})
            continue
        assert isinstance(out, torch.Tensor)
        error_norm = float((out.double() - exact).norm() / exact.norm())
        result["seconds"] = round(time.perf_counter() - started, 3)
        result["rel_l2"] = round(error_norm, 4) if math.isfinite(error_norm) else None
        if not math.isfinite(error_norm):
            result["verdict"] = "gives NaN or infinity"
        elif result["expected"] is None:
            result["verdict"] = "has no expected figure"
        elif abs(error_norm - result["expected"]) > TOLERANCE:
            result["verdict"] = f"rel-L2 {error_norm:.4f}, expected {result['expected']:.4f} ± {TOLERANCE:g}"
        else:
            result["verdict"] = "ok"
        results.append(result)
    return results


def _devices() -> list[dict[str, Any]]:
    import torch

    cpu = f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {platform.system()}"
    devices: list[dict[str, Any]] = [{"device": "cpu", "name": cpu}]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "memory_gib": round(properties.total_memory / 2**30, 1),
            }
        )
    if len(devices) == 1:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        devices.append({"device": "cuda", "name": f"none: PyTorch {torch.__version__}, {built}, finds no GPU"})
    if torch.backends.mps.is_available():
        devices.append({"device": "mps", "name": "Apple GPU"})
    return devices


def _backends(device: Any) -> list[dict[str, Any]]:
    from wanfp4.kernels import dispatch

    rows = []
    for backend in dispatch.backends():
        missing = backend.missing()
        runs = [] if missing else [n for n, p in policies().items() if backend.refuses(p.numerics, device) is None]
        rows.append({"name": backend.name, "summary": backend.summary, "missing": missing, "policies": runs})
    return rows


def _ffmpeg() -> dict[str, str | None]:
    import imageio_ffmpeg

    try:
        return {"found": imageio_ffmpeg.get_ffmpeg_version(), "problem": None}
    except (RuntimeError, OSError) as error:
        return {"found": None, "problem": f"no ffmpeg, so no mp4 can be written ({str(error).splitlines()[0]})"}


def _sample() -> dict[str, str | None]:
    from wanfp4.processors.model_info import inspect_model
    from wanfp4.samples import bundled

    try:
        info = inspect_model(bundled())
    except ModelError as error:
        return {"found": None, "problem": str(error)}
    return {"found": str(info.folder), "problem": "; ".join(info.offline) or None}


def _lines(report: dict[str, Any]) -> list[str]:
    lines = ["Versions", "  " + ", ".join(f"{name} {version}" for name, version in report["versions"].items())]
    lines += ["", "Devices"]
    for device in report["devices"]:
        more = [f"compute capability {device['compute_capability']}"] if "compute_capability" in device else []
        more += [f"{device['memory_gib']} GiB"] if "memory_gib" in device else []
        lines.append(f"  {device['device']}: {', '.join([device['name'], *more])}")
    lines += ["", "Backends"]
    count = len(policies())
    for backend in report["backends"]:
        runs = backend["policies"]
        can = "every policy" if len(runs) == count else ", ".join(runs) or "no policy"
        state = f"not available: {backend['missing']}" if backend["missing"] else f"available, runs {can}"
        lines.append(f"  {backend['name']}: {state}; {backend['summary']}")
    lines.append(f"  {report['not_in_this_version']}")
    lines += ["", "Parts"]
    for name, part in report["parts"].items():
        lines.append(f"  {name}: {part['problem'] or part['found']}")
    test = report["self_test"]
    lines += ["", f"Self-test on {test['device']}: rel-L2 against exact softmax attention, N(0,1), 512 tokens"]
    for row in test["policies"]:
        figures = [f"{row['rel_l2']:.4f}"] if row["rel_l2"] is not None else []
        figures += [f"(expected {row['expected']:.4f})"] if row["expected"] is not None else []
        lines.append("  ".join([f"  {row['policy']:<18}", *figures, row["verdict"]]))
    lines += ["", "Everything works." if not report["faults"] else "Something is wrong:"]
    lines += [f"  {fault}" for fault in report["faults"]]
    return lines
