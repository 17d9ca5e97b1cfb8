"""The conformance suite of environments: inherit it, and give it something that runs them.

    class TestMine(EnvironmentsTests):
        def make_environments(self, kind: type, max_open: int | None) -> Environments:
            return MyEnvironments(kind, max_open)

``kind`` is ``Countdown``, or what ``kind`` says instead. pytest collects the inherited tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest

from siirl_dask.environments import Action, Answer, Environments, Failure, Opening, Session, Step

COLUMNS = ("prompt", "answer", "marks")
"""Columns that the suite's environments are reset with."""
_WAIT = 60.0  # seconds for an answer


class Countdown:
    """Counts down from the row's answer to 0, which ends it. A turn ``raise`` raises. ``marks``
    is a file.
    """

    def __init__(self) -> None:
        self.left = 0
        self.seed = 0
        self.marks = ""

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        """Open it."""
        self.left = int(row["answer"])
        self.seed = seed
        self.marks = row["marks"]
        self.mark("+")
        return f"{row['prompt']} {self.left}"

    def step(self, text: str) -> Step:
        """Count, and say what is left, and a number that depends on the seed."""
        if text == "raise":
            raise ValueError("as it was told")
        self.left -= 1
        return Step(
            observation=f"{self.left} {self.seed % 1000}",
            reward=1.0,
            done=self.left == 0,
            state=self.left,
        )

    def close(self) -> None:
        """Close it."""
        self.mark("-")

    def mark(self, sign: str) -> None:
        """Append a sign to the file of marks: one write, so that processes do not mix theirs."""
        with Path(self.marks).open("a") as file:
            file.write(sign)


class AsyncCountdown(Countdown):
    """The same with async functions, which wait a little, the longer the larger the seed."""

    async def reset(self, row: Mapping[str, Any], seed: int) -> str:  # type: ignore[override]
        """Open it."""
        await asyncio.sleep((seed % 5) / 1000)
        return super().reset(row, seed)

    async def step(self, text: str) -> Step:  # type: ignore[override]
        """Count."""
        await asyncio.sleep((self.seed % 5) / 1000)
        return super().step(text)


def action(text: str) -> Action:
    """Return a turn with a token for each byte."""
    return Action(text, list(text.encode()))


class Answers:
    """Answers of a session, in the order in which they come."""

    def __init__(self) -> None:
        self._queue: Queue[tuple[int, Answer]] = Queue()

    def __call__(self, episode: int, answer: Answer) -> None:
        self._queue.put((episode, answer))

    def take(self, count: int) -> dict[int, Answer]:
        """Return the next ``count`` answers by episode, each of which must have one."""
        taken = [self._queue.get(timeout=_WAIT) for _ in range(count)]
        answers = dict(taken)
        assert len(answers) == count, "an episode was answered twice"
        return answers

    def none(self, seconds: float = 0.2) -> bool:
        """Return whether no answer comes for a while."""
        try:
            self._queue.get(timeout=seconds)
        except Empty:
            return True
        return False


class EnvironmentsTests:
    """Tests of an Environments, which is built for each."""

    kind: type = Countdown
    """Class of the environments."""

    def make_environments(self, kind: type, max_open: int | None) -> Environments:
        """Build what is to be tested, with the columns ``COLUMNS`` and no failures that end a
        run.
        """
        raise NotImplementedError

    @contextmanager
    def built(self, max_open: int | None = None) -> Iterator[Environments]:
        """Build it, and close it afterwards."""
        environments = self.make_environments(self.kind, max_open)
        try:
            yield environments
        finally:
            environments.close()

    @pytest.fixture
    def marks(self, tmp_path: Path) -> Path:
        """The file of what was opened and closed."""
        (tmp_path / "marks").touch()
        return tmp_path / "marks"

    def row(self, marks: Path, answer: int) -> dict[str, Any]:
        """Return a row of the suite's environments."""
        return {"prompt": "count", "answer": str(answer), "marks": str(marks)}

    def play(
        self,
        session: Session,
        answers: Answers,
        marks: Path,
        order: list[int],
    ) -> dict[int, list[Answer]]:
        """Play the episodes of these numbers to their ends, each turn of all before the next."""
        for episode in order:
            session.reset(episode, self.row(marks, episode % 3 + 1), seed=episode * 31)
        said = {episode: [answer] for episode, answer in answers.take(len(order)).items()}
        while going := [
            episode for episode in order if not getattr(said[episode][-1], "done", False)
        ]:
            for episode in going:
                session.step(episode, action("1"))
            for episode, answer in answers.take(len(going)).items():
                assert isinstance(answer, Step)
                said[episode].append(answer)
        return said

    def test_each_reset_and_each_step_is_answered_once_with_what_the_environment_said(
        self, marks: Path
    ) -> None:
        answers = Answers()
        with self.built() as environments, environments.session(answers) as session:
            said = self.play(session, answers, marks, list(range(9)))
            assert answers.none()
        assert said[1] == [
            Opening(prompt="count 2", tools=[]),
            Step(observation="1 31", reward=1.0, state="1"),
            Step(observation="0 31", reward=1.0, done=True, state="0"),
        ]

    def test_answers_depend_on_the_row_and_the_seed_alone(self, marks: Path) -> None:
        said = []
        for order in (list(range(12)), list(range(11, -1, -1))):
            answers = Answers()
            with self.built() as environments, environments.session(answers) as session:
                said.append(self.play(session, answers, marks, order))
        assert said[0] == said[1]

    def test_a_failure_is_the_failure_of_its_episode_alone(self, marks: Path) -> None:
        answers = Answers()
        with self.built() as environments, environments.session(answers) as session:
            for episode in range(4):
                session.reset(episode, self.row(marks, 5), seed=episode)
            answers.take(4)
            for episode in range(4):
                session.step(episode, action("raise" if episode == 2 else "1"))
            said = answers.take(4)
            assert said.pop(2) == Failure("raised ValueError: as it was told")
            assert all(isinstance(answer, Step) for answer in said.values())

    def test_a_step_of_an_episode_that_has_ended_is_a_failure(self, marks: Path) -> None:
        answers = Answers()
        with self.built() as environments, environments.session(answers) as session:
            self.play(session, answers, marks, [0])
            session.step(0, action("1"))
            assert isinstance(answers.take(1)[0], Failure)

    def test_no_more_environments_are_open_than_may_be_and_others_wait_for_their_turn(
        self, marks: Path
    ) -> None:
        answers = Answers()
        episodes = 17
        with self.built(max_open=3) as environments, environments.session(answers) as session:
            for episode in range(episodes):
                session.reset(episode, self.row(marks, 1), seed=episode)
            first = answers.take(3)
            assert answers.none(), "a fourth was opened"
            ready = [*first]
            opened = 3
            while ready:
                for episode in ready:
                    session.step(episode, action("1"))  # which ends it, so that another one begins
                begin = min(len(ready), episodes - opened)
                said = answers.take(len(ready) + begin)
                ready = [e for e, answer in said.items() if isinstance(answer, Opening)]
                opened = opened + begin
        count = 0
        most = 0
        for sign in marks.read_text():
            count += 1 if sign == "+" else -1
            most = max(most, count)
        assert (count, most) == (0, 3)

    def test_what_is_open_is_closed_when_the_session_is_left_even_by_an_error(
        self, marks: Path
    ) -> None:
        answers = Answers()
        with self.built() as environments:
            with pytest.raises(KeyboardInterrupt):
                self._interrupted(environments, answers, marks)
            assert marks.read_text().count("+") == marks.read_text().count("-") == 20

    def _interrupted(self, environments: Environments, answers: Answers, marks: Path) -> None:
        with environments.session(answers) as session:
            for episode in range(20):
                session.reset(episode, self.row(marks, 5), seed=episode)
            answers.take(20)
            for episode in range(10):
                session.step(episode, action("1"))
            raise KeyboardInterrupt

    def test_closing_answers_nothing_and_may_be_done_twice(self, marks: Path) -> None:
        answers = Answers()
        with self.built() as environments, environments.session(answers) as session:
            session.reset(0, self.row(marks, 5), seed=0)
            answers.take(1)
            session.close(0)
            session.close(0)
            session.close(1)
            assert answers.none()
        assert marks.read_text() == "+-"

    def test_one_session_follows_another(self, marks: Path) -> None:
        with self.built() as environments:
            for _ in range(2):
                answers = Answers()
                with environments.session(answers) as session:
                    self.play(session, answers, marks, [0, 1, 2])

    def test_a_session_that_lasts_is_left_for_the_next_one_and_with_the_environments(
        self, marks: Path
    ) -> None:
        with self.built() as environments:
            for left in range(3):
                answers = Answers()
                session = environments.lasting_session(answers)
                assert marks.read_text() == "+-" * left
                session.reset(0, self.row(marks, 5), seed=0)
                assert isinstance(answers.take(1)[0], Opening)
        assert marks.read_text() == "+-" * 3

    def test_a_session_that_lasts_may_be_left_by_its_user(self, marks: Path) -> None:
        answers = Answers()
        with self.built() as environments:
            session = environments.lasting_session(answers)
            session.reset(0, self.row(marks, 5), seed=0)
            answers.take(1)
            session.__exit__(None, None, None)
            assert marks.read_text() == "+-"
        assert marks.read_text() == "+-"
