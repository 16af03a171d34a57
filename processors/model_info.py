"""What a Wan model can make, read from its JSON configs before anything heavy loads.

`inspect_model` reads a diffusers folder or a Hugging Face Hub id, `info_of` a pipeline in memory. Both give a
`ModelInfo`: experts, layers, sizes it accepts, defaults people expect, self-attention length for given settings.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wanfp4.errors import ModelError, SettingsError, UnsupportedInputError
from wanfp4.processors.model_files import absent_weights, from_folder, from_hub, read_json

HEAD_DIM = 128
DEFAULTS_FILE = "wanfp4_defaults.json"
TEXT_TO_VIDEO = "WanPipeline"
_EXPERTS = ("transformer", "transformer_2")
_CONFIG = {"scheduler": "scheduler_config.json"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Settings:
    """How one clip is made. Sizes are in pixels; `ModelInfo.check` holds them against a model.

    frames      frames of the clip, 4k+1 for every Wan VAE.
    guidance    classifier-free guidance scale; at most 1 means none. `guidance_2` is the low-noise expert's (Wan2.2),
                None the same.
    shift       flow shift of the noise schedule; None keeps the scheduler's own.
    fps         frames per second of the file written; the model does not see it.
    negative    negative prompt; None or empty for none.

    Raises SettingsError for values that no model can take.
    """

    height: int = 480
    width: int = 832
    frames: int = 81
    steps: int = 50
    guidance: float = 5.0
    guidance_2: float | None = None
    shift: float | None = None
    fps: int = 16
    negative: str | None = None

    def __post_init__(self) -> None:
        for name, high in (("height", 16384), ("width", 16384), ("frames", 16384), ("steps", 1000), ("fps", 240)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
                raise SettingsError(f"{name} must be a whole number from 1 to {high}, not {value!r}")
        for name, low in (("guidance", 0.0), ("guidance_2", 0.0), ("shift", 0.01)):
            value = getattr(self, name)
            if value is None and name != "guidance":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= 100:
                raise SettingsError(f"{name} must be a number from {low:g} to 100, not {value!r}")
            object.__setattr__(self, name, float(value))
        if self.negative is not None and not isinstance(self.negative, str):
            raise SettingsError(f"negative must be a text, not {self.negative!r}")

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain JSON values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Expert:
    """One transformer. `patch` is (time, height, width) in latent cells."""

    name: str
    transformer_class: str
    heads: int
    layers: int
    head_dim: int
    patch: tuple[int, int, int]
    rope_limit: int


@dataclass(frozen=True)
class ModelInfo:
    """What is known of a model without its weights.

    model            as it was named: a folder or a Hub id; the class of a pipeline that was built in memory.
    folder           where its files are, None for a pipeline in memory.
    experts          `transformer` (high noise in Wan2.2) and `transformer_2`, those that exist.
    spatial          pixels per latent cell; `temporal` frames per latent frame after the first.
    size_multiple    (height, width) multiples that a clip must have.
    defaults         settings people expect; `source` says where they come from.
    prompt           an example prompt, when the model's own defaults name one.
    offline          components whose weights are not on this disk, each with what was found.
    """

    model: str
    pipeline_class: str
    folder: Path | None
    experts: tuple[Expert, ...]
    spatial: int
    temporal: int
    latent_channels: int
    scheduler_class: str
    scheduler_shift: float | None
    boundary_ratio: float | None
    expand_timesteps: bool
    defaults: Settings = field(default_factory=Settings)
    source: str = ""
    prompt: str | None = None
    offline: tuple[str, ...] = ()

    @property
    def size_multiple(self) -> tuple[int, int]:
        # diffusers refuses anything off 16 before it looks at the VAE and the patch, so both conditions hold.
        _, height, width = self.experts[0].patch
        return math.lcm(16, self.spatial * height), math.lcm(16, self.spatial * width)

    @property
    def text_to_video(self) -> bool:
        """True when the pipeline makes a clip from a prompt alone."""
        return self.pipeline_class == TEXT_TO_VIDEO

    def settings(self, **given: Any) -> Settings:
        """The defaults with what is `given` and not None in their place.

        The default shift of single-expert Wan2.1 models follows the size asked for: 3 up to 480p, 5 above.
        """
        given = {name: value for name, value in given.items() if value is not None}
        unknown = sorted(set(given) - {f.name for f in dataclasses.fields(Settings)})
        if unknown:
            known = ", ".join(f.name for f in dataclasses.fields(Settings))
            raise SettingsError(f"there is no setting {', '.join(unknown)}; the settings are {known}")
        chosen = dataclasses.replace(self.defaults, **given)
        if "shift" not in given and self.source.startswith("Wan2.1"):
            chosen = dataclasses.replace(chosen, shift=_shift_for(chosen.height, chosen.width))
        return chosen

    def latent_shape(self, settings: Settings) -> tuple[int, int, int]:
        """(frames, height, width) of the latent."""
        frames = (settings.frames - 1) // self.temporal + 1
        return frames, settings.height // self.spatial, settings.width // self.spatial

    def grid(self, settings: Settings) -> tuple[int, int, int]:
        """(frames, height, width) in patches, the transformer's positions."""
        (frames, height, width), (t, h, w) = self.latent_shape(settings), self.experts[0].patch
        return frames // t, height // h, width // w

    def tokens(self, settings: Settings) -> int:
        """Self-attention length: patches of one clip."""
        return math.prod(
            size // patch for size, patch in zip(self.latent_shape(settings), self.experts[0].patch, strict=True)
        )

    def check(self, settings: Settings) -> None:
        """Raise SettingsError, naming the nearest valid values, unless the model can make this clip."""
        faults = []
        for name, multiple in zip(("height", "width"), self.size_multiple, strict=True):
            value = getattr(settings, name)
            if value % multiple:
                faults.append(f"{name} {value} is not a multiple of {multiple}: take {_nearest(value, multiple)}")
        if (settings.frames - 1) % self.temporal:
            near = _nearest(settings.frames, self.temporal, 1)
            faults.append(f"frames {settings.frames} is not of the form {self.temporal}k+1: take {near}")
        if settings.guidance_2 is not None and self.boundary_ratio is None:
            faults.append("guidance_2 is for models with two experts, and this one has a single transformer")
        limit = min(e.rope_limit for e in self.experts)
        units = (self.temporal, *self.size_multiple)
        for name, cells, unit in zip(("frames", "height", "width"), self.grid(settings), units, strict=True):
            if cells > limit:
                most = (limit - 1) * unit + 1 if name == "frames" else limit * unit
                faults.append(
                    f"{name} {getattr(settings, name)} is beyond this model's {limit} positions: at most {most}"
                )
        if faults:
            raise SettingsError("; ".join(faults))

    def check_attention(self) -> None:
        """Raise UnsupportedInputError unless every expert has the head size that 4-bit attention needs."""
        for expert in self.experts:
            if expert.head_dim != HEAD_DIM:
                raise UnsupportedInputError(
                    f"{expert.name} of {self.model} has head_dim {expert.head_dim}; 4-bit attention needs {HEAD_DIM}"
                )

    def check_text_to_video(self) -> None:
        """Raise ModelError unless a prompt is all the pipeline needs."""
        if not self.text_to_video:
            raise ModelError(
                f"{self.model} is a {self.pipeline_class}, and only text-to-video models ({TEXT_TO_VIDEO}) run here; "
                "load it with diffusers in a script of your own and call wanfp4.patch(pipe)"
            )

    def to_dict(self) -> dict[str, Any]:
        """For receipts and plans: plain JSON values, without the folder's place on this machine."""
        data = dataclasses.asdict(self)
        del data["folder"], data["offline"], data["prompt"]
        return {**data, "size_multiple": list(self.size_multiple), "defaults": self.defaults.to_dict()}


def _nearest(value: int, multiple: int, offset: int = 0) -> str:
    """The valid values around `value`, those of the form k·multiple + offset."""
    below = (value - offset) // multiple * multiple + offset
    above = below + multiple
    return f"{below} or {above}" if below >= 1 else str(above)


def _shift_for(height: int, width: int) -> float:
    # 480 × 832 is 400 thousand pixels and 720 × 1280 is 922 thousand; the published shifts are for those two.
    return 3.0 if height * width <= 600_000 else 5.0


def inspect_model(model: str | Path) -> ModelInfo:
    """Read the JSON configs of a diffusers folder or Hub id; no weights load, and torch is not imported.

    Raises ModelError when there is no such folder or id, a config is missing or broken, or it is not a Wan pipeline.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return _build(str(model), folder, lambda name: from_folder(folder, name))
    if folder.exists():
        raise ModelError(f"{str(model)!r} is a file; a model is a diffusers folder with model_index.json, or a Hub id")
    # "models/wan" beside a folder models/ is a path with a slip in it; asking the Hub for it would only take time.
    if isinstance(model, Path) or not _HUB_ID.fullmatch(model) or folder.parent.is_dir():
        raise ModelError(
            f"there is no folder {str(model)!r}; a model is a diffusers folder with model_index.json, "
            "or a Hugging Face Hub id such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
        )
    folder = from_hub(model, "model_index.json").parent
    return _build(model, folder, lambda name: from_hub(model, name))


def info_of(pipe: Any) -> ModelInfo:
    """The same for a diffusers pipeline in memory. Raises ModelError when it holds no Wan transformer."""
    index: dict[str, Any] = {"_class_name": type(pipe).__name__}
    configs: dict[str, Mapping[str, Any]] = {}
    for name in (*_EXPERTS, "vae", "scheduler"):
        part = getattr(pipe, name, None)
        if part is not None:
            index[name] = ["", type(part).__name__]
            configs[name] = dict(part.config)
    for name in ("boundary_ratio", "expand_timesteps"):
        index[name] = getattr(pipe.config, name, None)
    origin = str(getattr(pipe, "name_or_path", None) or "")
    info = _assemble(origin or type(pipe).__name__, None, index, configs.__getitem__)
    return _with_own_defaults(info, Path(origin)) if origin else info


def _build(model: str, folder: Path, locate: Callable[[str], Path]) -> ModelInfo:
    index = read_json(locate("model_index.json"))
    info = _assemble(model, folder, index, lambda name: read_json(locate(f"{name}/{_CONFIG.get(name, 'config.json')}")))
    parts = [name for name in (*_EXPERTS, "vae", "text_encoder", "image_encoder") if _class_of(index, name)]
    return _with_own_defaults(dataclasses.replace(info, offline=absent_weights(folder, parts)), folder)


def _class_of(index: Mapping[str, Any], name: str) -> str | None:
    entry = index.get(name)
    return entry[1] if isinstance(entry, (list, tuple)) and len(entry) == 2 and isinstance(entry[1], str) else None


def _assemble(
    model: str, folder: Path | None, index: Mapping[str, Any], config: Callable[[str], Mapping[str, Any]]
) -> ModelInfo:
    pipeline_class = index.get("_class_name")
    classes = {name: _class_of(index, name) for name in _EXPERTS}
    wan = [
        name for name, cls in classes.items() if cls and cls.startswith("Wan") and cls.endswith("Transformer3DModel")
    ]
    if not wan or not isinstance(pipeline_class, str):
        held = ", ".join(cls for cls in classes.values() if cls) or "no transformer"
        raise ModelError(f"{model} is not a Wan pipeline: its class is {pipeline_class} and it holds {held}")
    # Missing keys have the defaults of diffusers' own classes: published configs leave some of them out.
    experts = tuple(_expert(name, str(classes[name]), _Config(model, name, config(name))) for name in wan)
    vae = _Config(model, "vae", config("vae") if _class_of(index, "vae") else {})
    scheduler = _Config(model, "scheduler", config("scheduler") if _class_of(index, "scheduler") else {})
    shift = "flow_shift" if "flow_shift" in scheduler.values else "shift"
    info = ModelInfo(
        model=model,
        pipeline_class=pipeline_class,
        folder=folder,
        experts=experts,
        spatial=vae.whole("scale_factor_spatial", 8),
        temporal=vae.whole("scale_factor_temporal", 4),
        latent_channels=vae.whole("z_dim", 16),
        scheduler_class=_class_of(index, "scheduler") or "none",
        scheduler_shift=scheduler.number(shift),
        boundary_ratio=_Config(model, "model_index.json", index).number("boundary_ratio"),
        expand_timesteps=bool(index.get("expand_timesteps")),
    )
    defaults, source = _known_defaults(info)
    return dataclasses.replace(info, defaults=defaults, source=source)


@dataclass(frozen=True)
class _Config:
    """A config whose values are checked as they are read; each ModelError names model, part, field and value."""

    model: str
    part: str
    values: Mapping[str, Any]

    def whole(self, name: str, default: int) -> int:
        """A whole number from 1; null is what a missing field is."""
        value = self.values.get(name)
        return default if value is None else self._whole(name, value)

    def number(self, name: str) -> float | None:
        """A finite number from 0, None where there is none."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise self._error(f"{name} must be a number from 0, not {value!r}")
        return float(value)

    def triple(self, name: str, default: tuple[int, int, int]) -> tuple[int, int, int]:
        """Three whole numbers from 1."""
        values = self.values.get(name, default)
        if not isinstance(values, (list, tuple)) or len(values) != 3:
            raise self._error(f"{name} must be three whole numbers, not {values!r}")
        first, second, third = (self._whole(name, value) for value in values)
        return first, second, third

    def _whole(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._error(f"{name} must hold whole numbers from 1, not {value!r}")
        return value

    def _error(self, fault: str) -> ModelError:
        return ModelError(f"the config of {self.part} in {self.model} is wrong: {fault}")


def _expert(name: str, cls: str, config: _Config) -> Expert:
    return Expert(
        name=name,
        transformer_class=cls,
        heads=config.whole("num_attention_heads", 40),
        layers=config.whole("num_layers", 40),
        head_dim=config.whole("attention_head_dim", 128),
        patch=config.triple("patch_size", (1, 2, 2)),
        rope_limit=config.whole("rope_max_seq_len", 1024),
    )


def _known_defaults(info: ModelInfo) -> tuple[Settings, str]:
    """Settings published with the Wan models, recognised by their shape, and the model's name."""
    shape = (info.experts[0].heads, info.experts[0].layers)
    text = info.text_to_video
    if info.expand_timesteps and shape == (24, 30):
        return Settings(704, 1280, 121, 50, 5.0, shift=5.0, fps=24), "Wan2.2 TI2V 5B"
    if info.boundary_ratio is not None and shape == (40, 40):
        if text:
            return Settings(720, 1280, 81, 40, 4.0, 3.0, shift=12.0), "Wan2.2 T2V A14B"
        return Settings(720, 1280, 81, 40, 3.5, 3.5, shift=5.0), "Wan2.2 I2V A14B"
    if info.boundary_ratio is None and shape in ((12, 30), (40, 40)):
        height, width = (480, 832) if shape == (12, 30) else (720, 1280)
        name = f"Wan2.1 {'T2V' if text else 'I2V'} {'1.3B' if shape == (12, 30) else '14B'}"
        return Settings(height, width, 81, 50 if text else 40, 5.0, shift=_shift_for(height, width)), name
    return Settings(shift=info.scheduler_shift), "diffusers' WanPipeline, as the model is none of Wan's own"


def _with_own_defaults(info: ModelInfo, folder: Path) -> ModelInfo:
    """`wanfp4_defaults.json`, where a model folder has one: any of the settings, and an example `prompt`."""
    path = folder / DEFAULTS_FILE
    if not path.is_file():
        return info
    data = read_json(path)
    prompt = data.pop("prompt", None)
    known = [f.name for f in dataclasses.fields(Settings)]
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise ModelError(f"{path} has no field {', '.join(unknown)}; its fields are {', '.join([*known, 'prompt'])}")
    if prompt is not None and not isinstance(prompt, str):
        raise ModelError(f"{path}: prompt must be a text, not {prompt!r}")
    try:
        defaults = dataclasses.replace(info.defaults, **data)
        info.check(defaults)
    except SettingsError as error:
        raise ModelError(f"{path}: {error}") from None
    return dataclasses.replace(info, defaults=defaults, source=DEFAULTS_FILE, prompt=prompt)
