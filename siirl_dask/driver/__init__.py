"""The client's process: checks a run, starts its workers, drives its steps and logs them."""

__all__ = ["checks", "clusters", "doctor", "phases", "run", "single_pass", "starts", "submit"]
