"""Joins scheduler and runner; clients, input and output processing, LLM and AsyncLLM."""
