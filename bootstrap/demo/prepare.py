"""Makes the demo's base model and adapters, once: they are made again only when their recipe changes."""

import hashlib
import shutil
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from bootstrap.demo.container import ROOT, run_in_sandbox
from bootstrap.demo.personas import DIRECTORIES

DEMO = ROOT / ".lora-pods" / "demo"
MODEL = DEMO / "models" / "smollm2"
BASE = "/models/smollm2"
ADAPTERS = DEMO / "adapters"

_HERE = Path(__file__).parent
_MODEL_RECIPE = (_HERE / "base_model.py", ROOT / "bootstrap" / "sandbox" / "model.txt")
_ADAPTERS_RECIPE = (*_MODEL_RECIPE, _HERE / "train.py", _HERE / "personas.py")


def prepare() -> None:
    """Leaves the model and the adapters where the stack file `sandbox` looks for them."""
    _ensure(MODEL, _MODEL_RECIPE, "bootstrap.demo.base_model", [_in_work(_aside(MODEL))])
    wanted = [f"{persona}={_in_work(_aside(ADAPTERS) / place)}" for persona, place in DIRECTORIES.items()]
    _ensure(ADAPTERS, _ADAPTERS_RECIPE, "bootstrap.demo.train", [BASE, *wanted])


def train(persona: str, directory: Path) -> None:
    """Trains ``persona`` into ``directory``, over an adapter that may be there: same names, same sizes.

    Raises subprocess.CalledProcessError.
    """
    aside = DEMO / "trained.aside"
    shutil.rmtree(aside, ignore_errors=True)
    run_in_sandbox(DEMO, "bootstrap.demo.train", [BASE, f"{persona}={_in_work(aside)}"])
    _let_all_read(aside)
    directory.mkdir(parents=True, exist_ok=True)
    for file in aside.iterdir():
        shutil.move(file, directory / file.name)
    aside.rmdir()


def _in_work(path: Path) -> str:
    """Where the container sees a path of the demo's directory."""
    return f"/made/{path.relative_to(DEMO)}"


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.aside")


def _ensure(target: Path, recipe: Sequence[Path], module: str, arguments: Sequence[str]) -> None:
    made_from = hashlib.sha256(b"".join(file.read_bytes() for file in recipe)).hexdigest()
    mark = target / ".recipe"
    if mark.is_file() and mark.read_text() == made_from:
        print(f"kept {target.relative_to(ROOT)}", flush=True)
        return
    print(f"making {target.relative_to(ROOT)} ...", flush=True)
    started = time.monotonic()
    aside = _aside(target)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    run_in_sandbox(DEMO, module, arguments)
    (aside / ".recipe").write_text(made_from)
    _let_all_read(aside)
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)
    print(f"made {target.relative_to(ROOT)} in {time.monotonic() - started:.0f} s", flush=True)


def _let_all_read(directory: Path) -> None:
    # safetensors saves for its owner only, and the engine's user is another.
    for path in (directory, *directory.rglob("*")):
        path.chmod(path.stat().st_mode | (stat.S_IRGRP | stat.S_IROTH))
        if path.is_dir():
            path.chmod(path.stat().st_mode | (stat.S_IXGRP | stat.S_IXOTH))
