"""A worker's device and CPUs: which it takes, and which it shares."""
