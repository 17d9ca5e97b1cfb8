"""The quickstart's task: digits to sort, and a tiny model that sorts about half of them."""
