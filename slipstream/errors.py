"""The public error names."""

from slipstream.contracts.errors import BadRequest, EngineDeadError, EngineError

__all__ = ["BadRequest", "EngineDeadError", "EngineError"]
