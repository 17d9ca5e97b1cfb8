"""A run with a role that takes long to build: PIECES of two seconds, of which it tells the first
four.
"""

import os
import time

from siirl_dask import Role, grpo

TOLD = 4


def build_slowly(device, rank):
    for piece in range(int(os.environ["PIECES"])):
        time.sleep(2)
        if piece < TOLD:
            device.progress()


if __name__ == "__main__":
    from siirl_dask import main

    main(lambda config: grpo(config).add(roles=(Role("slow", build_slowly),)))
