"""What a worker serves its peers and asks of them: rows, shared work, the store of process
groups.
"""
