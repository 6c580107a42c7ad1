"""Who may import what: dependencies point one way, and every outside library has one owner."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from components.on_pod import boot

ROOT = Path(__file__).resolve().parents[2]

# Every module belongs to the layer with the longest matching name; a layer may import itself, and these.
ALLOWED: Mapping[str, frozenset[str]] = {
    "__main__": frozenset(
        {
            "components.deployment",
            "components.described",
            "components.head_start",
            "components.settings",
            "components.core",
        }
    ),
    # Whatever it imported, the providers' process would wait for.
    "components.head_start": frozenset(),
    "components.deployment": frozenset(
        {
            "components.described",
            "components.engine",
            "components.bundles",
            "components.pods",
            "components.preview",
            "components.running",
            "components.settings",
            "components.core",
        }
    ),
    "components.running": frozenset({"components.engine", "components.pods", "components.preview", "components.core"}),
    "components.preview": frozenset({"components.core"}),
    "components.described": frozenset(
        {
            "components.certificate",
            "components.checked",
            "components.console",
            "components.engine",
            "components.locked",
            "components.settings",
            "components.core",
        }
    ),
    "components.console": frozenset({"components.core"}),
    "components.checked": frozenset(
        {"components.locked", "components.settings", "components.core.check", "components.core"}
    ),
    "components.locked": frozenset({"components.settings", "components.stack_files", "components.core"}),
    # The `lora` command. It starts in a fraction of a second: what it may import is short on purpose.
    "components.cli": frozenset(
        {
            "components.checked",
            "components.locked",
            "components.on_pod.boot",
            "components.pods",
            "components.settings",
            "components.ssh",
            "components.stack_files",
            "components.store",
            "components.store_url",
            "components.supply",
            "components.core.check",
            "components.core",
        }
    ),
    "components.certificate": frozenset({"components.core"}),
    "components.engine": frozenset(
        {
            "components.certificate",
            "components.pods",
            "components.remote",
            "components.render",
            "components.settings",
            "components.core",
        }
    ),
    "components.bundles": frozenset(
        {
            "components.console",
            "components.pods",
            "components.remote",
            "components.ssh",
            "components.provider",
            "components.settings",
            "components.store_url",
            "components.supply",
            "components.core",
        }
    ),
    "components.supply": frozenset(
        {"components.settings", "components.store", "components.store_url", "components.core"}
    ),
    "components.pods": frozenset(
        {
            "components.on_pod.boot",
            "components.remote",
            "components.ssh",
            "components.provider",
            "components.settings",
            "components.stack_files",
            "components.core",
        }
    ),
    "components.provider": frozenset({"components.settings", "components.core"}),
    "components.remote": frozenset({"components.on_pod.boot", "components.core"}),
    "components.render": frozenset({"components.core"}),
    "components.settings": frozenset({"components.stack_files", "components.store_url", "components.core"}),
    "components.store": frozenset({"components.store_errors", "components.store_url", "components.core"}),
    "components.store_errors": frozenset({"components.store_url", "components.core"}),
    "components.store_url": frozenset({"components.core"}),
    "components.stack_files": frozenset({"components.core"}),
    "components.ssh": frozenset({"components.core"}),
    "components.core": frozenset(),
    "components.core.check": frozenset({"components.core"}),
    # podctl travels to the pod as text: nobody imports it. In itself each module uses those before it in boot.MODULES.
    "components.on_pod.podctl": frozenset(),
    "components.on_pod.boot": frozenset(),
}

# Names from outside, and the only modules that may use them.
OWNERS: Mapping[str, frozenset[str]] = {
    "pulumi.Config": frozenset({"components.settings"}),
    "pulumi.runtime.proto": frozenset({"components.console", "components.head_start"}),
    "pulumi_command": frozenset({"components.remote"}),
    "jinja2": frozenset({"components.render"}),
    "asyncssh": frozenset({"components.ssh"}),
    "yaml": frozenset({"components.stack_files"}),
    "grpc": frozenset({"components.console"}),
    "cryptography": frozenset({"components.certificate", "components.pods.keys"}),
    "boto3": frozenset({"components.store"}),
    "botocore": frozenset({"components.store", "components.store_errors"}),
    "pulumi_aws": frozenset({"components.pods.ec2"}),
    "peft": frozenset(),
    "safetensors": frozenset(),
    "torch": frozenset(),
    "transformers": frozenset(),
    "vllm": frozenset(),
}

NETWORK = frozenset({"asyncio", "ftplib", "http", "smtplib", "socket", "socketserver", "ssl", "urllib", "xmlrpc"})
# What podctl says and how it reads documents: words that no test replaces, so they may go by their own names.
PURE_ON_POD = frozenset({"said", "names", "documents"})
NEVER_LOADED = frozenset({"boto3", "botocore", "moto", "peft", "pulumi_aws", "torch", "transformers", "vllm"})


@dataclass(frozen=True)
class Module:
    name: str
    tree: ast.Module
    is_package: bool


def module_at(path: Path) -> Module:
    parts = path.relative_to(ROOT).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    name = ".".join(parts[:-1] if is_package else parts)
    return Module(name, ast.parse(path.read_bytes(), filename=str(path)), is_package)


MODULES = [module_at(path) for path in (ROOT / "__main__.py", *sorted((ROOT / "components").rglob("*.py")))]


def imported(module: Module) -> Iterator[str]:
    """Full names of what a module imports, wherever the statement stands: ``a.b`` for both ways to write it."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                package = module.name.split(".")[: None if module.is_package else -1]
                package = package[: len(package) - node.level + 1]
                source = ".".join([*package, *([source] if source else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)


def used(module: Module) -> set[str]:
    """What is imported, and the attributes used of imported modules (``pulumi.Config``)."""
    names = set(imported(module))
    bound = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            bound.update({alias.asname or alias.name: alias.name for alias in node.names})
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in bound:
            names.add(f"{bound[node.value.id]}.{node.attr}")
    return names


def is_within(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


def layer_of(name: str) -> str | None:
    layers = [layer for layer in ALLOWED if is_within(name, layer)]
    return max(layers, key=len, default=None)


def own_imports(module: Module) -> Iterator[str]:
    yield from (name for name in imported(module) if is_within(name, "components"))


def foreign_roots(module: Module) -> set[str]:
    return {name.split(".")[0] for name in imported(module) if not is_within(name, "components")}


def test_the_table_points_one_way() -> None:
    TopologicalSorter(ALLOWED).prepare()


def test_every_module_has_a_layer() -> None:
    packages = {"components", "components.on_pod"}
    assert [m.name for m in MODULES if m.name not in packages and layer_of(m.name) is None] == []


def test_dependencies_point_one_way() -> None:
    wrong = []
    for module in MODULES:
        layer = layer_of(module.name)
        for name in own_imports(module):
            target = layer_of(name)
            if layer and target != layer and target not in ALLOWED[layer]:
                wrong.append(f"{module.name} imports {name}")
    assert wrong == []


def test_outside_libraries_have_one_owner() -> None:
    wrong = [
        f"{module.name} uses {name}"
        for module in MODULES
        for name in sorted(used(module))
        for outside, owners in OWNERS.items()
        if is_within(name, outside) and module.name not in owners
    ]
    assert wrong == []


def test_core_is_pure() -> None:
    pure = sys.stdlib_module_names - NETWORK - {"subprocess"}
    wrong = {m.name: sorted(foreign_roots(m) - pure) for m in MODULES if is_within(m.name, "components.core")}
    assert {name: roots for name, roots in wrong.items() if roots} == {}


def on_pod_faults(module: Module) -> list[str]:
    """What keeps a module of podctl from running in podctl's text, or a test from replacing what it calls."""
    package = "components.on_pod.podctl"
    name = module.name.removeprefix(f"{package}.")
    before = boot.MODULES[: boot.MODULES.index(name)]
    faults = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level):
            roots = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            foreign = {root.partition(".")[0] for root in roots} - sys.stdlib_module_names
            faults += [f"{name} imports {root}" for root in sorted(foreign)]
        elif isinstance(node, ast.ImportFrom):
            for full in imported(Module(module.name, ast.Module([node], []), is_package=False)):
                sibling, _, member = full.removeprefix(f"{package}.").partition(".")
                if sibling not in before:
                    faults.append(f"{name} imports {full.removeprefix(package + '.')}, which does not come before it")
                elif member[:1].islower() and sibling not in PURE_ON_POD:
                    faults.append(f"{name} imports {sibling}.{member} by name: nobody could replace it in one place")
    return faults


def test_what_runs_on_the_pod_needs_nothing_but_python_and_points_one_way() -> None:
    on_pod = [module for module in MODULES if is_within(module.name, "components.on_pod.podctl")]
    package, *modules = on_pod
    assert sorted(module.name.rpartition(".")[2] for module in modules) == sorted(boot.MODULES)
    assert [ast.get_docstring(module.tree) is None for module in on_pod] == [False] * len(on_pod)
    assert list(imported(package)) == []
    assert [fault for module in modules for fault in on_pod_faults(module)] == []


LATE = frozenset({"annotated_types", "asyncssh", "cryptography", "jinja2", "pulumi_command", "pydantic"})


def loaded_by(*modules: str) -> set[str]:
    program = f"import json, sys, {', '.join(modules)}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True, text=True)
    return {name.split(".")[0] for name in json.loads(done.stdout)}


def test_the_program_starts_without_heavy_libraries() -> None:
    assert loaded_by("components.deployment") & NEVER_LOADED == set()


def test_the_providers_process_loads_little_for_a_preview() -> None:
    """Every preview waits for it; it has to compare inputs, and neither to parse a stack file nor to reach a pod."""
    providers = ("components.bundles", "components.pods.reach", "components.pods.sandbox", "components.pods.host_key")
    assert loaded_by(*providers) & (NEVER_LOADED | LATE) == set()


def test_the_providers_process_is_asked_for_before_anything_else_is_loaded() -> None:
    (program,) = (module for module in MODULES if module.name == "__main__")
    calls = (node for node in ast.walk(program.tree) if isinstance(node, ast.Call))
    call = next(node for node in calls if isinstance(node.func, ast.Name) and node.func.id == "head_start")
    before = [node for node in program.tree.body if node.lineno < call.lineno]
    assert list(imported(Module("__main__", ast.Module(before, []), is_package=False))) == [
        "gc",
        "pulumi",
        "components.head_start.head_start",
    ]
    assert loaded_by("components.head_start") & (NEVER_LOADED | LATE) == set()


# --- the rules' own eyes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "source", "names"),
    [
        ("components.a", "import x.y, z as q", {"x.y", "z"}),
        ("components.a", "from x import y as q, z", {"x.y", "x.z"}),
        ("components.a", "def f():\n    import x", {"x"}),
        ("components.a.b", "from . import c\nfrom ..d import e", {"components.a.c", "components.d.e"}),
        ("components.a.b", "from .f import g", {"components.a.f.g"}),
        ("components.a", "import pulumi as p\np.Config()", {"pulumi", "pulumi.Config"}),
        ("components.a", "from pulumi import Config", {"pulumi.Config"}),
        ("components.a", "import pulumi\n'pulumi.Config'", {"pulumi"}),
    ],
)  # fmt: skip
def test_what_is_seen(name: str, source: str, names: set[str]) -> None:
    assert used(Module(name, ast.parse(source), is_package=False)) == names


def test_a_package_sees_itself() -> None:
    package = Module("components.a", ast.parse("from . import b"), is_package=True)
    assert list(imported(package)) == ["components.a.b"]


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ("import os, xml.dom\nfrom concurrent.futures import Future", []),
        ("from . import files, names\nfrom .said import clean\nfrom .store import Store", []),
        ("def f():\n    import yaml.nodes", ["units imports yaml"]),
        ("from asyncssh import connect", ["units imports asyncssh"]),
        ("from components.on_pod.podctl import files", ["units imports components"]),
        ("from . import proof", ["units imports proof, which does not come before it"]),
        ("def f():\n    from .units import g", ["units imports units.g, which does not come before it"]),
        ("from ..boot import BOOT", ["units imports components.on_pod.boot.BOOT, which does not come before it"]),
        ("from .files import hold", ["units imports files.hold by name: nobody could replace it in one place"]),
    ],
)
def test_what_is_seen_of_a_module_on_the_pod(source: str, faults: list[str]) -> None:
    assert on_pod_faults(Module("components.on_pod.podctl.units", ast.parse(source), is_package=False)) == faults
