"""Model and optimizer state in files: checkpoints, safetensors, Hugging Face folders."""

__all__ = ["checkpoint", "hugging_face", "unpack", "verify"]
