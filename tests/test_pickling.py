"""Functions that are sent to other processes keep the files that they are defined in."""

import pickle
import subprocess
import sys
import traceback

import pytest

from siirl_dask.pickling import dumps

SCRIPT = """
import sys
from functools import partial
from siirl_dask.pickling import dumps

def reward(prompt, response, low=0.0):
    def inner():
        raise ValueError(f"{response} is below {low}")
    return max([0], key=lambda _: inner())

sys.stdout.buffer.write(dumps({"by name": reward, "with options": partial(reward, low=1.0)}))
"""


@pytest.fixture
def sent(tmp_path):
    """A script of the user's, and the functions that it sends, which no other process can
    import.
    """
    script = tmp_path / "my_rewards.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, check=True)
    return script, pickle.loads(done.stdout)


@pytest.mark.parametrize("name", ["by name", "with options"])
def test_the_stack_of_a_function_of_the_users_names_its_file_line_and_text(sent, name):
    script, functions = sent
    with pytest.raises(ValueError, match="is below") as raised:
        functions[name]("a prompt", "a response")
    frames = traceback.extract_tb(raised.value.__traceback__)[1:]
    assert [(frame.filename, frame.name) for frame in frames] == [
        (str(script), "reward"),
        (str(script), "<lambda>"),
        (str(script), "inner"),
    ]
    assert frames[-1].line == 'raise ValueError(f"{response} is below {low}")'


def test_what_can_be_imported_is_sent_by_name_and_closures_by_value():
    assert pickle.loads(dumps(dumps)) is dumps
    count = 3
    assert pickle.loads(dumps(lambda more: count + more))(4) == 7
