"""torch.compile(fullgraph=True): one graph serves every layer, step and rule, and decides as eager does."""

import pytest
import torch
from diffusers import WanVideoToVideoPipeline
from tiny import TEXT_DIM, generate, tiny_pipeline, tiny_transformer

import wanfp4
from wanfp4.errors import FallbackError

# Importing torch's inductor, which some versions do on dynamo's reset, warns about its own code.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

RULED = wanfp4.policies()["wan-fast"].with_(
    name="ruled",
    rules=(
        wanfp4.Rule("bf16", layers=(0,)),
        wanfp4.Rule("nvfp4", sigma=(0.8, 1.0)),
        wanfp4.Rule("wan-two-piece", layers=(-1,)),
    ),
)


@pytest.fixture(autouse=True)
def dynamo():
    """Graphs compiled so far, counted from nothing; any recompile is an error."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()


@torch.no_grad()
def forward(model, timestep, text=32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 16, 3, 10, 14, generator=generator), torch.randn(1, text, TEXT_DIM, generator=generator)
    return model(x[0], torch.tensor([timestep]), x[1], return_dict=False)[0]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_graph_for_all_layers_steps_and_rules(dynamo, backend):
    pipe = tiny_pipeline(layers=10)  # more than torch's recompile limit of 8
    with wanfp4.patch(pipe, RULED) as handle:
        expected = generate(pipe, steps=4)
        receipt = handle.receipt().to_dict()["entries"]
    handle = wanfp4.patch(pipe, RULED)
    pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend=backend)
    assert torch.equal(generate(pipe, steps=4), expected)
    assert dynamo["unique_graphs"] == 1
    assert handle.receipt().to_dict()["entries"] == receipt
    assert {e.ran.name for e in handle.receipt().entries} == {"exact", "nvfp4", "ruled", "wan-two-piece"}


@pytest.mark.slow
def test_inductor(dynamo):
    """The compiler people use. It fuses operations, so values differ by rounding; decisions must not."""
    pipe = tiny_pipeline(layers=3)
    with wanfp4.patch(pipe, RULED) as handle:
        expected = generate(pipe, steps=3)
        receipt = handle.receipt().to_dict()["entries"]
    handle = wanfp4.patch(pipe, RULED)
    pipe.transformer = torch.compile(pipe.transformer, fullgraph=True)
    out = generate(pipe, steps=3)
    assert dynamo["unique_graphs"] == 1
    assert ((out - expected).norm() / expected.norm()).item() < 0.01
    assert [{**e, "notes": {}} for e in handle.receipt().to_dict()["entries"]] == [{**e, "notes": {}} for e in receipt]


def test_a_compiled_transformer_can_be_patched_restored_and_patched_again(dynamo):
    pipe = tiny_pipeline()
    plain = generate(pipe)
    compiled = torch.compile(pipe.transformer, fullgraph=True, backend="eager")
    pipe.transformer = compiled
    with wanfp4.patch(pipe, "wan-fast") as first:
        fast = generate(pipe)
    assert pipe.transformer is compiled
    with torch._dynamo.config.patch(error_on_recompile=False):
        assert torch.equal(generate(pipe), plain)
    assert dynamo["unique_graphs"] == 2  # patched and unpatched
    with wanfp4.patch(pipe, "wan-fast") as second:  # another session, the same graph
        assert torch.equal(generate(pipe), fast)
    with wanfp4.patch(pipe, "bf16"):
        assert torch.equal(generate(pipe), plain)
    assert dynamo["unique_graphs"] == 2
    assert first.receipt().calls == second.receipt().calls == 8


def test_regional_compilation_compiles_one_block_for_all(dynamo):
    model = tiny_transformer(layers=10)
    with wanfp4.patch(model, RULED) as handle:
        expected = [forward(model, t) for t in (900, 600, 300)]
        receipt = handle.receipt().to_dict()["entries"]
    handle = wanfp4.patch(model, RULED)
    model.compile_repeated_blocks(fullgraph=True, backend="eager")
    for t, out in zip((900, 600, 300), expected, strict=True):
        assert torch.equal(forward(model, t), out)
    assert dynamo["unique_graphs"] == 1
    assert handle.receipt().to_dict()["entries"] == receipt


def test_a_compiled_transformer_called_directly_tells_its_timestep(dynamo):
    model = torch.compile(tiny_transformer(), fullgraph=True, backend="eager")
    with wanfp4.patch(model, RULED, strict=True) as handle:
        for t in (900, 600, 300):
            forward(model, t)
    assert dynamo["unique_graphs"] == 1
    assert [(e.layers, e.steps, e.ran.name) for e in handle.receipt().entries] == [
        ((0,), (0, 1, 2), "exact"),
        ((1,), (0,), "nvfp4"),
        ((1,), (1, 2), "wan-two-piece"),
    ]


def test_a_pipeline_without_cache_context_tells_it_too(dynamo):
    """Compiled in place, not even the hooks of the transformer run: the pipeline's own timestep is asked."""
    text_to_video = tiny_pipeline()
    pipe = WanVideoToVideoPipeline(
        **{k: v for k, v in text_to_video.components.items() if k != "transformer_2"},
    )
    pipe.set_progress_bar_config(disable=True)
    pipe.transformer.compile(fullgraph=True, backend="eager")
    with wanfp4.patch(pipe, RULED, strict=True) as handle:
        pipe(
            video=[torch.zeros(3, 80, 112)] * 9,
            prompt="a red circle",
            negative_prompt="",
            height=80,
            width=112,
            num_inference_steps=4,
            max_sequence_length=32,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
        )
    assert dynamo["unique_graphs"] == 1
    assert handle.receipt().entries[0].steps == (0, 1, 2)  # strength 0.8 leaves out the first step
    expected = [float(s) for s in pipe.scheduler.sigmas[1:4]]
    assert handle.receipt().entries[0].sigma == pytest.approx((expected[-1], expected[0]))


def test_where_nobody_tells_the_receipt_says_so():
    """Compiled in place and called without a pipeline: sigma is unknown."""
    model = tiny_transformer()
    model.compile(fullgraph=True, backend="eager")
    with wanfp4.patch(model, RULED) as handle:
        forward(model, 900)
    (entry,) = handle.receipt().fallbacks
    assert entry.ran.reason == "rules[1] asks for sigma, which this pipeline does not tell"
    with wanfp4.patch(model, RULED, strict=True), pytest.raises(FallbackError, match="asks for sigma"):
        forward(model, 900)
    with wanfp4.patch(model, RULED, strict=True) as handle, model.cache_context("cond", step_index=3, sigma=0.4):
        forward(model, 900)
    assert handle.receipt().entries[0].steps == (3,)


def test_text_length_is_refused_outside_the_graph():
    model = torch.compile(tiny_transformer(image_dim=16, added_kv_proj_dim=256), fullgraph=True, backend="eager")
    with wanfp4.patch(model), pytest.raises(wanfp4.errors.UnsupportedInputError, match="found 32"):
        forward(model, 900)
