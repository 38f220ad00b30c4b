"""Flags, model spec and the frozen plan. No torch; nothing here runs a model."""
