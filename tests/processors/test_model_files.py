"""Damaged models: the sentence names the part or file and its fault, whatever is in it."""

import json
import shutil

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from tiny import tiny_pipeline

from wanfp4.errors import ModelError, brief
from wanfp4.processors import pipelines
from wanfp4.processors.pipelines import info_of, inspect_model

WEIGHTS = "diffusion_pytorch_model.safetensors"
JUNK = {
    "cut off": b'{"a": ',
    "empty": b"",
    "no UTF-8": b'{"a": "\xff"}',
    "a list": b"[]",
    "a number": b"3",
    "nested": b"[" * 100_000,
    "digits": b'{"a": ' + b"1" * 5000 + b"}",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tiny_pipeline(layers=1).save_pretrained(folder)
    return folder


@pytest.fixture
def model(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def sentence(function, *args, **kwargs):
    with pytest.raises(ModelError) as caught:
        function(*args, **kwargs)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    return text


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize(
    "name",
    ["model_index.json", "transformer/config.json", "vae/config.json", "scheduler/scheduler_config.json"],
)
def test_a_config_that_is_no_json_object_is_named_with_its_fault(model, name, junk):
    (model / name).write_bytes(JUNK[junk])
    said = sentence(inspect_model, model)
    assert said.startswith((f"cannot read {model / name}: ", f"{model / name} must hold a JSON object, not "))
    assert "wrong kind" not in said


VALUES = (0, -1, 1.5, "many", [], {}, True)


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("transformer", "num_attention_heads"),
        ("transformer", "num_layers"),
        ("transformer", "attention_head_dim"),
        ("transformer", "rope_max_seq_len"),
        ("vae", "scale_factor_spatial"),
        ("vae", "scale_factor_temporal"),
        ("vae", "z_dim"),
    ],
)
def test_a_count_that_is_none_is_named_with_part_and_value(model, part, name, value):
    edit(model / part / "config.json", **{name: value})
    fault = f"{name} must hold whole numbers from 1, not {value!r}"
    assert sentence(inspect_model, model) == f"the config of {part} in {model} is wrong: {fault}"


@pytest.mark.parametrize("value", [[1, 0, 2], [0, 0, 0], [1, 2, -2], [1, 2], [1, 2, 2, 2], 2, None, "122", [1, 2, 2.5]])
def test_a_patch_size_that_is_none_is_named(model, value):
    edit(model / "transformer/config.json", patch_size=value)
    assert "the config of transformer in" in (said := sentence(inspect_model, model))
    assert "patch_size must" in said


@pytest.mark.parametrize("value", ["many", [], -1, float("nan"), float("inf"), True], ids=repr)
def test_a_shift_or_ratio_that_is_no_number_is_named(model, value):
    before = (model / "scheduler/scheduler_config.json").read_text()
    edit(model / "scheduler/scheduler_config.json", flow_shift=value)
    assert f"the config of scheduler in {model} is wrong: flow_shift must be a number" in sentence(inspect_model, model)
    (model / "scheduler/scheduler_config.json").write_text(before)
    edit(model / "model_index.json", boundary_ratio=value)
    assert "boundary_ratio must be a number from 0, not" in sentence(inspect_model, model)


def test_a_pipeline_in_memory_is_checked_the_same_way():
    pipe = tiny_pipeline(layers=1)
    pipe.transformer.register_to_config(patch_size=(1, 0, 2))
    assert "patch_size must hold whole numbers from 1, not 0" in sentence(info_of, pipe)


@pytest.mark.parametrize("listed", [[], ["a.safetensors"], "a", 3, {"a": 1}, {"a": None}, {"a": ["b"]}, None], ids=repr)
def test_a_list_of_weight_files_that_is_none_is_named(model, listed):
    listing = model / f"transformer/{WEIGHTS}.index.json"
    listing.write_text(json.dumps({"weight_map": listed}))
    assert sentence(inspect_model, model) == f"{listing}: weight_map must map tensors to file names"


@pytest.mark.parametrize("junk", [*JUNK, "an empty object"])
def test_a_broken_tokenizer_is_called_that_and_not_weights(model, junk):
    (model / "tokenizer/tokenizer.json").write_bytes(JUNK.get(junk, b"{}"))
    said = sentence(pipelines.load_pipeline, model, device="cpu")
    assert said.startswith(f"cannot load {model}: tokenizer/tokenizer.json is broken: ")
    assert "weights" not in said


@pytest.mark.parametrize(
    "name", [f"transformer/{WEIGHTS}", f"vae/{WEIGHTS}", "text_encoder/model.safetensors", "text_encoder/config.json"]
)
def test_a_broken_part_is_named(model, name):
    (model / name).write_bytes(b"broken")
    said = sentence(pipelines.load_pipeline, model, device="cpu")
    assert said.startswith(f"cannot load {model}: ")
    assert name in said
    if name.startswith("vae"):
        assert f"cannot load the VAE of {model}: {name} holds no weights" in sentence(pipelines.load_vae, model)


def test_what_is_only_wrong_with_the_shapes_keeps_the_useful_part(model):
    edit(model / "transformer/config.json", ffn_dim=96)
    said = sentence(pipelines.load_pipeline, model, device="cpu")
    assert said.startswith(f"cannot load {model}: ")
    assert "ffn" in said
    assert "shape" in said


def test_an_error_in_brief_is_one_line_that_does_not_end_in_a_colon():
    assert brief(ValueError("one\ntwo")) == "ValueError: one"
    assert brief(ValueError("\n  one:\n\n\ttwo:\n three\nfour")) == "ValueError: one: two: three"
    assert brief(ValueError("one:\n")) == "ValueError: one:"
    assert brief(ValueError()) == brief(ValueError(" \n")) == "ValueError"


@pytest.mark.parametrize("offline", [True, False])
def test_an_offline_switch_is_said_to_be_set(monkeypatch, offline):
    def download(repo, name):
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    said = sentence(inspect_model, "someone/model")
    assert ("HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set" in said) == offline
    assert ("the Hub cannot be reached" in said) != offline
