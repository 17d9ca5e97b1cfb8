"""Rewards for child processes. In a module of tests, each child would import all that the tests
do.
"""


def share_right(prompt, response, answer, **extra):
    if response == "fails":
        raise RuntimeError("no")
    return float(response == answer)


def gives_its_own(prompt, response, answer, *, values, **extra):
    """Give the value whose place among ``values`` is the row's answer."""
    return values[int(answer)]
