"""The trainer, on problems small enough for one CPU thread."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline
from safetensors.torch import load_file
from typer.testing import CliRunner

from wanfp4.errors import ModelError, OutputError
from wanfp4.samples import bundled, models, train
from wanfp4.samples.data import HELD_OUT
from wanfp4.samples.loop import Average, History, TrainingError, checkpoint, run, step_random, warm_up_and_decay
from wanfp4.samples.transformer_stage import LatentPool, TransformerSettings, TransformerStage
from wanfp4.samples.vae_stage import VaeSettings, VaeStage, load_vae

VAE: dict[str, Any] = {
    "steps": 6,
    "batch": 2,
    "window": 16,
    "clips": 6,
    "warm_up": 2,
    "validation_clips": 8,
    "frames": 5,
    "height": 32,
    "width": 48,
    "model": {"base_dim": 16},
}
TRANSFORMER: dict[str, Any] = {
    "steps": 6,
    "batch": 4,
    "clips": 8,
    "long_batch": 2,
    "long_clips": 3,
    "long_every": 3,
    "warm_up": 2,
    "validate_every": 3,
    "size": (5, 32, 48),
    "long_size": (9, 48, 48),
    "model": {"num_layers": 2, "ffn_dim": 64},
}


def vae_stage(**changes: Any) -> VaeStage:
    return VaeStage(VaeSettings(**VAE | changes), "cpu")


def quiet(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a VAE of six steps."""
    folder = tmp_path_factory.mktemp("trained")
    stage = vae_stage()
    run(stage, folder, say=quiet)
    stage.finish(folder)
    return folder


def transformer_stage(trained: Path, **changes: Any) -> TransformerStage:
    return TransformerStage(TransformerSettings(**TRANSFORMER | changes), load_vae(trained / "vae.safetensors"), "cpu")


def equal(a: Any, b: Any) -> bool:
    """Bit for bit, through nested states."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def test_a_stopped_vae_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole, first, second = vae_stage(), vae_stage(), vae_stage()
    assert run(whole, tmp_path / "whole", say=quiet)
    assert not run(first, tmp_path / "parts", stop=lambda step: step == 4, say=quiet)
    assert not equal(first.state(), whole.state())
    assert run(second, tmp_path / "parts", say=quiet)
    assert equal(second.state(), whole.state())
    for stage, name in ((whole, "whole"), (second, "parts")):
        stage.finish(tmp_path / name)
    files = [(tmp_path / name / "vae.safetensors").read_bytes() for name in ("whole", "parts")]
    assert files[0] == files[1]


def test_a_stopped_transformer_goes_on_bit_for_bit(tmp_path: Path, trained: Path) -> None:
    whole, first, second = (transformer_stage(trained) for _ in range(3))
    assert run(whole, tmp_path / "whole", say=quiet)
    assert not run(first, tmp_path / "parts", stop=lambda step: step == 4, say=quiet)
    assert run(second, tmp_path / "parts", say=quiet)
    assert equal(second.state(), whole.state())
    for stage, name in ((whole, "whole"), (second, "parts")):
        stage.save_averages(tmp_path / name)
    for file in ("transformer.safetensors", "text_encoder.safetensors"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "parts" / file).read_bytes()


def test_other_seeds_give_other_weights(tmp_path: Path) -> None:
    first, second = vae_stage(steps=1), vae_stage(steps=1, seed=1)
    for stage in (first, second):
        run(stage, tmp_path / str(stage.options.seed), say=quiet)
    assert not equal(first.state()["vae"], second.state()["vae"])


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    run(vae_stage(), tmp_path, stop=lambda step: step == 2, say=quiet)
    with pytest.raises(TrainingError, match=r"batch is 3, and was 2"):
        run(vae_stage(batch=3), tmp_path, say=quiet)
    assert run(vae_stage(steps=5), tmp_path, say=quiet)  # its rate has not begun to fall
    with pytest.raises(TrainingError, match=r"begins to fall"):
        run(vae_stage(steps=9), tmp_path, say=quiet)


def test_the_vae_learns(tmp_path: Path) -> None:
    model = {"base_dim": 32, "dim_mult": [1, 1, 1]}
    stage = vae_stage(steps=45, batch=4, window=32, clips=1, warm_up=5, decay=0.2, rate=3e-3, model=model)
    run(stage, tmp_path, every=12, say=quiet)
    rows = History(tmp_path).data["vae"]["rows"]
    assert [row["step"] for row in rows] == [12, 24, 36, 45]
    assert rows[2]["loss"] < 0.8 * rows[0]["loss"]  # the second phase, with another loss, begins at step 36
    assert rows[2]["chroma"] < 0.6 * rows[0]["chroma"]
    assert rows[3]["psnr"] > rows[2]["psnr"] > rows[0]["psnr"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_transformer_learns(tmp_path: Path, trained: Path) -> None:
    stage = transformer_stage(trained, steps=36, batch=6, clips=2, long_clips=0, drop=0.0, validate_every=36)
    run(stage, tmp_path, every=12, say=quiet)
    rows = History(tmp_path).data["transformer"]["rows"]
    assert rows[2]["loss"] < 0.85 * rows[0]["loss"]
    assert "long loss" not in rows[2]
    assert {"held-out at 0.95", "held-out at 0.1"} <= set(rows[2])


def test_a_vae_that_stays_grey_is_stopped() -> None:
    stage = vae_stage()
    stage.check({"step": 400, "chroma": 0.99})
    stage.check({"step": 500, "chroma": 0.79})
    with pytest.raises(TrainingError, match="85 % of the chroma error is left"):
        stage.check({"step": 500, "chroma": 0.85})


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    class Broken:
        name, steps, settings = "broken", 3, {"steps": 3}

        def step(self, index: int) -> dict[str, torch.Tensor]:
            return {"loss": torch.tensor(float("nan"))}

        def check(self, row: dict[str, Any]) -> None:
            raise AssertionError("not reached")

        def state(self) -> dict[str, Any]:
            return {}

        def load(self, state: dict[str, Any]) -> None:
            pass

    with pytest.raises(TrainingError, match="loss is not finite at step 3"):
        run(Broken(), tmp_path, say=quiet)
    assert not checkpoint(tmp_path, "broken").exists()


def test_validation_clips_are_held_out_and_captions_are_dropped(trained: Path) -> None:
    stage = transformer_stage(trained, batch=32, drop=0.5)
    words = {stage.tokenizer.convert_tokens_to_ids(w): w for w in ("circle", "square", "triangle", "star", "cross")}
    for row in stage.pools["validation"].ids[:, 0].tolist():
        text = stage.tokenizer.decode([i for i in row if i > 2])
        assert any(t.colour in text and t.shape in text for t in HELD_OUT), text
    seen: list[torch.Tensor] = []
    loss = stage._loss
    stage._loss = lambda pool, rows, ids, sigma: seen.append(ids) or loss(pool, rows, ids, sigma)  # type: ignore[method-assign]
    stage.step(0)
    empty = (seen[0] == stage.empty).all(1)
    assert 4 < int(empty.sum()) < 28
    assert all(any(i in words for i in row) for row in seen[0][~empty].tolist())


def test_going_on_from_averaged_weights(tmp_path: Path, trained: Path) -> None:
    first = transformer_stage(trained)
    run(first, tmp_path, stop=lambda step: step == 4, say=quiet)
    first.save_averages(tmp_path)
    second = transformer_stage(trained)
    second.start_from(tmp_path, 4)
    for mine, saved in zip(second.average.values, first.average.values, strict=True):
        assert torch.equal(mine, saved.to(torch.bfloat16).float())
    seen: list[int] = []
    run(second, tmp_path / "next", stop=lambda step: seen.append(step) is not None, begin=4, say=quiet)
    assert seen == [4, 5]
    with pytest.raises(ModelError, match="missing"):
        second.start_from(tmp_path / "nowhere", 4)
    with pytest.raises(ModelError, match="does not fit"):
        transformer_stage(trained, model={"num_layers": 1, "ffn_dim": 64}).start_from(tmp_path, 4)


def test_encoded_clips_are_kept_on_disk(tmp_path: Path, trained: Path) -> None:
    vae = load_vae(trained / "vae.safetensors")
    first = TransformerStage(TransformerSettings(**TRANSFORMER), vae, "cpu", cache=tmp_path)
    file = tmp_path / "pools.pt"
    written = file.stat().st_mtime_ns
    again = TransformerStage(TransformerSettings(**TRANSFORMER), vae, "cpu", cache=tmp_path)
    assert file.stat().st_mtime_ns == written
    for name, pool in first.pools.items():
        assert torch.equal(pool.mean, again.pools[name].mean)
        assert torch.equal(pool.ids, again.pools[name].ids)
    TransformerStage(TransformerSettings(**TRANSFORMER | {"seed": 1}), vae, "cpu", cache=tmp_path)
    assert file.stat().st_mtime_ns != written


def test_latents_are_normalised(trained: Path) -> None:
    stage = transformer_stage(trained, clips=32)
    pool = stage.pools["train"]
    z = (pool.mean.float() - stage.mean) / stage.deviation
    assert z.mean((0, 2, 3, 4)).abs().max() < 0.3
    assert ((z.std((0, 2, 3, 4)) > 0.5) & (z.std((0, 2, 3, 4)) < 1.6)).all()


def test_what_is_learned_is_what_the_pipelines_sampler_asks_for(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one clip z the right velocity is known, (x − z)/σ: it has no loss, and sampling with it ends at z."""
    stage = transformer_stage(trained, clips=1, batch=16, long_clips=0)
    mean = stage.pools["train"].mean
    pool = LatentPool(mean, torch.zeros_like(mean), stage.pools["train"].ids)
    z = (mean.float() - stage.mean) / stage.deviation

    def right(transformer: Any, x: torch.Tensor, sigma: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return (x - z) / sigma.view(-1, 1, 1, 1, 1)

    stage.generator.manual_seed(0)
    rows, sigma = torch.zeros(16, dtype=torch.long), torch.linspace(0.05, 1, 16)
    assert (stage._loss(pool, rows, pool.ids[rows, 0], sigma) > 0.5).all()
    monkeypatch.setattr(models, "velocity", right)
    assert (stage._loss(pool, rows, pool.ids[rows, 0], sigma) < 1e-8).all()

    transformer, text_encoder = stage.averaged()
    pipe = models.build_pipeline(stage.tokenizer, text_encoder, load_vae(trained / "vae.safetensors"), transformer)
    pipe.set_progress_bar_config(disable=True)
    monkeypatch.setattr(
        transformer, "forward", lambda hidden_states, timestep, **_: (right(None, hidden_states, timestep / 1000, z),)
    )
    latents = pipe(
        "a red circle moving right",
        height=32,
        width=48,
        num_frames=5,
        num_inference_steps=20,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
    ).frames
    assert ((latents - z).norm() / z.norm()) < 0.02  # the scheduler's timesteps are whole numbers


def test_noise_levels_cover_the_range_evenly(trained: Path) -> None:
    stage = transformer_stage(trained)
    stage.generator.manual_seed(0)
    sigma = stage._sigmas(4096)
    assert sigma.min() >= 0
    assert sigma.max() <= 1
    assert abs(float(sigma.median()) - 0.75) < 0.01  # u = 1/2 after the shift of 3
    assert float((sigma > 0.9).float().mean()) == pytest.approx(0.15, abs=0.04)


def test_the_learning_rate_warms_up_stays_and_falls() -> None:
    factors = [warm_up_and_decay(i, 1000, 100, 0.4) for i in range(1000)]
    assert factors[0] == pytest.approx(0.01)
    assert factors[99] == factors[600] == 1
    assert factors[800] == pytest.approx(0.5)
    assert factors[999] == 0.01
    assert sorted(factors[600:], reverse=True) == factors[600:]


def test_the_average_follows_fast_at_first() -> None:
    p = torch.nn.Parameter(torch.zeros(2))
    average = Average([p], 0.9)
    p.data.fill_(1.0)
    average.update(0)
    assert torch.allclose(average.values[0], torch.full((2,), 1 - 1 / 20))
    average.update(1000)
    assert torch.allclose(average.values[0], torch.full((2,), 1 - 0.9 / 20))


def test_random_of_a_step_is_its_own() -> None:
    draws = {step_random(*key).random() for key in [(0, "vae", 1), (0, "vae", 2), (1, "vae", 1), (0, "transformer", 1)]}
    assert len(draws) == 4
    assert step_random(0, "vae", 1).random() in draws


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`train all` in one go, through the command."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    settings = folder.parent / "settings.json"
    settings.write_text(json.dumps({"vae": VAE, "transformer": TRANSFORMER}))
    command = ["all", "--out", str(folder), "--settings", str(settings), "--device", "cpu"]
    result = CliRunner().invoke(train.app, command)
    assert result.exit_code == 0, result.output
    return folder


def test_the_command_trains_exports_and_knows_when_it_is_done(whole_run: Path) -> None:
    names = {path.name for path in whole_run.iterdir()}
    assert names >= {"vae.safetensors", "transformer.safetensors", "text_encoder.safetensors", "history.json"}
    assert names >= {"curves.png", "log.txt", "pipeline"}
    history = json.loads((whole_run / "history.json").read_text())
    assert set(history) == {"vae", "transformer"}
    assert history["vae"]["result"]["clips"] == 8
    assert "held-out at 0.5" in history["transformer"]["result"]
    weights = load_file(whole_run / "transformer.safetensors")
    assert {t.dtype for t in weights.values()} == {torch.bfloat16}
    settings = str(whole_run.parent / "settings.json")
    again = CliRunner().invoke(
        train.app, ["all", "--out", str(whole_run), "--settings", settings, "--device", "cpu", "--max-seconds", "1"]
    )
    assert again.exit_code == 0, again.output
    assert again.output.count("done already") == 2


def test_the_exported_folder_is_a_plain_wan_pipeline(whole_run: Path) -> None:
    folder = whole_run / "pipeline"
    pipe = WanPipeline.from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    frames = pipe(
        "a red circle moving right",
        height=32,
        width=48,
        num_frames=5,
        num_inference_steps=2,
        guidance_scale=4.0,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    ).frames
    assert frames.shape == (1, 5, 32, 48, 3)
    assert frames.std() > 0.01
    index = json.loads((folder / "model_index.json").read_text())
    assert index["tokenizer"] == ["transformers", "PreTrainedTokenizerFast"]
    config = json.loads((folder / "vae" / "config.json").read_text())
    assert config["latents_std"] != [1.0] * 16
    assert (folder / "wanfp4_defaults.json").is_file()
    assert "6 steps" in (folder / "README.md").read_text()
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} == {".json", ".safetensors", ".md"}
    weights = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    own = load_file(whole_run / "transformer.safetensors")
    assert equal(weights, own)


def test_the_second_stage_alone_with_a_pipelines_vae(whole_run: Path, tmp_path: Path) -> None:
    settings = str(whole_run.parent / "settings.json")
    command = ["dit", "--out", str(tmp_path), "--settings", settings, "--device", "cpu", "--steps", "2"]
    result = CliRunner().invoke(train.app, [*command, "--vae", str(bundled())])
    assert result.exit_code == 0, result.output
    target = train.export_pipeline(tmp_path, tmp_path / "pipeline")
    for name in ("vae/config.json", "vae/diffusion_pytorch_model.safetensors"):
        ours, own = (folder / name for folder in (target, bundled()))
        if name.endswith("json"):
            ours, own = (json.loads(path.read_text())["latents_std"] for path in (ours, own))
            assert ours == own
        else:
            assert equal(load_file(ours), load_file(own))


def test_export_keeps_card_and_defaults(whole_run: Path, tmp_path: Path) -> None:
    for name, text in (("README.md", "mine"), ("wanfp4_defaults.json", "{}")):
        (tmp_path / name).write_text(text)
    result = CliRunner().invoke(train.app, ["export", "--out", str(whole_run), "--to", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "README.md").read_text() == "mine"
    assert (tmp_path / "wanfp4_defaults.json").read_text() == "{}"


def test_export_refuses_what_is_too_large(whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "FILE_LIMIT", 1000)
    with pytest.raises(OutputError, match=r"over 16 MiB: .*model\.safetensors"):
        train.export_pipeline(whole_run, tmp_path)


def test_stages_stop_in_time_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"vae": VAE, "transformer": TRANSFORMER}))
    command = ["all", "--out", str(tmp_path / "run"), "--settings", str(settings), "--device", "cpu"]
    monkeypatch.setattr(train, "_STARTED", -1e9)
    stopped = CliRunner().invoke(train.app, [*command, "--max-seconds", "5"])
    assert stopped.exit_code == train.UNFINISHED
    assert "stopped at step 0 of 6" in stopped.output
    assert not (tmp_path / "run" / "vae.safetensors").exists()
    finished = CliRunner().invoke(train.app, command)
    assert finished.exit_code == 0, finished.output
    assert "resumed at step 0 of 6" in finished.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["dit", "--out", "{tmp}"], "vae.safetensors' is missing: train the VAE first"),
        (["export", "--out", "{tmp}"], "is missing"),
        (["vae", "--out", "{tmp}", "--settings", "{tmp}/none.json"], "cannot read the settings"),
        (["vae", "--out", "{tmp}/file/below"], "cannot write into"),
        (["vae", "--out", "{tmp}", "--device", "gpu"], "unknown device"),
        (["dit", "--out", "{tmp}", "--vae", "{tmp}/file"], "is not a VAE of this training"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "file").write_text("no weights")
    result = CliRunner().invoke(train.app, [a.format(tmp=tmp_path) for a in arguments])
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1


def test_unknown_settings_are_named(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"vae": {"stepz": 3}}')
    result = CliRunner().invoke(train.app, ["vae", "--out", str(tmp_path), "--settings", str(file), "--device", "cpu"])
    assert result.exit_code == 2
    assert "has no stepz; it has steps, seed" in result.stderr
