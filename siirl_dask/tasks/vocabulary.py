"""Sizes of the tiny models' vocabulary, apart from transformers, whose import takes seconds."""

VOCABULARY = 264
"""256 bytes, two special tokens, and room up to a multiple of 8."""
