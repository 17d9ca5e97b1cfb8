"""Finds the call that trains in a script: of GRPOTrainer, or of a class that is derived from it.

Of a derived class it is named what it overrides, since the code of a method is not read.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from siirl_dask.commands.migrate.trl.options import TRL
from siirl_dask.commands.migrate.trl.script_names import called
from siirl_dask.errors import ConfigError

TRAINER = "GRPOTrainer"
POSITIONAL = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class")
"""Arguments of GRPOTrainer that may be given without their names, in order."""
_PLAIN_BASES = {"object", "ABC", "Generic", "Protocol", "Mixin"}
_HARMLESS = re.compile(
    r"_?log(_\w+)?|_?save(_\w+)?|_?print(_\w+)?|push_to_hub|create_model_card|_tag_names|_name|_paper"
)
"""Methods and attributes that change nothing that is learned."""
_SUBJECTS = (
    (re.compile("generat|rollout|vllm"), "rollout.engine", "the engine that generates"),
    (re.compile("reward"), "rewards.function", "siirl_dask.rewards:from_trl"),
    (re.compile("advantage"), "algorithm.advantage", "siirl_dask.algorithms:grpo"),
    (re.compile("loader|sampler|dataset|prepare_input"), "data.url", "the dataset's URL"),
    (re.compile("optimizer|scheduler"), "trainer.lr", "the learning rate"),
)
_LOSS = ("algorithm.loss", "a loss of docs/algorithms.md")


@dataclass(frozen=True, slots=True)
class TrainerCall:
    """The call that trains, and what its class leaves to a person."""

    call: ast.Call
    undecided: dict[str, str] = field(default_factory=dict)
    """Our keys that the class may change, with the reason."""


def find_trainer(tree: ast.Module, name: str) -> TrainerCall:
    """Return the one call that trains. ConfigError if there is none, or several."""
    classes = _TrainerClasses(tree)
    calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call) and classes.trains(one)]
    if not calls:
        raise ConfigError(
            f"{name}: no {TRAINER}(...) in it: expected a script that trains by TRL's GRPO"
        )
    if len(calls) > 1:
        lines = ", ".join(str(one.lineno) for one in calls)
        raise ConfigError(f"{name}: {TRAINER} in the lines {lines}: expected one")
    return TrainerCall(calls[0], classes.undecided(calls[0]))


class _TrainerClasses:
    """Classes of a script that are GRPOTrainer, by any name, or are derived from it."""

    def __init__(self, tree: ast.Module) -> None:
        self._classes: dict[str, ast.ClassDef] = {}
        self._names = {TRAINER}
        self._others: set[str] = set()
        """Names that come from TRL: its other trainers are none of GRPO."""
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self._classes[node.name] = node
            if isinstance(node, ast.ImportFrom):
                same = [one.asname for one in node.names if one.name == TRAINER and one.asname]
                self._names.update(same)
                if node.module is not None and node.module.partition(".")[0] == "trl":
                    self._others.update(one.asname or one.name for one in node.names)
        self._derived: set[str] = set()
        found = self._next_derived()
        while found:
            self._derived |= found
            found = self._next_derived()

    def _next_derived(self) -> set[str]:
        known = self._names | self._derived
        return {
            name
            for name, node in self._classes.items()
            if name not in known and known.intersection(_bases(node))
        }

    def trains(self, call: ast.Call) -> bool:
        """Return whether a call makes a trainer: one that is imported is known by its name and
        by the argument that no other trainer has.
        """
        name = called(call)
        if name in self._names or name in self._derived:
            return True
        if name in self._others or not name.endswith("Trainer"):
            return False
        return any(one.arg == "reward_funcs" for one in call.keywords)

    def undecided(self, call: ast.Call) -> dict[str, str]:
        """Return our keys that the class of a call may change, with the reason."""
        found: dict[str, str] = {}
        pending = [called(call)]
        seen: set[str] = set()
        while pending:
            base = pending.pop(0)
            node = self._classes.get(base)
            is_known = base in self._names | _PLAIN_BASES
            if base in seen or (node is None and is_known):
                continue
            seen.add(base)
            if node is None:
                key, value = _LOSS
                found.setdefault(
                    key,
                    f"what {base} changes of {TRAINER} is not in the script: write {value} that "
                    "learns the same",
                )
                continue
            for member, line in _changes(node):
                key, value = _subject(member)
                found.setdefault(
                    key,
                    f"{node.name}.{member} (line {line}) is code, which is not read: write {value} "
                    "that does the same (docs/dags.md for a node of its own)",
                )
            pending += _bases(node)
        return found


def _bases(node: ast.ClassDef) -> list[str]:
    """Return the last parts of the names of a class's bases."""
    names = []
    for base in node.bases:
        inner = base.value if isinstance(base, ast.Subscript) else base
        names.append(ast.unparse(inner).rpartition(".")[2])
    return names


def _subject(member: str) -> tuple[str, str]:
    """Return the key of ours that a method decides, and what may be written there."""
    for pattern, key, value in _SUBJECTS:
        if pattern.search(member):
            return key, value
    return _LOSS


def _changes(node: ast.ClassDef) -> Iterator[tuple[str, int]]:
    """Yield what a class defines that may change what is learned, with its line."""
    for statement in node.body:
        match statement:
            case ast.FunctionDef(name="__init__") if _passes_on(statement):
                continue
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names = [name]
            case ast.Assign(targets=targets):
                names = [ast.unparse(target) for target in targets]
            case ast.AnnAssign(target=target, value=value) if value is not None:
                names = [ast.unparse(target)]
            case _:
                continue
        for name in names:
            if not _HARMLESS.fullmatch(name):
                yield name, statement.lineno


def _passes_on(function: ast.FunctionDef) -> bool:
    """Return whether an ``__init__`` gives its arguments to its base under their names, and does
    nothing else but keep values of its own.
    """
    positional = [one.arg for one in (*function.args.posonlyargs, *function.args.args)][1:]
    if positional != list(POSITIONAL[: len(positional)]):
        return False
    for statement in function.body:
        match statement:
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                continue
            case ast.Expr(
                value=ast.Call(
                    func=ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr="__init__")
                ) as call
            ) if _gives_same_names(call, positional):
                continue
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=attribute)]) if (
                attribute not in _OPTION_NAMES
            ):
                continue
        return False
    return True


def _gives_same_names(call: ast.Call, positional: Sequence[str]) -> bool:
    given = [one.id for one in call.args if isinstance(one, ast.Name)]
    starred = [one for one in call.args if isinstance(one, ast.Starred)]
    if given != list(positional[: len(given)]) or len(given) + len(starred) < len(call.args):
        return False
    for keyword in call.keywords:
        if keyword.arg is None:
            continue
        if not isinstance(keyword.value, ast.Name) or keyword.value.id != keyword.arg:
            return False
    return True


_OPTION_NAMES = {name for option in TRL for name in option.names}
