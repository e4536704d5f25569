"""The shape of the package: what it imports, and in which direction."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import trivet

SOURCE = Path(trivet.__file__).parent

ARROWS = {
    "errors": set(),
    "journal": set(),
    "connectors": set(),
    "routing": set(),
    "surface": set(),
    "render": {"errors"},
    "topology": {"connectors", "errors"},
    "fleet": {"topology", "errors", "version"},
    "legs": {"connectors", "routing", "render", "journal", "surface"},
    "check": {"legs", "fleet", "connectors", "routing", "render", "topology", "journal", "errors"},
    "gateway": {
        "check",
        "surface",
        "fleet",
        "legs",
        "connectors",
        "routing",
        "render",
        "topology",
        "journal",
        "errors",
    },
    "demo": {"gateway", "fleet", "topology", "errors"},
    "sim": {"routing", "errors"},
    "transfer": {"connectors"},
    "cli": {"check", "demo", "gateway", "fleet", "render", "sim", "topology", "errors", "version"},
    "version": set(),
}
"""What each package may import besides itself; ``version`` is ``trivet`` itself."""

RENDERS = {
    "trivet.render.core": {"trivet.render.frontend"},
    "trivet.render.derender": {"trivet.render.derender_routes"},
    "trivet.render.derender_routes": {"trivet.render.quicken"},
    "trivet.render.detokenizing": {"trivet.render.frontend"},
    "trivet.render.features": {"trivet.render.core", "trivet.render.frontend"},
    "trivet.render.frontend": {"trivet.gateway.worker", "trivet.render.server"},
    "trivet.render.in_thread": {"trivet.render.renderer"},
    "trivet.render.listening": {"trivet.render.server"},
    "trivet.render.plain_chats": {
        "trivet.render.quick",
        "trivet.render.quicken",
        "trivet.render.renderer",
        "trivet.render.repeated",
    },
    "trivet.render.quick": {"trivet.render.quicken"},
    "trivet.render.renderer": {"trivet.render.quick", "trivet.render.quicken"},
    "trivet.render.repeated": {"trivet.render.quick"},
    "trivet.render.server": {"trivet.cli.render"},
    "trivet.render.validated": {"trivet.render.quick"},
}
OPENED_LATE = {**RENDERS, "trivet.fleet.vllm": {"trivet.cli.render", "trivet.gateway.worker"}}
USES_VLLM = set(OPENED_LATE)
"""Who may import what imports vLLM: nobody but the processes that need it."""


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            found |= {submodule(node.module, alias.name) for alias in node.names}
    return found


def submodule(module: str, name: str) -> str:
    """``from trivet.fleet import probe`` imports the module ``trivet.fleet.probe``."""
    folder = SOURCE.parent / Path(*module.split("."))
    return f"{module}.{name}" if (folder / f"{name}.py").is_file() or (folder / name).is_dir() else module


def package_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "version"


IMPORTS = {module_name(path): imports_of(path) for path in sorted(SOURCE.rglob("*.py"))}


def importers_of(*packages: str) -> set[str]:
    return {module for module, imported in IMPORTS.items() if any(name.split(".")[0] in packages for name in imported)}


def test_all_modules_are_looked_at():
    assert {"trivet", "trivet.legs.life", "trivet.topology", "trivet.cli.__main__"} <= set(IMPORTS)
    assert "trivet.fleet.probe" in IMPORTS["trivet.gateway.app"]


def test_imports_go_one_way():
    crossed = {
        (module, imported)
        for module, names in IMPORTS.items()
        for imported in names
        if imported.split(".")[0] == "trivet"
        and package_of(imported) != package_of(module)
        and package_of(imported) not in ARROWS[package_of(module)]
    }
    assert crossed == set()


def test_the_allowed_ways_form_no_circle():
    order = list(graphlib.TopologicalSorter(ARROWS).static_order())
    assert set(order) == {package_of(module) for module in IMPORTS}


def test_only_what_renders_and_what_runs_inside_vllm_imports_it():
    assert {module for module in importers_of("vllm") if package_of(module) != "transfer"} == USES_VLLM


def test_nothing_imports_torch_but_what_runs_inside_vllm():
    assert {package_of(module) for module in importers_of("torch")} == {"transfer"}


def test_nothing_imports_what_runs_inside_vllm():
    """Engines load it, by the name of its module."""
    seen = {module for module, names in IMPORTS.items() if any(name.startswith("trivet.transfer") for name in names)}
    assert {package_of(module) for module in seen} == {"transfer"}


def test_what_imports_vllm_is_opened_only_by_who_needs_it():
    opened = {target: {module for module, imported in IMPORTS.items() if target in imported} for target in OPENED_LATE}
    assert opened == OPENED_LATE


def test_nothing_outside_sees_more_of_render_than_its_contract():
    seen = {
        (module, imported)
        for module, names in IMPORTS.items()
        for imported in names
        if package_of(module) != "render" and imported.startswith("trivet.render")
    }
    whole = ("trivet.gateway.worker", "trivet.cli.render")  # processes that render
    assert {imported for module, imported in seen if module not in whole} <= {
        "trivet.render.contract",
        "trivet.render.pool",  # pure, as the contract
    }


@pytest.mark.parametrize(
    "module",
    ["trivet", "trivet.cli", "trivet.gateway.service", "trivet.gateway.worker", "trivet.topology.plan", "trivet.sim"],
)
def test_importing_it_imports_neither_torch_nor_vllm(module):
    code = f"import sys, {module}; print(sorted({{'torch', 'vllm'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_its_types_are_for_others_too():
    assert (SOURCE / "py.typed").is_file()
