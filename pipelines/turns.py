"""GRPO over episodes of several turns, with an environment written here. The DAG is in
siirl_dask/recipes/turns.py.

python pipelines/turns.py configs/quickstart_turns.yaml environments.turns=5
"""

from functools import partial

from siirl_dask import main, turns
from siirl_dask.environments import Step


class Guess:
    """One of 16 letters is to be guessed. Nothing to inherit; both methods may be async."""

    def reset(self, row: dict[str, object], seed: int) -> None:
        """Begin an episode with the columns of its row; the prompt is the row's own."""
        self.secret, self.tries = str(row["answer"]), 0

    def step(self, text: str) -> Step | str:
        """Answer a turn: a text goes on, a Step rewards or ends."""
        self.tries += 1
        if text == self.secret:
            return Step(reward=1.0, done=True, parts={"tries": self.tries})
        return ">" if self.secret > text else "<"


if __name__ == "__main__":
    run = main(partial(turns, environment=Guess))
    query = (
        "SELECT step, avg(reward) AS found, avg(len(turns)) AS guesses FROM rollouts GROUP BY step "
        "ORDER BY step"
    )
    for row in run.rollouts(query).to_pylist():
        print(row)
