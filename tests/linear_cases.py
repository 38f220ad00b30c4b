"""Random products and their float64 formulas, on any device: for the interpreter's cases and the GPU check.

Legend: M rows, N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from slipstream.kernels.linear import FLOAT16_SHRINK, Norm, Scaled

Tensor = torch.Tensor


@dataclass(frozen=True)
class LinearCase:
    """x and the residual have gaps between their rows, which are NaN."""

    x_MK: Tensor
    weight_NK: Tensor
    bias_N: Tensor | None
    norm: Norm | None
    residual_MN: Tensor

    def given(self, parts: int = 3) -> Tensor | Scaled:
        """x as a product takes it; with a norm, as what adds to the residual leaves it, squares in parts."""
        if self.norm is None:
            return self.x_MK
        shrink = FLOAT16_SHRINK if self.weight_NK.dtype == torch.float16 else 1.0
        pieces = self.x_MK.double().square().tensor_split(parts, 1)
        squares_PM = torch.stack([piece.sum(1) for piece in pieces]).float()
        scaled_MK = (self.x_MK * (self.norm.weight_K * shrink)).to(self.weight_NK.dtype)
        return Scaled(scaled_MK, squares_PM, self.norm)

    def expected(self, op: str) -> Tensor:
        """float64 [M, N], gated [M, N / 2]."""
        x_MK = self.x_MK.double()
        if self.norm is not None:
            x_MK = normalised(x_MK, self.norm)
        y_MN = x_MK @ self.weight_NK.double().T
        if self.bias_N is not None:
            y_MN = y_MN + self.bias_N.double()
        if op == "add":
            return self.residual_MN.double() + y_MN
        if op == "plain":
            return y_MN
        gate, up = y_MN.chunk(2, 1)
        return gate / (1 + (-gate).exp()) * up

    def only(self, first: int, last: int) -> LinearCase:
        """The case of some of its rows."""
        return replace(self, x_MK=self.x_MK[first:last], residual_MN=self.residual_MN[first:last])


def normalised(x_MK: Tensor, norm: Norm) -> Tensor:
    """RMSNorm in float64."""
    x_MK = x_MK.double()
    mean_M1 = x_MK.square().mean(1, keepdim=True)
    return x_MK / (mean_M1 + norm.eps).sqrt() * norm.weight_K.double()


def linear_case(
    rows: int,
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    *,
    normed: bool = False,
    biased: bool = False,
    gap: int = 5,
    device: torch.device | str = "cpu",
) -> LinearCase:
    """With a norm, x is a float32 residual; else of the weight's type. gap: elements between rows (a
    multiple of 16 lets one compiled kernel serve this case and contiguous ones)."""
    draw = torch.Generator(device).manual_seed(rows * 7919 + outputs * 31 + inputs)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device=device)

    x_MK = normal(rows, inputs + gap).to(torch.float32 if normed else dtype)
    residual_MN = normal(rows, outputs + gap)
    x_MK[:, inputs:] = residual_MN[:, outputs:] = float("nan")
    return LinearCase(
        x_MK[:, :inputs],
        (normal(outputs, inputs) / inputs**0.5).to(dtype),
        normal(outputs).to(dtype) if biased else None,
        Norm(0.5 + normal(inputs).abs(), 1e-5) if normed else None,
        residual_MN[:, :outputs],
    )
