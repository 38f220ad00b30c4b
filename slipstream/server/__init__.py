"""The HTTP door: OpenAI's endpoints over an engine. Knows text and JSON; knows nothing of rows or blocks."""
