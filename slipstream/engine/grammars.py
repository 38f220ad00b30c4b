"""Which engine constrains texts, and how its loop waits for what the grammars' workers do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slipstream.config.plan import EnginePlan
from slipstream.config.structured_outputs import DECISION, NONE
from slipstream.contracts.request import EngineRequest
from slipstream.contracts.step import mask_places
from slipstream.scheduler.constrained import Constraints, NoConstraints
from slipstream.text.tokenizer import load_tokenizer

REFUSED = "structured_outputs: this engine constrains no texts, see its plan"


class EngineGrammars(Constraints, Protocol):
    """What the scheduler asks, and the coming of requests."""

    @property
    def num_opening(self) -> int:
        """Requests that have not been named by take_opened yet."""
        ...

    @property
    def busy(self) -> bool:
        """Whether something will come that wait() waits for."""
        ...

    def open(self, request: EngineRequest) -> None: ...

    def take_opened(self) -> Sequence[tuple[EngineRequest, str | None]]: ...

    def wait(self, seconds: float) -> None: ...

    def shut_down(self) -> None: ...


class NoGrammars(NoConstraints):
    """Every request with a grammar is told that there are none."""

    busy = False

    def __init__(self) -> None:
        self._refused: list[tuple[EngineRequest, str | None]] = []

    @property
    def num_opening(self) -> int:
        return len(self._refused)

    def open(self, request: EngineRequest) -> None:
        self._refused.append((request, REFUSED))

    def take_opened(self) -> Sequence[tuple[EngineRequest, str | None]]:
        refused, self._refused = self._refused, []
        return refused

    def wait(self, seconds: float) -> None:
        """Nothing will come."""

    def shut_down(self) -> None:
        """Nothing runs."""


def make_grammars(plan: EnginePlan) -> EngineGrammars:
    """Begins to read the vocabulary, beside the loading of weights. Where there is none to read, whatever the
    plan says, requests with a grammar fail by that; a front end that takes texts has refused to start."""
    backend = plan.choices[DECISION].value["backend"]
    if backend == NONE:
        return NoGrammars()
    # Not needed where texts are free.
    from slipstream.grammar.compiler import Compiler
    from slipstream.grammar.matchers import Grammars

    spec, path = plan.spec, plan.args.tokenizer or plan.args.model
    # The old runner has one mask a row.
    speculation = None if plan.model_runner == "v1" else plan.speculation
    places = 1 if speculation is None else mask_places(speculation.num_speculative_tokens)
    compiler = Compiler(backend, lambda: load_tokenizer(path), spec.vocab_size, spec.end_token_ids)
    return Grammars(compiler, places)
