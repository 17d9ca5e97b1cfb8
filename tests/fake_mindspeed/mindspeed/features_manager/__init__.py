"""Features of MindSpeed."""
