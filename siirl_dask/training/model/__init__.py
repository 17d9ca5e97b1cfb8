"""The network: packed attention, log-probs in chunks, adapters."""
