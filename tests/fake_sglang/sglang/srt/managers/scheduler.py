"""The process in which SGLang computes; here it only waits for its end."""

from contextlib import suppress


def run_scheduler_process(server_args, pipe):
    pipe.send({"status": "ready"})
    with suppress(EOFError):
        pipe.recv()
