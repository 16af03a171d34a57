"""Parts of the pipeline, and their forms made for training, against diffusers' own."""

import functools
import math

import pytest
import torch
from diffusers import AutoencoderKLWan

from wanfp4.errors import UnsupportedInputError
from wanfp4.samples import bundled, optim, whole_clip
from wanfp4.samples.models import (
    TEXT_TOKENS,
    PadCountCrossAttention,
    TrainingSelfAttention,
    build_text_encoder,
    build_tokenizer,
    build_transformer,
    build_vae,
    encode_text,
    tokenise,
    velocity,
)
from wanfp4.samples.optim import COEFFICIENTS, Muon, orthogonalise


@pytest.fixture(scope="module")
def vae() -> AutoencoderKLWan:
    return AutoencoderKLWan.from_pretrained(bundled(), subfolder="vae").float().eval()


@pytest.mark.parametrize("frames", [1, 5, 17])
@torch.no_grad()
def test_whole_clip_vae_equals_the_chunked_one(vae: AutoencoderKLWan, frames: int) -> None:
    video = torch.rand(2, 3, frames, 48, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    posterior = vae.encode(video).latent_dist
    mean, log_variance = whole_clip.encode(vae, video)
    assert (mean - posterior.mean).abs().max() <= 1e-6 * posterior.mean.abs().max()
    assert (log_variance - posterior.logvar).abs().max() <= 2e-5
    decoded = whole_clip.decode(vae, mean).clamp(-1, 1)
    assert (decoded - vae.decode(mean).sample).abs().max() <= 5e-6


@torch.no_grad()
def test_whole_clip_vae_with_wan21s_own_levels() -> None:
    torch.manual_seed(0)
    vae = AutoencoderKLWan(base_dim=8, dim_mult=[1, 2, 2, 2], num_res_blocks=2).eval()
    video = torch.rand(1, 3, 9, 32, 48) * 2 - 1
    mean, _ = whole_clip.encode(vae, video)
    assert (mean - vae.encode(video).latent_dist.mean).abs().max() <= 5e-6
    assert (whole_clip.decode(vae, mean).clamp(-1, 1) - vae.decode(mean).sample).abs().max() <= 2e-5


def test_whole_clip_vae_refuses_wan22s_layout() -> None:
    with pytest.raises(UnsupportedInputError, match="is_residual"):
        whole_clip.encode(
            AutoencoderKLWan(
                base_dim=8, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[True], is_residual=True
            ),
            torch.zeros(1, 3, 5, 16, 16),
        )


def test_whole_clip_vae_passes_gradients_to_every_parameter() -> None:
    vae = build_vae(base_dim=8, dim_mult=[1, 1, 2])
    mean, log_variance = whole_clip.encode(vae, torch.rand(1, 3, 5, 16, 16))
    (whole_clip.decode(vae, mean).square().mean() + log_variance.mean()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in vae.parameters())


@torch.no_grad()
def test_training_forward_equals_the_transformers_own_on_512_text_tokens() -> None:
    tokenizer = build_tokenizer()
    transformer = build_transformer(num_layers=3)
    generator = torch.Generator().manual_seed(0)
    for p in transformer.parameters():  # those that begin at zero would hide faults
        if not p.any():
            p.normal_(std=0.05, generator=generator)
    text = encode_text(build_text_encoder(len(tokenizer)), tokenise(tokenizer, ["a red circle moving right", ""]))
    latents, sigma = torch.randn(2, 16, 3, 8, 12, generator=generator), torch.tensor([0.9, 0.3])
    for total in (512, 226, TEXT_TOKENS):
        padded = torch.cat([text, torch.zeros(2, total - TEXT_TOKENS, text.shape[-1])], 1)
        own = transformer(latents, sigma * 1000, padded, return_dict=False)[0]
        stock = [(block.attn1.processor, block.attn2.processor) for block in transformer.blocks]
        padding = PadCountCrossAttention("cpu")
        padding.pad_to(total)
        for block in transformer.blocks:
            block.attn1.set_processor(TrainingSelfAttention("cpu", 128))
            block.attn2.set_processor(padding)
        mine = velocity(transformer, latents, sigma, text)
        for block, processors in zip(transformer.blocks, stock, strict=True):
            block.attn1.set_processor(processors[0])
            block.attn2.set_processor(processors[1])
        assert own.abs().max() > 1
        assert (mine - own).abs().max() <= 3e-6 * own.abs().max()


@torch.no_grad()
def test_text_is_encoded_as_the_pipeline_does_it() -> None:
    tokenizer = build_tokenizer()
    encoder = build_text_encoder(len(tokenizer)).eval()
    text = "two shapes: a RED circle moving right, and a blue star"
    [embedding] = encode_text(encoder, tokenise(tokenizer, [text]))
    ids = tokenizer([text], padding="max_length", max_length=512, return_tensors="pt", return_attention_mask=True)
    length = int(ids.attention_mask.sum())
    own = encoder(ids.input_ids, ids.attention_mask).last_hidden_state[0, :length]
    assert tokenizer.unk_token_id not in ids.input_ids
    assert (embedding[:length] - own).abs().max() <= 1e-5
    assert not embedding[length:].any()


def test_everything_fits_into_the_sizes_promised() -> None:
    words = len(build_tokenizer())
    parts = [build_text_encoder(words), build_transformer(), build_vae()]
    sizes = [2 * sum(p.numel() for p in part.parameters()) for part in parts]
    assert max(sizes) < 16 * 2**20
    assert sum(sizes) < 23e6
    config = parts[1].config
    assert (config.attention_head_dim, config.num_attention_heads, config.num_layers) == (128, 2, 8)


def test_initial_weights_follow_from_the_seed_and_leave_torchs_generator_alone() -> None:
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    first, again, other = (build_transformer(seed, num_layers=1) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(3), expected)
    pairs = list(zip(first.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def plain_newton_schulz(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """One matrix at a time, as published."""
    a, b, c = COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 12, 5), (2, 5, 12)])
def test_orthogonalise_equals_a_plain_loop(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mine = orthogonalise(matrices, dtype=torch.float64)
    for result, matrix in zip(mine, matrices, strict=True):
        assert torch.allclose(result, plain_newton_schulz(matrix, 5), atol=1e-12)
        assert torch.linalg.svdvals(result).min() > 0.5
        assert torch.linalg.svdvals(result).max() < 1.3


def test_muon_equals_a_plain_loop_over_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "orthogonalise", functools.partial(orthogonalise, dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 8), (8, 8), (12, 6), (6, 4, 3, 3, 3)]
    mine = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    theirs = [p.detach().clone() for p in mine]
    momenta = [torch.zeros_like(p) for p in theirs]
    optimizer = Muon(mine, lr=0.02, momentum=0.9, weight_decay=0.1)
    for _ in range(3):
        for p, q, m in zip(mine, theirs, momenta, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            m.mul_(0.9).add_(p.grad, alpha=0.1)
            ahead = (0.1 * p.grad + 0.9 * m).flatten(1)
            update = plain_newton_schulz(ahead.double(), 5).float().view(p.shape)
            q.mul_(1 - 0.02 * 0.1).sub_(update, alpha=0.02 * 0.2 * math.sqrt(max(ahead.shape)))
        optimizer.step()
    for p, q in zip(mine, theirs, strict=True):
        assert torch.allclose(p, q, atol=1e-6)


def test_muon_goes_on_from_its_state() -> None:
    def train(steps: int, optimizer: Muon, p: torch.nn.Parameter, first: int = 0) -> None:
        for i in range(first, first + steps):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
            optimizer.step()

    start = torch.randn(6, 5)
    whole, parts = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    train(4, Muon([whole], lr=0.1), whole)
    first = Muon([parts], lr=0.1)
    train(2, first, parts)
    second = Muon([parts], lr=0.1)
    second.load_state_dict(first.state_dict())
    train(2, second, parts, 2)
    assert torch.equal(whole, parts)
