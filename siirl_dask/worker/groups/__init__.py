"""Process groups of a worker's roles: joined at the start, and ended where a collective is
stuck.
"""
