"""The network: packed attention, log-probs in chunks, adapters."""

__all__ = ["lora"]
