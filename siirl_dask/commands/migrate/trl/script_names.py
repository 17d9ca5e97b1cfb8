"""Names of a Python script, and the values of its expressions that are certain without running it."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CHANGE_IN_PLACE = (
    "append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault", "sort", "update",
)  # fmt: skip
"""Methods of lists and dicts."""
_DEEPEST = 20
"""Names from one that stands for another to the next."""


@dataclass(frozen=True, slots=True)
class Unread:
    """A value that the script alone does not tell."""

    source: str
    line: int


def function_in(path: Path, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return the function that a file defines under a name; None where it defines none."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            return node
    return None


def called(call: ast.Call) -> str:
    """Return the last part of the name of what is called."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


class ScriptNames:
    """Collects what a script assigns, defines and imports, and gives the values of expressions.
    ``command`` are the arguments of the command line.
    """

    def __init__(self, tree: ast.Module, command: Mapping[str, Any]) -> None:
        self._tree = tree
        self._command = command
        self._fields: dict[str, ast.expr] = {}
        self.assigned: dict[str, list[ast.expr | None]] = {}
        """Expressions that each name is assigned; None for one that is not certain."""
        self.attributes: dict[tuple[str, str], ast.expr] = {}
        """Expressions that attributes are assigned, by the name of their owner and their own."""
        self._attribute_stores: dict[tuple[str, str], int] = {}
        self.parsed: set[str] = set()
        """Names of what comes from the command line."""
        self.functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
        self.imported: dict[str, str] = {}
        """``module`` or ``module:name`` of what is imported."""

    def collect(self, function: ast.FunctionDef | ast.AsyncFunctionDef | None) -> None:
        """Collect the script's names, and those of the function that trains, if one does."""
        self._collect_from(self._tree.body)
        if function is not None:
            arguments = function.args
            self.parsed.update(one.arg for one in (*arguments.args, *arguments.kwonlyargs))
            self._collect_from(function.body)
        self._distrust_changed(function)

    def _collect_from(self, body: Sequence[ast.stmt], *, certain: bool = True) -> None:
        """Note what statements assign, define and import; ``certain`` unless a branch or a loop
        has them.
        """
        for node in body:
            match node:
                case ast.Assign(targets=targets, value=value):
                    for target in targets:
                        self._assign(target, value, certain=certain)
                case ast.Expr(
                    value=ast.Call(
                        func=ast.Name(id="setattr"),
                        args=[ast.Name() as owner, ast.Constant(value=str(attribute)), value],
                    )
                ):
                    target = ast.Attribute(value=owner, attr=attribute, lineno=node.lineno)
                    self._assign(target, value, certain=certain)
                case ast.AnnAssign(target=target, value=value) if value is not None:
                    self._assign(target, value, certain=certain)
                case ast.AugAssign(target=target):
                    self._assign(target, None)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    self.functions[node.name] = node
                case ast.ImportFrom(module=module, names=names) if module is not None:
                    for one in names:
                        self.imported[one.asname or one.name] = f"{module}:{one.name}"
                case ast.Import(names=names):
                    for one in names:
                        self.imported[one.asname or one.name] = one.name
                case ast.ClassDef():
                    self._collect_fields(node)
                case ast.If(test=test) if "__name__" in ast.unparse(test):
                    self._collect_from(node.body, certain=certain)
                case ast.With():
                    self._collect_from(node.body, certain=certain)
                case ast.If() | ast.For() | ast.While() | ast.Try():
                    self._collect_from(node.body, certain=False)
                    self._collect_from(node.orelse, certain=False)

    def _distrust_changed(self, function: ast.AST | None) -> None:
        """Take names for unknown that anything but the collected assignments sets or changes."""
        stores: dict[str, int] = {}
        attributes: dict[tuple[str, str], list[int]] = {}
        pending: list[ast.AST] = [self._tree]
        while pending:
            node = pending.pop()
            is_scope = isinstance(
                node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
            )
            if is_scope and node is not function:
                changed = [one for one in ast.walk(node) if isinstance(one, ast.Global)]
                for name in (name for one in changed for name in one.names):
                    self.assigned.setdefault(name, []).append(None)
                continue
            match node:
                case ast.Name(id=name, ctx=ast.Store()):
                    stores[name] = stores.get(name, 0) + 1
                case ast.Attribute(value=ast.Name(id=name), attr=attribute, ctx=ast.Store()):
                    attributes.setdefault((name, attribute), []).append(node.lineno)
                case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                    self.assigned.setdefault(name, []).append(None)
                case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                    self.assigned.setdefault(name, []).append(None)
                case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if (
                    method in _CHANGE_IN_PLACE
                ):
                    self.assigned.setdefault(name, []).append(None)
            pending += ast.iter_child_nodes(node)
        for name, count in stores.items():
            if count > len(self.assigned.get(name, [])):
                self.assigned.setdefault(name, []).append(None)
        for stored, lines in attributes.items():
            if len(lines) > self._attribute_stores.get(stored, 0):
                self.attributes[stored] = ast.Name(id="?", lineno=max(lines))

    def _assign(self, target: ast.expr, value: ast.expr | None, *, certain: bool = True) -> None:
        """Note what a target is set to. That is not known where ``value`` is None, and where it is
        not ``certain`` that the statement runs.
        """
        if not certain:
            value = None
        is_parsed = False
        if isinstance(value, ast.Call):
            is_parsed = called(value).startswith("parse_args")
        match target:
            case ast.Name(id=name):
                self.assigned.setdefault(name, []).append(value)
                if is_parsed:
                    self.parsed.add(name)
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                unknown = ast.Name(id="?", lineno=target.lineno)
                self.attributes[name, attribute] = unknown
                if value is not None:
                    self.attributes[name, attribute] = value
                seen = self._attribute_stores.get((name, attribute), 0)
                self._attribute_stores[name, attribute] = seen + 1
            case ast.Tuple(elts=parts):
                for part in parts:
                    self._assign(part, None)
                    if is_parsed and isinstance(part, ast.Name):
                        self.parsed.add(part.id)

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

    def definition(self, node: ast.expr, depth: int = 0) -> ast.expr:
        """Return the expression that a name was assigned once; the node itself for any other."""
        if isinstance(node, ast.Name) and node.id not in self.parsed and depth < _DEEPEST:
            assigned = self.assigned.get(node.id, [])
            if len(assigned) == 1 and assigned[0] is not None:
                return self.definition(assigned[0], depth + 1)
        return node

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression; Unread where it is not known."""
        node = self.definition(node)
        unread = Unread(ast.unparse(node), node.lineno)
        match node:
            case ast.Constant(value=value):
                return value
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                values = [self.value(part) for part in parts]
                if any(isinstance(one, Unread) for one in values):
                    return unread
                return values
            case ast.Dict(keys=keys, values=values) if all(key is not None for key in keys):
                pairs = [
                    (self.value(key), self.value(value))
                    for key, value in zip(keys, values, strict=True)
                    if key is not None
                ]
                if any(isinstance(one, Unread) for pair in pairs for one in pair):
                    return unread
                return {str(key): value for key, value in pairs}
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                number = self.value(operand)
                if isinstance(number, (int, float)):
                    return -number
                return unread
            case ast.BinOp(left=left, op=op, right=right):
                return _calculated(self.value(left), op, self.value(right), unread)
            case ast.JoinedStr(values=parts) if not any(_is_formatted(part) for part in parts):
                texts = [
                    self.value(one.value if isinstance(one, ast.FormattedValue) else one)
                    for one in parts
                ]
                if any(isinstance(one, Unread) for one in texts):
                    return unread
                return "".join(map(str, texts))
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in self.parsed:
                return self._argument(attribute, unread)
            case ast.Attribute(value=ast.Name(id="torch"), attr=attribute):
                return attribute
        return unread

    def _argument(self, name: str, unread: Unread) -> Any:
        """Return what the command line gives, or the default of the script's own dataclass."""
        if name in self._command:
            return self._command[name]
        if name in self._fields:
            return self.value(self._fields[name])
        return unread


def _is_formatted(part: ast.expr) -> bool:
    """Return whether a part of an f-string is written in a format of its own, as {x:03d} is."""
    if not isinstance(part, ast.FormattedValue):
        return False
    if part.format_spec is not None:
        return True
    return part.conversion != -1


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
