"""The models and engines of a worker: built, stored in checkpoints, reused by the next launch."""
