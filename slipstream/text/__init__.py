"""Text on both sides of the engine: tokenizers, chat templates, incremental detokenising. No torch."""
