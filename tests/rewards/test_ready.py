"""The ready rewards give the values that were worked out by hand."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.rewards import (
    brevity,
    by_source,
    dapo_math,
    exact_match,
    gsm8k,
    matches_format,
    math_answer,
    multiple_choice,
    weighted_sum,
)
from siirl_dask.rewards.math_answers import last_boxed

numbers = st.decimals(-(10**9), 10**9, places=2)


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("6 * 7 = 42\n#### 42", "She has 6 * 7 = 42.\n#### 42", 1.0),
        ("#### 42", "42", 1.0),
        ("#### 42", 42, 1.0),
        ("####42.00 apples.", "42", 1.0),
        ("#### $1,234,567", "1234567", 1.0),
        ("#### 1,00,000", "100000", 1.0),
        ("#### 1,23", "123", 1.0),
        ("#### 1,23", "23", 0.0),
        ("#### -5", "-5", 1.0),
        ("#### 5", "-5", 0.0),
        ("#### .5", "0.5", 1.0),
        ("#### 7.", "7", 1.0),
        ("#### 1 or #### 2", "2", 1.0),
        ("#### 1 or #### 2", "1", 0.0),
        ("the answer is 42", "42", 0.0),
        ("#### forty-two", "42", 0.0),
        ("", "42", 0.0),
    ],
)
def test_gsm8k_compares_the_marked_number(response, answer, reward):
    assert gsm8k("p", response, answer, source="x") == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("so it is 18.", 1.0),
        ("#### 18, since 3 are left", 1.0),
        ("it costs $18.00, I think", 1.0),
        ("20-2 is 18", 1.0),
        ("18 of 20", 0.0),
        ("v18", 0.0),
        ("none", 0.0),
    ],
)
def test_flexible_gsm8k_takes_the_last_number_where_nothing_is_marked(response, reward):
    assert gsm8k("p", response, "18", flexible=True) == reward


@given(numbers, numbers)
def test_gsm8k_compares_numbers_however_they_are_written(number, other):
    assert gsm8k("p", f"#### {number:,}", str(number)) == 1.0
    assert gsm8k("p", f"#### {number}", f"{other:,}") == float(number == other)


@pytest.mark.parametrize("answer", ["", "none", None, "forty 2 two"])
def test_gsm8k_refuses_an_answer_without_a_number(answer):
    with pytest.raises(ValueError, match="holds no number"):
        gsm8k("p", "#### 1", answer)


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{1}", "1"),
        (r"\boxed {1} and \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}} + \frac{3}{4}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{2} and \boxed{3", "2"),
        (r"} \boxed{2}", "2"),
        (r"\boxed{a \boxed{b}}", "b"),
        (r"\boxed{}", ""),
        (r"\boxed 3", None),
        ("", None),
    ],
)
def test_the_last_box_that_closes_is_found(text, inside):
    assert last_boxed(text) == inside


def test_boxes_that_never_close_take_no_time():
    assert last_boxed("\\boxed{" * 200_000) is None


def test_many_marks_take_no_time():
    assert dapo_math("p", "Answer: " * 100_000 + "34", "34") == 1.0


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("Answer: 34", "34", 1.0),
        ("thinking\n**Answer:** $34$.", 34, 1.0),
        (r"Answer: \boxed{34}", "34", 1.0),
        (r"The final answer: \text{34}", "34", 1.0),
        ("Answer: 1\nanswer: 34", "34", 1.0),
        ("Answer: 34\nAnswer: 1", "34", -1.0),
        (r"\boxed{1} or \boxed{34}", "34", 1.0),
        (r"Answer:" "\n" r"\boxed{034}", "34", 1.0),
        ("Answer: 1,000", "1000", 1.0),
        ("Answer: (1,2)", "(1, 2)", 1.0),
        ("Answer: (1,2)", "(12)", -1.0),
        (r"Answer: \dfrac{1}{2}", r"\frac12", 1.0),
        (r"Answer: \frac1{2}", r"\dfrac12", 1.0),
        (r"Answer: \dfrac{\sqrt3}{2}", r"\frac{\sqrt{3}}{2}", 1.0),
        (r"Answer: \frac12", r"\frac{1}{3}", -1.0),
        (r"Answer: 42^\circ", "42", 1.0),
        (r"Answer: 42^{\circ}", "42°", 1.0),
        ("Answer: 10 square units", "10", 1.0),
        (r"Answer: 10\text{ cm}", "10 cm", 1.0),
        ("Answer: 10 million", "10", -1.0),
        ("Answer: 10 or 11 ways", "10", -1.0),
        (r"Answer: $x = 42$", "42", 1.0),
        ("Answer: 40 + 2 = 42", "42", 1.0),
        ("Answer: x = 1,000", "1000", 1.0),
        ("Answer: x=41, y=42", "42", -1.0),
        ("Answer: y = 2x + 4", "y = 2x + 3", -1.0),
        ("Answer: y = 2x + 3", "y = 2x + 3", 1.0),
        (r"Answer: \$42", "42", 1.0),
        (r"Answer: 1{,}000", "1000", 1.0),
        ('Answer: "42"', "42", 1.0),
        ("Answer: *42*", "42", 1.0),
        ("**Answer:**\n\n42\n", "42", 1.0),
        (r"**Answer:**" "\n" r"$$\boxed{42}$$", "42", 1.0),
        ("Answer:\nso it is 42", "42", -1.0),
        ("Answer: the answer: 42", "42", 1.0),
        (r"Answer: \dfrac{1}{2}", r"\frac{1}{2}", 1.0),
        ("Answer: 1e999999999999", "34", -1.0),
        ("Answer: nan", "34", -1.0),
        ("it is 34", "34", -1.0),
        ("", "34", -1.0),
    ],
)
def test_dapo_math_takes_the_answer_line_or_the_box(response, answer, reward):
    assert dapo_math("p", response, answer) == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("The answer is (B).", 1.0),
        ("Answer: B", 1.0),
        ("**Answer:** B) because", 1.0),
        ("I take option B", 1.0),
        ("first A\nB", 1.0),
        ("(B)", 1.0),
        ("b.", 1.0),
        (r"\boxed{B}", 1.0),
        (r"Answer: A, no: \boxed{\text{B}}", 1.0),
        ("The answer is A. No, the answer is B.", 1.0),
        ("The answer is B. No, the answer is A.", 0.0),
        (r"The answer is B \boxed{A}", 0.0),
        ("The answer is a guess: B", 0.0),
        ("Because", 0.0),
        ("A or B", 0.0),
        ("", 0.0),
    ],
)
def test_multiple_choice_takes_the_boxed_the_stated_or_the_last_letter(response, reward):
    assert multiple_choice("p", response, "B") == reward


@pytest.mark.parametrize("answer", ["", "BC", "7", "Z", None])
def test_multiple_choice_refuses_an_answer_that_is_no_letter(answer):
    with pytest.raises(ValueError, match="is no choice"):
        multiple_choice("p", "B", answer)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>a\nb</think>\n<answer>4</answer>", 1.0),
        ("  <think></think><answer></answer>\n", 1.0),
        ("<think>a</think> so <answer>4</answer>", 0.0),
        ("<think>a</think><think>b</think><answer>4</answer>", 0.0),
        ("<think>a<think>b</think><answer>4</answer>", 0.0),
        ("<think>a</think><answer>4</answer> and more", 0.0),
        ("<answer>4</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_matches_format_compares_the_whole_response(response, reward):
    assert matches_format("p", response, "4") == reward


ANSWERED = "Two and two.</think><answer>4</answer>"


@pytest.mark.parametrize(
    ("prompt", "given", "response", "reward"),
    [
        ("2+2?<think>", {}, ANSWERED, 1.0),
        ("2+2?<think>\n", {}, ANSWERED, 1.0),
        ("2+2?<think>", {}, "<think>" + ANSWERED, 0.0),
        ("2+2?", {}, ANSWERED, 0.0),
        ("<think> of 2+2", {}, ANSWERED, 0.0),
        (
            [{"role": "user", "content": "2+2?"}],
            {"prompt_text": "<|user|>2+2?<|assistant|><think>\n"},
            ANSWERED,
            1.0,
        ),
        (
            [{"role": "user", "content": "2+2?"}],
            {"prompt_text": "<|user|>2+2?<|assistant|>"},
            ANSWERED,
            0.0,
        ),
        ([{"role": "user", "content": "2+2?<think>"}], {}, ANSWERED, 0.0),
    ],
)
def test_a_thought_that_the_template_opened_counts_once(prompt, given, response, reward):
    assert matches_format(prompt, response, "4", **given) == reward
    rewards = {"format": matches_format, "own": two_parts}
    weights = {"format": 1.0, "own": 0.0}
    parts = weighted_sum(
        prompt, response, "4", rewards=rewards, weights=weights, bonus=0.0, **given
    )
    assert parts["format"] == reward


def test_matches_format_takes_another_pattern():
    assert matches_format("p", "a\nb", "", pattern="a.b") == 1.0
    assert matches_format("p", "a\nbc", "", pattern="a.b") == 0.0


@pytest.mark.parametrize(
    ("length", "reward"), [(0, 0.0), (10, 0.0), (15, -0.5), (20, -1.0), (99, -1.0)]
)
def test_brevity_falls_from_free_to_limit(length, reward):
    assert brevity("p", "x" * length, "", free=10, limit=20) == reward


def test_brevity_refuses_a_limit_that_is_not_above_free():
    with pytest.raises(ValueError, match="expected 0 <= free < limit"):
        brevity("p", "x", "", free=5, limit=5)


def two_parts(prompt, response, answer, *, bonus):
    return {"reward": 2.0, "bonus": bonus}


def test_a_row_is_scored_by_the_reward_of_its_source():
    rewards = {"numbers": gsm8k, "words": exact_match}
    row = {"prompt": "p", "response": "so #### 3", "answer": "3"}
    assert by_source(**row, data_source="numbers", rewards=rewards) == 1.0
    assert by_source(**row, data_source="words", rewards=rewards) == 0.0
    thought = {"prompt": [], "response": "a</think><answer>b</answer>", "answer": ""}
    tags = {"tags": matches_format}
    seen = {"data_source": "tags", "rewards": tags, "prompt_text": "<think>\n"}
    assert by_source(**thought, **seen) == 1.0
    with pytest.raises(ValueError, match="data_source='verse': expected one of numbers, words"):
        by_source(**row, data_source="verse", rewards=rewards)


def test_a_weighted_sum_contains_each_of_its_rewards():
    rewards = {"gsm8k": gsm8k, "format": matches_format, "own": two_parts}
    result = weighted_sum(
        "p",
        "#### 4",
        "4",
        rewards=rewards,
        weights={"gsm8k": 1.0, "format": 0.5, "own": 0.25},
        bonus=7.0,
    )
    assert result == {"reward": 1.5, "gsm8k": 1.0, "format": 0.0, "own": 2.0, "own/bonus": 7.0}


@pytest.mark.parametrize("weights", [{}, {"other": 1.0}, {"gsm8k": 1.0, "other": 1.0}])
def test_a_weighted_sum_refuses_rewards_and_weights_of_other_names(weights):
    with pytest.raises(ValueError, match="expected the same names"):
        weighted_sum("p", "#### 4", "4", rewards={"gsm8k": gsm8k}, weights=weights)


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (r"so \boxed{\frac12}", "0.5", 1.0),
        (r"so $\frac{1}{2}$", "1/2", 1.0),
        (r"\boxed{x + 1}", "1 + x", 1.0),
        (r"\boxed{(1, 2)}", "(1,2)", 1.0),
        (r"\boxed{(2, 1)}", "(1,2)", 0.0),
        (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", 1.0),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}", 1.0),
        (r"\boxed{4}", r"thus \boxed{4}", 1.0),
        (r"\boxed{4}", "so $4$", 1.0),
        (r"\boxed{1,000}", 1000, 1.0),
        (r"\boxed{3}", "4", 0.0),
        ("no idea", "4", 0.0),
        ("", "4", 0.0),
    ],
)
def test_math_answer_rewards_equal_expressions(response, answer, reward):
    assert math_answer("p", response, answer) == reward


def test_math_answer_works_outside_the_main_thread():
    """The timeouts of math-verify are signals, which raise in other threads."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(math_answer, "p", r"\boxed{\frac12}", "0.5").result() == 1.0


def test_math_answer_refuses_an_answer_that_is_no_mathematics():
    with pytest.raises(ValueError, match="is no mathematics"):
        math_answer("p", "4", "")


ANSWERS = st.one_of(
    st.none(),
    st.floats(),
    st.decimals(),
    st.integers(),
    st.booleans(),
    st.text(st.characters(codec="utf-8"), max_size=5),
    st.binary(max_size=3),
    st.lists(st.text(max_size=2), max_size=2),
    st.dictionaries(st.text(max_size=2), st.text(max_size=2), max_size=2),
)


@given(answer=ANSWERS)
def test_an_answer_that_no_response_can_meet_is_a_failure_and_no_wrong_response(answer):
    is_text_or_number = isinstance(answer, str | float | Decimal | int)
    is_nan = str(answer).lower().lstrip("-s").startswith("nan") and not isinstance(answer, str)
    if not is_text_or_number or is_nan:
        for reward in (exact_match, math_answer, dapo_math):
            with pytest.raises(ValueError, match=r"the row's answer is"):
                reward("p", "5", answer)
    else:
        said = str(answer)
        assert exact_match("p", said, answer) == 1.0
        assert exact_match("p", f"{said} and more", answer) == 0.0
