"""A run whose worker is killed while a server of vLLM has stopped to take weights from it."""

import os
import signal

import psutil

from tests.rollout.test_servers import VllmAnswers, answer_of, http_server


class KillsItsWorker(VllmAnswers):
    """Kills whoever asks it to load weights, the second time, which are those of step 1."""

    def __init__(self):
        super().__init__()
        self.more |= {"max_model_len": 512}
        self.port = None

    def __call__(self, path, body):
        if path == "/collective_rpc" and self.loads == 1:
            (asking,) = {
                connection.pid
                for connection in psutil.net_connections("tcp")
                if connection.status == psutil.CONN_ESTABLISHED
                and connection.raddr.port == self.port
            }
            os.kill(asking, signal.SIGKILL)
        if path.endswith("/generate") and body is not None:
            tokens = body["sampling_params"]["max_tokens"]
            return 200, answer_of([5] * tokens, [0.5] * tokens, label=self.loaded)
        return super().__call__(path, body)


def test_a_server_is_not_left_paused_by_a_run_that_ends_as_its_worker_is_killed(start, tmp_path):
    with http_server() as server:
        server.answers = KillsItsWorker()
        server.answers.port = server.server_port
        run = start(
            "rollout.engine=server",
            f"rollout.server.urls=[http://127.0.0.1:{server.server_port}]",
            f"rollout.server.weights_folder={tmp_path / 'weights'}",
            "cluster.workers=1",
            "cluster.placement={}",
            "run.max_restarts=0",
            "observe.progress=true",
        )
        _, out, err = run.end(timeout=120)
        assert run.process.returncode, out
        assert server.answers.loads == 2, err
        assert not server.answers.paused, err
        assert "was left paused, as by a worker that was killed" in out + err
