"""``siirl-dask doctor``: examines the machine and, with a configuration, its store and its
cluster.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

from rich.text import Text

from siirl_dask.commands.plan import plan_checked
from siirl_dask.config.file import ConfigFile, load_config_file
from siirl_dask.driver.doctor import DoctorFinding, DoctorState, examine
from siirl_dask.driver.doctor.finding import fault, note, ok
from siirl_dask.driver.phases import dags
from siirl_dask.errors import ConfigError, UserError, counted
from siirl_dask.observe import PipeConsole, printable
from siirl_dask.wording import readable_bytes, redacted

_STYLES = {DoctorState.OK: "green", DoctorState.NOTE: "yellow", DoctorState.FAULT: "bold red"}


def doctor(config: str | None, overrides: Sequence[str], *, as_json: bool) -> int:
    """Print what is found, and return the exit code. ConfigError for a configuration that cannot
    be used.
    """
    given = [*([config] if config and "=" in config else []), *overrides]
    if given and (config is None or "=" in config):
        raise ConfigError(
            f"{given[0]!r} is given without a CONFIG: expected siirl-dask doctor CONFIG key=value"
        )
    found: list[DoctorFinding]
    if config is None:
        found = examine(None)
    else:
        file = load_config_file(config, overrides)
        found = [*examine(file.config), _memory_of_run(file)]
    findings = [
        replace(finding, text=redacted(finding.text), cure=redacted(finding.cure))
        for finding in found
    ]
    faults = sum(finding.state is DoctorState.FAULT for finding in findings)
    if as_json:
        print(
            json.dumps(
                {"version": 1, "faults": faults, "findings": [asdict(each) for each in findings]},
                indent=1,
            )
        )
    else:
        _print(findings, faults)
    if faults:
        return 1
    return 0


def _memory_of_run(file: ConfigFile) -> DoctorFinding:
    """Return a finding on what the workers may need of this machine's memory."""
    part = "memory of the run"
    try:
        planned = plan_checked(file.config, *dags(file))
    except UserError as error:
        cure = "`siirl-dask plan` with the same arguments says all that a run refuses"
        return note(part, f"it is not known, since a run would be refused: {error}", cure)
    shortage = planned.checked.shortage
    if shortage is None:
        needed = sum(group.total * len(group.workers) for group in planned.checked.memory)
        return ok(
            part, f"at most {readable_bytes(needed)} for {counted(len(planned.workers), 'worker')}"
        )
    if shortage.is_certain:
        return fault(part, shortage.text, shortage.cure)
    return note(part, shortage.text, shortage.cure)


def _print(findings: Sequence[DoctorFinding], faults: int) -> None:
    console = PipeConsole()
    width = max(len(finding.part) for finding in findings)
    for finding in findings:
        text = Text(f"{finding.state:<6}", style=_STYLES[finding.state])
        text.append(
            f"{printable(finding.part):<{width}}  {printable(finding.text)}", style="default"
        )
        if finding.cure:
            text.append(f"\n{'':<{width + 8}}{printable(finding.cure)}", style="dim")
        console.print(text, soft_wrap=True)
    count = "no fault"
    if faults:
        count = counted(faults, "fault")
    console.print(Text(f"{count} in {counted(len(findings), 'finding')}"), soft_wrap=True)
