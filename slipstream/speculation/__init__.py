"""Drafters, a file each, and what joins them to the tick."""
