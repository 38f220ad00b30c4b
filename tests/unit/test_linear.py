"""Linear backends: exactness, independence of rows, and the choice with its reason."""

from __future__ import annotations

import platform

import pytest
import torch

from slipstream.layers.linear import choose_linear

Tensor = torch.Tensor
CPU = torch.device("cpu")
X86 = platform.machine().lower() in ("x86_64", "amd64")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(1, 16, 8), (3, 257, 70), (40, 64, 576), (130, 33, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_agree_with_float64(dtype: torch.dtype, sizes: tuple[int, int, int], bias: bool) -> None:
    rows, outputs, inputs = sizes
    weight, bias_N = draw(outputs, inputs, scale=0.05).to(dtype), draw(outputs, seed=1).to(dtype)
    backend = choose_linear(dtype, CPU)
    x = draw(rows, inputs, seed=2).to(backend.activation_dtype)
    found = backend.make(weight, bias_N if bias else None)(x)
    expected = x.double() @ weight.double().T + (bias_N.double() if bias else 0.0)
    assert found.dtype == backend.activation_dtype
    bound = 1e-5 * (x.double().abs() @ weight.double().abs().T + 1) + inputs * 2.0**-25 * x.abs().max()
    slack = 1.0 if found.dtype == torch.float32 else torch.finfo(dtype).eps * 1e5
    assert ((found.double() - expected).abs() <= bound * slack).all()


def test_bfloat16_weights_are_exact_but_for_the_tiniest() -> None:
    """A one-hot input reads weights back: exact from 2^-14 on, and within 2^-25 below."""
    magnitudes = 2.0 ** torch.arange(-30, 15, 0.25)
    weight = torch.cat((magnitudes, -magnitudes, torch.zeros(1))).bfloat16()[:, None]
    backend = choose_linear(torch.bfloat16, CPU)
    read = backend.make(weight, None)(torch.ones(1, 1, dtype=backend.activation_dtype))[0].float()
    exact = weight[:, 0].float()
    normal = exact.abs() >= 2.0**-14
    assert torch.equal(read[normal], exact[normal])
    assert ((read - exact).abs() <= 2.0**-25).all()
    assert torch.equal(read, exact) == (not X86), "the sample must reach below float16's range"


def test_the_largest_weight_that_is_allowed_is_exact() -> None:
    backend = choose_linear(torch.float16, CPU)
    largest = torch.full((4, 1), min(backend.max_weight, 65504.0))
    one = torch.ones(1, 1, dtype=backend.activation_dtype)
    assert torch.equal(backend.make(largest.half(), None)(one)[0].float(), largest[:, 0])


def test_the_reason_says_what_runs() -> None:
    names = {dtype: choose_linear(dtype, CPU) for dtype in DTYPES}
    if X86:
        assert [backend.name for backend in names.values()] == ["onednn", "fbgemm", "fbgemm"]
        assert "bfloat16 on an x86 CPU: FBGEMM" in names[torch.bfloat16].reason
    fallback = choose_linear(torch.bfloat16, CPU, refused="a weight is too large")
    assert (fallback.name, fallback.activation_dtype) == ("torch", torch.bfloat16)
    assert fallback.max_weight == float("inf")
    assert fallback.reason == "F.linear in bfloat16 on cpu: a weight is too large"
    cuda = choose_linear(torch.bfloat16, torch.device("cuda"))
    assert (cuda.name, cuda.activation_dtype, cuda.even_rows(7)) == ("torch", torch.bfloat16, 7)


@pytest.mark.parametrize("sizes", [(96, 64), (257, 1536)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_at_even_counts_a_rows_result_does_not_depend_on_the_others(
    dtype: torch.dtype, sizes: tuple[int, int]
) -> None:
    if not X86:  # F.linear, which promises nothing
        with pytest.raises(ValueError, match="--batch-invariant"):
            choose_linear(dtype, CPU, batch_invariant=True)
        return
    backend = choose_linear(dtype, CPU, batch_invariant=True)
    linear = backend.make(draw(*sizes, scale=0.05), None)
    x = draw(600, sizes[1], seed=2)
    everything = linear(x)
    for rows in [*range(1, 140), 241, 242, 247, 254, 512]:
        even = backend.even_rows(rows)
        assert rows <= even <= rows + 2
        assert torch.equal(linear(x[:even]), everything[:even])
        # The same rows in another place of another batch.
        assert torch.equal(linear(x[5 : 5 + even]), everything[5 : 5 + even])
