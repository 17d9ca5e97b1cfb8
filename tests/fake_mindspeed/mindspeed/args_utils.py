"""The arguments of MindSpeed, from the command line at first."""

import sys
from argparse import ArgumentParser, Namespace

from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager


def _parsed():
    parser = ArgumentParser(allow_abbrev=False)
    MindSpeedFeaturesManager.register_features_args(parser)
    known, unknown = parser.parse_known_args(sys.argv[1:])
    if unknown:
        raise RuntimeError(f"these are somebody else's arguments: {unknown}")
    return known


_ARGUMENTS: Namespace = _parsed()


def get_full_args():
    return _ARGUMENTS
