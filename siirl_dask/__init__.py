"""Reinforcement-learning post-training of language models with no centre. See README.md and docs/."""

__version__ = "0.1.0"
