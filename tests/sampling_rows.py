"""Real tables and batches for the sampling tests, and what their expected values are computed with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch

from slipstream.contracts.request import EngineRequest
from slipstream.contracts.sampling_params import SamplingParams
from slipstream.contracts.step import Admission
from slipstream.kernels.backend import Arg, jit_with, tl
from slipstream.kernels.noise import lane_key, lane_keys, mix_word, noise_bits, token_cost
from slipstream.rows.table import RowTable
from slipstream.sampling.pipeline import Pipeline, SampledTokens, default_features
from slipstream.sampling.protocol import Feature, SampleBatch

CPU = torch.device("cpu")
MAX_MODEL_LEN = 48

# Each way through the fused sampler: a best token that is plainly kept, or weighed, or not kept again and
# again; few candidates, more, passes over a whole row.
WAYS_TO_TRUNCATE = [
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    {"top_k": 1},
    {"top_k": 64, "min_p": 0.1},
    {"top_p": 0.9},
    {"temperature": 0.7, "top_p": 1e-4},
    {"min_p": 0.05},
    {"top_k": 100},
    {"top_k": 700, "top_p": 0.9},
    {"min_p": 1e-6, "top_p": 0.99},
    {"temperature": 5.0, "top_p": 0.9},
    {"temperature": 9.0, "top_p": 0.02},
    {"temperature": 9.0, "top_p": 0.1, "min_p": 0.2},
    {"temperature": 5.0, "min_p": 0.1},
    {"temperature": 5.0, "top_k": 3000, "top_p": 0.9, "min_p": 0.001},
]

# One row of every kind; end id 0.
KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.3},
    {"temperature": 0.0, "top_k": 5, "top_p": 0.1, "min_p": 0.9, "presence_penalty": -1.0},
    {},
    {"temperature": 0.6},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.9, "top_k": 10, "top_p": 0.9},
    {"top_k": 3},
    {"temperature": 1.5, "top_k": 150},
    {"top_k": 100, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 3.0, "min_p": 0.2},
    {"min_p": 0.1, "allowed_token_ids": list(range(40, 90))},
    {"logit_bias": {4: 3.0, 5: -100.0}, "min_tokens": 9},
    {"top_k": -1, "frequency_penalty": 1.0, "temperature": 2.0},
    {"legal": tuple(range(9, 100, 3)), "top_k": 20},
]


@dataclass
class Row:
    """A request as a test names it. legal: tokens that a grammar leaves, next and after each draft; None
    without one."""

    params: SamplingParams = field(default_factory=SamplingParams)
    prompt: Sequence[int] = (1, 2, 3)
    output: Sequence[int] = ()
    seed: int = 0
    end_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    legal: tuple[tuple[int, ...], ...] | None = None

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.output]


def make_row(
    prompt=(1, 2, 3), output=(), seed=0, end_ids=(), bad_words=(), legal=None, legal_later=(), **params
) -> Row:
    places = None if legal is None else (legal, *legal_later)
    return Row(SamplingParams(max_tokens=None, **params), prompt, output, seed, end_ids, bad_words, places)


def make_pipeline(
    vocab: int,
    features: Sequence[Feature] | None = None,
    max_lanes: int = 0,
    device: torch.device = CPU,
) -> Pipeline:
    if features is None:
        features = default_features(vocab, max_lanes, device)
    return Pipeline(features, vocab, device)


def make_batch(pipeline: Pipeline, rows: Sequence[Row], device: torch.device = CPU) -> SampleBatch:
    """Lane i is rows[i], in a table row of another number; what admission does not write is rubbish."""
    table = RowTable(
        max_num_seqs=len(rows) + 3,
        max_model_len=MAX_MODEL_LEN,
        block_size=16,
        device=device,
        columns=pipeline.columns,
        features=pipeline.names,
    )
    table.arena.fill_(0x7F123456)
    row_of_lane = [(lane + 2) % (len(rows) + 3) for lane in range(len(rows))]
    used = []
    for number, row in zip(row_of_lane, rows, strict=True):
        request = EngineRequest(
            key=number,
            prompt_token_ids=np.array(row.prompt, np.int32),
            params=row.params,
            seed=row.seed,
            end_token_ids=row.end_ids,
            max_len=MAX_MODEL_LEN,
            bad_word_token_ids=row.bad_words,
            grammar="" if row.legal is None else "told by the test",
        )
        tokens = np.array(row.tokens, np.int32)
        writer = table.admit(Admission(number, 1, request, tokens, 0, np.array([1], np.int32)))
        used.append(pipeline.admit(request, writer))
        writer.scalar("features", used[-1])
        writer.commit()
        if row.legal is not None:
            bits = np.zeros((len(row.legal), 32 * max(2, -(-pipeline._vocab_size // 32))), np.uint8)
            for place, legal in enumerate(row.legal):
                bits[place, list(legal)] = 1
            masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
            drafts = np.full((1, len(row.legal) - 1), 5, np.int32)
            table.constrain(SimpleNamespace(
                legal_row=np.array([number], np.int32), legal=masks[None], legal_drafts=drafts,
                legal_length=np.array([len(tokens)], np.int32), admissions=[SimpleNamespace(row=number)],
            ))  # fmt: skip
    table.flush().apply(table.arena)
    row_N = torch.tensor(row_of_lane, device=device)
    lanes = {
        name: torch.tensor([lane for lane, bits in enumerate(used) if bits >> bit & 1], device=device)
        for bit, name in enumerate(pipeline.names)
        if any(bits >> bit & 1 for bits in used)
    }
    return SampleBatch(row_N, table.columns["length"][row_N], table.columns, lanes)


def apply_features(features: Sequence[Feature], rows: Sequence[Row], logits: torch.Tensor) -> torch.Tensor:
    """The logits after the features alone, without a choice."""
    batch = make_batch(make_pipeline(logits.shape[1], features), rows)
    changed = logits.clone()
    for feature in features:
        if feature.name in batch.feature_lanes:
            feature.apply(changed, batch)
    return changed


def sample(rows: Sequence[Row], logits: torch.Tensor) -> SampledTokens:
    """One token of each row through the whole pipeline."""
    pipeline = make_pipeline(logits.shape[1])
    return pipeline.sample(logits.clone(), make_batch(pipeline, rows))


def softmax64(logits: np.ndarray) -> np.ndarray:
    """float64 softmax over the last axis."""
    weight = np.exp(logits - logits.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True)


def chi_square_is_plausible(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Pearson's statistic against its 1 - 1e-5 quantile (Wilson and Hilferty's approximation)."""
    assert expected.min() >= 5, "too few draws for a chi-square test"
    statistic = float((((counts - expected) ** 2) / expected).sum())
    degrees = counts.size - 1
    spread = 2 / (9 * degrees)
    return statistic < degrees * (1 - spread + 4.265 * spread**0.5) ** 3


def rows_of_every_kind(seed: int = 100):
    rng = np.random.default_rng(seed)
    return [
        make_row(
            rng.integers(1, 200, 5).tolist(),
            rng.integers(1, 200, rng.integers(0, 6)).tolist(),
            seed=seed + lane,
            end_ids=(0,),
            bad_words=((7,), (3, 8)),
            **kind,
        )
        for lane, kind in enumerate(KINDS)
    ]


def random_logits(lanes: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(lanes, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def legal_probabilities(row, logits: np.ndarray) -> np.ndarray:
    """The stated order in plain float64: grammar, allowed, bias, minimum length, bad words, penalties,
    temperature, min_p, top_k, top_p."""
    x, params, ids = logits.astype(np.float64), row.params, np.arange(len(logits))
    if row.legal is not None:
        x[~np.isin(ids, row.legal[0])] = -np.inf
    if params.allowed_token_ids is not None:
        x[~np.isin(ids, params.allowed_token_ids)] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if len(row.output) < params.min_tokens:
        x[list(row.end_ids)] = -np.inf
    for word in row.bad_words:
        if len(word) == 1 or row.tokens[1 - len(word) :] == list(word[:-1]):
            x[word[-1]] = -np.inf
    for token in set(row.tokens):
        x[token] *= params.repetition_penalty if x[token] <= 0 else 1 / params.repetition_penalty
        x[token] -= params.frequency_penalty * row.output.count(token)
        x[token] -= params.presence_penalty * (token in row.output)
    if params.greedy:
        return (ids == x.argmax()).astype(np.float64)
    probability = softmax64(x / params.temperature)
    probability[probability < params.min_p * probability.max()] = 0
    if params.top_k > 0:
        probability[probability < np.sort(probability)[-min(params.top_k, len(x))]] = 0
    order = np.argsort(-probability)
    total = np.cumsum(probability[order])
    probability[order[total - probability[order] >= params.top_p * total[-1]]] = 0
    return probability / probability.sum()


NOISE_TOKENS = 8192


def noise_costs(seed: int, device: torch.device) -> tuple[np.ndarray, np.ndarray]:
    """What a kernel takes for -log of the noise of tokens, and float64's of the same bits."""
    got = torch.empty(NOISE_TOKENS, device=device)
    _cost_kernel[(NOISE_TOKENS // 1024,)](got, seed, -seed, 5, 1024)
    words = (torch.tensor([word], dtype=torch.int32) for word in (seed, -seed, 5))
    bits = noise_bits(lane_keys(*words, 0), torch.arange(NOISE_TOKENS, dtype=torch.int32))[0]
    share = np.maximum((bits.numpy().view(np.uint32) >> 8).astype(np.float64), 0.5) / 2**24
    return got.cpu().double().numpy(), -np.log(share)


@jit_with(do_not_specialize=("seed_lo", "seed_hi", "position"))
def _cost_kernel(out: Arg, seed_lo: Arg, seed_hi: Arg, position: Arg, BLOCK: tl.constexpr) -> None:
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key0, key1 = lane_key(seed_lo, seed_hi, position, 0)
    tl.store(out + token, token_cost(mix_word(token.to(tl.uint32)), key0, key1))
