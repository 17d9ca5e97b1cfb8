"""The quickstart's task: digits to sort, and a tiny model that half knows how."""
