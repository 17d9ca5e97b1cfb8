"""Servers of a guessing game that speak as OpenEnv's and NeMo Gym's servers do, for tests where these
packages are not installed. The secret follows from the seed or the row; a turn guesses its last digit.
"""

import asyncio
import json
import threading
from contextlib import contextmanager

from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application, RequestHandler
from tornado.websocket import WebSocketHandler

TASKS = 7


def secret_of(seed):
    return seed % 10


def answer_to(secret, guess):
    """Return the game's answer, its reward, and whether it has ended."""
    if guess == secret:
        return "right", 1.0, True
    return ("higher" if secret > guess else "lower"), -0.1, False


class Listed(RequestHandler):
    def get(self):
        self.write(json.dumps(["guess_env"]))


class Schema(RequestHandler):
    def get(self):
        fields = self.application.settings["fields"]
        self.write({"action": {"type": "object", "properties": fields, "required": [*fields]}})


class Tasks(RequestHandler):
    def post(self, name):
        assert name == "guess_env"
        if json.loads(self.request.body)["split"] != "train":
            self.set_status(501)
            return
        self.write({"num_tasks": TASKS})


class Game(WebSocketHandler):
    """A session of OpenEnv's protocol; ``most_sessions`` of them at once, each opened after so many
    ``seconds``.
    """

    async def prepare(self):
        self.application.settings["state"]["asked"] += 1
        await asyncio.sleep(self.application.settings["seconds"])

    def open(self):
        state = self.application.settings["state"]
        self.counted = state["open"] < self.application.settings["most_sessions"]
        if not self.counted:
            state["refused"] += 1
            data = {"message": "all sessions are taken", "code": "CAPACITY_REACHED"}
            self.write_message({"type": "error", "data": data})
            self.close()
            return
        state["open"] += 1
        state["most"] = max(state["most"], state["open"])

    def on_message(self, message):
        message = json.loads(message)
        if message["type"] == "reset":
            self.secret = secret_of(message["data"].get("index", message["data"]["seed"]))
            self.write_message(
                self.observation(f"guess {message['data'].get('level', 1)}", None, False)
            )
            return
        guess = message["data"].get("guess")
        if guess == 13:
            self.close()
            return
        if not isinstance(guess, int):
            data = {"message": "Invalid message", "code": "VALIDATION_ERROR"}
            self.write_message({"type": "error", "data": data})
            return
        if guess == 99:
            data = {"message": "it broke", "code": "EXECUTION_ERROR"}
            self.write_message({"type": "error", "data": data})
            return
        self.write_message(self.observation(*answer_to(self.secret, guess)))

    def observation(self, text, reward, done):
        data = {"observation": {"said": text}, "reward": reward, "done": done}
        return {"type": "observation", "data": data}

    def on_close(self):
        if self.counted:
            self.application.settings["state"]["open"] -= 1


class Described(RequestHandler):
    def get(self):
        self.write({"paths": {path: {} for path in self.application.settings["paths"]}})


class Turns(RequestHandler):
    """NeMo Gym's two ways: a session of turns, and a single turn that is verified."""

    def post(self, path):
        body = json.loads(self.request.body)
        secret = body["secret"]
        if path in ("reset", "seed_session"):
            self.set_cookie("session", str(secret))
            for cookie in body.get("cookies", ()):
                self.add_header("Set-Cookie", f"{cookie}; Path=/")
            self.write({"observation": "guess" if path == "reset" else None, "info": {}})
            return
        assert self.get_cookie("session") == str(secret)
        sent = self.request.headers["Cookie"].split("; ")
        assert [cookie for cookie in sent if not cookie.startswith("session=")] == body.get(
            "cookies", []
        )
        if "elsewhere" in body:
            self.redirect(body["elsewhere"])
            return
        text = body["response"]["output"][0]["content"][0]["text"]
        said, reward, ended = answer_to(secret, guess_in(text))
        if path == "verify":
            self.write(
                {**body, "reward": reward, "length": len(text), "correct": ended, "said": said}
            )
            return
        self.write({"observation": said, "reward": reward, "terminated": ended, "truncated": False})


class Endless(RequestHandler):
    """Answers when its client has gone."""

    async def post(self):
        self.gone = asyncio.Event()
        self.application.settings["state"]["begun"] += 1
        await self.gone.wait()

    def on_connection_close(self):
        self.application.settings["state"]["ended"] += 1
        self.gone.set()


class Broken(RequestHandler):
    def post(self):
        self.set_status(500)
        self.write("it broke")


def guess_in(text):
    digits = [letter for letter in text if letter.isdigit()]
    return int(digits[-1]) if digits else 0


@contextmanager
def serving(handlers, **settings):
    """Serve from a thread inside the ``with`` block; gives the address."""
    address = {}
    ready = threading.Event()
    loop = asyncio.new_event_loop()

    async def serve():
        stop = asyncio.Event()
        server = HTTPServer(Application(handlers, **settings))
        sockets = bind_sockets(0, "127.0.0.1")
        server.add_sockets(sockets)
        address["url"] = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
        address["stop"] = stop
        ready.set()
        await stop.wait()
        server.stop()
        await server.close_all_connections()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait()
    try:
        yield address["url"]
    finally:
        loop.call_soon_threadsafe(address["stop"].set)
        thread.join()
        loop.close()


def openenv_server(fields=None, most_sessions=1000, state=None, seconds=0.0):
    handlers = [
        ("/list_environments", Listed),
        ("/schema", Schema),
        ("/(.*)/num_tasks", Tasks),
        ("/ws", Game),
    ]
    state = {} if state is None else state
    state.update(asked=0, open=0, most=0, refused=0)
    fields = {"guess": {"type": "integer"}} if fields is None else fields
    settings = {"most_sessions": most_sessions, "state": state, "seconds": seconds}
    return serving(handlers, fields=fields, **settings)


def nemo_gym_server(*paths):
    handlers = [("/openapi.json", Described), ("/(reset|step|seed_session|verify)", Turns)]
    return serving(handlers, paths=paths)
