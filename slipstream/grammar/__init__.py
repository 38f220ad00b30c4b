"""Structured outputs: from what a request asks to the tokens that it may sample next. No torch, no runner."""
