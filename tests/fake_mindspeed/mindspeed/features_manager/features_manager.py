"""Features and their arguments; some are arguments of Megatron-LM's, and have no other sign here
than their names.
"""

import os
from types import SimpleNamespace

_LACKS = os.environ.get("FAKE_MINDSPEED_LACKS_OPTION", "")
_FLAGS = ("use_fused_rotary_pos_emb", "use_fused_rmsnorm", "use_fused_swiglu")


class MindSpeedFeaturesManager:
    FEATURES_LIST = tuple(
        SimpleNamespace(feature_name=name) for name in ("use_flash_attn", "megatron_basic")
    )

    @classmethod
    def register_features_args(cls, parser):
        for name in _FLAGS:
            if name != _LACKS:
                parser.add_argument("--" + name.replace("_", "-"), action="store_true")
        parser.add_argument("--sparse-mode", type=int, default=0)
        parser.add_argument("--pre-tockens", type=int, default=65536)
        parser.add_argument("--next-tockens", type=int, default=0)
