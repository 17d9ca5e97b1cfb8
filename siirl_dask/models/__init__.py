"""Model folders: loading them, and reading their sizes without loading."""
