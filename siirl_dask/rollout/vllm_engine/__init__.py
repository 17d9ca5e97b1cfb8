"""Runs vLLM as a rollout engine inside a worker's process."""
