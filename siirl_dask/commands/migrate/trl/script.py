"""Reads the arguments of a GRPOTrainer out of a Python script, which is parsed and never run.

Literals, names that are assigned once, and what comes from the command line are known. All else is
named, with its line.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from siirl_dask.commands.migrate.trl.script_names import ScriptNames, Unread, called, function_in
from siirl_dask.commands.migrate.trl.trainers import POSITIONAL, find_trainer
from siirl_dask.errors import ConfigError
from siirl_dask.schema import RESPONSE_IDS

_FILES = ("json", "csv", "parquet", "arrow")
_PASSED = (
    "prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments", "self",
)  # fmt: skip
"""Arguments of a reward that are no columns."""
_DEEPEST = 20
_STOCK_COLUMNS = {
    "trl:accuracy_reward": ["solution"],
    "trl:reasoning_accuracy_reward": ["solution"],
    "trl:think_format_reward": [],
}
"""Columns that the rewards of TRL itself read."""


@dataclass(slots=True)
class TrlScript:
    """Arguments of the trainer and of its configuration, by name."""

    values: dict[str, Any] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)
    """Sentences on options that are not read, and for which defaults stand."""
    columns: list[str] = field(default_factory=list)
    """Columns of the dataset that the reward functions name."""
    undecided: dict[str, str] = field(default_factory=dict)
    """Keys of ours that code of the script may change, which is not read, with the reason."""

    def put(self, name: str, value: Any, line: int) -> None:
        """Add an argument."""
        self.lines[name] = line
        if isinstance(value, Unread):
            self.values[name] = value.source
            self.unread[name] = value.source
        else:
            self.values[name] = value


def read_trl_script(text: str, name: str, command: Mapping[str, Any]) -> TrlScript:
    """Return the arguments of the one GRPOTrainer of a script, or of a class derived from it;
    ``command`` are those of the command line. ConfigError if there is none, or several, or it is no
    Python.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: no Python: {error}") from error
    trainer = find_trainer(tree, name)
    found = _Reader(tree, name, command).read(trainer.call)
    found.undecided |= trainer.undecided
    return found


class _Reader:
    """Reads the call that trains in one script, and what its arguments come from."""

    def __init__(self, tree: ast.Module, name: str, command: Mapping[str, Any]) -> None:
        self._tree = tree
        self._name = name
        self._command = command
        self._names = ScriptNames(tree, command)
        self._found = TrlScript()
        self._unseen_rewards: list[str] = []

    def read(self, trainer: ast.Call) -> TrlScript:
        """Return the arguments of the call that trains."""
        function = next((one for one in self._defined() if _holds(one, trainer)), None)
        self._names.collect(function)
        passed = dict(zip(POSITIONAL, trainer.args, strict=False))
        passed |= {one.arg: one.value for one in trainer.keywords if one.arg is not None}
        if any(one.arg is None for one in trainer.keywords):
            self._found.questions.append(
                f"line {trainer.lineno}: arguments of ** are not read: give them as key=value after "
                "the file"
            )
        self._read_config(passed.pop("args", None))
        for name, value in passed.items():
            match name:
                case "reward_funcs":
                    self._read_rewards(value, is_guarded=self._is_guarded(trainer, function))
                case "train_dataset" | "eval_dataset":
                    self._found.put(name, self._dataset(value), value.lineno)
                case "peft_config":
                    self._read_adapters(value)
                case "model":
                    self._found.put(name, self._model(value), value.lineno)
                case _:
                    shown = self._names.value(value)
                    if isinstance(shown, Unread):
                        shown = ast.unparse(value)
                    self._found.values[name] = shown
                    self._found.lines[name] = value.lineno
        return self._found

    def _defined(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in self._tree.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node

    def _is_guarded(self, trainer: ast.Call, function: ast.AST | None) -> bool:
        """Return whether importing the script starts no training."""
        if function is not None:
            return True
        guards = [one for one in self._tree.body if isinstance(one, ast.If)]
        return any("__name__" in ast.unparse(one.test) and _holds(one, trainer) for one in guards)

    def _read_config(self, node: ast.expr | None) -> None:
        if node is None:
            return
        defined = self._names.definition(node)
        if isinstance(defined, ast.Call) and called(defined) == "GRPOConfig":
            if defined.args:
                self._found.put("output_dir", self._names.value(defined.args[0]), defined.lineno)
            for one in defined.keywords:
                if one.arg is not None:
                    self._found.put(one.arg, self._names.value(one.value), one.value.lineno)
                else:
                    self._read_mapping(one.value)
        elif isinstance(node, ast.Name) and node.id in self._names.parsed:
            for name, value in self._command.items():
                self._found.put(name, value, 0)
        else:
            self._found.questions.append(
                f"line {node.lineno}: args={ast.unparse(node)} is no GRPOConfig(...) that can be "
                "read: give its options as key=value after the file"
            )
        if isinstance(node, ast.Name):
            self._read_changes(node.id)

    def _read_changes(self, owner: str) -> None:
        """Read what the script assigns to attributes of its configuration."""
        for (changed, attribute), value in self._names.attributes.items():
            if changed == owner:
                self._found.put(attribute, self._names.value(value), value.lineno)
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call) and _sets_unknown_attribute(node, owner):
                self._found.questions.append(
                    f"line {node.lineno}: {ast.unparse(node)} is not read: give what it sets as "
                    "key=value after the file"
                )

    def _read_mapping(self, node: ast.expr) -> None:
        values = self._names.value(node)
        if isinstance(values, dict):
            for name, value in values.items():
                self._found.put(name, value, node.lineno)
        else:
            self._found.questions.append(
                f"line {node.lineno}: **{ast.unparse(node)} is not read: give its options as "
                "key=value after the file"
            )

    def _model(self, node: ast.expr) -> Any:
        defined = self._names.definition(node)
        if isinstance(defined, ast.Call) and called(defined) == "from_pretrained" and defined.args:
            return self._names.value(defined.args[0])
        return self._names.value(node)

    def _dataset(self, node: ast.expr, depth: int = 0) -> Any:
        """Return the name or the files of a dataset; Unread for one that is made in the script."""
        unread = Unread(ast.unparse(node), node.lineno)
        if depth > _DEEPEST:
            return unread
        match node:
            case ast.Name(id=name):
                assigned = self._names.assigned.get(name, [])
                sources = [one for one in assigned if one is not None]
                if len(sources) < len(assigned):
                    return unread
                found = [self._dataset(one, depth + 1) for one in sources if not _reads(one, name)]
                for one in sources:
                    if _reads(one, name):
                        self._note_change(one)
                if len(found) == 1:
                    return found[0]
                return unread
            case ast.Subscript(value=value):
                return self._dataset(value, depth + 1)
            case ast.Call(args=args, keywords=keywords) if called(node) == "load_dataset":
                named = {one.arg: one.value for one in keywords if one.arg is not None}
                path_node = named.get("path", node)
                if args:
                    path_node = args[0]
                path = self._names.value(path_node)
                self._note_part(node, args, named)
                if path in _FILES and "data_files" in named:
                    files = self._names.value(named["data_files"])
                    if isinstance(files, dict):
                        return files.get("train", unread)
                    return files
                return path
            case ast.Call(func=ast.Attribute(value=value)):
                self._note_change(node)
                return self._dataset(value, depth + 1)
        return unread

    def _note_part(
        self,
        node: ast.Call,
        args: Sequence[ast.expr],
        named: Mapping[str, ast.expr],
    ) -> None:
        """Note a configuration and a slice of a dataset, which its name does not have."""
        chosen = [*args[1:2], *(value for name, value in named.items() if name == "name")]
        split = named.get("split")
        if split is not None and "[" in ast.unparse(split):
            chosen.append(split)
        if chosen:
            shown = ", ".join(ast.unparse(one) for one in chosen)
            self._found.notes.append(
                f"line {node.lineno}: load_dataset takes {shown} of the dataset: give data.url as a "
                "table of it (`siirl-dask data import`)"
            )

    def _note_change(self, node: ast.expr) -> None:
        method = ""
        if isinstance(node, ast.Call):
            method = called(node)
        if method in ("shuffle", "select_columns", "with_format", "load_dataset"):
            return
        note = (
            f"line {node.lineno}: the script changes its dataset (.{method}): write the changed "
            "one as a table, and give data.url"
        )
        if note not in self._found.notes:
            self._found.notes.append(note)

    def _read_rewards(self, node: ast.expr, *, is_guarded: bool) -> None:
        defined = self._names.definition(node)
        parts = [defined]
        if isinstance(defined, (ast.List, ast.Tuple)):
            parts = defined.elts
        names: list[str] = []
        unread: list[str] = []
        moved: list[str] = []
        for part in parts:
            name = self._reward(part)
            if name is None:
                unread.append(ast.unparse(part))
            else:
                names.append(name)
            if name is not None and name.startswith(f"{self._name}:") and not is_guarded:
                moved.append(name.rpartition(":")[2])
        self._found.values["reward_funcs"] = names
        self._found.lines["reward_funcs"] = node.lineno
        if moved:
            functions = ", ".join(f"YOUR_FILE.py:{name}" for name in moved)
            self._found.undecided["rewards.options"] = (
                f"importing the script trains, so {' and '.join(moved)} cannot be called there: move "
                "them to a file of their own with what they use, import them in the script and "
                f"migrate it again, or write {{functions: [{functions}]}}"
            )
        if unread:
            self._found.unread["reward_funcs"] = "; ".join(unread)
        if self._unseen_rewards and not self._found.columns:
            self._found.undecided["data.answer"] = (
                f"the code of {' and '.join(self._unseen_rewards)} is not beside the script: write the "
                "column that it reads as the answer"
            )

    def _reward(self, node: ast.expr) -> str | None:
        """Return a reward as module:function or file.py:function; None for what is neither."""
        match node:
            case ast.Name(id=name) if name in self._names.functions:
                self._note_columns(self._names.functions[name])
                return f"{self._name}:{name}"
            case ast.Name(id=name) if ":" in self._names.imported.get(name, ""):
                module, _, function = self._names.imported[name].partition(":")
                return self._imported_reward(module, function)
            case ast.Attribute(value=ast.Name(id=module), attr=name) if (
                module in self._names.imported
            ):
                return self._imported_reward(self._names.imported[module], name)
            case ast.Name():
                defined = self._names.definition(node)
                if defined is node:
                    return None
                return self._reward(defined)
            case ast.Constant(value=str(path)):
                self._found.values["reward_model"] = path
                return None
        return None

    def _imported_reward(self, module: str, function: str) -> str:
        """Return a reward of a module that lies beside the script by its file, and any other by its
        module's name; note the columns that it reads.
        """
        path = Path(self._name).parent / f"{module.replace('.', '/')}.py"
        if path.is_file():
            defined = function_in(path, function)
            if defined is None:
                self._unseen_rewards.append(function)
            else:
                self._note_columns(defined)
            return f"{path}:{function}"
        columns = _STOCK_COLUMNS.get(f"{module.partition('.')[0]}:{function}")
        if columns is None:
            self._unseen_rewards.append(function)
        else:
            self._found.columns += columns
        return f"{module}:{function}"

    def _note_columns(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Note the columns that a reward has arguments for, or takes from its keywords."""
        arguments = function.args
        names = [one.arg for one in (*arguments.args, *arguments.kwonlyargs)]
        keywords = ""
        if arguments.kwarg is not None:
            keywords = arguments.kwarg.arg
        for node in ast.walk(function):
            match node:
                case ast.Subscript(
                    value=ast.Name(id=owner), slice=ast.Constant(value=str(key))
                ) if owner == keywords:
                    names.append(key)
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id=owner), attr="get"),
                    args=[ast.Constant(value=str(key)), *_],
                ) if owner == keywords:
                    names.append(key)
        if "completion_ids" in names:
            names.append(RESPONSE_IDS)
        new = [one for one in names if one not in (*_PASSED, *self._found.columns)]
        self._found.columns += dict.fromkeys(new)

    def _read_adapters(self, node: ast.expr) -> None:
        defined = self._names.definition(node)
        if isinstance(defined, ast.Call) and called(defined) == "LoraConfig":
            self._found.values["use_peft"] = True
            self._found.values["lora_r"] = (
                8  # LoraConfig's defaults, which ModelConfig has others of
            )
            self._found.values["lora_alpha"] = 8
            self._found.values["lora_dropout"] = 0.0
            for one in defined.keywords:
                if one.arg is not None:
                    name = f"lora_{one.arg.removeprefix('lora_')}"
                    self._found.put(name, self._names.value(one.value), one.value.lineno)
        elif isinstance(defined, ast.Call) and called(defined) == "get_peft_config":
            for name, value in self._command.items():
                if name == "use_peft" or name.startswith("lora_"):
                    self._found.put(name, value, 0)
        elif not (isinstance(defined, ast.Constant) and defined.value is None):
            self._found.put("peft_config", Unread(ast.unparse(node), node.lineno), node.lineno)


def _sets_unknown_attribute(call: ast.Call, owner: str) -> bool:
    """Return whether a call sets an attribute of ``owner`` whose name the script does not spell."""
    match call:
        case ast.Call(func=ast.Name(id="setattr"), args=[ast.Name(id=name), attribute, _]):
            if isinstance(attribute, ast.Constant):
                return False
            return name == owner
    return False


def _holds(outer: ast.AST, inner: ast.AST) -> bool:
    return any(one is inner for one in ast.walk(outer))


def _reads(node: ast.expr, name: str) -> bool:
    return any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(node))
