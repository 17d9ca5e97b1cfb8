import torch

torch.set_num_threads(
    1
)  # faster than more on models this small, and many times so on a machine that is busy
