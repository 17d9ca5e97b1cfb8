"""Turns a script, a YAML file or a command line of TRL's GRPOTrainer into a configuration."""
