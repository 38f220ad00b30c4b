"""Norm and gate kernels in Triton's interpreter against float64 formulas."""

import pytest
import torch

from slipstream.kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    embed_rms_norm,
    embed_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from slipstream.kernels.silu_and_mul import silu_and_mul, silu_and_mul_reference

EPS = 1e-5
SHAPES = [(1, 64), (7, 576), (3, 1000)]


def norm64(x, weight):
    x = x.double()
    return x / (x.square().mean(1, keepdim=True) + EPS).sqrt() * weight.double()


def gappy(tokens, width, dtype=torch.float32):
    """Rows with gaps between them."""
    return torch.randn(tokens, width + 5).to(dtype)[:, :width]


@pytest.mark.parametrize("tokens,width", SHAPES)
@pytest.mark.parametrize("run", [add_rms_norm, add_rms_norm_reference])
def test_the_sum_goes_to_the_residual_and_its_norm_out(tokens, width, run):
    torch.manual_seed(width)
    residual, delta, weight = gappy(tokens, width), gappy(tokens, width, torch.bfloat16), torch.randn(width)
    total = residual.double() + delta.double()
    out = run(residual, delta, weight, EPS, torch.float32)
    torch.testing.assert_close(residual.double(), total, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(out.double(), norm64(total, weight), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens,width", SHAPES)
@pytest.mark.parametrize("run", [rms_norm, rms_norm_reference])
def test_a_plain_norm_leaves_its_input(tokens, width, run):
    torch.manual_seed(width)
    x, weight = gappy(tokens, width), torch.randn(width)
    before = x.clone()
    out = run(x, weight, EPS, torch.float32)
    torch.testing.assert_close(out.double(), norm64(before, weight), atol=1e-5, rtol=1e-5)
    assert torch.equal(x, before)


@pytest.mark.parametrize("tokens,width", SHAPES)
@pytest.mark.parametrize("run", [add_rms_norm, rms_norm])
def test_what_is_normed_may_be_copied_besides(tokens, width, run):
    torch.manual_seed(width)
    x, weight, copy = gappy(tokens, width), torch.randn(width), gappy(tokens, width)
    beside, given = copy._base[:, width:].clone(), (x, gappy(tokens, width)) if run is add_rms_norm else (x,)
    plain = run(*(each.clone() for each in given), weight, EPS, torch.float32)
    out = run(*given, weight, EPS, torch.float32, copy_TH=copy)
    assert torch.equal(out, plain)
    assert torch.equal(copy, x), "the sum, where there is one"
    assert torch.equal(copy._base[:, width:], beside)


@pytest.mark.parametrize(
    "token", [torch.tensor([49, 0, 7, 7]), torch.tensor([[49, 1], [0, 1], [7, 1]]).int()[:, 0]]
)
@pytest.mark.parametrize("run", [embed_rms_norm, embed_rms_norm_reference])
def test_embedding_starts_the_residual(run, token):
    torch.manual_seed(0)
    embed, weight = gappy(50, 96, torch.bfloat16), torch.randn(96)
    residual, out = run(token, embed, weight, EPS, torch.float32)
    assert torch.equal(residual, embed.float()[token])
    torch.testing.assert_close(out.double(), norm64(residual, weight), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens,inner", [(1, 48), (5, 1500), (2, 1024)])
@pytest.mark.parametrize("run", [silu_and_mul, silu_and_mul_reference])
def test_gate_and_up_are_the_two_halves_of_a_row(tokens, inner, run):
    torch.manual_seed(inner)
    x = gappy(tokens, 2 * inner) * 8
    gate, up = x.double().chunk(2, 1)
    out = run(x)
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), gate / (1 + (-gate).exp()) * up, atol=1e-4, rtol=1e-5)
