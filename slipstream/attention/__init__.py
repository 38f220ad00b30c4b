"""Paged attention backends behind one protocol (protocol.py)."""
