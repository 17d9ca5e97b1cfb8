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

from siirl_dask.commands.migrate.trl.script_names import ScriptNames, Unread, called
from siirl_dask.errors import ConfigError

_TRAINER = "GRPOTrainer"
_POSITIONAL = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class")
_FILES = ("json", "csv", "parquet", "arrow")
_PASSED = (
    "prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments", "self",
)  # fmt: skip
"""Arguments of a reward that are no columns."""
_DEEPEST = 20


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

    def put(self, name: str, value: Any, line: int) -> None:
        """Add an argument."""
        self.lines[name] = line
        if isinstance(value, Unread):
            self.values[name] = value.source
            self.unread[name] = value.source
        else:
            self.values[name] = value


def read_trl_script(text: str, name: str, command: Mapping[str, Any]) -> TrlScript:
    """Return the arguments of the one GRPOTrainer of a script; ``command`` are those of the
    command line. ConfigError if there is none, or several, or it is no Python.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: no Python: {error}") from error
    calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call) and called(one) == _TRAINER]
    if not calls:
        raise ConfigError(
            f"{name}: no {_TRAINER}(...) in it: expected a script that trains by TRL's GRPO"
        )
    if len(calls) > 1:
        lines = ", ".join(str(one.lineno) for one in calls)
        raise ConfigError(f"{name}: {_TRAINER} in the lines {lines}: expected one")
    return _Reader(tree, name, command).read(calls[0])


class _Reader:
    """Reads the call that trains in one script, and what its arguments come from."""

    def __init__(self, tree: ast.Module, name: str, command: Mapping[str, Any]) -> None:
        self._tree = tree
        self._name = name
        self._command = command
        self._names = ScriptNames(tree, command)
        self._found = TrlScript()

    def read(self, trainer: ast.Call) -> TrlScript:
        """Return the arguments of a call of GRPOTrainer."""
        function = next((one for one in self._defined() if _holds(one, trainer)), None)
        self._names.collect(function)
        passed = dict(zip(_POSITIONAL, trainer.args, strict=False))
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
                    is_read = not isinstance(shown, Unread)
                    text = shown if is_read else ast.unparse(value)
                    self._found.values[name] = text
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
                return found[0] if len(found) == 1 else unread
            case ast.Subscript(value=value):
                return self._dataset(value, depth + 1)
            case ast.Call(args=args, keywords=keywords) if called(node) == "load_dataset":
                named = {one.arg: one.value for one in keywords if one.arg is not None}
                path = (
                    self._names.value(args[0])
                    if args
                    else self._names.value(named.get("path", node))
                )
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
        self, node: ast.Call, args: Sequence[ast.expr], named: Mapping[str, ast.expr]
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
        method = called(node) if isinstance(node, ast.Call) else ""
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
        parts = defined.elts if isinstance(defined, (ast.List, ast.Tuple)) else [defined]
        names: list[str] = []
        unread: list[str] = []
        for part in parts:
            name = self._reward(part)
            if name is None:
                unread.append(ast.unparse(part))
            else:
                names.append(name)
            if name is not None and name.startswith(f"{self._name}:") and not is_guarded:
                function = name.rpartition(":")[2]
                unread.append(
                    f"{function}, which is in a script that trains when it is imported: move it "
                    "to a file of its own"
                )
        self._found.values["reward_funcs"] = names
        self._found.lines["reward_funcs"] = node.lineno
        if unread:
            self._found.unread["reward_funcs"] = "; ".join(unread)

    def _reward(self, node: ast.expr) -> str | None:
        """Return a reward as module:function or file.py:function; None for what is neither."""
        match node:
            case ast.Name(id=name) if name in self._names.functions:
                self._note_columns(self._names.functions[name])
                return f"{self._name}:{name}"
            case ast.Name(id=name) if ":" in self._names.imported.get(name, ""):
                if self._names.imported[name].endswith(":accuracy_reward"):
                    self._found.columns.append("solution")
                module, _, function = self._names.imported[name].partition(":")
                return f"{self._module(module)}:{function}"
            case ast.Attribute(value=ast.Name(id=module), attr=name) if (
                module in self._names.imported
            ):
                return f"{self._module(self._names.imported[module])}:{name}"
            case ast.Name():
                defined = self._names.definition(node)
                return None if defined is node else self._reward(defined)
            case ast.Constant(value=str(path)):
                self._found.values["reward_model"] = path
                return None
        return None

    def _module(self, name: str) -> str:
        """Return a module that lies beside the script as a file, and any other by its name."""
        path = Path(self._name).parent / f"{name.replace('.', '/')}.py"
        return str(path) if path.is_file() else name

    def _note_columns(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Note the columns that a reward has arguments for, or takes from its keywords."""
        arguments = function.args
        names = [one.arg for one in (*arguments.args, *arguments.kwonlyargs)]
        keywords = "" if arguments.kwarg is None else arguments.kwarg.arg
        for node in ast.walk(function):
            match node:
                case ast.Subscript(value=ast.Name(id=owner), slice=ast.Constant(value=str(key))):
                    names += [key] if owner == keywords else []
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id=owner), attr="get"),
                    args=[ast.Constant(value=str(key)), *_],
                ):
                    names += [key] if owner == keywords else []
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
            for one in defined.keywords:
                if one.arg is not None:
                    name = one.arg if one.arg.startswith("lora_") else f"lora_{one.arg}"
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
