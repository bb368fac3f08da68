"""Nothing but its owner writes an object's attributes, read off the syntax trees of `heeler.sketch`."""

from __future__ import annotations

import ast
from pathlib import Path

import heeler

SKETCH = Path(heeler.__file__).parent / "sketch"
PYTORCHS = {"ctx", "leaf.grad", "p.grad", "module.running_mean", "module.running_var", "module.training"}
"""Objects and attributes of PyTorch's own, which it wants to have written: an autograd function's context, the gradient
that is taken out of a leaf, and a module's mode, which `preserve_state` puts back."""


def writes(source: str, file: str) -> list[str]:
    """Assignments to `x.attribute` where x is neither self or cls nor made by the same function."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, (ast.FunctionDef, ast.Lambda, ast.Module)):
            continue
        own = _own_nodes(function)
        made = {
            target.id
            for node in own
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _is_class(node.value.func)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in own:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
                owner, whole = ast.unparse(node.value), ast.unparse(node)
                if owner not in {"self", "cls"} | made and not {owner, whole} & PYTORCHS:
                    found.append(f"{file}:{node.lineno}: {whole}")
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "object.__setattr__"):
                found.append(f"{file}:{node.lineno}: {ast.unparse(node)}")
    return found


def _own_nodes(function: ast.AST) -> list[ast.AST]:
    """Those inside, without the functions inside."""
    found: list[ast.AST] = []
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, (ast.FunctionDef, ast.Lambda)):
            found += [child, *_own_nodes(child)]
    return found


def _is_class(called: ast.expr) -> bool:
    return isinstance(called, ast.Name) and called.id.lstrip("_")[:1].isupper()


def test_nobody_writes_another_objects_attributes() -> None:
    files = sorted(SKETCH.rglob("*.py"))
    assert len(files) > 20
    assert not [place for path in files for place in writes(path.read_text(), path.name)]


def test_such_a_write_is_found() -> None:
    source = """
def f(self, recorder, leaf):
    own = Slot()
    own.batch, self.x, leaf.grad = 1, 2, None
    recorder.running, recorder.slots[0].taken = True, False
    recorder.depth += 1
    def g():
        own.batch = 2
    setattr(recorder, "a", 1)
"""
    found = [place.split(": ")[1] for place in writes(source, "f.py")]
    expected = [
        "recorder.running",
        "recorder.slots[0].taken",
        "recorder.depth",
        "setattr(recorder, 'a', 1)",
        "own.batch",
    ]
    assert sorted(found) == sorted(expected)
