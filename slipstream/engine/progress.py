"""The progress bar of LLM.generate."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from slipstream.engine.request_state import RequestState


class Progress:
    """Requests done, and tokens a second of prompts and of outputs. bar: False shows none; True is tqdm's;
    a callable makes one with tqdm's arguments."""

    def __init__(self, bar: bool | Callable[..., Any], num_requests: int) -> None:
        self._bar: Any = None
        if bar:
            self._bar = (_tqdm() if bar is True else bar)(
                total=num_requests, desc="Processed prompts", unit="req", dynamic_ncols=True,
                postfix="input: 0.00 tok/s, output: 0.00 tok/s",
            )
        self._begin = time.perf_counter()
        self._inputs = self._outputs = 0

    def update(self, ended: Sequence[RequestState], num_tokens: int) -> None:
        """After a step: requests that ended in it, and tokens that it made."""
        self._outputs += num_tokens
        if self._bar is None or not ended:
            return
        self._inputs += sum(len(state.prepared.token_ids) for state in ended)
        seconds = max(time.perf_counter() - self._begin, 1e-9)
        self._bar.postfix = (
            f"input: {self._inputs / seconds:.2f} tok/s, output: {self._outputs / seconds:.2f} tok/s"
        )
        self._bar.update(len(ended))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _tqdm() -> Callable[..., Any]:
    from tqdm.auto import tqdm

    bar: Callable[..., Any] = tqdm
    return bar
