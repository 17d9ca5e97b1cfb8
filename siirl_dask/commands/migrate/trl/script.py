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

from siirl_dask.errors import ConfigError

_TRAINER = "GRPOTrainer"
_POSITIONAL = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class")
_FILES = ("json", "csv", "parquet", "arrow")
_PASSED = (
    "prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments", "self",
)  # fmt: skip
"""Arguments of a reward that are no columns."""
_CHANGE_IN_PLACE = (
    "append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault", "sort", "update",
)  # fmt: skip
"""Methods of lists and dicts."""
_DEEPEST = 20


@dataclass(frozen=True, slots=True)
class Unread:
    """A value that the script alone does not tell."""

    source: str
    line: int


@dataclass(slots=True)
class TrlScript:
    """Arguments of the trainer and of its configuration, by name."""

    values: dict[str, Any] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
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
    calls = [
        one for one in ast.walk(tree) if isinstance(one, ast.Call) and _called(one) == _TRAINER
    ]
    if not calls:
        raise ConfigError(
            f"{name}: no {_TRAINER}(...) in it: expected a script that trains by TRL's GRPO"
        )
    if len(calls) > 1:
        lines = ", ".join(str(one.lineno) for one in calls)
        raise ConfigError(f"{name}: {_TRAINER} in the lines {lines}: expected one")
    return _Reader(tree, name, command).read(calls[0])


def _called(call: ast.Call) -> str:
    """Return the last part of the name of what is called."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


class _Reader:
    """Follows the names of one script."""

    def __init__(self, tree: ast.Module, name: str, command: Mapping[str, Any]) -> None:
        self._tree = tree
        self._name = name
        self._command = command
        self._assigned: dict[str, list[ast.expr | None]] = {}
        self._attributes: dict[tuple[str, str], ast.expr] = {}
        self._parsed: set[str] = set()
        self._functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
        self._imported: dict[str, str] = {}
        self._fields: dict[str, ast.expr] = {}
        self._found = TrlScript()

    def read(self, trainer: ast.Call) -> TrlScript:
        """Return the arguments of a call of GRPOTrainer."""
        function = next((one for one in self._defined() if _holds(one, trainer)), None)
        self._collect(self._tree.body)
        if function is not None:
            arguments = function.args
            self._parsed.update(one.arg for one in (*arguments.args, *arguments.kwonlyargs))
            self._collect(function.body)
        self._distrust_changed(function)
        passed = dict(zip(_POSITIONAL, trainer.args, strict=False))
        passed |= {one.arg: one.value for one in trainer.keywords if one.arg is not None}
        if any(one.arg is None for one in trainer.keywords):
            self._found.notes.append(f"line {trainer.lineno}: arguments of ** are not read")
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
                    shown = self._value(value)
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

    def _collect(self, body: Sequence[ast.stmt], *, certain: bool = True) -> None:
        """Note what statements assign, define and import; ``certain`` unless a branch or a loop
        has them.
        """
        for node in body:
            match node:
                case ast.Assign(targets=[target], value=value):
                    self._assign(target, value if certain else None)
                case ast.AnnAssign(target=target, value=value) if value is not None:
                    self._assign(target, value if certain else None)
                case ast.AugAssign(target=ast.Name(id=name)):
                    self._assigned.setdefault(name, []).append(None)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    self._functions[node.name] = node
                case ast.ImportFrom(module=module, names=names) if module is not None:
                    for one in names:
                        self._imported[one.asname or one.name] = f"{module}:{one.name}"
                case ast.Import(names=names):
                    for one in names:
                        self._imported[one.asname or one.name] = one.name
                case ast.ClassDef():
                    self._collect_fields(node)
                case ast.If(test=test) if "__name__" in ast.unparse(test):
                    self._collect(node.body, certain=certain)
                case ast.With():
                    self._collect(node.body, certain=certain)
                case ast.If() | ast.For() | ast.While() | ast.Try():
                    self._collect(node.body, certain=False)
                    self._collect(node.orelse, certain=False)

    def _distrust_changed(self, function: ast.AST | None) -> None:
        """Take names for unknown that anything but the collected assignments sets or changes."""
        stores: dict[str, int] = {}
        pending: list[ast.AST] = [self._tree]
        while pending:
            node = pending.pop()
            is_scope = isinstance(
                node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
            )
            if is_scope and node is not function:
                changed = [one for one in ast.walk(node) if isinstance(one, ast.Global)]
                for name in (name for one in changed for name in one.names):
                    self._assigned.setdefault(name, []).append(None)
                continue
            match node:
                case ast.Name(id=name, ctx=ast.Store()):
                    stores[name] = stores.get(name, 0) + 1
                case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                    self._assigned.setdefault(name, []).append(None)
                case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                    self._assigned.setdefault(name, []).append(None)
                case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if (
                    method in _CHANGE_IN_PLACE
                ):
                    self._assigned.setdefault(name, []).append(None)
            pending += ast.iter_child_nodes(node)
        for name, count in stores.items():
            if count > len(self._assigned.get(name, [])):
                self._assigned.setdefault(name, []).append(None)

    def _assign(self, target: ast.expr, value: ast.expr | None) -> None:
        is_parsed = False
        if isinstance(value, ast.Call):
            is_parsed = _called(value).startswith("parse_args")
        match target:
            case ast.Name(id=name):
                self._assigned.setdefault(name, []).append(value)
                if is_parsed:
                    self._parsed.add(name)
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                unknown = ast.Name(id="?", lineno=target.lineno)
                self._attributes[name, attribute] = unknown if value is None else value
            case ast.Tuple(elts=parts):
                for part in parts:
                    if isinstance(part, ast.Name):
                        self._assigned.setdefault(part.id, []).append(None)
                        if is_parsed:
                            self._parsed.add(part.id)

    def _collect_fields(self, node: ast.ClassDef) -> None:
        """Note the defaults of a dataclass of arguments."""
        for statement in node.body:
            match statement:
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.Call() as made):
                    for one in made.keywords:
                        if one.arg == "default":
                            self._note_field(name, one.value)
                case ast.AnnAssign(target=ast.Name(id=name), value=value) if value is not None:
                    self._note_field(name, value)

    def _note_field(self, name: str, default: ast.expr) -> None:
        before = self._fields.get(name)
        if before is not None and ast.dump(before) != ast.dump(default):
            # two classes have a field of this name: which of them is meant is not known
            default = ast.Name(id="?", lineno=default.lineno)
        self._fields[name] = default

    def _definition(self, node: ast.expr, depth: int = 0) -> ast.expr:
        """Return the expression that a name was assigned once; the node itself for any other."""
        if isinstance(node, ast.Name) and node.id not in self._parsed and depth < _DEEPEST:
            assigned = self._assigned.get(node.id, [])
            if len(assigned) == 1 and assigned[0] is not None:
                return self._definition(assigned[0], depth + 1)
        return node

    def _value(self, node: ast.expr) -> Any:
        """Return the value of an expression; Unread where it is not known."""
        node = self._definition(node)
        unread = Unread(ast.unparse(node), node.lineno)
        match node:
            case ast.Constant(value=value):
                return value
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                values = [self._value(part) for part in parts]
                return unread if any(isinstance(one, Unread) for one in values) else values
            case ast.Dict(keys=keys, values=values) if all(key is not None for key in keys):
                pairs = [
                    (self._value(key), self._value(value))
                    for key, value in zip(keys, values, strict=True)
                    if key is not None
                ]
                is_known = not any(isinstance(one, Unread) for pair in pairs for one in pair)
                return {str(key): value for key, value in pairs} if is_known else unread
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                number = self._value(operand)
                return -number if isinstance(number, (int, float)) else unread
            case ast.BinOp(left=left, op=op, right=right):
                return _calculated(self._value(left), op, self._value(right), unread)
            case ast.JoinedStr(values=parts) if not any(_is_formatted(part) for part in parts):
                texts = [
                    self._value(one.value if isinstance(one, ast.FormattedValue) else one)
                    for one in parts
                ]
                is_known = not any(isinstance(one, Unread) for one in texts)
                return "".join(map(str, texts)) if is_known else unread
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in self._parsed:
                return self._argument(attribute, unread)
            case ast.Attribute(value=ast.Name(id="torch"), attr=attribute):
                return attribute
        return unread

    def _argument(self, name: str, unread: Unread) -> Any:
        """Return what the command line gives, or the default of the script's own dataclass."""
        if name in self._command:
            return self._command[name]
        if name in self._fields:
            return self._value(self._fields[name])
        return unread

    def _read_config(self, node: ast.expr | None) -> None:
        if node is None:
            return
        defined = self._definition(node)
        if isinstance(defined, ast.Call) and _called(defined) == "GRPOConfig":
            if defined.args:
                self._found.put("output_dir", self._value(defined.args[0]), defined.lineno)
            for one in defined.keywords:
                if one.arg is not None:
                    self._found.put(one.arg, self._value(one.value), one.value.lineno)
                else:
                    self._read_mapping(one.value)
        elif isinstance(node, ast.Name) and node.id in self._parsed:
            for name, value in self._command.items():
                self._found.put(name, value, 0)
        else:
            self._found.notes.append(
                f"line {node.lineno}: args={ast.unparse(node)} is no GRPOConfig(...) that can be "
                "read: give its options as key=value after the file"
            )
        if isinstance(node, ast.Name):
            for (owner, attribute), value in self._attributes.items():
                if owner == node.id:
                    self._found.put(attribute, self._value(value), value.lineno)

    def _read_mapping(self, node: ast.expr) -> None:
        values = self._value(node)
        if isinstance(values, dict):
            for name, value in values.items():
                self._found.put(name, value, node.lineno)
        else:
            self._found.notes.append(
                f"line {node.lineno}: **{ast.unparse(node)} is not read: give its options as "
                "key=value after the file"
            )

    def _model(self, node: ast.expr) -> Any:
        defined = self._definition(node)
        if isinstance(defined, ast.Call) and _called(defined) == "from_pretrained" and defined.args:
            return self._value(defined.args[0])
        return self._value(node)

    def _dataset(self, node: ast.expr, depth: int = 0) -> Any:
        """Return the name or the files of a dataset; Unread for one that is made in the script."""
        unread = Unread(ast.unparse(node), node.lineno)
        if depth > _DEEPEST:
            return unread
        match node:
            case ast.Name(id=name):
                assigned = self._assigned.get(name, [])
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
            case ast.Call(args=args, keywords=keywords) if _called(node) == "load_dataset":
                named = {one.arg: one.value for one in keywords if one.arg is not None}
                path = self._value(args[0]) if args else self._value(named.get("path", node))
                self._note_part(node, args, named)
                if path in _FILES and "data_files" in named:
                    files = self._value(named["data_files"])
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
        called = _called(node) if isinstance(node, ast.Call) else ""
        if called in ("shuffle", "select_columns", "with_format", "load_dataset"):
            return
        note = (
            f"line {node.lineno}: the script changes its dataset (.{called}): write the changed "
            "one as a table, and give data.url"
        )
        if note not in self._found.notes:
            self._found.notes.append(note)

    def _read_rewards(self, node: ast.expr, *, is_guarded: bool) -> None:
        defined = self._definition(node)
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
            case ast.Name(id=name) if name in self._functions:
                self._note_columns(self._functions[name])
                return f"{self._name}:{name}"
            case ast.Name(id=name) if ":" in self._imported.get(name, ""):
                if self._imported[name].endswith(":accuracy_reward"):
                    self._found.columns.append("solution")
                module, _, function = self._imported[name].partition(":")
                return f"{self._module(module)}:{function}"
            case ast.Attribute(value=ast.Name(id=module), attr=name) if module in self._imported:
                return f"{self._module(self._imported[module])}:{name}"
            case ast.Name():
                defined = self._definition(node)
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
        defined = self._definition(node)
        if isinstance(defined, ast.Call) and _called(defined) == "LoraConfig":
            self._found.values["use_peft"] = True
            self._found.values["lora_r"] = (
                8  # LoraConfig's defaults, which ModelConfig has others of
            )
            self._found.values["lora_alpha"] = 8
            for one in defined.keywords:
                if one.arg is not None:
                    name = one.arg if one.arg.startswith("lora_") else f"lora_{one.arg}"
                    self._found.put(name, self._value(one.value), one.value.lineno)
        elif isinstance(defined, ast.Call) and _called(defined) == "get_peft_config":
            for name, value in self._command.items():
                if name == "use_peft" or name.startswith("lora_"):
                    self._found.put(name, value, 0)
        elif not (isinstance(defined, ast.Constant) and defined.value is None):
            self._found.put("peft_config", Unread(ast.unparse(node), node.lineno), node.lineno)


def _is_formatted(part: ast.expr) -> bool:
    """Return whether a part of an f-string is written in a format of its own, as {x:03d} is."""
    if not isinstance(part, ast.FormattedValue):
        return False
    return True if part.format_spec is not None else part.conversion != -1


def _holds(outer: ast.AST, inner: ast.AST) -> bool:
    return any(one is inner for one in ast.walk(outer))


def _reads(node: ast.expr, name: str) -> bool:
    return any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(node))


def _calculated(left: Any, op: ast.operator, right: Any, unread: Unread) -> Any:
    """Return a sum, a product and the like of two known values."""
    if isinstance(left, str) and isinstance(right, str) and isinstance(op, ast.Add):
        return left + right
    if not isinstance(left, (int, float)) or not isinstance(right, (int, float)):
        return unread
    match op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div() if right:
            return left / right
        case ast.FloorDiv() if right:
            return left // right
        case ast.Pow() if abs(left) <= 1000 and abs(right) <= 20:
            return left**right
    return unread
