"""Model folders: loading models, and reading sizes without loading."""

__all__ = [
    "adapter_folder",
    "adapters",
    "architecture",
    "broken_imports",
    "cache",
    "head",
    "loading",
    "longest_row",
    "number_type",
    "packed_weights",
    "planned_models",
    "remote",
    "rotary",
    "routing",
    "score_attention",
    "shapes",
    "spans",
    "weight_files",
    "weight_names",
]
