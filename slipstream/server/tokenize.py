"""POST /tokenize and /detokenize: what the model sees, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastapi import APIRouter, Response
from typing_extensions import TypedDict

from slipstream.contracts.errors import BadRequest
from slipstream.server.body import StrictRoute
from slipstream.server.chat import encode_chat
from slipstream.server.context import PIECE, Context, off_loop
from slipstream.server.errors import ErrorBody
from slipstream.server.schema import DetokenizeBody, TokenizeBody
from slipstream.server.streams import json_answer

if TYPE_CHECKING:
    from slipstream.text.tokenizer import Tokenizer

CONTEXT = 16  # tokens before a piece, so that a vocabulary that joins words sees what it continues
REPLACEMENT = "\ufffd"  # what a character that is not whole is decoded to


class Tokens(TypedDict):
    """count: len(tokens). token_strs: the vocabulary's own spelling, null unless asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(TypedDict):
    prompt: str


def router(context: Context) -> APIRouter:
    routes = APIRouter(route_class=StrictRoute, tags=["tokens"])
    limits = context.engine.info.limits

    @routes.post("/tokenize", responses={200: {"model": Tokens}, "4XX": {"model": ErrorBody}})
    async def tokenize(body: TokenizeBody) -> Response:
        """Token ids of a prompt, or of messages."""
        context.check_model(body.model)
        body.check_source()
        tokenizer = context.need_tokenizer("prompt")
        if body.messages is not None:
            ids = list(
                (await encode_chat(context, body.messages, body, bool(body.add_special_tokens))).token_ids
            )
        else:
            ids = await context.encode("prompt", body.prompt or "", body.add_special_tokens is not False)
        strings: list[str] | None = None
        if body.return_token_strs:
            strings = await off_loop(len(ids), tokenizer.convert_ids_to_tokens, ids)
        tokens: Tokens = {
            "count": len(ids),
            "max_model_len": limits.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }
        return json_answer(tokens)

    @routes.post("/detokenize", responses={200: {"model": Text}, "4XX": {"model": ErrorBody}})
    async def detokenize(body: DetokenizeBody) -> Response:
        """Text of token ids, special tokens included."""
        context.check_model(body.model)
        tokenizer = context.need_tokenizer("tokens")
        whole = await off_loop(len(body.tokens), _decode, tokenizer, body.tokens, limits.vocab_size)
        text: Text = {"prompt": whole}
        return json_answer(text)

    return routes


def _decode(tokenizer: Tokenizer, tokens: Sequence[int], vocab_size: int) -> str:
    """Text of token ids, a piece at a time. Raises BadRequest."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            limit = f"token id is out of vocabulary, must be 0 to {vocab_size - 1}"
            raise BadRequest("tokens", token, limit)
    texts: list[str] = []
    context: Sequence[int] = ()
    place = 0
    while place < len(tokens):
        end = _piece_end(tokenizer, tokens, place)
        before = tokenizer.decode(context, skip_special_tokens=False)
        text = tokenizer.decode([*context, *tokens[place:end]], skip_special_tokens=False)
        texts.append(text[len(before) :])
        context, place = tokens[end - CONTEXT : end], end
    return "".join(texts)


def _piece_end(tokenizer: Tokenizer, tokens: Sequence[int], start: int) -> int:
    """Where a piece may end: with a whole character, if one ends near."""
    last = start + PIECE
    if last >= len(tokens):
        return len(tokens)
    for end in range(last, last - CONTEXT, -1):
        if not tokenizer.decode(tokens[end - CONTEXT : end], skip_special_tokens=False).endswith(REPLACEMENT):
            return end
    return last
