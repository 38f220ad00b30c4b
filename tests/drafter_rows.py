"""Steps of a few rows by hand, with drafts of which some were right, for drafters with weights."""

from __future__ import annotations

import torch
from drafter_reference import VOCAB

from slipstream.attention.paged_torch import PagedTorchAttention
from slipstream.attention.paged_triton import PagedTritonAttention
from slipstream.attention.protocol import AttentionBackend, AttentionBatch
from slipstream.kernels.step_inputs import build_step_inputs
from slipstream.speculation.protocol import Drafter, DraftStep
from slipstream.speculation.target import Target

DRAFTS, BLOCK_SIZE, WIDTH, ROWS = 3, 4, 48, 4
TEXTS = torch.randint(0, VOCAB, (ROWS, WIDTH), generator=torch.Generator().manual_seed(5))
# Prompts whole and in chunks; drafts of which none, some and all were right; a row that begins later.
STEPS = (
    {0: (9, 9), 1: (6, 0)},
    {0: (4, 1), 1: (5, 5), 2: (1, 1)},
    {1: (4, 4), 0: (4, 3), 2: (3, 2)},
    {2: (4, 4), 3: (13, 13), 0: (1, 1), 1: (2, 1)},
    {3: (4, 2), 0: (4, 4), 1: (4, 1)},
)


class Rows:
    """A table by hand, whose rows follow TEXTS whatever is drafted. temperature: of every row."""

    def __init__(self, target: Target, drafter: Drafter, temperature: float = 0.0) -> None:
        self.target, self.drafter = target, drafter
        layers, kind = (*target.model.attention, *drafter.layers), torch.float32
        self.attention: AttentionBackend = PagedTorchAttention(layers, BLOCK_SIZE, kind, target.device)
        if target.fused:
            self.attention = PagedTritonAttention(layers, BLOCK_SIZE, kind, target.device, max_lanes=ROWS)
        self.attention.allocate(1 + ROWS * WIDTH // BLOCK_SIZE)
        names = ("alive", "length", "num_computed", "max_len", "seed_lo", "seed_hi")
        self.columns = dict(zip(names, torch.zeros(len(names), ROWS, dtype=torch.int32), strict=True))
        self.columns["alive"][:], self.columns["max_len"][:] = 1, WIDTH
        self.columns["seed_lo"][:] = torch.arange(7, 7 + ROWS)
        self.columns["temperature"] = torch.full((ROWS,), temperature)
        self.columns["tokens"] = TEXTS.int().clone()
        blocks = 1 + torch.randperm(ROWS * WIDTH // BLOCK_SIZE, generator=torch.Generator().manual_seed(1))
        self.columns["blocks"] = blocks.view(ROWS, -1).int()

    def step(self, lanes: dict[int, tuple[int, int]], drafts: int = DRAFTS) -> dict[int, list[int]]:
        """lanes: row -> tokens it computes, and how many of them hold (0: it is in its prompt still); the
        others are drafts that were wrong. Returns the drafts of each row that gained tokens."""
        columns, rows = self.columns, list(lanes)
        query_L, used_L = torch.tensor(list(lanes.values()), dtype=torch.int32).unbind(1)
        for row, (query, used) in lanes.items():
            first = int(columns["num_computed"][row])
            if used:
                columns["tokens"][row, first + used : first + query] += 1
        inputs = build_step_inputs(
            torch.tensor(rows, dtype=torch.int32), query_L.contiguous(), int(query_L.sum()),
            tokens_RM=columns["tokens"] % VOCAB, num_computed_R=columns["num_computed"],
            alive_R=columns["alive"], blocks_RB=columns["blocks"], block_size=BLOCK_SIZE, one_each=False,
        )
        batch = AttentionBatch(
            inputs.query_start_L1, inputs.length_L, inputs.position_T, inputs.slot_T, inputs.row_L,
            columns["blocks"], query_L.numpy(), inputs.length_L.numpy().copy(), 0,
        )
        hidden_TH, aux_TX = self.target.model.forward_aux(
            inputs.token_T, inputs.position_T, self.attention.bind(batch), self.drafter.aux_layers
        )
        columns["tokens"].copy_(TEXTS)
        columns["num_computed"][rows] += torch.where(used_L > 0, used_L, query_L)
        columns["length"][rows] = torch.where(used_L > 0, columns["num_computed"][rows] + 1, 0)
        found = self.drafter.propose(DraftStep(
            inputs=inputs, batch=batch, columns=columns, attention=self.attention, block_size=BLOCK_SIZE,
            appended_L=used_L.contiguous(), source_L=inputs.query_start_L1[:-1].long() + used_L - 1,
            hidden_TH=hidden_TH, aux_TX=aux_TX, length_bound=WIDTH, num_drafts=drafts,
        ))
        assert found.token_LK.dtype == found.count_L.dtype == torch.int32
        rows_with = [(lane, row) for lane, row in enumerate(rows) if lanes[row][1]]
        return {row: found.token_LK[lane, : found.count_L[lane]].tolist() for lane, row in rows_with}
