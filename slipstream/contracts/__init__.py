"""Plain data that crosses borders. Imports nothing of ours and no torch."""
