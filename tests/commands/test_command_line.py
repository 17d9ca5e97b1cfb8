"""The command line itself: it starts fast, names what there is, and completes in a shell."""

import json
import shutil
import subprocess
import sys

import pytest

from siirl_dask import __version__
from siirl_dask.cli import main
from siirl_dask.commands import COMMANDS
from siirl_dask.commands.configs import copy_of
from siirl_dask.commands.program.parsing import function_of, whole_parser
from siirl_dask.config.file import load_config_file, shipped, shipped_files

NARROW = 60
"""Columns of a narrow terminal."""


def ended(capsys, *arguments):
    """Exit code, output and errors of a command."""
    with pytest.raises(SystemExit) as raised:
        main(list(arguments))
    said = capsys.readouterr()
    return raised.value.code or 0, said.out, said.err


def modules_after(*arguments):
    """The modules that a process has imported when the command has ended."""
    code = (
        "import json, sys\n"
        "from siirl_dask.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit:\n    pass\n"
        "print('\\n' + json.dumps(sorted(sys.modules)))\n"
    )
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("arguments", [["--help"], [], ["--version"]], ids=" ".join)
def test_no_command_is_imported_by_what_names_none(arguments):
    modules = modules_after(*arguments)
    own = {f"siirl_dask.commands.{command.module}" for command in COMMANDS.values()}
    assert own.isdisjoint(modules)
    third = {name.partition(".")[0] for name in modules} & {"numpy", "pyarrow", "rich", "omegaconf"}
    assert not third


@pytest.mark.parametrize(
    "command", ["run", "plan", "quickstart", "replay", "eval", "export", "doctor"]
)
def test_help_of_a_command_imports_nothing_that_takes_time(command):
    heavy = {"torch", "dask", "distributed", "transformers", "pyarrow"}
    assert heavy.isdisjoint(modules_after(command, "--help"))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_a_function_help_and_a_line_that_fits_a_narrow_terminal(command, capsys):
    assert callable(function_of(command))
    code, out, _ = ended(capsys, command, "--help")
    assert code == 0
    assert out.startswith(f"usage: siirl-dask {command} ")
    _, whole, _ = ended(capsys, "--help")
    (line,) = [line for line in whole.splitlines() if line.startswith(f"  {command} ")]
    assert COMMANDS[command].line in line
    assert max(map(len, whole.splitlines())) <= NARROW


def test_without_a_command_all_are_listed(capsys):
    assert ended(capsys) == ended(capsys, "--help")


def test_the_version_is_printed(capsys):
    assert ended(capsys, "--version") == (0, f"siirl_dask {__version__}\n", "")


def test_the_package_is_a_program():
    command = [sys.executable, "-m", "siirl_dask", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout == f"siirl_dask {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pln", "x.yaml"], "no command 'pln' (`siirl-dask --help` lists all commands); did you"),
        (["--vers"], "did you mean '--version'?"),
        (["data", "import", "--tokeniser", "a", "x", "y"], "did you mean '--tokenizer'?"),
        (["run"], "the following arguments are required: CONFIG\n"),
        (["plan", "siirl_dask:quikstart"], "did you mean 'quickstart.yaml'?"),
        (["plan", "nowhere/quickstart.yaml"], "comes with siirl_dask:quickstart.yaml\n"),
        (["configs", "nothing"], "no config 'nothing' comes with siirl_dask"),
        (["plan", "siirl_dask:quickstart", "trainer.learning_rate=1"], "mean 'trainer.lr'?"),
    ],
)
def test_what_is_mistyped_is_named_with_what_was_meant(arguments, said, capsys):
    code, out, err = ended(capsys, *arguments)
    assert (code, out) == (2, "")
    assert said in err


def test_a_file_that_is_not_there_is_named_with_the_one_that_is(capsys, tmp_path):
    (tmp_path / "mine.yaml").write_text("base: siirl_dask:quickstart.yaml\n")
    _, _, err = ended(capsys, "plan", str(tmp_path / "mime.yaml"))
    assert err.endswith(f"no such file; did you mean '{tmp_path}/mine.yaml'?\n")


def test_a_run_that_is_not_there_is_named_with_the_one_that_is(capsys, tmp_path):
    (tmp_path / "mine").mkdir()
    for command in ("rollouts", "trace", "check"):
        _, _, err = ended(capsys, command, str(tmp_path / "mime"))
        assert err.endswith(f"there is no such folder; did you mean '{tmp_path}/mine'?\n")


def test_a_name_of_a_shipped_config_stands_for_its_file():
    named = load_config_file("siirl_dask:quickstart_ppo", ["run.steps=3"])
    assert named == load_config_file(shipped("quickstart_ppo.yaml"), ["run.steps=3"])


def test_shipped_configs_are_listed_with_a_line_each(capsys, monkeypatch):
    main(["configs"])
    lines = capsys.readouterr().out.splitlines()
    for name in shipped_files():
        start = f"  {name.removesuffix('.yaml')} "
        (line,) = [line for line in lines if line.startswith(start)]
        assert len(line.split()) > 3
        assert "arXiv" not in line


@pytest.mark.parametrize("name", [name for name in shipped_files() if "/" not in name])
def test_a_printed_config_is_the_shipped_one_wherever_it_lies(name, capsys, tmp_path):
    main(["configs", name])
    copy = tmp_path / "mine.yaml"
    copy.write_text(capsys.readouterr().out)
    assert copy.read_text() == copy_of(name)
    mine = load_config_file(copy)
    theirs = load_config_file(shipped(name))
    assert (mine.config, mine.roles, mine.nodes) == (theirs.config, theirs.roles, theirs.nodes)


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_a_shell_gets_every_command_and_option_to_complete(shell, capsys):
    main(["completion", shell])
    code = capsys.readouterr().out
    assert all(command in code for command in COMMANDS)
    assert "device-memory" in code
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=code, text=True, check=True, timeout=100)


def test_bash_completes_options_and_files(tmp_path, capsys):
    main(["completion", "bash"])
    (tmp_path / "completion.sh").write_text(capsys.readouterr().out)
    (tmp_path / "mine.yaml").touch()
    ask = (
        "source completion.sh; complete -p siirl-dask >&2; "
        "COMP_WORDS=({words}); COMP_CWORD={at}; "
        "$(complete -p siirl-dask | sed 's/.*-F \\([^ ]*\\).*/\\1/') 2>/dev/null; "
        'printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    for words, at, wanted in (
        ("siirl-dask pl", 1, "plan"),
        ("siirl-dask plan --ana", 2, "--analyze"),
        ("siirl-dask plan min", 2, "mine.yaml"),
        ("siirl-dask plan --format s", 3, "svg"),
    ):
        command = ["bash", "-c", ask.format(words=words, at=at)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert wanted in done.stdout.split(), done.stderr


def test_the_whole_parser_has_every_command():
    parser = whole_parser()
    assert parser.parse_args(["plan", "x.yaml", "trainer.lr=1"]).overrides == ["trainer.lr=1"]
    assert parser.parse_args(["data", "show", "x"]).url == "x"
