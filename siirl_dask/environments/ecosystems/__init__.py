"""Adapters of other packages' environments, one module each; ``planner/spec/ecosystems.py`` names
them.
"""
