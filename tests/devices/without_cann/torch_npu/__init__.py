"""Stands for torch-npu on a machine without CANN: its import fails at CANN's first library, as
the real one's does.
"""

raise ImportError("libhccl.so: cannot open shared object file: No such file or directory")
