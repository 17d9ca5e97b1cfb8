"""Model folders: loading models, and reading sizes without loading."""
