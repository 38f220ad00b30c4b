"""Logs and traces. Imports nothing of ours."""
