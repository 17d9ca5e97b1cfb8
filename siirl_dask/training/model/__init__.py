"""The network that learns: packed attention, log-probs in chunks, adapters."""
