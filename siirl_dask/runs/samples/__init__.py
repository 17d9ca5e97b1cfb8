"""A run's samples: read from its tables, asked, and shown."""
