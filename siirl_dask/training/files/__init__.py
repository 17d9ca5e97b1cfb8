"""Model and optimizer state in files: checkpoints, safetensors, Hugging Face folders."""
