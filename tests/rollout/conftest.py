import torch

# faster than more on models this small, and many times so on a machine that is busy
torch.set_num_threads(1)
