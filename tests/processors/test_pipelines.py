"""What is known of a model before it loads, and running one: settings, defaults, shift, latents, frames."""

import json
import shutil

import huggingface_hub
import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from huggingface_hub.errors import LocalEntryNotFoundError
from tiny import FRAMES, HEIGHT, TOKENS, WIDTH, tiny_pipeline, tiny_tokenizer

import wanfp4
from wanfp4.errors import ModelError, SettingsError, UnsupportedInputError
from wanfp4.processors import model_info, pipelines
from wanfp4.processors.pipelines import Settings, info_of, inspect_model
from wanfp4.samples import bundled

CLIP = Settings(HEIGHT, WIDTH, FRAMES, steps=2, guidance=4.0)
UNIPC = ["diffusers", "UniPCMultistepScheduler"]


def wan_folder(
    folder, heads, layers, *, pipeline="WanPipeline", two=False, ratio=None, expand=False, vae=None, shift=3.0
):
    """JSON configs as published with a Wan model, which leave out what is at diffusers' defaults; no weights."""
    transformer = ["diffusers", "WanTransformer3DModel"]
    index = {
        "_class_name": pipeline,
        "scheduler": UNIPC,
        "transformer": transformer,
        "transformer_2": transformer if two else [None, None],
        "vae": ["diffusers", "AutoencoderKLWan"],
        "boundary_ratio": ratio,
        "expand_timesteps": expand,
    }
    configs = {
        "model_index.json": index,
        "transformer/config.json": {"num_attention_heads": heads, "num_layers": layers, "attention_head_dim": 128},
        "vae/config.json": vae or {},
        "scheduler/scheduler_config.json": {"flow_shift": shift, "use_flow_sigmas": True},
    }
    if two:
        configs["transformer_2/config.json"] = configs["transformer/config.json"]
    for name, data in configs.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(data))
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tiny_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture
def copy_of_saved(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


# ---- what the configs say --------------------------------------------------------------------------------------


WAN = {
    # name: (heads, layers, more), defaults (height, width, frames, steps, guidance, guidance_2, shift, fps)
    "Wan2.1 T2V 1.3B": ((12, 30, {}), (480, 832, 81, 50, 5.0, None, 3.0, 16)),
    "Wan2.1 T2V 14B": ((40, 40, {}), (720, 1280, 81, 50, 5.0, None, 5.0, 16)),
    "Wan2.1 I2V 14B": ((40, 40, {"pipeline": "WanImageToVideoPipeline"}), (720, 1280, 81, 40, 5.0, None, 5.0, 16)),
    "Wan2.2 T2V A14B": ((40, 40, {"two": True, "ratio": 0.875}), (720, 1280, 81, 40, 4.0, 3.0, 12.0, 16)),
    "Wan2.2 TI2V 5B": (
        (24, 30, {"expand": True, "vae": {"scale_factor_spatial": 16, "z_dim": 48}}),
        (704, 1280, 121, 50, 5.0, None, 5.0, 24),
    ),
}


@pytest.mark.parametrize("name", WAN)
def test_published_models_are_recognised_and_get_their_defaults(tmp_path, name):
    (heads, layers, more), expected = WAN[name]
    info = inspect_model(wan_folder(tmp_path, heads, layers, **more))
    assert info.source == name
    s = info.settings()
    assert (s.height, s.width, s.frames, s.steps, s.guidance, s.guidance_2, s.shift, s.fps) == expected
    info.check(s)
    assert len(info.experts) == 1 + bool(more.get("two"))
    assert info.text_to_video == (name != "Wan2.1 I2V 14B")


@pytest.mark.parametrize(
    ("name", "size", "tokens", "multiple"),
    [
        ("Wan2.1 T2V 1.3B", (480, 832, 81), 32_760, 16),
        ("Wan2.1 T2V 14B", (720, 1280, 81), 75_600, 16),
        ("Wan2.2 TI2V 5B", (704, 1280, 121), 27_280, 32),
    ],
)
def test_tokens_and_size_multiples_are_those_of_the_model(tmp_path, name, size, tokens, multiple):
    (heads, layers, more), _ = WAN[name]
    info = inspect_model(wan_folder(tmp_path, heads, layers, **more))
    height, width, frames = size
    assert info.tokens(info.settings(height=height, width=width, frames=frames)) == tokens
    assert info.size_multiple == (multiple, multiple)
    info.check(info.settings(height=height + multiple))
    with pytest.raises(SettingsError, match=f"height {height + 8} is not a multiple of {multiple}: take {height} or"):
        info.check(info.settings(height=height + 8))


def test_the_shift_follows_the_size_for_wan21_and_stays_where_it_was_asked_for(tmp_path):
    info = inspect_model(wan_folder(tmp_path / "14b", 40, 40))
    assert info.settings(height=480, width=832).shift == 3.0
    assert info.settings(height=720, width=1280).shift == 5.0
    assert info.settings(height=480, width=832, shift=7.0).shift == 7.0
    wan22 = inspect_model(wan_folder(tmp_path / "a14b", 40, 40, two=True, ratio=0.875))
    assert wan22.settings(height=480, width=832).shift == 12.0


def test_a_model_of_unknown_shape_keeps_its_schedulers_shift(tmp_path):
    info = inspect_model(wan_folder(tmp_path, 3, 7, shift=4.5))
    assert info.settings().shift == 4.5
    assert "none of Wan's own" in info.source


def test_the_folders_own_defaults_win_and_are_checked(tmp_path):
    folder = wan_folder(tmp_path, 12, 30)
    own = folder / "wanfp4_defaults.json"
    own.write_text(json.dumps({"height": 96, "width": 96, "frames": 5, "prompt": "a hill"}))
    info = inspect_model(folder)
    assert info.settings() == Settings(96, 96, 5, 50, 5.0, shift=3.0)
    assert info.prompt == "a hill"
    for content, sentence in (
        ({"hight": 96}, "has no field hight; its fields are height, width"),
        ({"height": 90}, "height 90 is not a multiple of 16: take 80 or 96"),
        ({"steps": "many"}, "steps must be a whole number"),
        ({"prompt": 1}, "prompt must be a text"),
        ([], "must hold a JSON object, not list"),
    ):
        own.write_text(json.dumps(content))
        with pytest.raises(ModelError, match=sentence):
            inspect_model(folder)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"height": 79}, r"height 79 is not a multiple of 16: take 64 or 80"),
        ({"width": 8}, r"width 8 is not a multiple of 16: take 16$"),
        ({"frames": 10}, r"frames 10 is not of the form 4k\+1: take 9 or 13"),
        ({"frames": 3}, r"frames 3 is not of the form 4k\+1: take 1 or 5"),
        ({"frames": 257}, r"frames 257 is beyond this model's 64 positions: at most 253"),
        ({"height": 1040}, r"height 1040 is beyond this model's 64 positions: at most 1024"),
        ({"guidance_2": 3.0}, r"guidance_2 is for models with two experts"),
    ],
)
def test_check_names_the_nearest_valid_values(changes, sentence):
    info = info_of(tiny_pipeline())
    with pytest.raises(SettingsError, match=sentence):
        info.check(Settings(**{**CLIP.to_dict(), **changes}))


def test_the_largest_clip_that_check_allows_does_run():
    info = info_of(tiny_pipeline(layers=1))
    longest = Settings(16, 16, 253, steps=1, guidance=1.0)
    info.check(longest)
    latents = pipelines.generate_latents(tiny_pipeline(layers=1), "a", longest, 0, max_sequence_length=8)
    assert latents.shape == (1, 16, 64, 2, 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 0},
        {"steps": True},
        {"steps": 2.0},
        {"height": -16},
        {"guidance": float("nan")},
        {"fps": 241},
        {"shift": 0},
    ],
)
def test_values_no_model_takes_are_refused(changes):
    with pytest.raises(SettingsError, match=f"{next(iter(changes))} must be a"):
        Settings(**changes)


def test_settings_that_do_not_exist_are_refused():
    with pytest.raises(SettingsError, match="there is no setting hight; the settings are height, width"):
        info_of(tiny_pipeline()).settings(hight=3)


def test_a_pipeline_in_memory_is_known_as_well_as_its_folder(saved):
    (saved / "wanfp4_defaults.json").write_text(
        json.dumps({"height": 80, "width": 112, "frames": 9, "prompt": "a red"})
    )
    try:
        disk = inspect_model(saved)
        memory = info_of(pipelines.load_pipeline(saved, device="cpu"))
    finally:
        (saved / "wanfp4_defaults.json").unlink()
    assert memory.to_dict() == disk.to_dict()
    assert memory.prompt == "a red"
    assert memory.tokens(disk.settings()) == TOKENS
    built = info_of(tiny_pipeline(dual=True))
    assert [expert.name for expert in built.experts] == ["transformer", "transformer_2"]
    assert built.boundary_ratio == 0.875


def test_what_is_not_a_wan_pipeline_is_refused_with_what_it_is(tmp_path):
    folder = wan_folder(tmp_path, 12, 30)
    index = json.loads((folder / "model_index.json").read_text())

    def refused(sentence, **changes):
        (folder / "model_index.json").write_text(json.dumps({**index, **changes}))
        with pytest.raises(ModelError, match=sentence):
            inspect_model(folder)

    other = {"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]}
    refused("its class is FluxPipeline and it holds FluxTransformer2DModel", **other)
    refused("it holds no transformer", transformer=[None, None])
    refused("names transformer_2, but transformer_2/config.json is missing", transformer_2=index["transformer"])
    (folder / "transformer/config.json").write_text('{"num_attention_heads": "many"}')
    refused("the config of transformer in .* is wrong: num_attention_heads must hold whole numbers from 1, not 'many'")
    (folder / "transformer/config.json").write_text("[")
    refused("cannot read .*config.json")
    with pytest.raises(ModelError, match=r"is not a diffusers model: it has no model_index.json \(found config.json\)"):
        inspect_model(folder / "vae")
    with pytest.raises(ModelError, match="is a file; a model is a diffusers folder"):
        inspect_model(folder / "model_index.json")


def test_head_dim_64_is_refused_before_anything_loads(copy_of_saved):
    config = copy_of_saved / "transformer/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "attention_head_dim": 64}))
    for weights in copy_of_saved.rglob("*.safetensors"):
        weights.unlink()
    with pytest.raises(UnsupportedInputError, match=r"transformer of .* has head_dim 64; 4-bit attention needs 128"):
        pipelines.load_pipeline(copy_of_saved, device="cpu")


# ---- Hub ids ---------------------------------------------------------------------------------------------------


def test_a_hub_id_reads_configs_through_the_hub_library(tmp_path, monkeypatch):
    folder = wan_folder(tmp_path, 12, 30)
    asked = []

    def download(repo, name):
        asked.append((repo, name))
        return str(folder / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    info = inspect_model("Wan-AI/Wan2.1-T2V-1.3B-Diffusers")
    assert info.source == "Wan2.1 T2V 1.3B"
    assert ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "vae/config.json") in asked
    assert info.offline[0] == "transformer: no weights in transformer/"


def test_a_hub_that_is_out_of_reach_is_said_to_be(monkeypatch):
    def download(repo, name):
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(ModelError, match="'someone/model' is not a folder here, is not in the local cache"):
        inspect_model("someone/model")


def test_a_slip_in_a_path_does_not_ask_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a: pytest.fail("asked the Hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for name in ("models/wan", "wan", "/nowhere/wan", "a/b/c", tmp_path / "gone"):
        with pytest.raises(ModelError, match="there is no folder"):
            inspect_model(name)


# ---- loading ---------------------------------------------------------------------------------------------------


def test_load_takes_dtype_by_name_and_auto_is_bf16(saved):
    for dtype, expected in (("auto", torch.bfloat16), ("fp32", torch.float32), ("fp16", torch.float16)):
        pipe = pipelines.load_pipeline(saved, device="cpu", dtype=dtype)
        assert pipe.transformer.dtype == pipe.vae.dtype == expected


def test_broken_missing_and_incomplete_weights_are_model_errors(copy_of_saved):
    weights = copy_of_saved / "vae/diffusion_pytorch_model.safetensors"
    other = copy_of_saved / "transformer/diffusion_pytorch_model.safetensors"
    weights.write_bytes(b"broken")
    with pytest.raises(ModelError, match=r"cannot load .*: vae/diffusion_pytorch_model.safetensors holds no weights: "):
        pipelines.load_pipeline(copy_of_saved, device="cpu")
    shutil.copy(other, weights)
    with pytest.raises(ModelError, match=r"the weight files of vae lack \d+ tensors"):
        pipelines.load_pipeline(copy_of_saved, device="cpu")
    weights.unlink()
    with pytest.raises(ModelError, match="is incomplete: vae: no weights in vae/"):
        pipelines.load_pipeline(copy_of_saved, device="cpu")
    with pytest.raises(ModelError, match="is incomplete: vae: no weights in vae/"):
        pipelines.load_vae(copy_of_saved, device="cpu")


def test_a_missing_shard_is_named(copy_of_saved):
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    (copy_of_saved / "transformer/diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    (copy_of_saved / "transformer/part-1.safetensors").touch()
    expected = r"transformer: 1 of 2 weight files are missing \(part-2.safetensors …\)"
    with pytest.raises(ModelError, match=expected):
        pipelines.load_pipeline(copy_of_saved, device="cpu")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"device": "xpu"}, "unknown device 'xpu'"),
        ({"dtype": "int4"}, "unknown dtype 'int4'"),
        ({"offload": "model"}, "the device is the CPU"),
        ({"offload": "some"}, "unknown offload 'some'"),
    ],
)
def test_unknown_ways_to_load_are_refused(saved, arguments, sentence):
    with pytest.raises(SettingsError, match=sentence):
        pipelines.load_pipeline(saved, **{"device": "cpu", **arguments})


def test_devices_that_are_not_here_are_refused_with_what_was_found(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert pipelines.pick_device("auto").type == "cpu"
    with pytest.raises(SettingsError, match=r"'cuda' is not here: PyTorch .* finds no GPU"):
        pipelines.pick_device("cuda")
    with pytest.raises(SettingsError, match="'mps' is not here"):
        pipelines.pick_device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pipelines.pick_device("auto").type == "cuda"
    assert pipelines.pick_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(SettingsError, match=r"'cuda:2' is not here: PyTorch finds 2 GPU"):
        pipelines.pick_device("cuda:2")


# ---- running ---------------------------------------------------------------------------------------------------


def test_latents_are_those_of_the_pipelines_own_call():
    pipe = tiny_pipeline()
    latents = pipelines.generate_latents(pipe, "a red circle", CLIP, 5, max_sequence_length=32)
    own = pipe(
        prompt="a red circle",
        height=HEIGHT,
        width=WIDTH,
        num_frames=FRAMES,
        num_inference_steps=2,
        guidance_scale=4.0,
        generator=torch.Generator().manual_seed(5),
        max_sequence_length=32,
        output_type="latent",
    ).frames
    assert latents.dtype == torch.float32
    assert torch.equal(latents, own)
    assert not torch.equal(latents, pipelines.generate_latents(pipe, "a red circle", CLIP, 6, max_sequence_length=32))


def test_two_experts_get_their_own_guidance():
    pipe = tiny_pipeline(dual=True, boundary_ratio=0.8)
    both = {**CLIP.to_dict(), "steps": 3}
    one = pipelines.generate_latents(pipe, "a", Settings(**both), 0, max_sequence_length=8)
    two = pipelines.generate_latents(pipe, "a", Settings(**{**both, "guidance_2": 2.0}), 0, max_sequence_length=8)
    assert not torch.equal(one, two)


def test_generate_refuses_bad_settings_seeds_and_pipelines():
    pipe = tiny_pipeline()
    with pytest.raises(SettingsError, match="take 96 or 112"):
        pipelines.generate_latents(pipe, "a", Settings(80, 100, 9), 0)
    for seed in (-1, 2**63, 1.0, True):
        with pytest.raises(SettingsError, match="seed must be a whole number"):
            pipelines.generate_latents(pipe, "a", CLIP, seed)
    pipe.__class__ = type("WanVideoToVideoPipeline", (type(pipe),), {})
    with pytest.raises(ModelError, match=r"only text-to-video models .*wanfp4.patch\(pipe\)"):
        pipelines.generate_latents(pipe, "a", CLIP, 0)


def test_frames_are_those_of_the_pipelines_own_decoding():
    pipe = tiny_pipeline()
    latents = pipelines.generate_latents(pipe, "a red circle", CLIP, 0, max_sequence_length=32)
    frames = pipelines.decode_latents(pipe, latents)
    pictures = pipe(
        prompt="a red circle",
        height=HEIGHT,
        width=WIDTH,
        num_frames=FRAMES,
        num_inference_steps=2,
        guidance_scale=4.0,
        generator=torch.Generator().manual_seed(0),
        max_sequence_length=32,
        output_type="pil",
    ).frames[0]
    assert frames.dtype == np.uint8
    assert frames.shape == (FRAMES, HEIGHT, WIDTH, 3)
    assert np.array_equal(frames, np.stack([np.asarray(picture) for picture in pictures]))


def test_the_vae_alone_decodes_the_same(saved):
    pipe = pipelines.load_pipeline(saved, device="cpu", dtype="bf16")
    latents = torch.randn(1, 16, 2, 6, 8, generator=torch.Generator().manual_seed(0))
    vae = pipelines.load_vae(saved, device="cpu", dtype="bf16")
    assert np.array_equal(pipelines.decode_with_vae(vae, latents), pipelines.decode_latents(pipe, latents))
    for shape in ((16, 2, 6, 8), (2, 16, 2, 6, 8), (1, 48, 2, 6, 8)):
        with pytest.raises(UnsupportedInputError, match=r"latents must be \[1, 16, frames, height, width\]"):
            pipelines.decode_with_vae(vae, torch.zeros(shape))


@pytest.mark.parametrize("scheduler", [UniPCMultistepScheduler, FlowMatchEulerDiscreteScheduler])
def test_set_shift_keeps_the_scheduler_and_moves_the_sigmas(scheduler):
    pipe = tiny_pipeline(shift=3.0)
    if scheduler is FlowMatchEulerDiscreteScheduler:
        pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)

    def sigmas():
        pipe.scheduler.set_timesteps(4)
        return pipe.scheduler.sigmas.clone()

    before, config = sigmas(), dict(pipe.scheduler.config)
    pipelines.set_shift(pipe, 8.0)
    assert type(pipe.scheduler) is scheduler
    name = "shift" if scheduler is FlowMatchEulerDiscreteScheduler else "flow_shift"
    assert dict(pipe.scheduler.config) == {**config, name: 8.0}
    after = sigmas()
    assert (after[1:-1] > before[1:-1]).all()
    # Shift s maps the unshifted σ to s·σ / (1 + (s − 1)·σ): it multiplies σ / (1 − σ) by s. FlowMatchEuler's grid ends
    # at a σ that depends on the shift itself, so there only the first step is close to that.
    ratio = (after / (1 - after) / (before / (1 - before)))[1:-1]
    if scheduler is UniPCMultistepScheduler:
        assert torch.allclose(ratio, torch.full_like(ratio, 8 / 3), rtol=1e-4)
    else:
        assert float(ratio[0]) == pytest.approx(8 / 3, rel=0.02)


def test_shifted_is_for_a_while_and_generate_leaves_the_scheduler_alone():
    pipe = tiny_pipeline(shift=3.0)
    own = pipe.scheduler

    def fail_inside():
        with pipelines.shifted(pipe, 7.0):
            assert pipe.scheduler.config.flow_shift == 7.0
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert pipe.scheduler is own
    short = {"max_sequence_length": 8}
    plain = pipelines.generate_latents(pipe, "a", CLIP, 0, **short)
    moved = pipelines.generate_latents(pipe, "a", Settings(**{**CLIP.to_dict(), "shift": 9.0}), 0, **short)
    assert pipe.scheduler is own
    assert not torch.equal(plain, moved)
    assert torch.equal(plain, pipelines.generate_latents(pipe, "a", CLIP, 0, **short))


@pytest.mark.parametrize(
    ("scheduler", "sentence"),
    [
        (DDIMScheduler(), "scheduler DDIMScheduler has no flow shift to set"),
        (UniPCMultistepScheduler(), "ignores the shift: its config has use_flow_sigmas=False"),
        (FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), "computes its own shift"),
    ],
)
def test_schedulers_without_a_shift_are_refused(scheduler, sentence):
    pipe = tiny_pipeline()
    pipe.scheduler = scheduler
    with pytest.raises(SettingsError, match=sentence):
        pipelines.set_shift(pipe, 5.0)


def test_unknown_words_are_found_by_any_tokenizer_with_an_unknown_token():
    fast = tiny_tokenizer()
    assert pipelines.unknown_words(fast, "A Red dog, a red DOG moving right!") == ["dog", ",", "DOG", "!"]
    assert pipelines.unknown_words(fast, "a red circle") == []

    class Slow:
        unk_token_id = 2

        def __call__(self, text, **kwargs):
            return fast(text, **kwargs)

    assert pipelines.unknown_words(Slow(), "a red dog moving dog") == ["dog"]
    assert pipelines.unknown_words(object(), "a red dog") == []


def test_the_bundled_pipeline_says_what_it_is():
    info = inspect_model(bundled())
    assert info.offline == ()
    assert info.source == model_info.DEFAULTS_FILE
    assert info.settings() == Settings(112, 144, 33, 20, 2.5, shift=3.0, fps=16)
    assert info.tokens(info.settings()) == 567
    assert info.experts[0].layers == 8
    assert info.prompt == "a red circle moving right"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_way_to_offload_gives_the_same_clip(saved):
    clips = {}
    for offload in pipelines.OFFLOADS:
        pipe = pipelines.load_pipeline(saved, device="cuda", offload=offload)
        pipe.set_progress_bar_config(disable=True)
        assert (pipe.transformer.dtype, pipe.vae.dtype) == (torch.bfloat16, torch.float32)
        with wanfp4.patch(pipe) as handle:
            latents = pipelines.generate_latents(pipe, "a red circle", CLIP, 0)
        assert handle.receipt().calls == 2 * 2 * 2  # layers, steps, branches
        clips[offload] = latents.cpu(), pipelines.decode_latents(pipe, latents)
    for latents, frames in clips.values():
        assert torch.equal(latents, clips["none"][0])
        assert np.array_equal(frames, clips["none"][1])
