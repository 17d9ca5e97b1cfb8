"""Trains models with megatron-core: tensor and pipeline parallelism inside the role's process
groups.
"""
