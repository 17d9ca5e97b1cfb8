"""How a model lies on several workers: replicas, shards (FSDP2), sequence and tensor parallelism."""
