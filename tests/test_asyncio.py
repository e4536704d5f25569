"""What of asyncio the source does not use, because a cancellation or a leg could be lost with it."""

import ast
from pathlib import Path

import trivet

SOURCE = Path(trivet.__file__).parent
FILES = {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
_LIVES_LONG = ("legs", "gateway", "render")


def test_nothing_waits_with_wait_for():
    """Python 3.11's may lose a cancellation that comes when what it waits for has just ended: ``asyncio.timeout``."""
    found = {
        f"{name}:{node.lineno}"
        for name, tree in FILES.items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr == "wait_for" and ast.unparse(node.value) == "asyncio")
        or (isinstance(node, ast.ImportFrom) and "wait_for" in {alias.name for alias in node.names})
    }
    assert found == set()


def generators(tree: ast.AST) -> set[str]:
    """Names of functions and methods that are asynchronous generators."""
    return {
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.AsyncFunctionDef)
        and any(isinstance(node, ast.Yield) for node in ast.walk(function))
    }


def test_generators_are_iterated_where_they_are_closed():
    """One that is left is closed by whoever comes: the loop at its end, while another may still be inside of it."""
    own = set().union(*(generators(tree) for name, tree in FILES.items() if name.startswith(_LIVES_LONG)))
    assert {"serve", "_together", "_one_token", "stream", "read"} <= own
    found = {
        f"{name}:{node.lineno}"
        for name, tree in FILES.items()
        if name.startswith(_LIVES_LONG)
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncFor)
        and isinstance(node.iter, ast.Call)
        and ast.unparse(node.iter.func).rpartition(".")[2] in own
    }
    assert found == set()
