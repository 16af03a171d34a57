"""`wanfp4 generate` and `wanfp4 decode` on a tiny model."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from safetensors import safe_open
from tiny import FRAMES, HEIGHT, TOKENS, WIDTH

import wanfp4
from wanfp4.cli import common
from wanfp4.cli import generate as generate_module
from wanfp4.kernels import dispatch
from wanfp4.processors import pipelines
from wanfp4.samples import bundled


def kept_latents(path):
    with safe_open(path, framework="pt") as file:
        return file.get_tensor("latents")


def clip(path):
    """Shape [T, H, W, 3] and frames per second of an mp4."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", path, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    done = subprocess.run(command, capture_output=True, check=True)
    width, height, fps = re.search(r"Video: .* (\d+)x(\d+)\b.* ([\d.]+) fps", done.stderr.decode()).groups()
    frames = np.frombuffer(done.stdout, np.uint8).reshape(-1, int(height), int(width), 3)
    return frames.shape, float(fps)


def test_writes_an_mp4_of_exactly_the_size_asked_for_and_nothing_else_but_its_receipt(run, tiny_model):
    result = run(
        "generate", "a red circle", "--model", tiny_model, "--height", 48, "--width", 80, "--frames", 5, "-o", "a.mp4"
    )
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "a.mp4\n"
    shape, fps = clip("a.mp4")
    assert shape == (5, 48, 80, 3)
    assert fps == 8
    assert sorted(p.name for p in Path.cwd().iterdir()) == ["a.json", "a.mp4"]
    assert "denoising: 100%" in result.stderr
    assert "wan-fast on reference (emulated), 8 calls" in result.stderr


def test_the_receipt_holds_what_it_takes_to_run_it_again(run, tiny_model):
    prompt = "a blue square moving left"
    run(
        "generate",
        prompt,
        "--model",
        tiny_model,
        "--policy",
        "nvfp4",
        "--seed",
        7,
        "--steps",
        3,
        "--shift",
        2,
        "-o",
        "a.mp4",
    )
    receipt = json.loads(Path("a.json").read_text())
    assert receipt["prompt"] == prompt
    assert receipt["seed"] == 7
    assert receipt["settings"] == {
        "height": HEIGHT,
        "width": WIDTH,
        "frames": FRAMES,
        "steps": 3,
        "guidance": 4.0,
        "guidance_2": None,
        "shift": 2.0,
        "fps": 8,
        "negative": None,
    }
    assert receipt["model"]["model"] == str(tiny_model)
    assert receipt["model"]["tokens"] == TOKENS
    assert receipt["versions"]["torch"] == torch.__version__
    assert receipt["versions"]["wanfp4"] == wanfp4.__version__
    assert receipt["machine"]["device"] == "cpu"
    assert receipt["dtypes"]["transformer"] == "bfloat16"
    attention = receipt["attention"]
    assert wanfp4.Policy.from_dict(attention["policy"]) == wanfp4.policies()["nvfp4"]
    assert attention["calls"] == 2 * 3 * 2  # layers, steps, guidance branches
    assert {entry["backend"] for entry in attention["entries"]} == {"reference"}
    assert all(entry["emulated"] for entry in attention["entries"])
    assert receipt["timings"]["denoise"] > 0
    assert "Emulated" in receipt["timings"]["note"]
    assert receipt["output"] == {"file": "a.mp4", "frames": FRAMES, "height": HEIGHT, "width": WIDTH, "fps": 8}


def test_bf16_is_the_pipelines_own_attention_to_the_bit_and_a_seed_means_the_same_noise(run, tiny_model):
    for name, policy, seed in (("own", "bf16", 3), ("again", "bf16", 3), ("other", "bf16", 4), ("fast", "wan-fast", 3)):
        args = ("--policy", policy, "--seed", seed, "--keep-latents", "-o", f"{name}.mp4")
        assert run("generate", "a red circle", "--model", tiny_model, *args).exit_code == 0
    own, again, other, fast = (kept_latents(f"{n}.latents.safetensors") for n in ("own", "again", "other", "fast"))
    pipe = pipelines.load_pipeline(tiny_model, device="cpu")
    pipe.set_progress_bar_config(disable=True)
    expected = pipe(
        prompt="a red circle",
        height=HEIGHT,
        width=WIDTH,
        num_frames=FRAMES,
        num_inference_steps=2,
        guidance_scale=4.0,
        generator=torch.Generator("cpu").manual_seed(3),
        output_type="latent",
    ).frames
    assert torch.equal(own, expected)
    assert torch.equal(own, again)
    assert not torch.equal(own, other)
    assert not torch.equal(own, fast)


def test_a_negative_prompt_changes_the_clip(run, tiny_model):
    for name, more in (("plain", ()), ("negative", ("--negative", "blue square"))):
        run("generate", "a red circle", "--model", tiny_model, *more, "--keep-latents", "-o", f"{name}.mp4")
    assert not torch.equal(kept_latents("plain.latents.safetensors"), kept_latents("negative.latents.safetensors"))


def test_the_default_name_tells_prompt_policy_and_seed(run, tiny_model):
    result = run("generate", "A red, circle!", "--model", tiny_model, "--steps", 1, "--seed", 5)
    assert result.stdout == "a-red-circle-wan-fast-seed5.mp4\n"
    assert Path("a-red-circle-wan-fast-seed5.json").exists()


def test_several_prompts_give_numbered_clips_from_one_loading(run, tiny_model, monkeypatch):
    loads = []
    load = pipelines.load_pipeline
    monkeypatch.setattr(pipelines, "load_pipeline", lambda *a, **k: loads.append(a) or load(*a, **k))
    Path("prompts.txt").write_text("# two of them\n\na red circle\n  a blue square  \n")
    result = run("generate", "--prompts", "prompts.txt", "--model", tiny_model, "--steps", 1, "-o", "x/c.mp4")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "x/c-01.mp4\nx/c-02.mp4\n"
    assert len(loads) == 1
    receipts = [json.loads(Path(f"x/c-0{i}.json").read_text()) for i in (1, 2)]
    assert [r["prompt"] for r in receipts] == ["a red circle", "a blue square"]
    assert [r["attention"]["calls"] for r in receipts] == [4, 4]  # each clip's own, not the sum


def test_a_policy_file_works_like_a_preset(run, tiny_model):
    policy = wanfp4.policies()["wan-two-piece"].with_(name="mine", min_tokens=10_000)
    policy.to_json("mine.json")
    assert run("generate", "a red circle", "--model", tiny_model, "--policy", "mine.json", "-o", "a.mp4").exit_code == 0
    entries = json.loads(Path("a.json").read_text())["attention"]["entries"]
    assert [entry["reason"] for entry in entries] == [f"{TOKENS} tokens, fewer than min_tokens=10000"]


def test_words_the_model_does_not_know_are_named(run, tiny_model):
    result = run("generate", "a red zebra over a Lake", "--model", tiny_model, "--steps", 1, "-o", "a.mp4")
    assert result.exit_code == 0
    assert "does not know 'zebra', 'Lake' in" in result.stderr
    assert "does not know" not in run("generate", "a red circle", "--model", tiny_model, "--steps", 1).stderr


def test_dry_run_prints_the_plan_and_loads_no_weights(run, copy_of_tiny):
    for weights in copy_of_tiny.rglob("*.safetensors"):
        weights.write_bytes(b"no weights")
    args = ("generate", "a red circle", "--model", copy_of_tiny, "--policy", "direct-p-accurate", "-o", "new/a.mp4")
    result = run(*args, "--dry-run")
    assert result.exit_code == 0, result.stderr
    for part in (
        "WanPipeline",
        "transformer: 2 layers × 2 heads × 128",
        f"{FRAMES} frames of {HEIGHT} × {WIDTH} at 8 fps, {TOKENS} tokens",
        "2 steps, guidance 4, shift 3, UniPCMultistepScheduler, seed 0",
        "direct-p-accurate: QK nvfp4, P mxfp4-direct, V mxfp4-direct, mix(1.65, 0.8, density 1), anchor32",
        "reference (emulated: shows quality, brings no speed)",
        "new/a.mp4: a red circle",
    ):
        assert part in result.stdout
    assert list(Path.cwd().iterdir()) == []
    # The same job without --dry-run does read the weights.
    assert run(*args).exit_code == 2


def test_dry_run_shows_rules_guard_and_where_a_policy_never_applies(run, tiny_model):
    rule = {"numerics": "bf16", "layers": [0, -1], "sigma": [0.9, 1.0]}
    base = wanfp4.policies()["wan-fast"].to_dict()
    Path("mine.json").write_text(json.dumps({**base, "name": "mine", "rules": [rule], "min_tokens": 1000}))
    out = run("generate", "a red circle", "--model", tiny_model, "--policy", "mine.json", "--dry-run").stdout
    assert "layers 0, -1; sigma 0.9 to 1: exact" in out
    assert "guard where logits exceed 60: M = 110, L = 16" in out
    assert f"never applies: {TOKENS} tokens, fewer than min_tokens=1000" in out


BAD = {
    "height": (["--height", "81"], "height 81 is not a multiple of 16: take 80 or 96"),
    "width": (["--width", "100"], "width 100 is not a multiple of 16: take 96 or 112"),
    "frames": (["--frames", "8"], "frames 8 is not of the form 4k+1: take 5 or 9"),
    "two at once": (["--height", "81", "--frames", "8"], "take 80 or 96; frames 8"),
    "no frames": (["--frames", "0"], "frames must be a whole number from 1"),
    "steps 0": (["--steps", "0"], "steps must be a whole number from 1 to 1000, not 0"),
    "steps -1": (["--steps", "-1"], "steps must be a whole number from 1 to 1000, not -1"),
    "guidance": (["--guidance", "-1"], "guidance must be a number from 0 to 100, not -1"),
    "guidance nan": (["--guidance", "nan"], "guidance must be a number"),
    "guidance-2": (["--guidance-2", "3"], "guidance_2 is for models with two experts"),
    "shift": (["--shift", "0"], "shift must be a number from 0.01"),
    "seed": (["--seed", "-1"], "seed must be a whole number from 0"),
    "fps": (["--fps", "0"], "fps must be a whole number from 1 to 240"),
    "policy": (["--policy", "fastest"], "unknown policy 'fastest'; presets are bf16, wan-fast"),
    "policy file": (["--policy", "none.json"], "cannot read policy file 'none.json'"),
    "backend": (["--backend", "fast"], "unknown backend 'fast'; this version has sm100, sm90, sm89"),
    "backend refuses": (["--backend", "sdpa"], "backend 'sdpa' cannot run this on cpu: it rounds nothing"),
    "device": (["--device", "tpu"], "unknown device 'tpu'; choose from auto, cpu, cuda"),
    "device index": (["--device", "cuda:x"], "unknown device 'cuda:x'"),
    "dtype": (["--dtype", "fp8"], "unknown dtype 'fp8'; choose from auto, bf16, fp16, fp32"),
    "offload": (["--offload", "disk"], "unknown offload 'disk'; choose from none, model, sequential"),
    "offload on the CPU": (["--offload", "model", "--device", "cpu"], "the device is the CPU"),
    "not an mp4": (["-o", "a.gif"], "must be a file name that ends in .mp4, not 'a.gif'"),
    "no folder": (["-o", "/proc/nowhere/a.mp4"], "cannot write into '/proc/nowhere'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_sentence(refused, tiny_model, monkeypatch, case):
    monkeypatch.setattr(pipelines, "load_pipeline", lambda *a, **k: pytest.fail("weights were loaded"))
    args, sentence = BAD[case]
    assert sentence in refused("generate", "a red circle", "--model", tiny_model, *args)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device that must be missing")
def test_a_device_that_is_not_here_is_refused(refused, tiny_model):
    error = refused("generate", "a red circle", "--model", tiny_model, "--device", "cuda")
    assert "device 'cuda' is not here: PyTorch" in error


def test_prompts_that_are_missing_empty_or_given_twice_are_refused(refused, tiny_model):
    Path("none.txt").write_text("# nothing\n\n")
    model = ("--model", tiny_model)
    assert "a prompt is needed, for example 'a red circle'" in refused("generate", *model)
    assert "the prompt is empty" in refused("generate", "  ", *model)
    assert "'none.txt' holds no prompt" in refused("generate", "--prompts", "none.txt", *model)
    assert "cannot read prompts from 'gone.txt'" in refused("generate", "--prompts", "gone.txt", *model)
    assert "not both" in refused("generate", "a red circle", "--prompts", "none.txt", *model)


def test_models_that_cannot_be_used_are_refused_with_what_was_found(refused, copy_of_tiny):
    def edit(name, **changes):
        path = copy_of_tiny / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    def error():
        return refused("generate", "a red circle", "--model", copy_of_tiny)

    assert "there is no folder 'nowhere'" in refused("generate", "a red circle", "--model", "nowhere")
    assert "has no model_index.json (found nothing)" in refused("generate", "a red circle", "--model", ".")
    (copy_of_tiny / "transformer/diffusion_pytorch_model.safetensors").write_bytes(b"no weights")
    assert f"cannot load {copy_of_tiny}: transformer/diffusion_pytorch_model.safetensors holds no weights: " in error()
    (copy_of_tiny / "transformer/diffusion_pytorch_model.safetensors").unlink()
    assert "incomplete: transformer: no weights in transformer/" in error()
    edit("transformer/config.json", attention_head_dim=64)
    assert "has head_dim 64; 4-bit attention needs 128" in error()
    edit("transformer/config.json", attention_head_dim=128)
    edit("model_index.json", _class_name="WanImageToVideoPipeline")
    assert "is a WanImageToVideoPipeline, and only text-to-video" in error()
    assert "wanfp4.patch(pipe)" in error()
    edit("model_index.json", _class_name="FluxPipeline", transformer=["diffusers", "FluxTransformer2DModel"])
    assert "is not a Wan pipeline: its class is FluxPipeline and it holds FluxTransformer2DModel" in error()
    (copy_of_tiny / "model_index.json").write_text("{")
    assert "cannot read" in error()


def test_latents_survive_a_failed_decode_and_the_error_says_how_to_go_on(run, tiny_model, monkeypatch):
    args = ("generate", "a red circle", "--model", tiny_model)
    assert run(*args, "-o", "good.mp4").exit_code == 0

    def no_memory(*args):
        raise MemoryError("no room for the VAE")

    with monkeypatch.context() as patched:
        patched.setattr(pipelines, "decode_latents", no_memory)
        result = run(*args, "-o", "a.mp4")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "error: MemoryError: no room for the VAE" in result.stderr
    assert sorted(p.name for p in Path.cwd().glob("a.*")) == ["a.latents.safetensors"]
    [said] = [line for line in result.stderr.splitlines() if "wanfp4 decode" in line]
    command = shlex.split(said.partition("them: ")[2])
    assert command[0] == "wanfp4"

    result = run(*command[1:])
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "a.mp4\n"
    assert Path("a.mp4").read_bytes() == Path("good.mp4").read_bytes()
    good, late = (json.loads(Path(f"{n}.json").read_text()) for n in ("good", "a"))
    for key in ("prompt", "seed", "settings", "model", "attention", "versions"):
        assert good[key] == late[key]


def test_latents_that_hold_nan_are_an_error_and_leave_no_file(run, tiny_model, monkeypatch):
    made = pipelines.generate_latents
    monkeypatch.setattr(pipelines, "generate_latents", lambda *a: made(*a).index_fill(2, torch.tensor([0]), torch.nan))
    result = run("generate", "a red circle", "--model", tiny_model, "-o", "a.mp4")
    assert result.exit_code == 1
    assert "latent values are NaN or infinite" in result.stderr
    assert list(Path.cwd().iterdir()) == []


def test_strict_turns_a_fallback_into_an_error(run, refused, tiny_model, monkeypatch):
    monkeypatch.setattr(dispatch, "_BACKENDS", tuple(b for b in dispatch.backends() if b.name == "sdpa"))
    args = ("generate", "a red circle", "--model", tiny_model, "-o", "a.mp4")
    assert "strict: " in refused(*args, "--strict")
    result = run(*args)
    assert result.exit_code == 0
    assert "FALLBACK to the pipeline's own attention" in result.stderr


def test_what_nobody_foresaw_is_one_line_and_a_traceback_only_on_request(run, tiny_model, monkeypatch):
    def surprise(*args):
        raise ZeroDivisionError("a surprise\nwith details")

    monkeypatch.setattr(generate_module, "inspect_model", surprise)
    result = run("generate", "a red circle", "--model", tiny_model)
    assert result.exit_code == 1
    assert "error: ZeroDivisionError: a surprise\n" in result.stderr
    assert "--debug" in result.stderr
    assert "Traceback" not in result.stderr
    assert "Traceback" in run("--debug", "generate", "a red circle", "--model", tiny_model).stderr


def test_ctrl_c_in_the_middle_leaves_nothing(run, tiny_model, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(pipelines, "generate_latents", interrupted)
    result = run("generate", "a red circle", "--model", tiny_model, "-o", "a.mp4")
    assert result.exit_code == 130
    assert result.stderr.endswith("interrupted\n")
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.slow
def test_the_bundled_pipeline_is_the_default(run):
    result = run("generate", "a red circle moving right", "--steps", 2, "-o", "a.mp4")
    assert result.exit_code == 0, result.stderr
    shape, fps = clip("a.mp4")
    assert shape == (33, 112, 144, 3)
    assert fps == 16
    receipt = json.loads(Path("a.json").read_text())
    assert receipt["model"]["model"] == "bundled"
    assert str(bundled().parent) not in Path("a.json").read_text()
    assert receipt["attention"]["calls"] == 8 * 2 * 2


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_a_prompt_file_from_any_editor_gives_the_same_prompts(tmp_path, monkeypatch, mark, newline):
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_bytes(mark + "# two\n ein roter Kreis ü\n\n日本語\n".encode().replace(b"\n", newline))
    assert common.collect_prompts(None, Path("p.txt"), None) == ["ein roter Kreis ü", "日本語"]
    Path("p.txt").write_bytes(mark + b"a red circle")
    assert common.collect_prompts(None, Path("p.txt"), None) == ["a red circle"]


BREAKS = ["\n", "\r\n", "\r", "\x0b", "\x0c", "\x1b[2J", "\x85", "\u2028", "\u2029", "\t", "\x00"]


@pytest.mark.parametrize("character", BREAKS, ids=ascii)
def test_a_plan_keeps_its_lines_whatever_prompt_and_policy_hold(run, tiny_model, character):
    policy = wanfp4.policies()["nvfp4"].to_dict()
    Path("mine.json").write_text(json.dumps({**policy, "name": f"my{character}own"}))
    args = ("--model", tiny_model, "--policy", "mine.json", "--dry-run")
    plain = run("generate", "a red circle", *args).stdout
    result = run("generate", f"a red{character}circle", *args)
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.splitlines()) == len(plain.splitlines())
    assert all(line == line.rstrip() and line.isprintable() for line in result.stdout.splitlines())
    assert result.stdout.splitlines()[-1].endswith("circle")


@pytest.mark.parametrize("policy", ["bf16", "wan-fast", "nvfp4", "mixed.json"])
@pytest.mark.parametrize("backend", [None, "reference", "sdpa"])
def test_the_plan_says_emulated_just_when_the_receipt_does(run, tiny_model, policy, backend):
    mixed = wanfp4.policies()["bf16"].with_(name="mixed", rules=[{"numerics": "nvfp4", "layers": [0]}])
    mixed.to_json("mixed.json")
    args = ["generate", "a red circle", "--model", tiny_model, "--policy", policy, "--steps", 1, "-o", "a.mp4"]
    args += ["--backend", backend] if backend else []
    plan, result = run(*args, "--dry-run"), run(*args)
    assert plan.exit_code == result.exit_code
    if result.exit_code == 0:
        entries = json.loads(Path("a.json").read_text())["attention"]["entries"]
        assert ("emulated" in plan.stdout) == any(entry["emulated"] for entry in entries)
    else:
        assert plan.stderr == result.stderr
