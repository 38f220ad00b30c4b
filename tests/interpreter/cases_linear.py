"""Products with what is fused into them, in Triton's interpreter against float64 formulas.

Weights are float32 and float16: the interpreter multiplies the bits of bfloat16 matrices, not their values.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from linear_cases import LinearCase, linear_case

from slipstream.kernels.linear import (
    INVARIANT,
    INVARIANT_FLOAT32,
    LinearConfig,
    LinearScratch,
    Norm,
    add_linear,
    choose_linear_config,
    gated_linear,
    linear,
    scratch_size,
)

ROWS = (1, 3, 16, 33)
# Outputs and inputs that no tile divides, and one case that tiles fit exactly.
SIZES = ((128, 256), (100, 500), (72, 320))
CONFIGS = {
    "a slab": LinearConfig("slab", rows=8, columns=16, depth=1024, stages=1),
    "slabs ahead": LinearConfig("slab", rows=16, columns=32, depth=256, warps=8, stages=3),
    "a slab at a time": LinearConfig("slab", rows=4, columns=32, depth=128, stages=1),
    "early": LinearConfig("slab", rows=8, columns=32, depth=256, early=True),
    "vectors": LinearConfig("vector", rows=4, columns=32, depth=256, warps=1, stages=2),
    "direct": LinearConfig("direct", rows=8, columns=16, depth=256, stages=1),
    "direct, ahead": LinearConfig("direct", rows=16, columns=32, depth=128, warps=2, stages=2),
    "tiles": LinearConfig("tile", rows=32, columns=64, depth=64, stages=3),
    "tiles, held": LinearConfig("tile", rows=16, columns=32, depth=64, stages=3, held=2),
    "all tiles held": LinearConfig("tile", rows=32, columns=32, depth=128, held=9),
}
SPLITS = {
    "vectors": LinearConfig("vector", rows=4, columns=64, depth=128, splits=2, stages=3),
    "direct": LinearConfig("direct", rows=16, columns=32, depth=64, warps=2, splits=2, stages=2),
    "slabs": LinearConfig("slab", rows=16, columns=16, depth=128, splits=2, stages=2),
    "a slab each": LinearConfig("slab", rows=8, columns=32, depth=128, splits=5),
    "tiles": LinearConfig("tile", rows=16, columns=64, depth=64, splits=3, stages=2),
}
LIMITS = {torch.float32: 1e-5, torch.float16: 5e-3}


def close(got, expected, dtype):
    assert got.shape == expected.shape
    torch.testing.assert_close(got.double(), expected, atol=LIMITS[dtype], rtol=LIMITS[dtype])


def run(case: LinearCase, op: str, config: LinearConfig) -> torch.Tensor:
    """What the kernel makes of a case."""
    out = case.residual_MN.clone()
    scratch = LinearScratch(*scratch_size(*out.shape, config), torch.device("cpu"))
    scratch.partial.fill_(float("nan"))
    if op == "add":
        add_linear(case.x_MK, case.weight_NK, case.bias_N, out, config, scratch)
    else:
        product = gated_linear if op == "gated" else linear
        out = product(case.given(), case.weight_NK, case.bias_N, config, scratch)
    assert not scratch.counter.any()
    return out


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("op", ["plain", "gated", "add"])
@pytest.mark.parametrize("name", CONFIGS)
def test_products_are_right_at_any_size(rows, op, name):
    turn = ROWS.index(rows) + list(CONFIGS).index(name)
    # Four turns in a row, those of a config's ROWS, are both types with and without norm and bias.
    dtype, extras = (torch.float16 if turn % 2 else torch.float32), turn % 4 > 1
    outputs, inputs = SIZES[turn % len(SIZES)]
    case = linear_case(rows, outputs, inputs, dtype, normed=extras and op != "add", biased=extras)
    close(run(case, op, CONFIGS[name]), case.expected(op), dtype)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", SPLITS)
def test_split_products_are_right_at_any_size(rows, name):
    turn = ROWS.index(rows) + list(SPLITS).index(name)
    outputs, inputs = SIZES[turn % len(SIZES)]
    for op in ("add", ("plain", "gated")[turn % 2]):
        case = linear_case(rows, outputs, inputs, torch.float32, biased=True, normed=op != "add")
        config = replace(SPLITS[name])
        close(run(case, op, config), case.expected(op), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", [*CONFIGS, *(f"{name} in splits" for name in SPLITS)])
def test_a_norm_is_shared_by_the_sum_before_it_and_the_product_after_it(name, dtype):
    config = SPLITS[name.removesuffix(" in splits")] if name.endswith(" in splits") else CONFIGS[name]
    turn = list(CONFIGS).index(name) if name in CONFIGS else len(name)
    rows, (outputs, inputs) = ROWS[turn % len(ROWS)], SIZES[turn % len(SIZES)]
    case = linear_case(rows, outputs, inputs, dtype, biased=turn % 2 > 0)
    after = linear_case(rows, 64, outputs, dtype, normed=True)
    scratch = LinearScratch(*scratch_size(*case.residual_MN.shape, config), torch.device("cpu"))
    residual = case.residual_MN.clone()
    scaled = add_linear(case.x_MK, case.weight_NK, case.bias_N, residual, config, scratch, after.norm)
    close(residual, case.expected("add"), dtype)
    assert scaled is not None and scaled.norm is after.norm
    squares = residual.double().square().sum(1)
    torch.testing.assert_close(scaled.squares_PM.double().sum(0), squares, atol=0, rtol=1e-5)
    next_config = CONFIGS[("a slab", "vectors", "direct", "tiles")[turn % 4]]
    for op, product in (("plain", linear), ("gated", gated_linear)):
        got = product(scaled, after.weight_NK, None, next_config)
        close(got, replace(after, x_MK=residual).expected(op), dtype)


def test_large_activations_do_not_overflow_float16_before_the_norm_scales_them():
    case = linear_case(3, 64, 256, torch.float16, normed=True)
    case.x_MK.mul_(1e5)
    close(run(case, "plain", CONFIGS["a slab"]), case.expected("plain"), torch.float16)
    close(run(case, "plain", CONFIGS["tiles"]), case.expected("plain"), torch.float16)


@pytest.mark.parametrize("op", ["plain", "gated", "add"])
def test_what_is_chosen_for_any_batch_adds_up_in_one_order(op):
    """tests/gpu/check_invariance.py shows that these do, to the bit; here, that nothing else is chosen."""
    chosen = set()
    for rows, outputs in itertools.product((1, 16, 17, 64, 65, 256, 8192), (96, 1024, 4096, 151936)):
        config = choose_linear_config(op, rows, outputs, 320, torch.float32, invariant=True)
        assert config == INVARIANT_FLOAT32
        config = choose_linear_config(op, rows, outputs, 320, torch.bfloat16, invariant=True)
        assert rows > 16 or config.rows == 16
        chosen.add(config)
    assert chosen == set(INVARIANT)
    assert all((each.kind, each.splits, each.held) == ("tile", 1, 0) for each in INVARIANT)
    assert all(each.columns * 4 == 64 * each.warps for each in INVARIANT)  # 64 outputs to four warps


@pytest.mark.parametrize(
    "dtype,config", [(torch.float32, INVARIANT_FLOAT32), *((torch.float16, each) for each in INVARIANT)]
)
@pytest.mark.parametrize("op", ["plain", "gated", "add"])
def test_an_invariant_row_is_the_same_alone_and_in_any_batch(dtype, config, op):
    case = linear_case(144, 96, 320, dtype, normed=op != "add", biased=True)
    every = run(case, op, config)
    # Rows keep their places in a tile: numpy's products, unlike a tensor core's, depend on them.
    for first, last in ((0, 1), (0, 53), (128, 144)):
        assert torch.equal(run(case.only(first, last), op, config), every[first:last])


@pytest.mark.parametrize("rows", [1, 8, 16, 33, 200])
@pytest.mark.parametrize("op,outputs,inputs", [("plain", 96, 576), ("gated", 72, 576), ("add", 64, 1536)])
def test_what_is_chosen_is_right(rows, op, outputs, inputs):
    config = choose_linear_config(op, rows, outputs, inputs, torch.float16)
    if config is not None:
        case = linear_case(rows, outputs, inputs, torch.float16, normed=op != "add")
        close(run(case, op, config), case.expected(op), torch.float16)
    assert choose_linear_config(op, rows, outputs, inputs, torch.float32) is None


def test_what_does_not_fit_is_refused():
    case, config = linear_case(4, 96, 320, torch.float32), SPLITS["slabs"]
    x, weight = case.x_MK, case.weight_NK
    with pytest.raises(ValueError, match="scratch is too small"):
        add_linear(x, weight, None, case.residual_MN, config, LinearScratch(10, 10, torch.device("cpu")))
    with pytest.raises(ValueError, match="scratch is too small"):
        linear(x, weight, None, config)
    with pytest.raises(ValueError, match="contiguous"):
        linear(x, weight[:, ::2], None, CONFIGS["tiles"])
    with pytest.raises(ValueError, match="weight's type"):
        linear(x.half(), weight, None, CONFIGS["tiles"])
    with pytest.raises(ValueError, match="norm's weight"):
        scratch, norm = LinearScratch(0, 0, x.device), Norm(torch.ones(320), 1e-5)
        add_linear(x, weight, None, case.residual_MN, CONFIGS["tiles"], scratch, norm)
