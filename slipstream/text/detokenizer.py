"""Incremental detokenising: tokens in, text out; never half a character, never a piece of a stop string.

Text that comes in pieces and text made at once are the same, because both are made here.
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import Callable, Sequence
from typing import Protocol

from slipstream.contracts.sampling_params import SamplingParams
from slipstream.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 5  # of the prompt, so that a vocabulary that joins words sees what it continues
_MAX_OPEN_TOKENS = 16  # without bytes to look at, text that still ends in U+FFFD then is shown as it is


class TextStream(Protocol):
    """The text of one sample, as far as it is certain."""

    def feed(self, tokens: Sequence[int]) -> str:
        """What these tokens add. A character that is not complete yet waits."""
        ...

    def end(self) -> str:
        """The rest, when no token follows: bytes that never became a character, as U+FFFD."""
        ...


class _TokenBytes(dict[int, bytes]):
    """Token to bytes, filled on first use."""

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int]) -> None:
        super().__init__(dict.fromkeys(skip, b""))
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> bytes:
        found = self._tokenizer.token_bytes(token)
        assert found is not None, "only where tokens have bytes of their own"
        self[token] = found
        return found


class ByteStream:
    """Where tokens have bytes of their own: through a UTF-8 decoder that keeps what is incomplete."""

    def __init__(self, table: _TokenBytes) -> None:
        self._bytes_of = table.__getitem__
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, tokens: Sequence[int]) -> str:
        return self._decode(b"".join(map(self._bytes_of, tokens)))

    def end(self) -> str:
        return self._decode(b"", True)


class WindowStream:
    """Any other vocabulary: decodes a few tokens with and without the newest, and takes the difference."""

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int]) -> None:
        self._decode = decode
        self._shown = list(context)  # tokens whose text is out, and that the next ones are decoded with
        self._shown_text = decode(self._shown)
        self._open: list[int] = []

    def feed(self, tokens: Sequence[int]) -> str:
        return "".join(map(self._feed, tokens))

    def _feed(self, token: int) -> str:
        self._open.append(token)
        text = self._decode(self._shown + self._open)
        if text.endswith(_REPLACEMENT) and len(self._open) < _MAX_OPEN_TOKENS:
            return ""
        return self._show(text)

    def _show(self, text: str) -> str:
        new = text[len(self._shown_text) :]
        if new or len(self._open) >= _MAX_OPEN_TOKENS:
            # Tokens that were skipped join nothing: the context stays.
            self._shown = self._open if new else self._shown
            self._open = []
            self._shown_text = self._decode(self._shown)
        return new

    def end(self) -> str:
        return self._show(self._decode(self._shown + self._open)) if self._open else ""


@functools.lru_cache(maxsize=1024)
def _borders(pattern: str) -> tuple[int, ...]:
    """borders[k]: length of the longest proper prefix of pattern[:k] that is also its suffix."""
    borders = [0, 0]
    for char in pattern[1:]:
        length = borders[-1]
        while length and pattern[length] != char:
            length = borders[length]
        borders.append(length + (pattern[length] == char))
    return tuple(borders)


class StopFinder:
    """Finds stop strings in text that comes in pieces, and holds back the end of it that may begin one.

    The match that is complete first wins; of those that end together, the longest. So pieces of any size
    give the same answer. (Knuth, Morris and Pratt, 1977: a few operations a character, whatever the text.)
    found: the stop string, after which nothing may be fed.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = stops
        self._include = include
        self._matched = [0] * len(stops)  # characters of each that the text so far ends with
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str, counts: bool = True) -> str:
        """The text that may be shown. counts: False where a match that ends in this piece is passed over."""
        first_end = len(text)
        for place, stop in enumerate(self._stops):
            end, self._matched[place] = _advance(stop, self._matched[place], text, counts)
            if end and (self.found is None or (-end, len(stop)) > (-first_end, len(self.found))):
                first_end, self.found = end, stop
        whole = self._held + text
        if self.found is not None:
            keep = 0 if self._include else len(self.found)
            return whole[: len(self._held) + first_end - keep]
        cut = len(whole) - (0 if self._include else max(self._matched))
        self._held = whole[cut:]
        return whole[:cut]

    def end(self) -> str:
        """What was held back, when no text follows."""
        return "" if self.found is not None else self._held


def _advance(stop: str, matched: int, text: str, counts: bool) -> tuple[int, int]:
    """(index in text just after the first whole match, or 0; characters matched there)."""
    if not matched and stop[0] not in text:
        return 0, 0
    borders = _borders(stop)
    for end, char in enumerate(text, 1):
        while matched and stop[matched] != char:
            matched = borders[matched]
        matched += stop[matched] == char
        if matched == len(stop):
            if counts:
                return end, matched
            matched = borders[matched]
    return 0, matched


class Detokenizer:
    """Text of one sample, with its stop strings. stopped: the stop string that ended it."""

    def __init__(self, stream: TextStream, params: SamplingParams) -> None:
        self._stream = stream
        self._stops = StopFinder(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    @property
    def stopped(self) -> str | None:
        return None if self._stops is None else self._stops.found

    def feed(self, tokens: Sequence[int]) -> tuple[str, int]:
        """The text that these tokens release, and how many of them were used: fewer than all where a stop
        string is complete. Stop strings count once there are more than min_tokens tokens."""
        if self._stops is None:
            return self._stream.feed(tokens), len(tokens)
        text = ""
        for used, token in enumerate(tokens, 1):
            self._num_tokens += 1
            text += self._stops.feed(self._stream.feed((token,)), self._num_tokens > self._min_tokens)
            if self._stops.found is not None:
                return text, used
        return text, len(tokens)

    def end(self) -> str:
        """The rest of the text, when no token follows."""
        if self._stops is None:
            return self._stream.end()
        if self._stops.found is not None:
            return ""
        text = self._stops.feed(self._stream.end(), self._num_tokens > self._min_tokens)
        return text + self._stops.end()


class Detokenizers:
    """Makes the detokenizers of requests; shares the tables that they read."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._by_bytes = tokenizer.token_bytes(0) is not None
        self._whole = _TokenBytes(tokenizer, frozenset())
        self._skipping = _TokenBytes(tokenizer, tokenizer.special_ids)
        self._texts: dict[int, str] = {}

    def open(self, params: SamplingParams, prompt: Sequence[int]) -> Detokenizer:
        """prompt: the token ids that the sample continues."""
        return Detokenizer(self._stream(params, prompt), params)

    def _stream(self, params: SamplingParams, prompt: Sequence[int]) -> TextStream:
        if self._by_bytes:
            return ByteStream(self._skipping if params.skip_special_tokens else self._whole)
        decode = functools.partial(
            self._tokenizer.decode,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        return WindowStream(decode, prompt[-_CONTEXT_TOKENS:])

    def token_text(self, token: int) -> str:
        """The text of a single token, special or not; bytes that are no character alone become U+FFFD."""
        text = self._texts.get(token)
        if text is None:
            if self._by_bytes:
                text = self._whole[token].decode("utf-8", "replace")
            else:
                text = self._tokenizer.decode([token], skip_special_tokens=False)
            self._texts[token] = text
        return text
