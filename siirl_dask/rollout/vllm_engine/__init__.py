"""vLLM as a rollout engine, inside the worker's process."""
