"""A Wan2.1 1.3B-shaped pipeline with random weights: patched, offloaded, compiled, and a map of its layers' error.

    python kernels/bench/real_size.py -o out/real-size                       on a GPU, 81 frames of 480 x 832
    python kernels/bench/real_size.py -o out/toy --model tiny --size 9x64x96   anywhere

Text encoder and VAE are the bundled sample's, whose cost is not looked at; the transformer has the published
configuration but for the width of its text. Weights are random, so errors are those of random logits. Policies do not
take turns, since a compiled model is compiled anew for each patch; medians are told. The map is that of
`wanfp4.quality.maps.attention_map`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from wanfp4 import patch
from wanfp4.cli.bench import parse_size
from wanfp4.errors import Wanfp4Error, brief
from wanfp4.processors import bench, environment
from wanfp4.processors.model_info import Settings
from wanfp4.processors.pipelines import generate_latents, load_pipeline
from wanfp4.quality.files import output_folder, write
from wanfp4.quality.maps import attention_map
from wanfp4.samples import bundled, models

PROMPT = "a red circle moving right"


def pipeline(model: str, device: torch.device) -> Any:
    """The bundled sample with a transformer of another size."""
    sample = load_pipeline(bundled(), device=device, dtype="bf16")
    transformer = bench.build(bench.MODELS[model], None, device, sample.text_encoder.config.d_model)
    parts = (sample.tokenizer, sample.text_encoder, sample.vae, transformer)
    return models.build_pipeline(*parts)


def timed(pipe: Any, settings: Settings, rounds: int, policies: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Seconds of a step (of all steps, divided) and peak memory in bytes, by policy; what cannot run says why."""
    rows: dict[str, Any] = {}
    for name, pair in policies.items():
        try:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            with nullcontext() if pair is None else patch(pipe, *pair):
                measured = []
                for _ in range(rounds + 1):  # the first compiles
                    _wait(device)
                    start = time.perf_counter()
                    generate_latents(pipe, PROMPT, settings, 0)
                    _wait(device)
                    measured.append((time.perf_counter() - start) / settings.steps)
            memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
            rows[name] = {"step": statistics.median(measured[1:]), "rounds": measured, "memory": memory}
        except Exception as error:  # noqa: BLE001 - a way that cannot run is a result
            rows[name] = {"error": brief(error)}
    return rows


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", "-o", type=Path, required=True)
    parser.add_argument("--model", choices=bench.MODELS, default="1.3b")
    parser.add_argument("--size", default="81x480x832")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policy", action="append", help="NAME or NAME/BACKEND, repeatable; default wan-fast")
    parser.add_argument("--way", action="append", choices=("plain", "compiled", "offloaded"), help="default: all")
    parser.add_argument("--no-map", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        frames, height, width = parse_size(arguments.size)
    except Wanfp4Error as error:
        parser.error(str(error))
    settings = Settings(height=height, width=width, frames=frames, steps=arguments.steps, guidance=5.0, shift=3.0)
    policies: dict[str, Any] = {"own attention": None}
    for text in arguments.policy or ["wan-fast"]:
        name, _, backend = text.partition("/")
        policies[text] = (name, backend or None)
    report: dict[str, Any] = {
        "model": arguments.model, "weights": "random", "size": [frames, height, width], "steps": arguments.steps,
        "versions": environment.versions(), "machine": environment.machine(device), "ways": {},
    }  # fmt: skip

    def save() -> None:
        write(arguments.output / "real-size.json", json.dumps(report, indent=2) + "\n")

    try:
        with output_folder(arguments.output):
            pipe = pipeline(arguments.model, device)
            pipe.set_progress_bar_config(disable=True)
            if not arguments.no_map:
                for text, pair in policies.items():
                    if pair is not None:
                        layers = attention_map(pipe, pair[0], PROMPT, 0, settings=settings, backend=pair[1])
                        layers.save(arguments.output / f"map-{text.replace('/', '-')}")
            ways: dict[str, Callable[[], None]] = {
                "plain": lambda: None,
                "compiled": lambda: pipe.transformer.compile_repeated_blocks(fullgraph=True),
                "offloaded": lambda: pipe.enable_model_cpu_offload(device=device),
            }
            for way in arguments.way or ways:
                ways[way]()
                rows = timed(pipe, settings, arguments.rounds, policies, device)
                report["ways"][way] = rows
                save()
                for name, row in rows.items():
                    memory = "" if row.get("memory") is None else f"  {row['memory'] / 2**30:.1f} GiB"
                    figure = row.get("error") or f"{row['step'] * 1e3:9.1f} ms a step{memory}"
                    print(f"{way:<10} {name:<28} {figure}", flush=True)
    except Wanfp4Error as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
