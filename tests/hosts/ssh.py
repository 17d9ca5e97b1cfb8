"""sshd on the hosts of a lab, and a home folder with a key that all of them take."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from siirl_dask.testing.hosts import Lab

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin:/sbin")


def why_no_ssh() -> str | None:
    """Return what is missing for ssh, or None."""
    if SSHD is None or shutil.which("ssh-keygen") is None:
        return "ssh needs sshd and ssh-keygen (Debian: openssh-server)"
    return None if os.geteuid() == 0 else "sshd needs root"


@contextmanager
def ssh(lab: Lab, folder: Path) -> Iterator[dict[str, str]]:
    """Start sshd on every host, and yield the environment of a user whose key it takes. Logs lie
    in ``folder``.
    """
    home = folder / ".ssh"
    home.mkdir(mode=0o700)
    for key in (folder / "host_key", home / "id_ed25519"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    kind, code, *_ = (folder / "host_key.pub").read_text().split()
    names = ",".join(name for host in lab.hosts for name in (host.name, host.address))
    (home / "known_hosts").write_text(f"{names} {kind} {code}\n")
    Path("/run/sshd").mkdir(exist_ok=True)  # where sshd's unprivileged part lives
    settings = {
        "AuthorizedKeysFile": home / "id_ed25519.pub",
        "StrictModes": "no",
        "UsePAM": "no",
        "PidFile": "none",
    }
    options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
    for host in lab.hosts:
        log = folder / f"sshd-{host.name}.log"
        host.start(SSHD, "-D", "-E", log, "-h", folder / "host_key", *options)
        late = time.monotonic() + 20
        while not log.exists() or "listening" not in log.read_text():
            assert time.monotonic() < late, (
                f"sshd does not start: {log.read_text() if log.exists() else ''}"
            )
            time.sleep(0.02)
    yield {**os.environ, "HOME": str(folder)}
