"""Runs this package's modules inside the sandbox image, so that the host needs no torch."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "localhost/lora-pods-sandbox"

# What the libraries print while they load would bury what we say; waiting threads that spin slow a busy machine;
# peft writes a set of modules in the order of their hashes.
_ENVIRONMENT = {
    "HOME": "/tmp",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    "OMP_WAIT_POLICY": "passive",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONWARNINGS": "ignore",
    "TORCH_LOGS": "-all",
}


def run_in_sandbox(work: Path, module: str, arguments: Sequence[str]) -> None:
    """Runs ``python -m module`` in a container without a network. It sees ``work`` as ``/made``, and ``work/models``
    as ``/models``, as the pod does: adapters name their base by its path.

    Raises subprocess.CalledProcessError when the module fails.
    """
    engine, limits = _engine()
    # Files that a docker container writes as root would be root's on the host; podman maps the user itself.
    user = ["--user", f"{os.getuid()}:{os.getgid()}"] if Path(engine[0]).name == "docker" else []
    command = [*engine, "run", "--rm", "--network", "none", "--security-opt", "label=disable", *limits, *user]
    for name, value in _ENVIRONMENT.items():
        command += ["--env", f"{name}={value}"]
    command += ["--volume", f"{work}:/made", "--volume", f"{work / 'models'}:/models:ro"]
    command += ["--volume", f"{ROOT / 'bootstrap'}:/program/bootstrap:ro"]
    command += ["--workdir", "/program", IMAGE, "/opt/vllm/bin/python", "-m", module, *arguments]
    subprocess.run(command, check=True)


def _engine() -> tuple[list[str], list[str]]:
    """The words that start every call of podman or docker, and those that every run needs."""
    script = '. "$0" && choose_engine && printf "%s\\n" "${engine[@]}" -- "${limits[@]}"'
    done = subprocess.run(
        ["bash", "-c", script, str(ROOT / "bootstrap/sandbox/engine.sh")], check=True, stdout=subprocess.PIPE, text=True
    )
    words = done.stdout.splitlines()
    middle = words.index("--")
    return words[:middle], words[middle + 1 :]
