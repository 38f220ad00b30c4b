"""Sampling features, one file each, joined by a list (pipeline.py)."""
