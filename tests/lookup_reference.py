"""N-gram and suffix drafts written out in plain Python, one row at a time: what kernels are compared with."""

from collections.abc import Sequence

LEVELS, SLOTS, OWN, PAST = (1, 2, 4, 8), 16, 16, 16
WORD = 0xFFFFFFFF


def draft_ngram(tokens: Sequence[int], least: int, most: int, count: int) -> list[int]:
    """What followed the most recent earlier place of the longest n-gram that the row ends with."""
    for n in range(most, least - 1, -1):
        for after in range(len(tokens) - 1, n - 1, -1):
            if tokens[after - n : after] == tokens[len(tokens) - n :]:
                return [tokens[after + i % (len(tokens) - after)] for i in range(count)]
    return []


def match_length(text: Sequence[int], end: int, tokens: Sequence[int], longest: int) -> int:
    """How many tokens before text[end] are the last ones of tokens."""
    n = 0
    while n < min(longest, end, len(tokens)) and text[end - 1 - n] == tokens[-1 - n]:
        n += 1
    return n


def mix(word: int) -> int:
    """lowbias32."""
    word = (word ^ word >> 16) * 0x7FEB352D & WORD
    word = (word ^ word >> 15) * 0x846CA68B & WORD
    return word ^ word >> 16


def hashes(tokens: Sequence[int]) -> dict[int, int]:
    """Of the last tokens, for each level that there are enough of."""
    word, found = 0, {}
    for n, token in enumerate(tokens[: -max(LEVELS) - 1 : -1], start=1):
        word = mix(word ^ token)
        if n in LEVELS:
            found[n] = word
    return found


class SuffixReference:
    """log: past outputs, each followed by -1, the oldest tokens overwritten; index: where an n-gram has
    been, the latest place in each slot."""

    def __init__(
        self, depth: int, factor: float, min_prob: float, requests: int, log_tokens: int, buckets: int
    ) -> None:
        self.longest, self.factor, self.min_prob = depth - 1, factor, min_prob
        self.requests, self.log_tokens, self.buckets = requests, log_tokens, buckets
        self.log: list[int] = []
        self.starts: list[int] = []
        self.index: dict[tuple[int, int], int] = {}

    def finish(self, output: Sequence[int]) -> None:
        """The request has ended."""
        if not self.requests or not output:
            return
        self.starts.append(len(self.log))
        for n in range(1, len(output)):
            at = len(self.log) + n
            for word in hashes(output[:n]).values():
                self.index[word % self.buckets, mix(at & WORD) % SLOTS] = at
        self.log += [*output, -1]

    def past(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """(match length, place after it) of the best past occurrences in the tokens' buckets."""
        floor = max(len(self.log) - self.log_tokens, 0)
        if len(self.starts) > self.requests > 0:
            floor = max(floor, self.starts[-self.requests])
        places = {
            self.index.get((word % self.buckets, slot), -1)
            for word in hashes(tokens).values()
            for slot in range(SLOTS)
        }
        log = self.log[floor:]
        found = ((match_length(log, at - floor, tokens, self.longest), at) for at in places if at > floor)
        return sorted((n, at) for n, at in found if n)[-PAST:]

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """The continuation that most weight agrees on: an occurrence weighs four times as much for every
        token that it matches, and four times as much in the row itself."""
        own = sorted(
            (n, at)
            for at in range(1, len(tokens))
            if (n := match_length(tokens, at, tokens, self.longest))
        )[-OWN:]
        live = [(n + 1, [*tokens[at:]] * count) for n, at in reversed(own)]
        past = self.past(tokens)
        live += [(n, self.after(at, count)) for n, at in reversed(past)]
        if not live:
            return []
        highest = max(rank for rank, _ in live)
        weighted = [(4 ** max(12 - highest + rank, 0), text) for rank, text in live]
        total, draft = sum(weight for weight, _ in weighted), []
        longest = max(n for n, _ in own + past)
        while len(draft) < min(count, int(self.factor * longest + 1e-6)):
            votes: dict[int, int] = {}
            for weight, text in weighted:
                if text[len(draft)] >= 0:
                    votes[text[len(draft)]] = votes.get(text[len(draft)], 0) + weight
            # Of equals the first: of the row itself, or longer, or more recent.
            best = max(votes, key=lambda token: votes[token], default=-1)
            if best < 0 or votes[best] << 20 < int(self.min_prob * 2**20) * total:
                break
            weighted = [(weight, text) for weight, text in weighted if text[len(draft)] == best]
            draft.append(best)
        return draft

    def after(self, at: int, count: int) -> list[int]:
        """What followed, up to the output's end."""
        text = self.log[at : at + count]
        end = text.index(-1) if -1 in text else len(text)
        return text[:end] + [-1] * (count + 1 - end)
