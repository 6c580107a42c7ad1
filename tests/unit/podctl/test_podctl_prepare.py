"""The first run on a pod: what it lacks, all at once; then podctl and, where asked for, vLLM are there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from components.on_pod.boot import BOOT, podctl_source
from components.on_pod.podctl import files, preparing, programs, waiting
from components.on_pod.podctl.programs import Ran
from components.on_pod.podctl.said import Refusal
from components.on_pod.podctl.store import Store
from tests.unit.podctl.pods import Answer, PodDirectory, mode

SOURCE = podctl_source()
SHA256 = hashlib.sha256(SOURCE.encode()).hexdigest()
Disk = namedtuple("Disk", "f_bavail f_blocks f_frsize")
GIB = 1024**3


def show_to_others(directory: Path) -> None:
    """pytest's directories are for their user alone."""
    for parent in (directory, *directory.parents[:-2]):
        if not parent.stat().st_mode & stat.S_IXOTH:
            parent.chmod(0o755)


class Machine:
    """A machine that has everything, until a test takes something away."""

    def __init__(self, pod: PodDirectory, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pod = pod
        self.disk, self.shm = 100 * GIB, GIB
        self.programs: dict[tuple[str, ...], Ran] = {
            ("systemctl", "--no-pager", "--version"): Ran(0, "systemd 252 (252.38-1~deb12u1)\n+PAM\n", ""),
            ("nvidia-smi", "-L"): Ran(0, "GPU 0: NVIDIA H200 (UUID: GPU-1)\nGPU 1: NVIDIA H200 (UUID: GPU-2)\n", ""),
        }
        self.opt = directory / "opt"
        (self.opt / "vllm/bin").mkdir(parents=True)
        self.python = self.opt / "vllm/bin/python"
        self.python.write_text("#!/bin/sh\n")
        self.python.chmod(0o755)
        self.has_vllm(str(self.python), "0.33.0")
        self.base = self.opt / "base"
        self.base.mkdir()
        (self.base / "config.json").write_text("{}")
        monkeypatch.setattr(programs, "run", lambda *argv, **_: self.programs.get(argv, Ran(127, "", "none")))
        monkeypatch.setattr(preparing, "pid_1_fault", lambda: "")
        monkeypatch.setattr(os, "statvfs", self._statvfs)
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(preparing, "TEMPORARY", ("/nowhere",))
        monkeypatch.setattr(preparing, "HOMES", (str(directory / "home"),))
        show_to_others(directory)

    def has_vllm(self, python: str, version: str) -> None:
        self.programs[(python, "-I", "-c", programs.VLLM_PROBE)] = Ran(0, version + "\n", "")

    def _statvfs(self, path: str) -> Disk:
        return Disk(self.disk, self.shm, 1) if path == "/dev/shm" else Disk(self.disk, self.disk, 1)

    def prepare(self, **needs: Any) -> Answer:
        wanted = {"diskGiB": 1.0, "shmMiB": 160, "gpu": False, "python": None, "vllm": None, "base": None, **needs}
        document = {"podctl": SOURCE, "sha256": SHA256, "needs": wanted, "identity": "pod-1"}
        return self.pod.run("prepare", stdin=document)

    def faults(self, **needs: Any) -> list[str]:
        answer = self.prepare(**needs)
        assert (answer.status, answer.lines[0]) == (1, "this pod cannot serve yet:")
        assert not self.pod.root.exists()
        return answer.lines[1:]


@pytest.fixture
def machine(pod: PodDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(pod, tmp_path, monkeypatch)


def test_a_machine_that_has_everything(machine: Machine, pod: PodDirectory) -> None:
    answer = machine.prepare(gpu=True, python=str(machine.python), base=str(machine.base))

    identity = Path("/etc/machine-id")
    assert answer == (
        0,
        {
            "machineId": identity.read_text().strip() if identity.exists() else "",
            "python": ".".join(map(str, sys.version_info[:3])),
            "systemd": "252",
            "vllm": "0.33.0",
            "gpus": ["NVIDIA H200", "NVIDIA H200"],
        },
        [],
    )
    installed = pod.root / "bin" / f"podctl-{SHA256[:12]}.py"
    assert installed.read_text(encoding="utf-8") == SOURCE
    assert (mode(installed), mode(pod.root)) == ("0o644", "0o755")
    written = installed.stat()
    assert machine.prepare().status == 0
    assert installed.stat() == written


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (0, []),
        (2, []),  # degraded: it got over something
        (127, []),  # an AMI without it
        (1, ["cloud-init ended with an error (`cloud-init status --long` on the pod says which): going on"]),
        (124, ["cloud-init is still at work after 20 minutes: going on without it"]),
    ],
)
def test_a_machine_that_was_just_made_is_let_finish(machine: Machine, status: int, said: list[str]) -> None:
    machine.programs[("cloud-init", "status", "--wait")] = Ran(status, "", "")
    answer = machine.prepare(cloudInit=True)
    assert (answer.status, answer.lines) == (0, said)
    machine.programs[("cloud-init", "status", "--wait")] = Ran(1, "", "")
    assert machine.prepare().lines == [], "nobody else waits for it"


def test_every_fault_is_reported_at_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "pid_1_fault", lambda: "PID 1 is sshd and must be systemd")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    del machine.programs[("nvidia-smi", "-L")]
    machine.disk, machine.shm = GIB // 2, 64 * 1024**2

    faults = machine.faults(gpu=True, python="/opt/none/python", base="/opt/none/base", vllm={"version": "1;rm"})

    assert faults == [
        "- PID 1 is sshd and must be systemd",
        "- this must run as root: log in as root, or let the user use sudo",
        f"- the disk of {machine.pod.root} has 512.0 MiB free and the models need 1.0 GiB",
        "- /dev/shm has 64.0 MiB and vLLM needs 160.0 MiB: give it more (a container: --shm-size)",
        "- nvidia-smi lists no GPU: install NVIDIA's driver, or set engine.device to cpu",
        "- engine.python /opt/none/python is not a program on this pod",
        "- the base /opt/none/base has no config.json on this pod",
        '- engine.vllm.version "1;rm" is not a version',
    ]


def test_more_gpus_than_the_pod_has(machine: Machine) -> None:
    assert machine.faults(gpu=True, gpus=4) == ["- engine.args shares the base among 4 GPUs, and nvidia-smi lists 2"]
    assert machine.prepare(gpu=True, gpus=2).status == 0


def test_what_is_here_already_counts_as_room_for_it(machine: Machine, pod: PodDirectory) -> None:
    """Preparing again (a rotated key, say) must not ask for the space that the models took since."""
    machine.prepare()
    home = pod.root.parent / "private" / "lora-pods-prod-base-1"
    home.mkdir(parents=True)
    (home / "model.safetensors").write_bytes(b"m" * 5 * 1024**2)
    machine.disk = GIB - 4 * 1024**2
    assert machine.prepare().status == 0
    machine.disk = GIB - 8 * 1024**2
    answer = machine.prepare()
    assert (answer.status, answer.lines[1:]) == (
        1,
        [f"- the disk of {pod.root} has 1016.0 MiB free and the models need 1.0 GiB"],
    )


def test_only_what_this_engine_has_here_counts_as_room_for_it(machine: Machine, pod: PodDirectory) -> None:
    machine.prepare()
    homes = pod.root.parent / "private"
    for home in ("lora-pods-prod-other-1", "lora-pods-prod-base-1"):
        (homes / home).mkdir(parents=True)
    for path in (homes / "lora-pods-prod-other-1/model", pod.root / "blobs/model", pod.root / "venvs/vllm-9/wheel"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"m" * 5 * 1024**2)
    machine.disk = GIB - 8 * 1024**2
    assert machine.prepare().status == 0, "a document that names no engine counts all"
    assert machine.prepare(engine="prod-base-1").lines[1:] == [
        f"- the disk of {pod.root} has 1016.0 MiB free and the models need 1.0 GiB"
    ]
    (homes / "lora-pods-prod-base-1/model").write_bytes(b"m" * 5 * 1024**2)
    assert machine.prepare(engine="prod-base-1").status == 1
    venv = pod.root / "venvs/vllm-0.33.0/bin"
    venv.mkdir(parents=True)
    (venv / "python").write_bytes(b"m" * 5 * 1024**2)
    assert machine.prepare(engine="prod-base-1", vllm={"version": "0.33.0"}).status == 0


def test_an_interpreter_without_vllm(machine: Machine) -> None:
    machine.has_vllm(str(machine.python), "")

    assert machine.faults(python=str(machine.python)) == [
        f"- engine.python {machine.python} has no vLLM: install it there, or set engine.vllm"
    ]


def test_an_interpreter_whose_vllm_does_not_know_a_flag_of_the_unit(machine: Machine) -> None:
    """It would end at once, over and over, with argparse's words."""
    machine.has_vllm(str(machine.python), "0.9.2+cpu")
    assert machine.faults(python=str(machine.python), vllmAtLeast="0.18.0") == [
        f"- engine.python {machine.python} has vLLM 0.9.2+cpu, which does not know --shutdown-timeout: install 0.18.0 "
        "or newer there, or set engine.args: {shutdownTimeout: 0}"
    ]
    for version in ("0.18", "0.18.0rc1", "0.33.0", "1.0", "0.1.dev1+g0123abc"):
        machine.has_vllm(str(machine.python), version)
        assert machine.prepare(python=str(machine.python), vllmAtLeast="0.18.0").status == 0, version


def test_an_interpreter_that_the_engines_user_cannot_reach(machine: Machine) -> None:
    (machine.opt / "vllm").chmod(0o700)

    assert machine.faults(python=str(machine.python)) == [
        f"- engine.python is at {machine.python}, and other users may not enter {machine.opt}/vllm: "
        f"chmod o+x {machine.opt}/vllm"
    ]


def test_an_interpreter_that_leads_into_a_home(machine: Machine) -> None:
    """As uv makes them: a venv under /opt whose python is a link into root's home, which the unit does not see."""
    home = machine.opt.parent / "home"
    (home / "uv").mkdir(parents=True)
    real = home / "uv" / "python3.12"
    machine.python.rename(real)
    machine.python.symlink_to(real)

    assert machine.faults(python=str(machine.python)) == [
        f"- engine.python is at {real}, and the engine cannot see {home}: put it elsewhere, say /opt"
    ]
    # A path that the unit itself names in a home makes the unit see homes (render.py).
    machine.has_vllm(str(real), "0.33.0")
    assert machine.prepare(python=str(real)).status == 0


def test_a_base_in_a_temporary_directory(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "TEMPORARY", (str(machine.opt),))

    assert machine.faults(base=str(machine.base)) == [
        f"- the base {machine.base} is at {machine.base}/config.json, and the engine cannot see {machine.opt}: "
        "put it elsewhere, say /opt"
    ]


def test_a_base_whose_weights_only_root_reads(machine: Machine) -> None:
    weights = machine.base / "model.safetensors"
    weights.write_bytes(b"")
    weights.chmod(0o600)

    assert machine.faults(base=str(machine.base)) == [
        f"- the base {machine.base} has model.safetensors, which other users may not read: chmod -R o+rX {machine.base}"
    ]


def test_a_podctl_that_was_cut_on_its_way_is_not_installed(machine: Machine, pod: PodDirectory) -> None:
    needs = {"diskGiB": 1, "shmMiB": 1, "gpu": False, "python": None, "vllm": None, "base": None}

    answer = pod.run("prepare", stdin={"podctl": SOURCE[:-1], "sha256": SHA256, "needs": needs})

    assert (answer.status, answer.lines) == (1, ["podctl did not arrive whole: run this again"])
    assert not pod.root.exists()


def test_pid_1(monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter([Ran(0, "running\n", ""), Ran(1, "degraded\n", ""), Ran(1, "offline\n", "")])
    monkeypatch.setattr(programs, "run", lambda *argv, **_: next(states))
    monkeypatch.setattr(os.path, "isdir", lambda path: path == "/run/systemd/system")
    assert preparing.pid_1_fault() == ""
    assert preparing.pid_1_fault() == ""
    assert preparing.pid_1_fault() == "systemd is offline here and must be running"
    monkeypatch.setattr(os.path, "isdir", lambda path: False)
    monkeypatch.setattr(files, "read_file", lambda path: b"sshd\n")
    assert (
        preparing.pid_1_fault() == "PID 1 is sshd and must be systemd: use a machine or a container that boots with it"
    )


UV = """#!/bin/sh
echo "uv $*" >> "$LOG"
env | grep ^UV_ | sort >> "$LOG"
case $1 in
venv) eval "target=\\${$#}"; mkdir -p "$target/bin" "$UV_CACHE_DIR/wheels"; python=${BASE_PYTHON-$target/bin/python}
      printf '#!/bin/sh\\necho 0.33.0\\n' > "$python"; chmod 755 "$python"
      test "$python" -ef "$target/bin/python" || ln -s "$python" "$target/bin/python" ;;
pip)  test ! -e "$LOG.fail" || { echo "  x No solution found: there is no version of vllm==0.33.0"; exit 1; } ;;
esac
"""


@pytest.fixture
def uv_log(pod: PodDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A uv on PATH that writes down what it is asked."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "uv").write_text(UV)
    (programs / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setattr(preparing, "TEMPORARY", ("/nowhere",))
    monkeypatch.setattr(preparing, "HOMES", (str(tmp_path / "home"),))
    show_to_others(tmp_path)
    for name in [name for name in os.environ if name.startswith("UV_")]:
        monkeypatch.delenv(name)
    return tmp_path / "log"


def test_vllm_is_installed_once(pod: PodDirectory, uv_log: Path) -> None:
    store = Store(str(pod.root), str(pod.units))

    python = preparing.make_venv(store, "0.33.0", homes_shown=False)

    venv = f"{pod.root}/venvs/vllm-0.33.0"
    environment = [
        f"UV_CACHE_DIR={pod.root}/cache",
        "UV_NATIVE_TLS=1",
        "UV_NO_PROGRESS=1",
        f"UV_PYTHON_INSTALL_DIR={pod.root}/python",
        "UV_SYSTEM_CERTS=1",
    ]
    assert python == f"{venv}/bin/python"
    assert uv_log.read_text().splitlines() == [
        f"uv venv --python >=3.11,<3.14 {venv}",
        *environment,
        f"uv pip install --python {python} vllm==0.33.0",
        *environment,
    ]
    assert sorted(path.name for path in pod.root.iterdir()) == ["venvs"]
    assert [path.name for path in (pod.root / "venvs").iterdir()] == ["vllm-0.33.0"]
    uv_log.unlink()
    assert preparing.make_venv(store, "0.33.0", homes_shown=False) == python
    assert not uv_log.exists()


def test_an_installation_that_failed_is_made_anew(
    pod: PodDirectory, uv_log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(str(pod.root), str(pod.units))
    uv_log.with_name("log.fail").touch()
    with pytest.raises(Refusal) as refusal:
        preparing.make_venv(store, "0.33.0", homes_shown=False)
    uv = shutil.which("uv")
    assert str(refusal.value) == f"installing vLLM 0.33.0 failed ({uv} pip)"
    assert refusal.value.details == ("  x No solution found: there is no version of vllm==0.33.0",)
    assert capsys.readouterr().err.splitlines() == ["making a venv for vLLM", "installing vLLM 0.33.0"]
    assert list((pod.root / "venvs").iterdir()) == []
    uv_log.with_name("log.fail").unlink()

    preparing.make_venv(store, "0.33.0", homes_shown=False)

    assert [path.name for path in (pod.root / "venvs").iterdir()] == ["vllm-0.33.0"]


def test_a_python_that_the_unit_cannot_see_is_refused_before_vllm_arrives(
    pod: PodDirectory, uv_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uv takes the first that fits: with conda or pyenv that may be one in root's home."""
    (tmp_path / "home").mkdir()
    python = tmp_path / "home" / "python3.12"
    monkeypatch.setenv("BASE_PYTHON", str(python))
    store = Store(str(pod.root), str(pod.units))

    with pytest.raises(Refusal) as refusal:
        preparing.make_venv(store, "0.33.0", homes_shown=False)

    assert str(refusal.value) == (
        "vLLM needs a Python that every user can read: install Python 3.11, 3.12 or 3.13 in /usr or /opt"
    )
    assert refusal.value.details == (
        f"- the Python that uv found is at {python}, and the engine cannot see {tmp_path}/home: "
        "put it elsewhere, say /opt",
    )
    assert "uv pip" not in uv_log.read_text()
    assert list((pod.root / "venvs").iterdir()) == []
    # Where the unit names a path in a home, it sees homes (render.py).
    assert preparing.make_venv(store, "0.33.0", homes_shown=True)


def test_an_installation_that_was_killed_is_made_anew(pod: PodDirectory, uv_log: Path) -> None:
    store = Store(str(pod.root), str(pod.units))
    python = Path(preparing.make_venv(store, "0.33.0", homes_shown=False))
    (pod.root / "venvs/vllm-0.33.0.building").touch()
    (python.parent / "half").touch()

    preparing.make_venv(store, "0.33.0", homes_shown=False)

    assert not (python.parent / "half").exists()

    assert [path.name for path in (pod.root / "venvs").iterdir()] == ["vllm-0.33.0"]


def test_boot_runs_the_podctl_of_the_document() -> None:
    """The real line, in a real shell: it gets as far as a disk that no machine has."""
    needs = {"diskGiB": 10**9, "shmMiB": 1, "gpu": False, "python": None, "vllm": None, "base": None}
    document = {"podctl": SOURCE, "sha256": SHA256, "needs": needs, "identity": "é\u2028"}
    ran = subprocess.run(["sh", "-c", BOOT], input=json.dumps(document).encode(), capture_output=True)
    assert (ran.returncode, ran.stdout) == (1, b"")
    lines = ran.stderr.decode().splitlines()
    assert lines[0] == "this pod cannot serve yet:"
    assert any(line.startswith("- the disk of /var/lib/lora-pods has ") for line in lines)
    assert len(BOOT) < 350


def test_boot_refuses_an_old_python_with_its_version(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sys;sys.version_info=(3,6,9);$2" "$3"\n')
    old.chmod(0o755)
    ran = subprocess.run(
        ["sh", "-c", BOOT], input=b"{}", capture_output=True, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, b"", b"python3 is 3.6 on this pod: install 3.8 or newer\n")


def test_boot_says_when_there_is_no_python(tmp_path: Path) -> None:
    shell = shutil.which("sh")
    assert shell is not None
    ran = subprocess.run([shell, "-c", BOOT], input=b"{}", capture_output=True, env={"PATH": str(tmp_path)})
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, b"", b"python3 is not on this pod: install 3.8 or newer\n")


def test_the_stdlib_of_python_3_8_is_enough() -> None:
    vermin = Path(sys.executable).with_name("vermin")
    package = Path(preparing.__file__).parent
    ran = subprocess.run([vermin, "-t=3.8-", "--no-tips", package], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.splitlines()[-2]) == (0, "Minimum required versions: 3.8")


@pytest.fixture
def no_nginx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A machine that has apt-get and no nginx; what is done about that, in order."""
    done: list[str] = []
    monkeypatch.setattr(preparing, "NGINX", str(tmp_path / "nginx"))
    monkeypatch.setattr(waiting, "PAUSES", (0.0, 0.0))

    def systemctl(*words: str) -> Ran:
        done.append(" ".join(words))
        return Ran(0, "", "")

    monkeypatch.setattr(programs, "systemctl", systemctl)

    def watched(what: str, environment: dict[str, str], *argv: str) -> None:
        assert environment["LC_ALL"] == "C", "in another language nothing is known by its words"
        done.append(" ".join(argv))

    monkeypatch.setattr(programs, "watched", watched)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    return done


APT = "apt-get -q -y -o DPkg::Lock::Timeout=300"


def test_nginx_is_installed_for_a_public_engine_and_its_own_service_stays_off(
    machine: Machine, no_nginx: list[str]
) -> None:
    assert machine.prepare().status == 0
    assert [line for line in no_nginx if "nginx" in line] == []
    assert machine.prepare(proxy=True).status == 0
    assert [line for line in no_nginx if line != "--version"] == [
        "mask --runtime nginx.service",
        f"{APT} update",
        f"{APT} install --no-install-recommends nginx",
        "unmask --runtime nginx.service",
        "disable nginx.service",
    ]
    # One that is there is nobody else's business.
    no_nginx.clear()
    Path(preparing.NGINX).touch()
    assert machine.prepare(proxy=True).status == 0
    assert [line for line in no_nginx if line != "--version"] == []


def test_where_nginx_cannot_be_had_it_is_said(
    machine: Machine, no_nginx: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(what: str, environment: object, *argv: str) -> None:
        no_nginx.append(" ".join(argv))
        raise Refusal(f"{what} failed (apt-get -q)", ["E: Could not get lock /var/lib/apt/lists/lock"])

    monkeypatch.setattr(programs, "watched", fails)
    assert machine.prepare(proxy=True).lines == [
        "engine.listen opens the engine to other machines, which takes nginx, and it cannot be installed: fetching the "
        "lists of packages failed (apt-get -q); install it on the pod, or let the engine listen on loopback",
        "E: Could not get lock /var/lib/apt/lists/lock",
    ]
    assert no_nginx.count(f"{APT} update") == 3, "apt waits for no other's update"
    assert no_nginx[-1] == "unmask --runtime nginx.service"


def test_a_system_without_apt_is_told_beforehand(
    machine: Machine, no_nginx: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert machine.faults(proxy=True) == [
        f"- engine.listen opens the engine to other machines, which takes nginx at {preparing.NGINX}, and there is no "
        "apt-get to install it: install it there, or let the engine listen on loopback"
    ]
