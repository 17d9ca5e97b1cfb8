"""Layouts of a model over several workers: replicas, shards (FSDP2), sequence and tensor
parallelism.
"""
