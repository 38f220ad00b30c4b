"""What a model thinks before it answers: <think>thoughts</think>answer."""

from __future__ import annotations

from slipstream.text.parsers.protocol import open_length

OPEN, CLOSE = "<think>", "</think>"


class ThinkParser:
    """Splits an answer into (thoughts, the rest), as it comes. Line feeds beside the tags are dropped.

    thinks: the answer begins inside the thoughts, though it may say the opening tag once more; False: only
    that tag begins them.
    """

    def __init__(self, thinks: bool) -> None:
        self._rest = ""
        self._space = ""  # line feeds of the thoughts, until more thoughts follow
        self._begun = self._thought = self._ended = False
        self._inside = thinks

    @property
    def thinks(self) -> bool:
        """Whether what is fed next is thoughts, or may be while nothing was."""
        return self._inside

    def feed(self, text: str) -> tuple[str, str]:
        self._rest += text
        if not self._begun and not self._begin():
            return "", ""
        if not self._inside:
            return "", self._content()
        thoughts, closed, rest = self._rest.partition(CLOSE)
        if not closed:
            held = open_length(self._rest, (CLOSE,))
            thoughts, self._rest = self._rest[: len(self._rest) - held], self._rest[len(self._rest) - held :]
            return self._thoughts(thoughts), ""
        shown = self._thoughts(thoughts)
        self._inside, self._ended, self._space, self._rest = False, True, "", rest
        return shown, self._content()

    def end(self) -> tuple[str, str]:
        """The rest, when no text follows."""
        rest, self._rest = self._rest, ""
        return (self._thoughts(rest), "") if self._inside else ("", rest)

    def _begin(self) -> bool:
        """Whether the first characters have told how the answer begins."""
        start = self._rest.lstrip()
        if start.startswith(OPEN):
            self._rest, self._inside = start.removeprefix(OPEN), True
        elif OPEN.startswith(start):
            return False
        self._begun = True
        return True

    def _thoughts(self, text: str) -> str:
        text = self._space + (text if self._thought else text.lstrip("\n"))
        shown = text.rstrip("\n")
        self._space = text[len(shown) :]
        self._thought |= bool(text)
        return shown

    def _content(self) -> str:
        if self._ended:
            self._rest = self._rest.lstrip("\n")
            self._ended = not self._rest
        shown, self._rest = self._rest, ""
        return shown


def _tail_state(prompt: str) -> bool | None:
    """True where the prompt's end opened the thoughts, False where it closed them, None where it did
    neither."""
    tail = prompt.rstrip()
    return True if tail.endswith(OPEN) else False if tail.endswith(CLOSE) else None


def deepseek_r1(prompt: str) -> ThinkParser:
    """The answer begins with thoughts, whether or not the template has opened them."""
    return ThinkParser(_tail_state(prompt) is not False)


def qwen3(prompt: str) -> ThinkParser:
    """Thoughts need their tag, in the prompt's end or in the answer."""
    return ThinkParser(_tail_state(prompt) is True)


