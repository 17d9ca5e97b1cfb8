"""A model of a training step from parts that were measured one by one: what it says of small runs, and of large ones."""
