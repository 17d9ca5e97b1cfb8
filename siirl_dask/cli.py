"""The command line. Errors are one message on stderr.

Whatever takes time is imported by ``main`` or later, so that Ctrl-C is answered from the beginning.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # as typing has it, which takes some milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; a failure ends the process with a message and an exit code."""
    from siirl_dask.commands.program.interrupts import EndsAtOnce

    with EndsAtOnce():
        from siirl_dask.commands.program.ending import exit_with_message
    code = exit_with_message(lambda: _run(arguments))
    if code is not None:
        sys.exit(code)


def _run(arguments: Sequence[str] | None) -> int | None:
    """Run the command that is named, and return its exit code; None stands for 0."""
    from siirl_dask.commands.program.interrupts import EndsAtOnce

    with EndsAtOnce():
        from siirl_dask.commands import NAME_FUNCTIONS
        from siirl_dask.commands.program.ending import files_named, find_functions_here
        from siirl_dask.commands.program.parsing import function_of, parse

        options = parse(arguments)
        if options.command in NAME_FUNCTIONS:
            find_functions_here()
        command = function_of(options.command)
    with files_named():
        return command(options)


if __name__ == "__main__":
    main()
