"""Stands for MindSpeed (branch core_r0.16.0) on NPUs that are stood in for: it records, and patches
megatron-core.

It has the names by which the project calls it. Like the real one it reads ``sys.argv`` as it is
imported, wants to be imported before megatron-core, replaces megatron-core's norms whatever its
options, and everything else only where an option says so. Its operators are torch_npu's, which are
stood in for by ``tests/fake_npu``.
"""

import os

if missing := os.environ.get("FAKE_MINDSPEED_LACKS_LIBRARY"):
    raise ImportError(f"{missing}: cannot open shared object file: No such file or directory")
