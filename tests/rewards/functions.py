"""Rewards for child processes. In a module of tests, each child would import all that the tests
do.
"""


def share_right(prompt, response, answer, **extra):
    if response == "fails":
        raise RuntimeError("no")
    return float(response == answer)


def gives(prompt, response, answer, *, value, **extra):
    return value
