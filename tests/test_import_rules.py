"""Who may import whom, and what may be imported where. The rules stand in one table here."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

COMMON = {"settings", "telemetry", "checkpoint"}
MAY_IMPORT: dict[str, set[str]] = {
    "settings": set(),
    "telemetry": {"settings"},
    "checkpoint": {"settings", "telemetry"},
    "engine": COMMON,
    "kvtransfer": COMMON,
    "protos": COMMON | {"engine", "kvtransfer"},
    "prefill_worker": COMMON | {"engine", "kvtransfer", "protos"},
    "decode_worker": COMMON | {"engine", "kvtransfer", "protos"},
    "router": COMMON | {"engine", "protos"},
    "benchmarks": COMMON | {"engine", "kvtransfer", "protos", "router"},
    "hex_llm": {"deploy"},
    "deploy": COMMON | {"engine", "kvtransfer", "protos", "prefill_worker", "decode_worker"}
    | {"router"},
}  # fmt: skip
"""Room → the other rooms whose modules it may import."""

PLAIN_ENGINE = {"engine.types", "engine.events", "engine.blocks", "engine.block_hash"}
"""What the wire and the router may know of the engine."""

ACCELERATED = {"jax", "jaxlib", "torch", "ray", "libtpu"}
JAX_FREE_ROOMS = COMMON | {"router", "protos", "kvtransfer", "benchmarks"}
MOVES_ARRAYS = {"kvtransfer.array_transfer"}
"""The jax transport's dealings with jax; only what hosts workers imports it, when it is wanted."""
MEASURES_ENGINE = {
    f"benchmarks.{name}"
    for name in (
        "kernels", "kernel_cases", "kernel_floors", "expert_cases", "engine", "engine_steps",
        "kv_device", "kv_by_hand", "load", "paced_engine", "machine_floors", "peer_runs", "peers",
        "step_gaps", "chaos_agent", "caching_routing",
    )
}  # fmt: skip
"""Run the engine in a process of its own; other benchmarks load no jax."""
JAX_FREE_ENGINE = {
    f"engine.{name}"
    for name in (
        "scheduler", "blocks", "sequence", "plan", "events", "types", "programs", "fake", "engine",
        "runner", "exports", "admission", "batching", "growth", "copies", "pace", "prefill_order",
        "waiting", "under_way", "models.families", "models.weights", "block_hash", "prefix_cache",
        "recount", "reuse", "slot_loads", "layer_groups", "layer_needs",
    )
}  # fmt: skip


def room_of(module: str) -> str:
    return module.partition(".")[0]


def python_files() -> Iterator[Path]:
    for room in MAY_IMPORT:
        yield from sorted((ROOT / room).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Every module of ours, parsed."""
    return {module_name(path): ast.parse(path.read_bytes()) for path in python_files()}


def imports_of(tree: ast.Module, known: set[str]) -> set[str]:
    """Full names of the modules that a module imports, those inside functions as well.

    `from a import b` is the module a.b where `known` has it, else the module a.
    """
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module)
    return found


@functools.cache
def imports() -> dict[str, set[str]]:
    """Module of ours → what it imports."""
    known = set(trees())
    return {name: imports_of(tree, known) for name, tree in trees().items()}


@functools.cache
def own_imports(module: str) -> set[str]:
    return {name for name in imports()[module] if room_of(name) in MAY_IMPORT}


@functools.cache
def reachable(module: str) -> set[str]:
    """`module` and all modules of ours that it imports, directly or not."""
    seen, waiting = {module}, [module]
    while waiting:
        new = own_imports(waiting.pop()) - seen
        seen |= new
        waiting += new
    return seen


def is_main(module: str) -> bool:
    return module.endswith(".__main__")


def test_every_room_has_a_rule() -> None:
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert rooms == set(MAY_IMPORT)


def test_imports_are_found_wherever_they_stand() -> None:
    tree = ast.parse(
        "import a.b, c\nfrom d import e, f\nfrom d.e import g\ndef h():\n    from i import j\n"
    )
    assert imports_of(tree, {"d", "d.e", "i"}) == {"a.b", "c", "d.e", "d", "i"}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_the_rooms_below_it(room: str) -> None:
    wrong = [
        f"{module} imports {name}"
        for module in imports()
        if room_of(module) == room and not is_main(module)
        for name in own_imports(module)
        if room_of(name) not in MAY_IMPORT[room] | {room}
    ]
    assert not wrong


def test_a_main_file_imports_its_room_deploy_and_what_all_may_import() -> None:
    mains = [module for module in imports() if is_main(module)]
    assert mains
    for module in mains:
        allowed = COMMON | {"deploy", "engine", room_of(module)}
        assert {room_of(name) for name in own_imports(module)} <= allowed, module


@pytest.mark.parametrize("room", ["protos", "router", "benchmarks"])
def test_only_plain_parts_of_the_engine_are_known_outside_workers(room: str) -> None:
    seen = {
        name
        for module in imports().keys() - MEASURES_ENGINE
        if room_of(module) == room
        for name in own_imports(module)
        if room_of(name) == "engine"
    }
    assert seen <= PLAIN_ENGINE


class WithoutTypeImports(ast.NodeTransformer):
    """Leaves out what runs only under a type checker: `if TYPE_CHECKING:`."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return node.orelse
        return self.generic_visit(node)


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    known, graph = set(trees()), {}
    for module in known:
        tree = WithoutTypeImports().visit(ast.parse(ast.unparse(trees()[module])))
        graph[module] = (imports_of(tree, known) & known) - {module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize("room", sorted(JAX_FREE_ROOMS))
def test_a_room_without_jax_reaches_no_module_with_it(room: str) -> None:
    for module in imports().keys() - MEASURES_ENGINE - MOVES_ARRAYS:
        if room_of(module) == room and not is_main(module):
            assert_no_jax(module)


@pytest.mark.parametrize("module", sorted(JAX_FREE_ENGINE))
def test_the_plain_parts_of_the_engine_reach_no_jax(module: str) -> None:
    assert_no_jax(module)


def assert_no_jax(module: str) -> None:
    for name in reachable(module):
        heavy = {room_of(imported) for imported in imports()[name]} & ACCELERATED
        assert not heavy, f"{module} reaches {name}, which imports {heavy}"


@pytest.mark.parametrize(
    "modules",
    ["router, router.app, router.dispatch", "deploy.cli, deploy.local, deploy.router_cli",
     "kvtransfer, protos.session_client, protos.session_server"],
)  # fmt: skip
def test_importing_what_runs_in_the_router_process_loads_no_jax(modules: str) -> None:
    code = (
        f"import sys, {modules}; "
        f"loaded = {ACCELERATED!r} & set(sys.modules); assert not loaded, loaded"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def environment_uses(tree: ast.Module) -> list[int]:
    """Lines that touch os.environ or os.getenv, by whatever name they were imported."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.alias) and node.name in names)
    ]


def test_environment_uses_are_found() -> None:
    code = (
        "import os\nos.environ['a']\nos.getenv('a')\nfrom os import environ as e\nx.environment\n"
    )
    assert environment_uses(ast.parse(code)) == [4, 2, 3]


def test_only_settings_touches_the_environment() -> None:
    users = {module for module, tree in trees().items() if environment_uses(tree)}
    assert users == {"settings.environment"}


def test_the_base_install_has_no_torch_no_ray_and_no_accelerator() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"]:
        assert not any(word in requirement.lower() for word in ("torch", "ray", "tpu", "cuda"))
    assert {"tpu", "cuda", "ray", "test"} <= set(project["optional-dependencies"])
