"""Compares the words that ``bash`` itself passes to a trainer with those that ``migrate`` reads.

    python -m tests.commands.shell_oracle FOLDER [NAME=value ...]

Runs every script of FOLDER (such as a checkout of verl) that calls a trainer, and compares. Bash
runs as an unprivileged user in an empty folder. Its PATH has stubs alone: those that could start a
trainer record their words, ``date`` prints one text, and every other command does nothing and
succeeds. With SHELL_ORACLE_RECORD=FILE the words that bash passed are written as well, in the
form of migrate_files/verl_words.json, which is of verl's examples at 1dda039 with DEVICE=gpu.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from siirl_dask.commands.migrate.shell import Script, read_script
from siirl_dask.errors import ConfigError

HOME = "/home/me"
NOBODY = 65534
SECONDS = 20
RECORDING = ("python", "python3", "uv", "ray", "torchrun", "accelerate", "srun", "nohup", "mpirun")
MODULE = re.compile(r"(verl|siirl|recipe)[\w.]*|[\w./-]*/main_\w+\.py")
STUB = """#!{bash}
case " $* " in *" -c "*) exit 1;; esac
printf '%s\\0' "${{0##*/}}" "$@" >> {record}
printf '\\n\\0' >> {record}
"""
HANDLER = "command_not_found_handle() { return 0; }\nexport -f command_not_found_handle\n"


@dataclass
class Comparison:
    """Result of one script."""

    name: str
    verdict: str
    """``equal``, ``to decide`` or ``wrong``."""
    differences: list[str] = field(default_factory=list)


def words_of_bash(text: str, variables: Mapping[str, str] | None = None) -> list[str] | None:
    """Return the words after the trainer's module that bash passes; None where it calls none."""
    bash = shutil.which("bash")
    assert bash is not None
    with tempfile.TemporaryDirectory(prefix="oracle-") as made:
        folder = Path(made)
        stubs = folder / "stubs"
        empty = folder / "empty"
        stubs.mkdir()
        empty.mkdir()
        record = folder / "record"
        record.touch()
        for name in RECORDING:
            (stubs / name).write_text(STUB.format(bash=bash, record=record))
        (stubs / "date").write_text(f"#!{bash}\necho DATE\n")
        for stub in stubs.iterdir():
            stub.chmod(0o755)
        (folder / "handler").write_text(HANDLER)
        (folder / "script.sh").write_text(text)
        folder.chmod(0o755)
        user: dict[str, int] = {}
        if os.geteuid() == 0:
            user = {"user": NOBODY, "group": NOBODY}
            for path in (empty, record):
                os.chown(path, NOBODY, NOBODY)
        environment = {
            "PATH": str(stubs),
            "HOME": HOME,
            "BASH_ENV": str(folder / "handler"),
            **(variables or {}),
        }
        subprocess.run(
            [bash, str(folder / "script.sh")],
            cwd=empty,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
            check=False,
            extra_groups=[] if user else None,
            **user,
        )
        recorded = record.read_bytes().decode()
    for call in recorded.split("\n\0"):
        words = call.split("\0")[:-1]
        for place, word in enumerate(words):
            is_module = bool(place) and (words[place - 1] == "-m" or word.endswith(".py"))
            if is_module and MODULE.fullmatch(word):
                return words[place + 1 :]
    return None


def words_read(script: Script, way: int = 0) -> list[str]:
    """Return the words of one way as a shell would pass them."""
    return [option.text.replace("${oc.env:HOME}", HOME) for option in script.ways[way].options]


def compare(text: str, name: str, variables: Mapping[str, str]) -> Comparison | None:
    """Compare one script; None where bash calls no trainer, or the script has several calls."""
    expected = words_of_bash(text, variables)
    if expected is None:
        return None
    try:
        script = read_script(text, name, variables)
    except ConfigError as error:
        return Comparison(name, "refused", [str(error)])
    found = [words_read(script, way) for way in range(len(script.ways))]
    wanted = _normal(expected)
    differences = [_differences(wanted, one) for one in found]
    best = min(differences, key=len)
    if best:
        return Comparison(name, "wrong", best)
    unread = any("${oc.env:" in word for one in found for word in one)
    open_words = any(option.unread for way in script.ways for option in way.options)
    if len(script.ways) > 1 or unread or open_words:
        return Comparison(name, "to decide")
    return Comparison(name, "equal")


def _normal(words: list[str]) -> list[str]:
    """Return bash's words with the time left out that ``date`` prints, and without blank words."""
    return [re.sub(r"[_-]*DATE(_DATE)*", "", word) for word in words if word.strip()]


def _differences(expected: list[str], found: list[str]) -> list[str]:
    if len(expected) == len(found):
        pairs = zip(expected, found, strict=True)
        return [f"bash {one!r}, read {two!r}" for one, two in pairs if not _same(one, two)]
    missing = [f"bash {one!r}, not read" for one in expected if one not in found]
    return [*missing, *(f"read {two!r}, not in bash" for two in found if two not in expected)] or [
        "another number of words"
    ]


def _same(expected: str, found: str) -> bool:
    """Whether a word is bash's, where each part that is not known may be any text, or a time that
    was left out with the dash before it.
    """
    parts = re.split(r"\$\{oc\.env:\w+\}|\$\([^()]*(?:\([^()]*\)[^()]*)*\)|\$\{?\w+\}?", found)
    known = [*(part.rstrip("_-") for part in parts[:-1]), parts[-1]]
    return re.fullmatch("[_-]*.*".join(map(re.escape, known)), expected, re.DOTALL) is not None


def main(arguments: list[str]) -> None:
    """Compare all scripts of a folder, and print what differs."""
    folder = Path(arguments[0])
    variables = dict(argument.split("=", 1) for argument in arguments[1:])
    counts: dict[str, int] = {}
    recorded: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.sh")):
        text = path.read_text()
        result = compare(text, str(path.relative_to(folder)), variables)
        if result is None:
            continue
        counts[result.verdict] = counts.get(result.verdict, 0) + 1
        recorded[result.name] = words_of_bash(text, variables) or []
        if result.differences:
            print(f"{result.verdict}: {result.name}")
            print("".join(f"    {one[:300]}\n" for one in result.differences), end="")
    print(sum(counts.values()), "scripts:", counts)
    if record := os.environ.get("SHELL_ORACLE_RECORD"):
        every = sorted({word for words in recorded.values() for word in words})
        places = {word: place for place, word in enumerate(every)}
        lists = {name: [places[word] for word in words] for name, words in recorded.items()}
        words = ",\n".join(json.dumps(word) for word in every)
        scripts = ",\n".join(f"{json.dumps(name)}: {value}" for name, value in lists.items())
        Path(record).write_text(f'{{"words": [\n{words}\n],\n"scripts": {{\n{scripts}\n}}}}\n')


if __name__ == "__main__":
    main(sys.argv[1:])
