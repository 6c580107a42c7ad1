"""What an engine needs of the pod: checked at once, then podctl, nginx and vLLM are put there."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import sys
import time
from typing import Iterator, List, Optional, Sequence, Tuple

from . import files, programs, units, waiting
from .documents import Document, field, number, optional
from .said import Refusal, clean, human, say, shown
from .store import Store

CLOUD_INIT_SECONDS = 1200.0  # what a new machine does by itself is waited for
HOMES = ("/home", "/root", "/run/user")  # a unit sees them only if its own text names a path there (ProtectHome=)
NGINX = "/usr/sbin/nginx"
TEMPORARY = ("/tmp", "/var/tmp")  # a unit has its own (PrivateTmp=)


def systemd_version() -> str:
    match = re.match(r"systemd (\S+)", programs.systemctl("--version").out)
    return match.group(1) if match else ""


def pid_1_fault() -> str:
    if os.path.isdir("/run/systemd/system"):
        state = programs.systemctl("is-system-running").out.strip()
        if state in ("running", "degraded", "starting", "initializing"):
            return ""
        return "systemd is %s here and must be running" % (state or "silent")
    first = (files.read_file("/proc/1/comm") or b"another program").decode("utf-8", "replace").strip()
    return "PID 1 is %s and must be systemd: use a machine or a container that boots with it" % first


def bytes_of_ours(root: str, engine: Optional[str], version: Optional[str]) -> int:
    """What is here already of the engine to come, its home and its vLLM, and needs no room a second time.

    Of all that is ours, where the document does not name the engine.
    """
    private = os.path.join(os.path.dirname(root), "private")
    prefix = os.path.basename(root) + "-"
    if engine is None:
        tops = [root, *(os.path.join(private, name) for name in files.listed(private) if name.startswith(prefix))]
    else:
        tops = [os.path.join(private, prefix + engine)]
        tops += [os.path.join(root, "venvs", "vllm-" + version)] if version is not None else []
    total = 0
    for top in tops:
        for directory, _, names in os.walk(top):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    total += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return total


def space_faults(root: str, document: Document) -> Iterator[str]:
    needed = number(document, "needs.diskGiB") * 1024**3
    disk = os.statvfs(files.existing_parent(root))
    if getattr(disk, "f_flag", 0) & os.ST_RDONLY:
        yield "the disk of %s is read-only: find out why (dmesg), and make it writable" % root
    free = disk.f_bavail * disk.f_frsize
    engine, version = optional(document, "needs.engine", str), optional(document, "needs.vllm.version", str)
    if free < needed and free + bytes_of_ours(root, engine, version) < needed:
        yield "the disk of %s has %s free and the models need %s" % (root, human(free), human(needed))
    needed = number(document, "needs.shmMiB") * 1024**2
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    size = shm.f_blocks * shm.f_frsize if shm else 0
    if size < needed:
        yield (
            "/dev/shm has %s and vLLM needs %s: give it more (a container: --shm-size)" % (human(size), human(needed))
        )


def gpu_names() -> List[str]:
    listing = programs.run("nvidia-smi", "-L", seconds=60)
    return re.findall(r"^GPU \d+: (.+?) \(UUID", listing.out, re.M) if listing.status == 0 else []


def under(path: str, roots: Sequence[str]) -> str:
    """The first of `roots` that `path` lies in, "" if none."""
    return next((root for root in roots if path.startswith(root + "/")), "")


def unseen(path: str, what: str, homes_shown: bool) -> Iterator[str]:
    """Why an engine, which runs as a user of its own in a confined unit, could not read a path."""
    for place in sorted({os.path.abspath(path), os.path.realpath(path)}):
        hidden = under(place, TEMPORARY if homes_shown else HOMES + TEMPORARY)
        if hidden:
            yield "%s is at %s, and the engine cannot see %s: put it elsewhere, say /opt" % (what, place, hidden)
            return
        parent = os.path.dirname(place)
        while parent != "/":
            if not os.stat(parent).st_mode & stat.S_IXOTH:
                yield "%s is at %s, and other users may not enter %s: chmod o+x %s" % (what, place, parent, parent)
                return
            parent = os.path.dirname(parent)


def vllm_of(python: str, least: Optional[str], homes_shown: bool) -> Tuple[str, List[str]]:
    """The version of the vLLM that a Python has, and what keeps an engine from running it.

    `least` is the oldest release that knows the unit's flags.
    """
    if not os.path.isabs(python) or not os.path.isfile(python) or not os.access(python, os.X_OK):
        return "", ["engine.python %s is not a program on this pod" % python]
    faults = list(unseen(python, "engine.python", homes_shown))
    found = programs.vllm_version(python)
    if not found:
        faults.append("engine.python %s has no vLLM: install it there, or set engine.vllm" % python)
    elif least is not None and is_older(found, least):
        faults.append(
            "engine.python %s has vLLM %s, which does not know --shutdown-timeout: install %s or newer there, or set "
            "engine.args: {shutdownTimeout: 0}" % (python, clean(found)[:60], least)
        )
    return found, faults


def is_older(version: str, least: str) -> bool:
    """Whether a release came before another one. What was built of a clone (0.1.dev1+g0123abc) may be any."""
    return "dev" not in version and numbers(version) < numbers(least)


def numbers(version: str) -> List[int]:
    """The three at the front of a version."""
    return [int(number) for number in (re.findall(r"\d+", version) + ["0"] * 3)[:3]]


def base_faults(base: str, homes_shown: bool) -> Iterator[str]:
    if not os.path.isfile(os.path.join(base, "config.json")):
        yield "the base %s has no config.json on this pod" % base
        return
    yield from unseen(os.path.join(base, "config.json"), "the base %s" % base, homes_shown)
    for name in [".", *files.listed(base)]:
        path = os.path.join(base, name)
        if os.path.exists(path) and not os.stat(path).st_mode & stat.S_IROTH:
            yield "the base %s has %s, which other users may not read: chmod -R o+rX %s" % (base, name, base)
            return


def await_cloud_init() -> None:
    """A machine that was just made grows its disk and installs packages, some of it when sshd answers already."""
    ran = programs.run("cloud-init", "status", "--wait", seconds=CLOUD_INIT_SECONDS)
    if ran.status == 124:
        say("cloud-init is still at work after %d minutes: going on without it" % (CLOUD_INIT_SECONDS // 60))
    elif ran.status == 1:
        say("cloud-init ended with an error (`cloud-init status --long` on the pod says which): going on")


def verb_prepare(store: Store, document: Document) -> Document:
    """Everything an engine will need from this pod, checked at once; then this program and vLLM are put there."""
    needs = field(document, "needs", dict)
    if optional(needs, "cloudInit", bool):
        await_cloud_init()
    gpus = gpu_names() if field(needs, "gpu", bool) else []
    python, base = optional(needs, "python", str), optional(needs, "base", str)
    version = optional(needs, "vllm.version", str)
    faults = [pid_1_fault()]
    if os.geteuid() != 0:
        faults.append("this must run as root: log in as root, or let the user use sudo")
    faults += space_faults(store.root, document)
    if needs["gpu"] and not gpus:
        faults.append("nvidia-smi lists no GPU: install NVIDIA's driver, or set engine.device to cpu")
    elif needs["gpu"] and (optional(needs, "gpus", int) or 0) > len(gpus):
        faults.append("engine.args shares the base among %d GPUs, and nvidia-smi lists %d" % (needs["gpus"], len(gpus)))
    homes_shown = any(under(path, HOMES) for path in (python, base) if path is not None)
    faults += unseen(os.path.join(files.existing_parent(store.root), "blobs"), "the blob store", homes_shown)
    vllm = None
    if python is not None:
        vllm, wrong = vllm_of(python, optional(needs, "vllmAtLeast", str), homes_shown)
        faults += wrong
    if base is not None:
        faults += base_faults(base, homes_shown)
    faults += proxy_needs(document)
    if version is not None and not re.fullmatch(r"[0-9][0-9A-Za-z.+!_-]*", version):
        faults.append("engine.vllm.version %s is not a version" % shown(version))
    faults = [fault for fault in faults if fault]
    if faults:
        raise Refusal("this pod cannot serve yet:", ["- " + fault for fault in faults])

    program, expected = field(document, "podctl", str).encode("utf-8"), field(document, "sha256", str)
    if hashlib.sha256(program).hexdigest() != expected:
        raise Refusal("podctl did not arrive whole: run this again")
    store.make_staging()
    with store.lock("prepare"):
        # The other name is for people: the newest one.
        for path in (store.path("bin", "podctl-%s.py" % expected[:12]), store.path("bin", "podctl")):
            if files.read_file(path) != program:
                files.write_file(path, program)
    if optional(needs, "proxy", bool):
        install_nginx(store)
    if version is not None:
        vllm = programs.vllm_version(make_venv(store, version, homes_shown))
    return {
        "machineId": (files.read_file("/etc/machine-id") or b"").decode("ascii", "replace").strip(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "systemd": systemd_version(),
        "vllm": vllm,
        "gpus": gpus,
    }


def proxy_needs(document: Document) -> Iterator[str]:
    import shutil

    if optional(document, "needs.proxy", bool) and not os.path.exists(NGINX) and shutil.which("apt-get") is None:
        yield (
            "engine.listen opens the engine to other machines, which takes nginx at %s, and there is no apt-get to "
            "install it: install it there, or let the engine listen on loopback" % NGINX
        )


def install_nginx(store: Store) -> None:
    """The distribution's nginx, which its security updates reach. Its own service, at port 80, is never started."""
    if os.path.exists(NGINX):
        return
    with store.hold("prepare: installing nginx", store.path(".lock-nginx"), seconds=3600):
        if os.path.exists(NGINX):
            return
        apt = ("apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=300")
        environment = {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}  # what it says is looked at below
        # A package's service starts as it is installed, unless it is masked; and at the next boot, unless disabled.
        programs.systemctl("mask", "--runtime", "nginx.service")
        try:
            for pause in (*waiting.PAUSES, None):
                try:
                    programs.watched("fetching the lists of packages", environment, *apt, "update")
                    break
                except Refusal as refusal:
                    # A machine that was just made looks for updates by itself, and apt waits for no other's `update`.
                    if pause is None or not any("lock" in line for line in refusal.details):
                        raise
                    time.sleep(pause)
            programs.watched("installing nginx", environment, *apt, "install", "--no-install-recommends", "nginx")
        except Refusal as refusal:
            raise Refusal(
                "engine.listen opens the engine to other machines, which takes nginx, and it cannot be installed: %s; "
                "install it on the pod, or let the engine listen on loopback" % refusal,
                refusal.details,
            ) from None
        finally:
            programs.systemctl("unmask", "--runtime", "nginx.service")
        programs.systemctl("disable", "nginx.service")


def make_venv(store: Store, version: str, homes_shown: bool) -> str:
    """A venv with this vLLM, made once. It cannot be moved, so a marker beside it says that it is not whole."""
    venv = store.path("venvs", "vllm-" + version)
    marker = venv + ".building"
    python = os.path.join(venv, "bin", "python")
    # Two stacks may prepare one pod at once, and vLLM takes many minutes to arrive.
    with store.hold("prepare: installing vLLM %s" % version, store.path(".lock-venvs"), seconds=3600):
        installed = files.read_file(os.path.join(venv, "installed"))
        if os.path.exists(python) and not os.path.exists(marker):
            if installed in (None, programs.vllm_version(python).encode("utf-8")):
                return python
            say("%s has another vLLM than was installed there, so it is made anew" % venv)
            with store.lock("prepare"):
                units.mark_stale(store, venv + "/")
        files.write_file(marker, b"")
        files.remove_tree(venv)
        environment = {
            "UV_PYTHON_INSTALL_DIR": store.path("python"),
            "UV_CACHE_DIR": store.path("cache"),
            "UV_NO_PROGRESS": "1",
            "UV_NATIVE_TLS": "1",  # the machine's certificates; UV_SYSTEM_CERTS to newer ones
            "UV_SYSTEM_CERTS": "1",
        }
        try:
            uv = find_uv(store)
            # The Pythons that vLLM's wheels are for.
            programs.watched("making a venv for vLLM", environment, uv, "venv", "--python", ">=3.11,<3.14", venv)
            # Before gigabytes arrive: it may be a Python of conda or pyenv in root's home, which the unit cannot see.
            hidden = list(unseen(os.path.realpath(python), "the Python that uv found", homes_shown))
            if hidden:
                raise Refusal(
                    "vLLM needs a Python that every user can read: install Python 3.11, 3.12 or 3.13 in /usr or /opt",
                    ["- " + fault for fault in hidden],
                )
            install = [uv, "pip", "install", "--python", python, "vllm==" + version]
            programs.watched("installing vLLM %s" % version, environment, *install)
        except Refusal:
            files.remove_tree(venv)  # gigabytes that a corrected version would not use; what was downloaded stays
            files.unlink(marker)
            raise
        files.write_file(os.path.join(venv, "installed"), programs.vllm_version(python).encode("utf-8"))
        files.remove_tree(store.path("cache"))
        os.sync()  # uv and pip leave that to the kernel, and without the marker all of it counts as whole
        files.unlink(marker)
        files.fsync_dir(os.path.dirname(venv))
    return python


def find_uv(store: Store) -> str:
    import shutil

    own = store.path("tools", "bin", "uv")
    found = shutil.which("uv") or (own if os.path.exists(own) else None)
    if found is None:
        files.remove_tree(store.path("tools"))
        what = "making a venv for uv (Debian and Ubuntu: package python3-venv)"
        programs.watched(what, {}, sys.executable, "-m", "venv", store.path("tools"))
        programs.watched("installing uv", {}, store.path("tools", "bin", "pip"), "install", "--quiet", "uv")
    return found or own
