"""What a scheduler needs to know: a few numbers."""

from __future__ import annotations

from dataclasses import dataclass

POLICIES = ("fcfs", "priority")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Raises ValueError that names the field.

    max_num_batched_tokens: most tokens of a step; enough for every row to decode, so nobody starves.
    num_blocks: blocks of the KV pool, the null block (0) counted: a request can have all but one.
    tokens_per_step: tokens that a decode lane may add at most, 1 + drafts; bounds assume all that a step may.
    lookahead: KV positions beyond those of a step that a drafter with layers of its own writes after it.
    uneven_drafts: lanes may verify more drafts than each one's share, of those that others have no use for.
    grant_ahead: blocks a decode row is given beyond the one it needs, so that most steps grant nothing.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    policy: str = "fcfs"
    enable_prefix_caching: bool = True
    tokens_per_step: int = 1
    lookahead: int = 0
    grant_ahead: int = 1
    uneven_drafts: bool = False

    def __post_init__(self) -> None:
        for name, least in (
            ("max_num_seqs", 1), ("max_model_len", 1), ("block_size", 1), ("num_blocks", 2),
            ("tokens_per_step", 1), ("lookahead", 0), ("grant_ahead", 0),
            ("max_num_batched_tokens", self.max_num_seqs),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {least}")
        if self.policy not in POLICIES:
            raise ValueError(f"policy={self.policy!r}: must be one of {', '.join(POLICIES)}")

    @property
    def usable_blocks(self) -> int:
        """Blocks that can be granted: all but the null block."""
        return self.num_blocks - 1

    def most_drafts(self, share: int) -> int:
        """Drafts that one lane may verify in a step with room for `share` a lane."""
        return self.tokens_per_step - 1 if share and self.uneven_drafts else share

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many KV positions."""
        return -(-tokens // self.block_size)
