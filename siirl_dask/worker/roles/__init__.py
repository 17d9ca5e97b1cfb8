"""The models and engines of a worker: built, stored in checkpoints, reused by the next launch."""

__all__ = ["lazy_role", "role_state"]
