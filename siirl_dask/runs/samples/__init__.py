"""A run's samples: read from its tables, asked, and shown."""

__all__ = [
    "conversations",
    "last_message",
    "mismatch",
    "parts",
    "prompt_images",
    "questions",
    "rollouts",
    "sample_rows",
    "token_texts",
    "utterances",
]
