"""Timings for `wanfp4 bench`: attention alone beside its peers, and a whole denoising step of a Wan-shaped model.

Variants take turns, so that clocks and temperature are the same for all, and medians are told. A model for a step is
built from a published configuration with random weights: what a step costs does not depend on them.
"""

from __future__ import annotations

import functools
import importlib
import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wanfp4.errors import SettingsError, brief
from wanfp4.kernels import dispatch
from wanfp4.kernels.blackwell import verify
from wanfp4.policy import Policy
from wanfp4.processors.patch import patch

TEXT_TOKENS, TEXT_DIM = 512, 4096


@dataclass(frozen=True)
class Shape:
    """A Wan text-to-video transformer: heads of 128 channels, blocks, and the width of their feed-forward part."""

    heads: int
    layers: int
    ffn: int


# Of Wan2.1-T2V's published configurations; "tiny" is for machines without a GPU.
MODELS = {"1.3b": Shape(12, 30, 8960), "14b": Shape(40, 40, 13824), "tiny": Shape(2, 2, 256)}


# Attention kernels of the Hugging Face Hub: repository, version, function and its options, as diffusers takes them.
HUB: dict[str, tuple[str, int, str, dict[str, Any]]] = {
    "flash-attn2": ("kernels-community/flash-attn2", 3, "flash_attn_func", {}),
    "flash-attn3": ("kernels-community/flash-attn3", 1, "flash_attn_func", {}),
    "flash-attn4": ("kernels-community/flash-attn4", 0, "flash_attn_func", {}),
    "sageattention": ("SageAttention/sage-attention", 3, "sageattn", {"tensor_layout": "NHD"}),
}


def attention(
    pairs: Sequence[tuple[Policy, str | None]],
    tokens: int,
    heads: int,
    device: torch.device,
    rounds: int,
    *,
    peers: bool = True,
    hub: Sequence[str] = (),
) -> dict[str, Any]:
    """Seconds of attention for q, k, v [1, tokens, heads, 128] in BF16 from N(0, 1), as plain JSON values.

    pairs   policies, each with the backend that runs it (None: the fastest)
    peers   also time PyTorch's SDPA and what else is installed
    hub     also time these kernels of `HUB`, which are downloaded unless they are in the local cache

    Of each variant `median`, `low`, `high` (quartiles), `host`, `tflops` (4·S²·H·128 operations, whatever is computed),
    `backend`, `speed` over cuDNN's SDPA (over PyTorch's own choice where that cannot run), and on CUDA `extra_memory`,
    bytes at the peak beyond q, k and v; or an `error`.
    """
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(1, tokens, heads, verify.HEAD_DIM, device=device, generator=generator).bfloat16() for _ in range(3)
    )
    variants: dict[str, Callable[[], object]] = {}
    for policy, backend in pairs:
        variants[_name(policy, backend)] = functools.partial(
            dispatch.run, q, k, v, policy.numerics, guard=policy.guard, backend=backend
        )
    if peers:
        variants |= verify.sdpa_contenders(q, k, v) | others(q, k, v)
    variants |= from_hub(hub, q, k, v)
    times = verify.interleaved(variants, _clock(device), rounds)
    operations = 4 * tokens * tokens * heads * verify.HEAD_DIM
    for name, row in times.items():
        if "median" in row:
            row["tflops"] = operations / row["median"] / 1e12
            made, row["extra_memory"] = _peak(variants[name], device)
            if isinstance(made, dispatch.Outcome):
                row["backend"] = made.backend
    _compare(times, ("sdpa cudnn", "sdpa"))
    size = {"tokens": tokens, "heads": heads, "input_bytes": 3 * q.numel() * q.element_size()}
    return {**size, "rounds": rounds, "gpu": verify.smi(device), "times": times}


def others(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], object]]:
    """Attention of other packages, those that are installed, on [B, S, H, D] tensors."""
    found: dict[str, Callable[[], object]] = {}
    for name, module, function, options in (
        ("flash-attn-4", "flash_attn.cute", "flash_attn_func", {}),
        ("flash-attn-3", "flash_attn_interface", "flash_attn_func", {}),
        ("sageattention", "sageattention", "sageattn", {"tensor_layout": "NHD"}),
    ):
        try:
            call = getattr(importlib.import_module(module), function)
        except Exception:  # noqa: BLE001 - not installed, or made for another machine: there is nothing to time
            continue
        found[name] = functools.partial(call, q, k, v, **options)
    return found


def from_hub(names: Sequence[str], q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], object]]:
    """Attention of the Hugging Face Hub's kernels, names of `HUB`, on [B, S, H, D] tensors.

    Downloads what is not in the local cache and runs it. Raises SettingsError without the package `kernels`, and
    with the Hub's own words for a kernel that cannot be had.
    """
    if not names:
        return {}
    try:
        kernels = importlib.import_module("kernels")
    except ImportError as error:
        raise SettingsError(
            f"kernels of the Hub need the package of that name: pip install kernels ({error})"
        ) from error
    found: dict[str, Callable[[], object]] = {}
    for name in names:
        repository, version, function, options = HUB[name]
        try:
            call = getattr(kernels.get_kernel(repository, version=version), function)
        except Exception as error:  # no network, no build for this machine: whatever its library says
            raise SettingsError(f"cannot get {repository}, version {version}, from the Hub: {brief(error)}") from error
        found[f"hub {name}"] = functools.partial(call, q, k, v, **options)
    return found


def step(
    model: str,
    policies: Sequence[tuple[Policy, str | None]],
    size: tuple[int, int, int],
    device: torch.device,
    rounds: int,
    *,
    layers: int | None = None,
) -> dict[str, Any]:
    """Seconds of one forward pass of a Wan-shaped transformer with random BF16 weights, as plain JSON values.

    model   a name of `MODELS`, with `layers` blocks if given
    size    frames, height, width of the video in pixels

    The pipeline's own attention is the variant "own", and `speed` is over it; `memory` is the peak of a pass in bytes,
    weights included, on CUDA. Raises SettingsError for a model or size that there is not.
    """
    if model not in MODELS:
        raise SettingsError(f"there is no model {model!r} to build; {', '.join(MODELS)} are known")
    tokens = tokens_of(size)
    transformer = build(MODELS[model], layers, device)
    given = inputs(size, device)
    clock = _clock(device)
    times: dict[str, dict[str, Any]] = {}
    seconds: dict[str, list[float]] = {}

    def once() -> float:
        clock.start()
        try:
            with torch.inference_mode():
                transformer(**given, return_dict=False)
        finally:
            clock.stop()
            elapsed = clock.seconds()[0]
        return elapsed

    def with_policy(pair: tuple[Policy, str | None] | None) -> float:
        if pair is None:
            return once()
        with patch(transformer, pair[0], pair[1]):
            return once()

    variants = {"own": None} | {_name(*pair): pair for pair in policies}
    for name, pair in variants.items():  # compiles kernels, and finds what cannot run
        try:
            times[name] = {"memory": _peak(functools.partial(with_policy, pair), device, whole=True)[1]}
            seconds[name] = []
        except Exception as error:  # noqa: BLE001 - a variant that cannot run is a result
            times[name] = {"error": brief(error)}
    log, level = logging.getLogger("wanfp4"), logging.getLogger("wanfp4").level
    log.setLevel(logging.ERROR)  # every patch says anew that it emulates; once was enough
    try:
        for _ in range(rounds):
            for name in seconds:
                seconds[name].append(with_policy(variants[name]))
    finally:
        log.setLevel(level)
    for name, measured in seconds.items():
        low, median, high = statistics.quantiles(measured, n=4, method="inclusive")
        times[name] |= {"median": median, "low": low, "high": high}
    _compare(times, ("own",))
    about = {"model": model, "layers": len(transformer.blocks), "weights": "random", "size": list(size)}
    return {**about, "tokens": tokens, "rounds": rounds, "gpu": verify.smi(device), "times": times}


def tokens_of(size: tuple[int, int, int]) -> int:
    """Self-attention tokens of frames, height and width in pixels. Raises SettingsError for sizes that Wan lacks."""
    frames, height, width = size
    if frames % 4 != 1 or height % 16 or width % 16:
        raise SettingsError(f"Wan makes 4k+1 frames of multiples of 16 pixels, not {frames} of {height} x {width}")
    return ((frames - 1) // 4 + 1) * (height // 16) * (width // 16)


def inputs(size: tuple[int, int, int], device: torch.device) -> dict[str, Tensor]:
    """A forward pass's arguments from N(0, 1) in BF16, for frames, height and width in pixels, at timestep 500."""
    frames, height, width = size
    generator = torch.Generator(device).manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).bfloat16()

    return {
        "hidden_states": noise(1, 16, (frames - 1) // 4 + 1, height // 8, width // 8),
        "timestep": torch.tensor([500], device=device),
        "encoder_hidden_states": noise(1, TEXT_TOKENS, TEXT_DIM),
    }


def build(shape: Shape, layers: int | None, device: torch.device, text_dim: int = TEXT_DIM) -> Any:
    """A WanTransformer3DModel of this shape with random weights in BF16 on `device`."""
    from diffusers import WanTransformer3DModel

    with torch.device(device):
        model = WanTransformer3DModel(
            num_attention_heads=shape.heads,
            attention_head_dim=verify.HEAD_DIM,
            num_layers=layers or shape.layers,
            ffn_dim=shape.ffn,
            text_dim=text_dim,
        )
    return model.to(torch.bfloat16).eval()


def _name(policy: Policy, backend: str | None) -> str:
    return policy.name if backend is None else f"{policy.name} / {backend}"


def _clock(device: torch.device) -> verify.Clock:
    return verify.CudaClock() if device.type == "cuda" else verify.HostClock()


def _peak(call: Callable[[], object], device: torch.device, *, whole: bool = False) -> tuple[object, int | None]:
    """What a call gives, and the bytes that its peak adds to what was allocated (all of them if `whole`), on CUDA."""
    if device.type != "cuda":
        return call(), None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = 0 if whole else torch.cuda.memory_allocated(device)
    made = call()
    torch.cuda.synchronize(device)
    return made, torch.cuda.max_memory_allocated(device) - before


def _compare(times: dict[str, dict[str, Any]], baselines: Sequence[str]) -> None:
    """`speed` of every variant over the first of `baselines` that ran."""
    for name in baselines:
        if "median" in times.get(name, {}):
            for row in times.values():
                if "median" in row:
                    row["speed"] = times[name]["median"] / row["median"]
                    row["baseline"] = name
            return
