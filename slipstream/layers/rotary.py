"""Rotary position embedding (Su et al., 2021) and its scalings for longer contexts.

Cosines and sines of every position are computed once, in float32, as transformers does; a step gathers its
rows and all layers share them. Legend: T tokens, H heads, D head size, P positions.

Dynamic NTK scaling makes the frequencies depend on the length of the sequence. transformers uses the length
that a forward pass sees, so there a token's key depends on how the prompt was cut into passes. Here position
p always gets the frequencies of length p + 1 (those of the trained length while p is inside it). This equals
transformers for any prompt up to the trained length, decoded to any length, and for a longer prompt fed one
token at a time; and it is the only rule under which chunked prefill, prefix caching and preemption cannot
change an answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from slipstream.config.model import RopeSpec

Tensor = torch.Tensor
Turn = tuple[Tensor, Tensor]


class Rotary:
    """The table of cosines and signed sines for positions 0 .. max_positions - 1.

    Rotation pairs dimension i with i + D/2. With the halves of x swapped it reads x * cos + swap(x) * sin,
    where the first half of sin carries the minus sign.
    """

    def __init__(self, spec: RopeSpec, max_positions: int, device: torch.device) -> None:
        positions_P1 = torch.arange(max_positions, dtype=torch.float32, device=device)[:, None]
        inverse_PD, attention_factor = inverse_frequencies(spec, positions_P1)
        angles_PD = positions_P1 * inverse_PD
        cos, sin = angles_PD.cos() * attention_factor, angles_PD.sin() * attention_factor
        self.table_P2D = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
        self.num_bytes = self.table_P2D.nbytes

    def turn(self, positions_T: Tensor) -> Turn:
        """The step's cosines and signed sines, [T, 1, D] float32. positions_T: int64."""
        rows_T2D = self.table_P2D.index_select(0, positions_T)
        return rows_T2D[:, :1], rows_T2D[:, 1:]


def rotate(x_THD: Tensor, turn: Turn) -> Tensor:
    """Turns every head of x by its token's angles. x: adjacent elements in a head; a new tensor of x's dtype
    out."""
    cos_T1D, sin_T1D = turn
    halves = x_THD.view(*x_THD.shape[:-1], 2, -1)
    return (x_THD * cos_T1D).addcmul_(halves.flip(-2).view(x_THD.shape), sin_T1D).to(x_THD.dtype)


def inverse_frequencies(spec: RopeSpec, positions_P1: Tensor) -> tuple[Tensor, float]:
    """Radians a position for each of the D/2 pairs, [1, D/2] or [P, D/2] where they depend on the position,
    and the factor on cosines and sines. float32, formulas as in transformers' modeling_rope_utils."""
    inverse_D, attention_factor = _SCALINGS[spec.kind](spec, positions_P1)
    if spec.divisors:
        inverse_D = inverse_D / inverse_D.new_tensor(spec.divisors)
    return inverse_D, attention_factor


def _powers(theta: float | Tensor, spec: RopeSpec, device: torch.device) -> Tensor:
    exponent_D = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32, device=device) / spec.rotary_dim
    return (theta**exponent_D)[None] if isinstance(theta, float) else theta**exponent_D


def _default(spec: RopeSpec, positions_P1: Tensor) -> tuple[Tensor, float]:
    return 1.0 / _powers(spec.theta, spec, positions_P1.device), 1.0


def _linear(spec: RopeSpec, positions_P1: Tensor) -> tuple[Tensor, float]:
    return _default(spec, positions_P1)[0] / spec.factor, 1.0


def _dynamic(spec: RopeSpec, positions_P1: Tensor) -> tuple[Tensor, float]:
    """NTK-aware scaling that grows with the length; see the module's docstring for which length."""
    trained, dim = spec.original_max_position, spec.rotary_dim
    length_P1 = (positions_P1 + 1).clamp(min=trained)
    stretch_P1 = spec.factor * length_P1 / trained - (spec.factor - 1)
    return 1.0 / _powers(spec.theta * stretch_P1 ** (dim / (dim - 2)), spec, positions_P1.device), 1.0


def _llama3(spec: RopeSpec, positions_P1: Tensor) -> tuple[Tensor, float]:
    """Long wavelengths are divided by factor, short ones kept, those between blended."""
    inverse_D = _default(spec, positions_P1)[0]
    wavelength_D = 2 * math.pi / inverse_D
    turns_D = spec.original_max_position / wavelength_D
    smooth_D = ((turns_D - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)).clamp(0, 1)
    return (1 - smooth_D) * inverse_D / spec.factor + smooth_D * inverse_D, 1.0


def _yarn(spec: RopeSpec, positions_P1: Tensor) -> tuple[Tensor, float]:
    """YaRN (Peng et al., 2023): a ramp over dimensions between dividing by factor and leaving alone."""
    dim, theta = spec.rotary_dim, spec.theta

    def dimension_of(turns: float) -> float:
        return dim * math.log(spec.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(spec.beta_fast), dimension_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0.0
    inverse_D = _default(spec, positions_P1)[0]
    dimension_D = torch.arange(dim // 2, dtype=torch.float32, device=inverse_D.device)
    ramp_D = ((dimension_D - low) / (high - low)).clamp(0, 1)
    return inverse_D / spec.factor * ramp_D + inverse_D * (1 - ramp_D), _yarn_attention_factor(spec)


def _yarn_attention_factor(spec: RopeSpec) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if spec.factor <= 1 else 0.1 * mscale * math.log(spec.factor) + 1.0

    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return scale(spec.mscale) / scale(spec.mscale_all_dim)
    return scale(1.0)


_SCALINGS: dict[str, Callable[[RopeSpec, Tensor], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
