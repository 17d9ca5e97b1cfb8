"""The client's process: checks a run, starts its workers, drives its steps and logs them."""
