"""Environments of other packages by their own names, with the packages themselves: what a run's
rows hold is what the package answers to the same actions, and wrong names are refused.
"""

import json
import random
import signal
from pathlib import Path

import pytest
from siirl_storage import open_table

from siirl_dask.cli import main
from siirl_dask.errors import ConfigError, PlanError
from siirl_dask.planner import resolve
from siirl_dask.planner.spec.dag_spec import bind
from siirl_dask.planner.spec.ecosystems import BEHIND_SERVERS, ECOSYSTEMS, ecosystem_name
from siirl_dask.planner.spec.names import canonical
from siirl_dask.rewards import reasoning_gym as score
from siirl_dask.rewards.reasoning_answers import entry_text
from tests.environments.trained_rows import (
    FIRST_SEED,
    imported,
    text_of,
    turns_of,
    what_rows_say,
)

FUNCTIONS = Path(__file__).with_name("ecosystem_functions.py")
OWN = f"action={FUNCTIONS}:chosen&observation={FUNCTIONS}:shown"
LAKE = "gymnasium:FrozenLake-v1?is_slippery=true"
GUESS = "textarena:GuessTheNumber-v0"
NIM = "textarena:Nim-v0?players=2"
VERIFIED = "verifiers:tests.environments.verifiers_guessing"
SUM = "reasoning_gym:chain_sum?max_terms=3"


def needs(name):
    pytest.importorskip(name.partition(":")[0], reason="its package is an extra")


@pytest.mark.parametrize(
    ("name", "package", "options"),
    [
        ("gymnasium:FrozenLake-v1", "gymnasium", {}),
        ("reasoning-gym:chain_sum?a=1&b=x&c=[1, 2]&d=true&e=", "reasoning_gym", None),
        ("gymnasium:make", "gymnasium", {}),
    ],
)
def test_a_name_has_a_package_an_id_and_options_of_json(name, package, options):
    expected = {"a": 1, "b": "x", "c": [1, 2], "d": True, "e": ""} if options is None else options
    found = ecosystem_name(name)
    assert (found.package, found.options) == (package, expected)


@pytest.mark.parametrize("name", ["mine.py:Guess", "siirl_dask.nodes:play", "s3://a/b", "a.jsonl"])
def test_other_names_are_no_ecosystem_s(name):
    assert ecosystem_name(name) is None


@pytest.mark.parametrize("query", ["a", "a=1&a=2", "=1"])
def test_an_option_without_a_value_or_given_twice_is_refused(query):
    with pytest.raises(PlanError, match="expected different options with values"):
        ecosystem_name(f"gymnasium:FrozenLake-v1?{query}")


@pytest.mark.parametrize("package", sorted({*ECOSYSTEMS} - BEHIND_SERVERS))
def test_a_package_that_is_not_installed_is_named_with_its_extra(package, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    extra = package.replace("_", "-")
    with pytest.raises(PlanError, match=rf"pip install 'siirl_dask\[{extra}\]'"):
        resolve(f"{package}:some-id")


REFUSED = {
    "gymnasium:FrozenLak-v1": "did you mean 'FrozenLake-v1'",
    "gymnasium:FrozenLake-v1?slippery=true": "unexpected keyword argument 'slippery'",
    "gymnasium:Pendulum-v1": r"actions of Box\(.*gymnasium:Pendulum-v1\?action=mine.py:action",
    "gymnasium:FrozenLake-v1?action=nothere:f": "there is no module 'nothere'",
    "reasoning_gym:chain_sm": "did you mean 'chain_sum'",
    "reasoning_gym:chain_sum?terms=3": "unexpected keyword argument 'terms'",
    "textarena:Nimm-v0": "did you mean 'Nim-v0'",
    "textarena:Nim-v0": r"with 1 player: .*textarena:Nim-v0\?players=2 is for two",
    f"{VERIFIED}?tools=true": "has tools, which an API would call",
    f"{VERIFIED}?turn=3": "unexpected keyword argument 'turn'",
    f"{VERIFIED}s": "Could not import",
    "textarena:Nim-v0?players=x": "players='x': expected a number of at least 1",
}


@pytest.mark.parametrize(("name", "said"), REFUSED.items(), ids=REFUSED)
def test_a_name_that_the_package_does_not_take_is_refused_when_it_is_planned(name, said):
    needs(name)
    with pytest.raises(PlanError, match=said):
        resolve(name)


def test_an_environment_of_verifiers_takes_no_signal_of_the_process():
    needs(VERIFIED)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    resolve(f"{VERIFIED}?turns_allowed=7")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_function_of_the_package_itself_stays_one():
    gymnasium = pytest.importorskip("gymnasium", reason="its package is an extra")
    assert resolve("gymnasium:make") is gymnasium.make


@pytest.mark.parametrize("name", [f"{LAKE}&{OWN}", SUM, NIM])
def test_a_recorded_name_makes_the_same_environments(name):
    needs(name)
    factory = resolve(name)
    recorded = json.loads(json.dumps(canonical(factory)))
    again = bind(resolve(recorded["run"]), recorded["with"], "recorded")
    assert canonical(again) == canonical(factory)
    assert again().reset({"prompt": ""}, 7) == factory().reset({"prompt": ""}, 7)


def test_global_random_numbers_of_a_game_are_its_own():
    needs(GUESS)
    games = [resolve("textarena:KuhnPoker-v0?players=2")() for _ in range(3)]
    random.seed(3)
    before = random.getstate()
    alone = [game.reset({}, seed) for game, seed in zip(games, (7, 7, 8), strict=True)]
    assert alone[0] == alone[1]
    moves = ("[check]", "[bet]", "[call]", "[check]", "[check]")
    one, other = [[games[number].step(move) for move in moves] for number in (0, 1)]
    assert one == other
    again = [resolve("textarena:KuhnPoker-v0?players=2")() for _ in range(2)]
    assert [game.reset({}, seed) for game, seed in zip(again, (7, 8), strict=True)] == [
        alone[0],
        alone[2],
    ]
    in_turn = [[game.step(move) for game in again] for move in moves]
    assert [steps[0] for steps in in_turn] == one
    assert random.getstate() == before


def test_every_task_of_reasoning_gym_is_scored_from_its_row_as_by_itself():
    needs(SUM)
    from reasoning_gym.factory import create_dataset

    # arc_agi compares tuples, graph_color has numbers as keys, boxnet no answer of its own
    for name in (
        "arc_agi",
        "chain_sum",
        "graph_color",
        "boxnet",
        "basic_arithmetic",
        "mini_sudoku",
    ):
        dataset = create_dataset(name, seed=3, size=2)
        for entry in (dataset[0], dataset[1]):
            row = entry_text(name, {}, entry)
            for answer in (str(entry["answer"]), "nonsense", ""):
                expected = float(dataset.score_answer(answer, entry))
                assert score(None, answer, row) == expected, name
                assert score(None, f"so <answer>{answer}</answer>.", row) == expected, name
    with pytest.raises(ConfigError, match=r"data\.answer=entry"):
        score(None, "5", "5")


def test_imported_tasks_are_the_package_s_own(tmp_path):
    needs(SUM)
    from reasoning_gym.factory import create_dataset

    rows = imported(f"{SUM}&size=600&seed={FIRST_SEED}", tmp_path / "table")
    own = [
        entry
        for seed in (FIRST_SEED, FIRST_SEED + 1)
        for entry in create_dataset("chain_sum", seed=seed, size=500, max_terms=3)
    ]
    asked = [{"role": "user", "content": entry["question"]} for entry in own[:600]]
    assert [row["prompt"] for row in rows] == [[message] for message in asked]
    assert [row["answer"] for row in rows] == [entry["answer"] for entry in own[:600]]
    assert all(score(None, row["answer"], row["entry"]) == 1.0 for row in rows)
    assert {row["data_source"] for row in rows} == {"reasoning_gym/chain_sum"}


@pytest.mark.parametrize("option", ["size=0", "seed=-1", "size=x", "chat=2", "size=true"])
def test_a_wrong_option_of_an_import_is_refused(option, tmp_path, capsys):
    needs(LAKE)
    with pytest.raises(SystemExit, match="2"):
        main(["data", "import", f"gymnasium:FrozenLake-v1?{option}", str(tmp_path / "table")])
    assert f"{option.partition('=')[0]}=" in capsys.readouterr().err
    assert not (tmp_path / "table").exists()


def test_gymnasium_s_rows_are_gymnasium_s_own_answers_and_the_same_in_another_run(trained):
    needs(LAKE)
    import gymnasium

    name = f"{LAKE}&{OWN}"
    rows = trained("one", name, LAKE)
    acted = 0
    for row in rows:
        lake = gymnasium.make("FrozenLake-v1", is_slippery=True)
        place, _ = lake.reset(seed=FIRST_SEED + row["data_row"])
        assert row["prompt_text"] == f"{row['prompt']}FrozenLakeEnv at {place}\n"
        written = ""
        total = 0.0
        ended = False
        for text in turns_of(row):
            assert not ended
            written += text
            if not text:
                written += "\nWrite a whole number from 0 to 3 each turn.\n"
                continue
            place, reward, ended, _, _ = lake.step(sum(text.encode()) % 4)
            written += f"\nFrozenLakeEnv at {place}\n"
            total += reward
            acted += 1
        shown = text_of(row["response_ids"])
        assert written.startswith(shown)
        assert row["reward"] == total
        assert row["finish_reason"] == ("environment" if ended else "turns")
    assert acted > len(rows)
    again = trained("two", name, LAKE, "environments.processes=1")
    assert [*map(what_rows_say, again)] == [*map(what_rows_say, rows)]


def test_what_gymnasium_draws_is_shown_with_its_colours_as_brackets():
    needs(LAKE)
    lake = resolve("gymnasium:FrozenLake-v1?is_slippery=false")()
    opening = lake.reset({"prompt": [{"role": "user", "content": "Go. "}]}, 1)
    assert opening.prompt == [{"role": "user", "content": "Go. [S]FFF\nFHFH\nFFFH\nHFFG"}]
    assert lake.step("then 1").observation == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    unheard = lake.step("7")
    assert unheard.observation == "Write a whole number from 0 to 3 each turn."
    assert unheard.state == "4"
    last = lake.step("2")
    assert (last.done, last.reward, last.state) == (True, 0.0, "4")


def test_textarena_s_rows_are_its_own_messages_and_rewards(trained):
    needs(GUESS)
    import textarena

    rows = trained("one", GUESS, f"{GUESS}?")
    for row in rows:
        before = random.getstate()
        game = textarena.make("GuessTheNumber-v0-raw")
        game.reset(num_players=1, seed=FIRST_SEED + row["data_row"])
        _, messages = game.get_observation()
        rules = "".join(f"[GAME] {text}\n" for _, text, _ in messages)
        assert row["prompt_text"] == row["prompt"] + rules
        written = ""
        reward = 0.0
        for text in turns_of(row):
            written += text
            done, _ = game.step(text if "[" in text else f"[{text}]")
            if done:
                reward = game.close()[0][0]
                break
            _, messages = game.get_observation()
            lines = [f"[GAME] {text}" for sender, text, _ in messages if sender == -1]
            written += "\n" + "\n".join(lines) + "\n"
        random.setstate(before)
        assert written.startswith(text_of(row["response_ids"]))
        assert row["reward"] == pytest.approx(reward)
    again = trained("two", GUESS, f"{GUESS}?", "environments.processes=1")
    assert [*map(what_rows_say, again)] == [*map(what_rows_say, rows)]


def test_two_players_of_textarena_are_agents_with_rewards_of_their_own(trained):
    needs(NIM)
    agents = ["environments.agents=[player_0, player_1]", "environments.turns=4"]
    rows = trained("one", NIM, NIM, *agents)
    by_episode = {}
    for row in rows:
        by_episode.setdefault((row["step"], row["episode_id"]), {})[row["agent"]] = row
    first = [rows["player_0"] for rows in by_episode.values()]
    assert all("Welcome to Nim, Player 0!" in row["prompt_text"] for row in first)
    # who makes two moves against the rules loses
    assert {row["reward"] for row in first} == {-1.0}
    assert {row["finish_reason"] for row in first} == {"environment"}


def test_reasoning_gym_s_rows_are_its_own_questions_and_scores(trained, tmp_path):
    needs(SUM)
    from reasoning_gym.factory import create_dataset

    rows = trained("one", SUM, SUM, columns="[prompt, entry]")
    table = open_table(str(tmp_path / "table")).to_table().to_pylist()
    own = create_dataset("chain_sum", seed=FIRST_SEED, size=500, max_terms=3)
    for row in rows:
        entry = own[row["data_row"]]
        assert row["prompt_text"] == entry["question"]
        assert row["reward"] == score(None, row["response"], table[row["data_row"]]["entry"])
        assert row["finish_reason"] == "environment"
    new = trained("two", SUM, SUM, columns="[prompt, answer]")
    asked = [row["prompt_text"].removeprefix(row["prompt"]) for row in new]
    assert all(question.startswith("State the final answer") for question in asked)
    assert not {*asked} & {row["prompt_text"] for row in rows}
    again = trained("three", SUM, SUM, columns="[prompt, answer]")
    assert [*map(what_rows_say, again)] == [*map(what_rows_say, new)]


@pytest.mark.parametrize("turns", [1, 3])
def test_verifiers_rows_are_its_own_messages_and_its_rubric_s_rewards(trained, tmp_path, turns):
    needs(VERIFIED)
    from tests.environments.verifiers_guessing import guess_in

    name = f"{VERIFIED}?turns_allowed={turns}"
    rows = trained("one", name, name, columns="[prompt, entry]")
    table = open_table(str(tmp_path / "table")).to_table().to_pylist()
    assert sorted(int(row["answer"]) for row in table) == sorted(n % 16 for n in range(24))
    for row in rows:
        source = table[row["data_row"]]
        secret = int(source["answer"])
        assert row["prompt_text"] == f"{source['prompt']}\n"
        assert source["prompt"].startswith("Be brief.\nGame ")
        written = ""
        said = turns_of(row)
        for text in said:
            written += f"{text}\n{'higher' if secret > guess_in(text) else 'lower'}\n"
        near = 1 - abs(guess_in(said[-1]) - secret) / 16
        assert written.startswith(text_of(row["response_ids"]))
        assert row["reward"] == pytest.approx(near + 0.1 * len(said))
        assert dict(row["reward_parts"])["nearness"] == pytest.approx(near)
        assert len(said) == turns or guess_in(said[-1]) == secret
        assert row["finish_reason"] == "environment"
    again = trained("two", name, name, "environments.processes=1", columns="[prompt, entry]")
    assert [*map(what_rows_say, again)] == [*map(what_rows_say, rows)]
