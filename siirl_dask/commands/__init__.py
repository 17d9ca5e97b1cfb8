"""The commands of ``siirl-dask``, by name. A command's module is imported when it is named."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["COMMANDS", "GROUPS", "NAME_FUNCTIONS", "program", "script"]


class Command(NamedTuple):
    """Where a command is, and what it does."""

    module: str
    """Module below ``siirl_dask.commands``."""
    add: str
    """Function of the module that adds the command's arguments to a parser."""
    call: str
    """Function of the module that runs the command with the parsed arguments; it returns an exit
    code, or None for 0."""
    line: str
    """Its line of the help, at most 46 characters long, which fits a terminal of 60 columns."""


GROUPS: dict[str, dict[str, Command]] = {
    "Begin": {
        "quickstart": Command(
            "options.quickstart",
            "add_quickstart",
            "run_quickstart",
            "train a tiny model on this machine",
        ),
        "configs": Command(
            "configs",
            "add_configs",
            "show_configs",
            "list the configs of the package, or print one",
        ),
        "data": Command("data", "add_data", "data", "import datasets, or look into one"),
        "doctor": Command(
            "options.doctor", "add_doctor", "run_doctor", "examine this machine and its cluster"
        ),
        "migrate": Command(
            "migrate",
            "add_migrate",
            "show_migration",
            "turn a config of verl or TRL into one of ours",
        ),
    },
    "Train": {
        "plan": Command(
            "options.plan", "add_plan", "run_plan", "show what a config would do; start nothing"
        ),
        "run": Command("options.run", "add_run", "run", "train as a config says"),
    },
    "Look at a run": {
        "watch": Command("watch", "add_watch", "watch", "show a run until it ends"),
        "serve": Command("serve", "add_serve", "serve", "serve the page of a run, or of a folder"),
        "report": Command(
            "report", "add_report", "write_report", "write one HTML page on a run, or on several"
        ),
        "rollouts": Command(
            "rollouts", "add_questions", "show_rollouts", "ask every sample of a run"
        ),
        "trace": Command("trace", "add_trace", "show_trace", "show where a run's time goes"),
        "replay": Command(
            "options.replay", "add_replay", "run_replay", "run nodes again on stored rows, changed"
        ),
        "check": Command("options.check", "add_check", "run_check", "verify every file of a run"),
        "clean": Command(
            "options.clean", "add_clean", "run_clean", "delete what a run does not need"
        ),
    },
    "Use a model": {
        "chat": Command(
            "options.chat", "add_chat", "run_chat", "talk to a run's model or a folder's"
        ),
        "eval": Command(
            "options.evaluate", "add_eval", "run_eval", "sample from a model and score"
        ),
        "export": Command(
            "options.export", "add_export", "run_export", "write a checkpoint as a model's folder"
        ),
        "unpack": Command(
            "options.unpack",
            "add_unpack",
            "run_unpack",
            "write a quantized model as one that trains",
        ),
    },
    "Shell": {
        "completion": Command(
            "options.completion",
            "add_completion",
            "print_completion",
            "print what completes words in your shell",
        ),
    },
}
"""Every command, in the groups of ``siirl-dask --help``."""

COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
NAME_FUNCTIONS = ("quickstart", "run", "plan", "doctor", "replay", "eval", "chat", "migrate")
"""Commands whose config may name functions of the working directory. The others read runs and data,
which may be a stranger's, and import nothing from where they are started."""
