"""A run's part inside the process of Dask's scheduler, where it watches workers and nodes.
Imports no torch.
"""
