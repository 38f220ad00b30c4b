"""POST /v1/embeddings: no model that this engine runs gives them, and the answer says so."""

from __future__ import annotations

from fastapi import APIRouter, Response

from slipstream.contracts.errors import BadRequest
from slipstream.server.body import StrictRoute
from slipstream.server.context import Context
from slipstream.server.errors import ErrorBody
from slipstream.server.schema import Body, Prompt


class EmbeddingBody(Body):
    """OpenAI's fields, so that what is wrong with a request is told before what is wrong with the model."""

    input: Prompt
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None


def router(context: Context) -> APIRouter:
    routes = APIRouter(route_class=StrictRoute, tags=["embeddings"])

    @routes.post("/v1/embeddings", responses={"4XX": {"model": ErrorBody}})
    async def embed(body: EmbeddingBody) -> Response:
        """Always refused: the model served generates text."""
        context.check_model(body.model)
        raise BadRequest("model", context.model, "does not support embeddings: it generates text")

    return routes
