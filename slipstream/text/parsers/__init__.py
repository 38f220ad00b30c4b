"""What a model's text means: calls of tools and thoughts, read as the text comes. No HTTP, no tokens."""
