"""docs/planning.md: what the page shows of plans is what the commands print."""

import re
import shlex
from pathlib import Path

import pytest

from siirl_dask.cli import main
from tests.models.configs import QWEN2_5_7B, write_config

ROOT = Path(__file__).parents[2]
SHOWN = re.findall(
    r"^```\n\$ siirl-dask (.*)\n\[\.\.\.\]\n((?:.*\n)+?)```$",
    (ROOT / "docs/planning.md").read_text(),
    re.M,
)


@pytest.mark.parametrize(("line", "shown"), SHOWN, ids=range(len(SHOWN)))
def test_the_plans_on_the_page_are_what_is_printed(tmp_path, monkeypatch, capsys, line, shown):
    (tmp_path / "models").mkdir()
    write_config(tmp_path / "models" / "Qwen2.5-7B", QWEN2_5_7B)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    main(shlex.split(line))
    assert capsys.readouterr().out.rstrip().endswith(shown.rstrip())


def test_the_page_shows_some():
    assert len(SHOWN) == 6
