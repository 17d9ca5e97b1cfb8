"""Rewards that a process of its own loads: beside the tests it would import all that these do."""


def share_right(prompt, response, answer, **extra):
    if response == "fails":
        raise RuntimeError("no")
    return float(response == answer)
