"""Wan pipelines as a whole: inspect, load, run to latents, decode.

info = inspect_model(folder)                        JSON only; `wanfp4.processors.model_info` has the details
pipe = load_pipeline(folder, device="cpu")
latents = generate_latents(pipe, "a red circle moving right", info.settings(steps=20), seed=0)
frames = decode_latents(pipe, latents)              uint8 [frames, height, width, 3]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from wanfp4.errors import ModelError, SettingsError, UnsupportedInputError, brief
from wanfp4.processors.model_files import broken_file
from wanfp4.processors.model_info import Expert, ModelInfo, Settings, info_of, inspect_model

__all__ = [
    "DTYPES",
    "OFFLOADS",
    "Expert",
    "ModelInfo",
    "Settings",
    "check_dtype",
    "check_offload",
    "check_seed",
    "decode_latents",
    "decode_with_vae",
    "generate_latents",
    "info_of",
    "inspect_model",
    "load_pipeline",
    "load_vae",
    "pick_device",
    "require_weights",
    "set_shift",
    "shifted",
    "unknown_words",
]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OFFLOADS = ("none", "model", "sequential")
MAX_SEED = 2**63 - 1

_T = TypeVar("_T")


def pick_device(name: str = "auto") -> torch.device:
    """`auto` (CUDA, then MPS, then CPU), `cpu`, `mps`, `cuda` or `cuda:N`.

    Raises SettingsError when the name means nothing or there is no such device here.
    """
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        return torch.device("cuda" if cuda else "mps" if mps else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (index and (kind != "cuda" or not index.isdecimal())):
        raise SettingsError(f"unknown device {name!r}; choose from auto, cpu, cuda, cuda:N, mps")
    if kind == "cuda":
        if not cuda:
            built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
            raise SettingsError(f"device {name!r} is not here: PyTorch {torch.__version__}, {built}, finds no GPU")
        if index and int(index) >= torch.cuda.device_count():
            raise SettingsError(f"device {name!r} is not here: PyTorch finds {torch.cuda.device_count()} GPU(s)")
    if kind == "mps" and not mps:
        raise SettingsError(f"device 'mps' is not here: PyTorch {torch.__version__} finds no Apple GPU")
    return torch.device(name)


def check_dtype(dtype: str) -> None:
    """Raise SettingsError unless `dtype` is `auto` or one of `DTYPES`."""
    if dtype != "auto" and dtype not in DTYPES:
        raise SettingsError(f"unknown dtype {dtype!r}; choose from auto, {', '.join(DTYPES)}")


def _dtypes(dtype: str, device: torch.device) -> Any:
    check_dtype(dtype)
    if dtype == "auto":
        # Wan is published with an FP32 VAE beside BF16 transformers; on a CPU the VAE is quicker in BF16, and the
        # bundled one loses less than 0.03 dB by it.
        vae = torch.bfloat16 if device.type == "cpu" else torch.float32
        return {"default": torch.bfloat16, "vae": vae}
    return DTYPES[dtype]


def _loading(info: ModelInfo, what: str, load: Callable[[], _T]) -> _T:
    try:
        return load()
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{what} does not fit into memory: {brief(error)}") from error
    # Whatever a part's files hold, its library fails on in its own way; tokenizers raises bare Exceptions.
    except Exception as error:
        fault = (broken_file(info.folder) if info.folder is not None else None) or brief(error)
        raise ModelError(f"cannot load {what}: {fault}") from error


def require_weights(info: ModelInfo, parts: tuple[str, ...] | None = None) -> None:
    """Raise ModelError when a model folder lacks weight files, of `parts` only if given. Nothing loads."""
    absent = [a for a in info.offline if parts is None or a.partition(":")[0] in parts]
    # A Hub id may lack weights here: diffusers downloads them.
    if absent and Path(info.model).expanduser().is_dir():
        raise ModelError(f"{info.model} is incomplete: {'; '.join(absent)}")


def _require_filled(model: str | Path, pipe: Any) -> None:
    """Raise ModelError when the files lacked some weights: diffusers then leaves them on `meta` without an error."""
    for name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module):
            empty = [key for key, tensor in part.state_dict().items() if tensor.is_meta]
            if empty:
                raise ModelError(
                    f"{model} is incomplete: the weight files of {name} lack {len(empty)} tensors ({empty[0]} …)"
                )


def load_pipeline(
    model: str | Path, *, device: str | torch.device = "auto", dtype: str = "auto", offload: str = "none"
) -> Any:
    """The diffusers pipeline of a folder or Hub id, ready to run on `device`.

    dtype    `bf16`, `fp16`, `fp32`, or `auto`: BF16, with an FP32 VAE on accelerators.
    offload  `none`, `model` (one component at a time on the device) or `sequential` (one layer at a time).

    Raises ModelError (missing, broken, not Wan, out of memory), SettingsError (device, dtype, offload),
    UnsupportedInputError (head_dim other than 128), all but broken weights before anything loads.
    """
    info = inspect_model(model)
    info.check_attention()
    place = pick_device(device) if isinstance(device, str) else device
    dtypes = _dtypes(dtype, place)
    check_offload(offload, place)
    require_weights(info)

    import diffusers

    cls = getattr(diffusers, info.pipeline_class, None)
    if cls is None:
        raise ModelError(f"{model} is a {info.pipeline_class}, which diffusers {diffusers.__version__} does not have")
    pipe = _loading(info, info.model, lambda: cls.from_pretrained(str(model), dtype=dtypes))
    _require_filled(model, pipe)
    if offload == "model":
        pipe.enable_model_cpu_offload(device=place)
    elif offload == "sequential":
        pipe.enable_sequential_cpu_offload(device=place)
    else:
        _loading(info, info.model, lambda: pipe.to(place))
    return pipe


def check_offload(offload: str, device: torch.device) -> None:
    """Raise SettingsError for an unknown way to offload, or one that has nothing to offload from."""
    if offload not in OFFLOADS:
        raise SettingsError(f"unknown offload {offload!r}; choose from {', '.join(OFFLOADS)}")
    if offload != "none" and device.type == "cpu":
        raise SettingsError(
            f"offload {offload!r} moves weights between an accelerator and the CPU; the device is the CPU"
        )


def load_vae(model: str | Path, *, device: str | torch.device = "auto", dtype: str = "auto") -> Any:
    """Only the VAE of a model, for decoding saved latents; errors as `load_pipeline`."""
    info = inspect_model(model)
    place = pick_device(device) if isinstance(device, str) else device
    dtypes = _dtypes(dtype, place)
    require_weights(info, ("vae",))

    from diffusers import AutoencoderKLWan

    chosen = dtypes["vae"] if isinstance(dtypes, dict) else dtypes
    return _loading(
        info,
        f"the VAE of {model}",
        lambda: AutoencoderKLWan.from_pretrained(str(model), subfolder="vae", dtype=chosen).to(place),
    )


def set_shift(pipe: Any, shift: float) -> None:
    """Give `pipe` a scheduler of the same class and config but for the flow shift.

    UniPC and the other solvers call it `flow_shift`, the flow-matching ones `shift`. Raises SettingsError when the
    scheduler has neither, or does not use it.
    """
    scheduler = pipe.scheduler
    name = next((n for n in ("flow_shift", "shift") if n in scheduler.config), None)
    cls = type(scheduler).__name__
    if name is None:
        raise SettingsError(f"scheduler {cls} has no flow shift to set")
    if name == "flow_shift" and not scheduler.config.get("use_flow_sigmas"):
        raise SettingsError(f"scheduler {cls} ignores the shift: its config has use_flow_sigmas=False")
    if scheduler.config.get("use_dynamic_shifting"):
        raise SettingsError(f"scheduler {cls} computes its own shift: its config has use_dynamic_shifting=True")
    if scheduler.config[name] != shift:
        pipe.scheduler = type(scheduler).from_config(scheduler.config, **{name: float(shift)})


@contextmanager
def shifted(pipe: Any, shift: float | None) -> Iterator[None]:
    """`set_shift` for a while; the pipeline's own scheduler object comes back. None changes nothing."""
    own = pipe.scheduler
    try:
        if shift is not None:
            set_shift(pipe, shift)
        yield
    finally:
        pipe.scheduler = own


def check_seed(seed: int) -> None:
    """Raise SettingsError unless a `torch.Generator` takes the seed the same way everywhere."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
        raise SettingsError(f"seed must be a whole number from 0 to {MAX_SEED}, not {seed!r}")


def generate_latents(
    pipe: Any, prompt: str, settings: Settings, seed: int, negative: str | None = None, **extra: Any
) -> Tensor:
    """Run a text-to-video pipeline up to its latents: float32 [1, C, frames, height, width] in latent cells.

    The noise comes from a CPU generator, so a seed means the same noise on every device. `negative` overrides
    `settings.negative`; `extra` goes to the pipeline's call. Its scheduler is as before afterwards.

    Raises SettingsError for settings the model cannot make and ModelError for pipelines that need more than a prompt.
    """
    info = info_of(pipe)
    info.check_text_to_video()
    info.check(settings)
    check_seed(seed)
    if info.boundary_ratio is not None:
        extra.setdefault("guidance_scale_2", settings.guidance_2)
    with shifted(pipe, settings.shift):
        latents: Tensor = pipe(
            prompt=prompt,
            negative_prompt=negative if negative is not None else settings.negative,
            height=settings.height,
            width=settings.width,
            num_frames=settings.frames,
            num_inference_steps=settings.steps,
            guidance_scale=settings.guidance,
            generator=torch.Generator("cpu").manual_seed(seed),
            output_type="latent",
            **extra,
        ).frames
    return latents


def decode_latents(pipe: Any, latents: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Latents [1, C, F, h, w] to uint8 frames [frames, height, width, 3], as diffusers' WanPipeline decodes them."""
    frames = decode_with_vae(pipe.vae, latents)
    pipe.maybe_free_model_hooks()
    return frames


@torch.no_grad()
def decode_with_vae(vae: Any, latents: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """`decode_latents` with nothing but the VAE. Raises UnsupportedInputError for latents that are not the VAE's."""
    from diffusers.utils.torch_utils import get_module_execution_device
    from diffusers.video_processor import VideoProcessor

    channels = vae.config.z_dim
    if latents.ndim != 5 or latents.shape[0] != 1 or latents.shape[1] != channels:
        raise UnsupportedInputError(
            f"latents must be [1, {channels}, frames, height, width] for this VAE; found {list(latents.shape)}"
        )
    latents = latents.to(get_module_execution_device(vae), vae.dtype)
    # diffusers rounds mean and deviation to the VAE's dtype before it uses them: the order is part of the result.
    mean = torch.tensor(vae.config.latents_mean).view(1, channels, 1, 1, 1).to(latents)
    inverse = 1.0 / torch.tensor(vae.config.latents_std).view(1, channels, 1, 1, 1).to(latents)
    video = vae.decode(latents / inverse + mean, return_dict=False)[0]
    frames = VideoProcessor(vae_scale_factor=vae.config.scale_factor_spatial).postprocess_video(video, output_type="np")
    return np.asarray((frames[0] * 255).round(), dtype=np.uint8)


def unknown_words(tokenizer: Any, prompt: str) -> list[str]:
    """Words of `prompt` that the tokenizer turns into its unknown token, in order and once each.

    Empty for tokenizers without one, and for those that spell every word out in pieces, as UMT5's does.
    """
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is None:
        return []
    if getattr(tokenizer, "is_fast", False):
        coded = tokenizer(prompt, add_special_tokens=False, return_offsets_mapping=True)
        spans = zip(coded.input_ids, coded["offset_mapping"], strict=True)
        found = [prompt[start:end] for code, (start, end) in spans if code == unknown]
    else:
        found = [w for w in prompt.split() if unknown in tokenizer(w, add_special_tokens=False).input_ids]
    return list(dict.fromkeys(found))
