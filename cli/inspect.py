"""`wanfp4 inspect`: what the compiler made of the SM100 kernels, and what their softmax loop costs on paper. No GPU."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from wanfp4.cli import common
from wanfp4.errors import UnsupportedInputError, Wanfp4Error
from wanfp4.policy import Policy, get_policy, policies


def inspect(
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|FILE", help="A preset or a policy's .json file; repeatable. Default: all that run."),
    ] = None,
    arch: Annotated[str, typer.Option(metavar="NAME", help="sm_100a (B200, GB200) or sm_103a (B300).")] = "sm_100a",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="All figures, as JSON.")] = None,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Leave PTX, cubin and disassembly of every kernel there.")
    ] = None,
) -> None:
    """Compile the Blackwell kernels, without a GPU, and show what they take and what the softmax loop costs.

    Exit code 1 when a kernel spills or exceeds the hardware's limits.
    """
    from wanfp4.quality import files

    if json_file is not None:
        files.writable_folder(json_file.absolute().parent)
    report = examine([get_policy(name) for name in policy or ()], arch, keep)
    if json_file is not None:
        files.write(json_file, json.dumps(report, indent=2) + "\n")
    typer.echo("\n".join(_lines(report)))
    if report["faults"]:
        raise typer.Exit(common.FAILURE)


def examine(chosen: Sequence[Policy], arch: str, keep: Path | None) -> dict[str, Any]:
    """All figures as plain JSON values; without `chosen`, of every preset that the kernels compute.

    Kernels are those of a call in BF16 without log-sum-exp. Raises UnsupportedInputError for a chosen policy that has
    none, SettingsError for an unknown architecture, Wanfp4Error where compiler or disassembler are missing.
    """
    import torch

    from wanfp4.kernels.blackwell import backend
    from wanfp4.kernels.blackwell import inspect as figures

    if missing := backend.not_installed():
        raise Wanfp4Error(missing)
    users: dict[Any, dict[str, None]] = {}
    left_out = {}
    for policy in chosen or policies().values():
        reasons = [backend.limits(numerics) for numerics in policy.rounding or (policy.numerics,)]
        if why := next(filter(None, reasons), None):
            if chosen:
                raise UnsupportedInputError(f"policy {policy.name!r} has no SM100 kernels: {why}")
            left_out[policy.name] = why
            continue
        for numerics in policy.rounding:
            for kernel in backend.plan(numerics, policy.guard, torch.bfloat16, False).kernels:
                users.setdefault(kernel, {})[policy.name] = None
    # Forward kernels first, in the order of the policies.
    ordered = sorted(users, key=lambda kernel: kernel.kind != "forward")
    rows: list[dict[str, Any]] = []
    with figures.Compiler(arch, keep) as compiler:
        for number, kernel in enumerate(ordered, 1):
            name = ", ".join(users[kernel]) if kernel.kind == "forward" else figures.describe(kernel)
            common.note(f"compiling {number} of {len(ordered)}: {name}")
            for made in compiler.figures(kernel):
                rows.append({"kernel": name, "policies": list(users[kernel]), **made.to_dict(arch)})
        common.note("compiling flash-attn-4's BF16 forward")
        peer = compiler.flash_attention()
    return {
        "arch": arch,
        "compiler": f"nvidia-cutlass-dsl {importlib.metadata.version('nvidia-cutlass-dsl')}",
        "kernels": rows,
        "peer": None if peer is None else {"kernel": figures.peer_name(), **peer.to_dict(arch)},
        "shared_limit": figures.SHARED_LIMIT,
        "rates": figures.rates(arch).lanes,
        "left_out": left_out,
        "faults": [f"{row['kernel']}: {fault}" for row in rows for fault in row["faults"]],
    }


def _lines(report: dict[str, Any]) -> list[str]:
    shared_limit = report["shared_limit"]
    lines = [
        f"SM100 kernels for {report['arch']}, made by {report['compiler']}. Nothing was run: figures of the compiler.",
        "",
        "Kernels (registers: of a thread at launch, then what warps ask for; bytes otherwise)",
    ]
    rows = [("", "threads", "registers", "spills", "stack", "local", "shared", "TMEM", "code", "tensor core")]
    for row in _with_peer(report):
        wanted = "/".join(map(str, row["setmaxnreg"]))
        rows.append(
            (
                row["kernel"],
                row["threads"],
                f"{row['registers']}{f' {wanted}' if wanted else ''}",
                row["spills"],
                row["stack"],
                row["local"],
                f"{row['static_shared'] + row['dynamic_shared']:,}",
                row["tensor_columns"] or "",
                f"{row['instructions']:,}",
                ", ".join(f"{n} {name}" for name, n in row["tensor_core"].items()),
            )
        )
    lines += _table(rows)
    lines.append(f"  Limits: no spills, {shared_limit:,} bytes of shared memory, 512 columns of tensor memory (TMEM).")

    loops = [row for row in _with_peer(report) if row["loop"]]
    pipes = list(loops[0]["loop"]["slots"])
    lines += ["", "Softmax loop: issue slots for two P elements, all in; instructions of a warp and key tile"]
    rows = [("", "all", *pipes, "a tile", "MUFU.EX2", "rescale", "last tile")]
    for row in loops:
        loop = row["loop"]
        rows.append(
            (
                row["kernel"],
                f"{loop['slots_per_pair']:.2f}",
                *(f"{loop['slots'][pipe] / loop['pairs']:.2f}" for pipe in pipes),
                loop["slots_per_tile"],
                loop["exponentials_per_tile"],
                loop["rescale"] or "",
                loop["tail"] or "",
            )
        )
    lines += _table(rows)
    lines += [
        '  "all": a tile whose waits are over and whose rows need no rescaling; "rescale" comes on top where one does.',
        '  "last tile": the masked one, of lengths that are no multiple of 128.',
        "",
        "Cycles of a tile (128 queries × 128 keys): a model on paper, not a measurement",
    ]
    modelled = list(loops[0]["loop"]["cycles"])
    rows = [("", *modelled, "most", "of")]
    for row in loops:
        cycles = row["loop"]["cycles"]
        slowest = max(cycles, key=lambda pipe: cycles[pipe])
        rows.append((row["kernel"], *(f"{cycles[pipe]:.0f}" for pipe in modelled), f"{cycles[slowest]:.0f}", slowest))
    lines += _table(rows)
    lanes = ", ".join(f"{pipe} {lanes:g}" for pipe, lanes in report["rates"].items())
    lines += [
        "  A tile is the work of four warps, one on each scheduler of a multiprocessor: n instructions of a warp take",
        "  n cycles to issue, and n · 128 / rate on a pipe. Threads a clock and multiprocessor, taken as",
        f"  {lanes}; an FFMA2 is one instruction on two floats.",
        "  Tensor core: 128 cycles for each of Q·Kᵀ and P·V in FP4, four times that in BF16.",
        "  Not in it: latency, waits, bank conflicts, other warps (flash-attn-4's correction warps among them).",
        "",
    ]
    for name, why in report["left_out"].items():
        lines.append(f"No kernel for {name}: {why}.")
    if report["peer"] is None:
        lines.append("flash-attn-4 is not installed, so there is nothing to compare with.")
    if report["faults"]:
        lines += ["", "Over the limits:", *(f"  {fault}" for fault in report["faults"])]
    return lines


def _with_peer(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [*report["kernels"], *([report["peer"]] if report["peer"] else [])]


def _table(rows: Sequence[Sequence[object]]) -> list[str]:
    """Columns side by side: the first and the last to the left, numbers to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        padded[0], padded[-1] = row[0].ljust(widths[0]), row[-1]
        lines.append(("  " + "  ".join(padded)).rstrip())
    return lines
