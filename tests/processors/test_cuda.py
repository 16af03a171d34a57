"""What only a GPU shows: autocast's mixed dtypes, offloaded weights, CUDA graphs."""

import pytest
import torch
from diffusers.hooks import apply_group_offloading
from tiny import TEXT_DIM, generate, tiny_pipeline, tiny_transformer

import wanfp4
from wanfp4.kernels import dispatch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RULED = wanfp4.policies()["wan-fast"].with_(
    name="ruled", rules=(wanfp4.Rule("bf16", layers=(0,)), wanfp4.Rule("nvfp4", sigma=(0.9, 1.0)))
)


@torch.no_grad()
def forward(model, timestep=500, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 16, 3, 10, 14, generator=generator), torch.randn(1, 32, TEXT_DIM, generator=generator)
    arguments = x[0].to("cuda", dtype), torch.tensor([timestep], device="cuda"), x[1].to("cuda", dtype)
    return model(*arguments, return_dict=False)[0].clone()


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # diffusers' RMSNorm
def test_autocast(monkeypatch):
    """v comes in bfloat16; q and k too or in float32, which depends on how torch's version treats RMSNorm."""
    seen = []
    run = dispatch.run

    def spy(q, k, v, *args, **kwargs):
        seen.append((q.dtype, k.dtype, v.dtype))
        return run(q, k, v, *args, **kwargs)

    monkeypatch.setattr(dispatch, "run", spy)
    model = tiny_transformer().cuda()
    with torch.autocast("cuda", torch.bfloat16):
        plain = forward(model)
        with wanfp4.patch(model, "bf16"):
            assert torch.equal(forward(model), plain)
        with wanfp4.patch(model):
            fast = forward(model)
    assert len(seen) == 2
    assert all(q == k and q in (torch.float32, torch.bfloat16) and v == torch.bfloat16 for q, k, v in seen)
    assert fast.dtype == plain.dtype
    assert 0 < ((fast - plain).float().norm() / plain.float().norm()).item() < 0.1


@pytest.mark.parametrize("way", ["model", "sequential", "group"])
def test_offloaded_weights(way):
    """On the CPU or on meta while the pipeline is patched; the attention follows q's device."""
    expected = {}
    for policy in ("bf16", "wan-fast"):
        pipe = tiny_pipeline().to("cuda")
        with wanfp4.patch(pipe, policy):
            expected[policy] = generate(pipe).cpu()
    for order in ("offload, then patch", "patch, then offload"):
        for policy, latents in expected.items():
            pipe = tiny_pipeline()
            if order == "patch, then offload":
                wanfp4.patch(pipe, policy)
            if way == "model":
                pipe.enable_model_cpu_offload()
            elif way == "sequential":
                pipe.enable_sequential_cpu_offload()
            else:
                pipe.to("cuda")
                pipe.transformer.cpu()
                apply_group_offloading(
                    pipe.transformer, torch.device("cuda"), offload_type="block_level", num_blocks_per_group=1
                )
            if order == "offload, then patch":
                wanfp4.patch(pipe, policy)
            torch.testing.assert_close(generate(pipe).cpu(), latents, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")  # inductor's
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_on_cuda_decides_at_every_step(mode):
    """CUDA graphs replay kernels without Python: had one swallowed the operator, later steps would repeat the first."""
    torch._dynamo.reset()
    model = tiny_transformer(layers=3).cuda()
    with wanfp4.patch(model, RULED) as handle:
        expected = [forward(model, t) for t in (950, 950, 950, 700, 500, 300)]
        receipt = handle.receipt().to_dict()["entries"]
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    with wanfp4.patch(compiled, RULED) as handle:
        out = [forward(compiled, t) for t in (950, 950, 950, 700, 500, 300)]
    assert handle.receipt().to_dict()["entries"] == receipt
    for a, b in zip(out, expected, strict=True):
        assert ((a - b).norm() / b.norm()).item() < 0.02
    torch._dynamo.reset()
