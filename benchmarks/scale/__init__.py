"""A model of a training step, from parts that were measured one by one: held against small runs,
asked about large.
"""
