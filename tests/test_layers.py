"""The import arrows: who may know whom. A violation is a design change, not a detail."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "edged"
LEAVES = (
    "",
    "core",
    "errors",
    "config",
    "settings",
    "machine",
)  # open to all; they import each other only

# module prefix -> what it may import of edged besides itself and the leaves. The longest prefix
# that fits a module decides; a module no prefix fits fails the test, so new parts are placed.
ALLOWED: dict[str, tuple[str, ...]] = {
    "": (),  # edged/__init__.py: the version
    "__main__": ("cli",),
    "cli": ("app", "check", "model_dirs", "logs", "models", "systemd", "export", "twin"),
    "app": ("*",),
    "core": (),
    "errors": (),
    "config": (),
    "settings": (),
    "machine": (),
    "logs": (),
    "systemd": (),
    "metrics": ("status", "wire"),
    "status": ("scheduler", "guard"),
    "models": (),
    "manifest": (),
    "queue": (),
    "ladder": (),
    "memory": (),
    "reboot": (),
    "audit": (),
    "census": ("audit",),
    "audit_facts": ("audit", "census", "scheduler", "engine"),
    "watch": ("audit", "audit_facts", "census", "engine", "metrics", "status", "systemd"),
    "wire": (),
    "scheduler": ("engine", "text", "queue"),
    "ingress": ("scheduler", "text", "status", "metrics", "guard.view"),
    "engine": ("text", "wire", "ladder", "memory"),
    "text": (),
    "worker": ("wire", "text.constraint"),
    "worker.om.binding": ("worker", "twin.acl"),  # the simulated board, reached as `acl`
    "guard": (),
    "chain": ("engine", "manifest"),
    "check": ("thermal", "guard", "twin", "ingress", "engine.links"),
    "model_dirs": ("models", "twin.boards"),
    "thermal": ("guard", "twin", "wire", "manifest"),
    "twin": ("scheduler", "queue", "ladder", "guard", "worker.plan", "worker.even_pace", "wire"),
    "export": ("models", "text.vocabulary", "twin.om"),  # packs what the twin runs
}
HEAVY = ("numpy", "gguf", "onnx", "onnxruntime", "safetensors", "acl", "xllamacpp")


def modules() -> dict[str, Path]:
    """Dotted name below edged ("" for the package itself) -> file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        found[".".join(parts)] = path
    return found


def imports(path: Path) -> set[str]:
    """Dotted names of everything the file imports, wherever in it; names, not only modules."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: import by full name"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def within(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")


def home(module: str) -> str | None:
    """The longest entry of ALLOWED the module belongs to."""
    return max((part for part in ALLOWED if within(module, part)), key=len, default=None)


def violations(module: str, imported: set[str], known: set[str]) -> list[str]:
    part = home(module)
    if part is None:
        return [f"{module}: no rule in ALLOWED says what it may import"]
    wrong = []
    for name in sorted(imported):
        if not within(name, "edged"):
            continue
        target = name[len("edged.") :]
        while target not in known and target:  # a name in a module: its module counts
            target = target.rpartition(".")[0]
        open_to_it = (*ALLOWED[part], part, *LEAVES)
        if "*" not in open_to_it and not any(within(target, other) for other in open_to_it):
            wrong.append(f"{module} imports {name}")
    return wrong


@pytest.mark.parametrize("module", modules())
def test_every_import_follows_the_arrows(module: str) -> None:
    """A module imports only what lies below it: app, ingress, scheduler, engine, wire, worker."""
    known = modules()
    assert violations(module, imports(known[module]), set(known)) == []


def test_the_arrows_would_catch_a_violation() -> None:
    """The check is not blind: an engine that imports the ingress is found."""
    known = {"core", "engine", "guard.policy", "ingress.http", "stray", "wire", "worker.loop"}
    assert violations("engine", {"edged.ingress.http.HttpServer"}, known)
    assert violations("worker.loop", {"edged.engine"}, known)
    assert violations("guard.policy", {"edged.scheduler"}, known | {"scheduler"})
    assert violations("stray", set(), known)
    assert not violations("worker.loop", {"edged.wire.Launch", "edged.core.Limits"}, known)


def test_the_daemon_stays_light() -> None:
    """What the daemon imports brings neither numpy nor any model library into the process."""
    code = (
        "import sys, edged.app, edged.cli\n"
        f"print(*sorted(set({HEAVY!r}) & {{name.partition('.')[0] for name in sys.modules}}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("library", HEAVY)
def test_heavy_libraries_have_one_home(library: str) -> None:
    """acl lives in one file, onnxruntime where graphs run, model files in the exporter."""
    homes = {
        "numpy": ("worker", "export", "twin"),
        "gguf": ("export", "text.extract"),
        "onnx": ("export", "twin"),
        "onnxruntime": ("worker.ort", "twin", "export.golden"),
        "safetensors": ("export",),
        "acl": ("worker.om.binding",),
        "xllamacpp": (),
    }[library]
    users = {
        module
        for module, path in modules().items()
        if any(within(name, library) for name in imports(path))
    }
    strays = {user for user in users if not any(within(user, place) for place in homes)}
    assert strays == set()
