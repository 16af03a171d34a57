"""`wanfp4 verify`: does a backend compute what it should on this machine, and how fast? One receipt to send back."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from wanfp4.cli import common
from wanfp4.errors import BackendError, OutputError, SettingsError, brief
from wanfp4.policy import Policy, get_policy, policies

SCHEMA = 1
RECEIPT = Path("wanfp4-verify.json")
ARCHITECTURES = ("sm_100a", "sm_103a")


@dataclass(frozen=True)
class Plan:
    """What is verified where. `arch` is that of the simulator, None on a real device."""

    backend: str
    arch: str | None
    device: Any
    policies: tuple[Policy, ...]
    left_out: dict[str, str]

    def about(self) -> dict[str, Any]:
        """For the receipt, as plain JSON values."""
        from wanfp4.kernels.blackwell.verify import smi
        from wanfp4.processors import environment

        return {
            "versions": {**environment.versions(), **_more_versions()},
            "machine": environment.machine(self.device),
            "gpu": smi(self.device),
            "backend": self.backend,
            "simulated": self.arch,
            "policies": [policy.to_dict() for policy in self.policies],
            "left_out": self.left_out,
        }


def verify(
    backend: Annotated[str, typer.Option(metavar="NAME", help="What is verified against the reference.")] = "sm100",
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Run its kernels on the simulator, without a GPU and without timings.")
    ] = False,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|FILE", help="A preset or a policy's .json file; repeatable. Default: all that run."),
    ] = None,
    arch: Annotated[
        str, typer.Option(metavar="NAME", help="What --simulate simulates: sm_100a or sm_103a.")
    ] = "sm_100a",
    device: common.DeviceOption = "auto",
    timing: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SxH", help="Tokens x heads to time, repeatable. Default: the paper's grid and Wan's own."
        ),
    ] = None,
    timings: Annotated[bool, typer.Option(help="Whether anything is timed.")] = True,
    rounds: Annotated[int, typer.Option(metavar="N", min=2, help="Rounds of each timing.")] = 15,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the data.")] = 0,
    json_file: Annotated[Path, typer.Option("--json", metavar="FILE", help="The receipt.")] = RECEIPT,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an earlier receipt.")] = False,
) -> None:
    """Check a backend's numerics against the reference, then time it beside PyTorch's attention.

    For the first owner of a Blackwell GPU: run it, and send back the receipt. Exit code 1 when a check fails.
    """
    from wanfp4.kernels.blackwell import verify as work
    from wanfp4.quality import files

    shapes = [work.parse_timing(text) for text in timing or ()]
    files.writable_folder(json_file.absolute().parent)
    if json_file.exists() and not force:
        raise OutputError(f"{str(json_file)!r} exists; choose another --json, or --force to overwrite it")

    def save(receipt: dict[str, Any]) -> None:
        files.write(json_file, json.dumps(receipt, indent=2) + "\n")

    plan = prepare(backend, simulate, [get_policy(name) for name in policy or ()], arch, device)
    receipt = {
        "kind": "wanfp4 verify",
        "schema": SCHEMA,
        "created": common.now(),
        "command": common.command_line(),
        **plan.about(),
        "seed": seed,
        "numerics": [],
        "timings": [],
        "faults": [],
        "complete": False,
    }
    check_numerics(plan, receipt, seed, save)
    if timings and not simulate:
        take_timings(plan, receipt, shapes, rounds, save)
    receipt["complete"] = True
    save(receipt)
    typer.echo("\n".join(_lines(receipt)))
    common.note(f"the receipt is {json_file}" + ("" if simulate else "; please send it back"))
    if receipt["faults"]:
        raise typer.Exit(common.FAILURE)


def prepare(backend: str, simulate: bool, chosen: Sequence[Policy], arch: str, device: str) -> Plan:
    """Who verifies what. Raises BackendError when there is nothing that the backend computes here, or not all that is
    chosen; SettingsError for a device, or an architecture of the simulator, that there is not."""
    import torch

    from wanfp4.kernels.blackwell import verify as work
    from wanfp4.processors.pipelines import pick_device

    if simulate and backend != "sm100":
        raise SettingsError(f"the simulator runs the backend 'sm100', not {backend!r}")
    if simulate and arch not in ARCHITECTURES:
        raise SettingsError(f"{arch!r} is not simulated; {' and '.join(ARCHITECTURES)} are")
    place = torch.device("cpu") if simulate else pick_device(device)
    reasons = {p.name: work.unsupported(p, backend, place, simulate=simulate) for p in chosen or policies().values()}
    left_out = {name: why for name, why in reasons.items() if why is not None}
    if left_out and (chosen or len(left_out) == len(reasons)):
        hint = "; --simulate runs its kernels on the simulator" if backend == "sm100" and not simulate else ""
        if chosen:
            name = next(policy.name for policy in chosen if policy.name in left_out)
            raise BackendError(f"{backend!r} cannot run policy {name!r}: {left_out[name]}{hint}")
        [(why, _)] = Counter(left_out.values()).most_common(1)
        raise BackendError(f"{backend!r} can run no policy here: {why}{hint}")
    able = tuple(p for p in chosen or policies().values() if p.name not in left_out)
    return Plan(backend, arch if simulate else None, place, able, left_out)


def check_numerics(plan: Plan, receipt: dict[str, Any], seed: int, save: Callable[[dict[str, Any]], None]) -> None:
    """Every case for every policy, into the receipt. Policies with the same numerics and guard are one."""
    from wanfp4.kernels.blackwell import verify as work

    cases = work.SMALL_CASES if plan.arch else work.CASES
    if plan.device.type == "cuda":
        cases += work.LARGE_CASES
    different = list({(p.numerics, p.guard): p for p in reversed(plan.policies)}.values())[::-1]
    with contextlib.ExitStack() as stack:
        call = stack.enter_context(work.simulated(plan.arch)) if plan.arch else work.dispatched(plan.backend)
        for policy in different:
            for case in cases:
                row = work.check(call, policy, case, plan.device, seed)
                receipt["numerics"].append(row)
                verdict = "; ".join(row["faults"]) or "ok"
                common.note(f"{policy.name}, {case.label}: {verdict} ({row['seconds']:.1f} s)")
                receipt["faults"] += [f"{policy.name}, {case.label}: {fault}" for fault in row["faults"]]
            save(receipt)


def take_timings(
    plan: Plan,
    receipt: dict[str, Any],
    shapes: Sequence[tuple[int, int]],
    rounds: int,
    save: Callable[[dict[str, Any]], None],
) -> None:
    """Every shape, by default `verify.TIMINGS`, into the receipt. On a CPU only those that are asked for."""
    from wanfp4.kernels.blackwell import verify as work

    if not shapes and plan.device.type != "cuda":
        common.note(f"nothing is timed on {plan.device.type} unless --timing asks for it")
        return
    for tokens, heads in shapes or work.TIMINGS:
        common.note(f"timing {tokens:,} tokens × {heads} heads")
        try:
            row = work.measure(work.dispatched(plan.backend), plan.policies, tokens, heads, plan.device, rounds)
        except RuntimeError as error:  # out of memory, most likely: the other shapes still count
            row = {"tokens": tokens, "heads": heads, "error": brief(error), "times": {}}
        receipt["timings"].append(row)
        save(receipt)


def _more_versions() -> dict[str, str]:
    """Of what only the kernels depend on."""
    import torch

    found = {"cuda of torch": str(torch.version.cuda)}
    for name in ("nvidia-cutlass-dsl", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "flash-attn-4"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _lines(receipt: dict[str, Any]) -> list[str]:
    where = f"simulated {receipt['simulated']}" if receipt["simulated"] else receipt["machine"]["name"]
    lines = [f"{receipt['backend']} on {where}: {len(receipt['numerics'])} checks of numerics against the reference"]
    for name in dict.fromkeys(row["policy"] for row in receipt["numerics"]):
        rows = [row for row in receipt["numerics"] if row["policy"] == name]
        ran = [row for row in rows if "rel_l2" in row]
        bad = sum(bool(row["faults"]) for row in rows)
        worst = max((row["rel_l2"] for row in ran if isinstance(row["rel_l2"], float)), default=None)
        figures = f"largest rel-L2 {worst:.1e}" if worst is not None else "no figures"
        lines.append(f"  {name}: {len(rows) - bad} of {len(rows)} ok, {figures}")
    for row in receipt["timings"]:
        lines += ["", f"{row['tokens']:,} tokens × {row['heads']} heads"]
        if "error" in row:
            lines.append(f"  not timed: {row['error']}")
        for name, times in row["times"].items():
            if "error" in times:
                lines.append(f"  {name}: {times['error']}")
            else:
                speedup = f", {times['speedup']:.2f} × the fastest SDPA" if times["speedup"] else ""
                lines.append(f"  {name}: {times['median'] * 1e3:.3f} ms, {times['tflops']:.1f} TFLOP/s{speedup}")
    lines += ["", "Everything is as it should be." if not receipt["faults"] else "Something is wrong:"]
    return lines + [f"  {fault}" for fault in receipt["faults"]]
