"""The most likely tokens of a row: in order of value, lower token id first where values are equal.

Found through the maxima of small chunks: the first K tokens of that order lie in the first K chunks.

Legend: n rows, V vocabulary, C chunks, K candidates.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

Tensor = torch.Tensor

CHUNK = 32
ID_MASK = (1 << 32) - 1


def top_candidates(logits_nV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` tokens of each row (all V where there are fewer): values float32 [n, K] and ids
    int64 [n, K]. NaN rows give ids in range and say nothing about other rows."""
    if logits_nV.dim() != 2 or logits_nV.dtype != torch.float32 or count < 1:
        raise ValueError("logits must be float32 [n, V], count at least 1")
    return top_candidates_reference(logits_nV, min(count, logits_nV.shape[1]))


def top_candidates_reference(logits_nV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The same in torch operations."""
    rows, vocab = logits_nV.shape
    chunks = -(-vocab // CHUNK)
    if count >= chunks:
        id_V = torch.arange(vocab, device=logits_nV.device)
        id_nK = id_V.expand(rows, vocab).gather(1, _first(logits_nV, id_V, count))
        return logits_nV.gather(1, id_nK), id_nK
    logits_nCc = _chunked(logits_nV)
    chunk_C = torch.arange(chunks, device=logits_nV.device)
    chosen_nK = _first(logits_nCc.amax(2), chunk_C, count)
    index_nKc = chosen_nK.unsqueeze(2).expand(rows, count, CHUNK)
    value_nM = logits_nCc.gather(1, index_nKc).flatten(1)
    id_nM = (chosen_nK.unsqueeze(2) * CHUNK + torch.arange(CHUNK, device=logits_nV.device)).flatten(1)
    place_nK = _first(value_nM, id_nM, count)
    return value_nM.gather(1, place_nK), id_nM.gather(1, place_nK)


def first_argmax(logits_nV: Tensor) -> tuple[Tensor, Tensor]:
    """The highest value of each row, float32 [n], and the lowest id that has it, int64 [n]."""
    if logits_nV.dim() != 2:
        raise ValueError("logits must be [n, V]")
    logits_nCc = _chunked(logits_nV)
    chunk_n = logits_nCc.amax(2).argmax(1)
    best_nc = logits_nCc[torch.arange(len(chunk_n), device=chunk_n.device), chunk_n]
    place_n = best_nc.argmax(1)
    return best_nc.gather(1, place_n.unsqueeze(1)).squeeze(1), chunk_n * CHUNK + place_n


def _order_key(values: Tensor) -> Tensor:
    """float32 as int32 of the same order (equal for 0.0 and -0.0; NaN goes to either end)."""
    bits = (values + 0.0).view(torch.int32)
    return bits ^ (bits >> 31).bitwise_and_(0x7FFFFFFF)


def _first(values_nK: Tensor, ids: Tensor, count: int) -> Tensor:
    """Places of the first `count` by (value down, id up). Both go in one int64, so that no two are equal."""
    joined = (_order_key(values_nK).long() << 32) + (ID_MASK - ids)
    return joined.topk(count, 1).indices


def _chunked(logits_nV: Tensor) -> Tensor:
    """[n, C, CHUNK]; the last chunk is filled with -inf where the vocabulary is no multiple of CHUNK."""
    vocab = logits_nV.shape[1]
    chunks = -(-vocab // CHUNK)
    if chunks * CHUNK != vocab:
        logits_nV = pad(logits_nV, (0, chunks * CHUNK - vocab), value=-torch.inf)
    return logits_nV.reshape(-1, chunks, CHUNK)
