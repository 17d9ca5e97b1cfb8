"""No reward takes a part of a version, a date or a fraction for the answer."""

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.rewards import dapo_math, exact_match, gsm8k, math_answer

# what makes one thing, which is no number, of the digits on either side of it
JOINTS = [
    ".{}.",
    "-{}-",
    ":",
    "/",
    "/{}/",
    " {}/",
    "_",
    "^",
    "^{{{}}}/",
    "\u2013",
    "'",
    "\u00d7",
    " \u00d7 ",
    "x",
    ",,",
    "..",
    "\u066c",
]
SIGNS = ["--", "+-", "-+", "\u2212\u2212", "-\u2212"]
BEHIND = ["²", "½", "千", "⁻¹"]
digits = st.integers(1, 999).map(str)


@st.composite
def no_numbers(draw):
    """Something that is no number, and the parts of it that are."""
    kind = draw(st.sampled_from(["joined", "signed", "followed", "grouped"]))
    first = draw(digits)
    match kind:
        case "joined":
            joint = draw(st.sampled_from(JOINTS)).format(draw(digits))
            text = first + joint + draw(digits)
        case "signed":
            text = draw(st.sampled_from(SIGNS)) + first
        case "followed":
            text = first + draw(st.sampled_from(BEHIND))
        case "grouped":
            groups = draw(st.lists(digits, min_size=1, max_size=3))
            text = ",".join([first, *groups])
            if all(len(group) == 3 for group in groups):
                text = f"0{text}"
    parts = re.findall(r"\d+(?:\.\d+)?", text)
    return text, [*parts, *(f"-{part}" for part in parts), re.sub(r"\D", "", text)]


@given(no_numbers())
def test_a_part_of_what_is_no_number_is_no_answer(what):
    text, parts = what
    # GSM8K's own scoring, and verl's, leave out the commas of the number that is marked
    without_commas = text.replace(",", "")
    is_number = re.fullmatch(r"\d+(\.\d+)?", without_commas) is not None
    for part in parts:
        assert gsm8k("p", f"#### {text}", part) == float(is_number and part == without_commas)
        assert gsm8k("p", f"It is {text}.", part, flexible=True) == 0.0
        assert dapo_math("p", f"Answer: {text}", part) == -1.0
        assert dapo_math("p", rf"\boxed{{{text}}}", part) == -1.0
        assert exact_match("p", text, float(part)) == 0.0
    if is_number:
        assert gsm8k("p", f"#### {without_commas}", f"She gets\n#### {text}") == 1.0
    else:
        with pytest.raises(ValueError, match="holds no number"):
            gsm8k("p", "#### 1", f"She gets\n#### {text}")


@given(
    number=st.decimals(-(10**6), 10**6, places=2),
    before=st.sampled_from(["", "$", "so ", "= ", "("]),
    behind=st.sampled_from(["", ".", "%", " apples", "km", ", since 3 are left", ")", "\n"]),
)
def test_a_number_is_read_however_it_is_written(number, before, behind):
    if number.is_zero():
        number = abs(number)
    for written in (f"{number:,}", f"{number}", f"{number}".replace("-", "\u2212"), f"{number:e}"):
        alone = f"{before}{written}{behind}"
        assert gsm8k("p", f"#### {written}{behind}", str(number)) == 1.0
        if "3" not in behind:
            assert gsm8k("p", f"It is {alone}", str(number), flexible=True) == 1.0
        assert gsm8k("p", f"#### {written}", str(number + 1)) == 0.0
        assert dapo_math("p", f"Answer: {written}", f"{number}") == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("3.14.15", "3.14"),
        ("it is 192.168.0.1", "192.168"),
        ("at 10:30", "10"),
        ("5²", "5"),
        ("1e3", "1"),
    ],
)
def test_math_answer_takes_no_part_that_math_verify_takes(response, answer):
    assert math_answer("p", response, answer) == 0.0


@given(numerator=st.integers(-999, 999), denominator=st.integers(1, 99))
def test_math_answer_takes_fractions_and_minus_signs_of_all_kinds(numerator, denominator):
    value = Fraction(numerator, denominator)
    for sign in "-\u2212":
        written = f"{numerator}".replace("-", sign)
        assert math_answer("p", rf"\boxed{{\frac{{{written}}}{{{denominator}}}}}", f"{value}")
        assert math_answer("p", f"It is {written}.", f"{numerator}") == 1.0


@pytest.mark.parametrize("text", ["5 1/2", "1 2", "5 \\frac12"])
def test_spaces_between_digits_are_not_left_out(text):
    assert dapo_math("p", f"Answer: {text}", text) == 1.0
    assert dapo_math("p", f"Answer: {text}", text.replace(" ", "", 1).replace("\\", "")) == -1.0
    for thousand in ("1 000", r"1\,000", r"1\ 000", "1{,}000", r"1,\!000"):
        assert dapo_math("p", f"Answer: {thousand}", "1000") == 1.0


def test_much_text_is_read_in_no_time():
    for piece in ("#", "5", "-", "5-", "5 ", "#### ", "5a", "5,555", "5 * ", "####5\\times"):
        gsm8k("p", piece * 100_000, "5", flexible=True)
        dapo_math("p", "Answer: " + piece * 100_000, "5")
