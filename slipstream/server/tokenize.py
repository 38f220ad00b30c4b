"""POST /tokenize and /detokenize: what the model sees, without running it."""

from __future__ import annotations

from fastapi import APIRouter, Response
from typing_extensions import TypedDict

from slipstream.contracts.errors import BadRequest
from slipstream.server.body import StrictRoute
from slipstream.server.chat import encode_chat
from slipstream.server.context import Context
from slipstream.server.errors import ErrorBody
from slipstream.server.schema import DetokenizeBody, TokenizeBody
from slipstream.server.streams import json_answer


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
        strings = tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
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
        for token in body.tokens:
            if not 0 <= token < limits.vocab_size:
                raise BadRequest(
                    "tokens", token, f"token id is out of vocabulary, must be 0 to {limits.vocab_size - 1}"
                )
        text: Text = {"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}
        return json_answer(text)

    return routes
