"""The client's process: it checks a run, starts its workers, drives its steps and logs them."""
