"""./dev, run for real in a copy of itself on a machine whose programs are all recorded fakes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("dev", "bootstrap/*.sh", "bootstrap/*/go.mod", "bootstrap/tools/*.txt", "requirements*.txt", "pyproject.toml")
REAL_TOOLS = (
    "bash", "cat", "cp", "cut", "dirname", "env", "find", "grep", "head", "id", "install", "mkdir", "mv",
    "printf", "rm", "sed", "sh", "sha256sum", "sleep", "sort", "stat", "tail", "timeout", "uname", "xargs",
)  # fmt: skip
PULUMI_VERSION = re.findall(
    r"^require github.com/pulumi/pulumi/pkg/v3 v(.*)$",
    (ROOT / "bootstrap/pulumi/go.mod").read_text(encoding="utf-8"),
    re.MULTILINE,
)[0]
INSTALL = (
    "uv pip install --quiet --offline --python ROOT/.venv/bin/python --no-deps --no-build-isolation --editable ROOT"
)

# Each fake writes down its name and arguments.
RECORD = '#!/bin/sh\necho "${0##*/} $*" >>"$CALLS"\n'
PYTHON = """#!/bin/sh
[ "$1" = -c ] && echo 3.11.0 && exit
echo "python $*" >>"$CALLS"
[ "$3" != --images ] || echo "$BENCH_NEEDS"
exit "${PYTHON_EXIT:-0}"
"""
# Hosts answer, but nothing can be downloaded.
CURL_HEAD = RECORD + 'case "$*" in *--head*) ;; *) exit 6 ;; esac\n'
LINTER = RECORD + 'exit "${LINT_EXIT:-0}"\n'
PULUMI = RECORD + '[ "$1" != version ] || echo "v$PULUMI_SAYS"\n[ "$1" != plugin ]\n'
BUILD_IMAGES = (
    RECORD
    + """[ -z "${IMAGES_FAIL_AFTER:-}" ] && exit
until [ -s "$IMAGES_FAIL_AFTER" ]; do sleep 0.1; done
echo "no space left"
exit 1
"""
)
UV = (
    RECORD
    + """case "$1" in
--version) echo "uv 9.9.9" ;;
venv)
  for dir; do :; done
  mkdir -p "$dir/bin"
  cp "$FAKES/python" "$FAKES/ruff" "$FAKES/mypy" "$dir/bin" ;;
pip)
  [ "$2" != install ] || cp "$FAKES/python" "${FAKES%/*}/checkout/.venv/bin/lora" ;;
esac
"""
)
GO = (
    RECORD
    + """[ -z "${GO_HANGS:-}" ] || [ "$3" != build ] || { echo $$ >"$GO_HANGS"; exec sleep 60; }
[ -z "${GO_FAILS:-}" ] || [ "$3" != build ] || { echo "go: no such module"; exit 1; }
case "$1 $3" in
"env ") echo go99.0.0 ;;
*list) echo "$SDK" ;;
*build)
  while [ "$1" != -o ]; do shift; done
  mkdir -p "${2%/*}"
  cp "$FAKES/pulumi" "$2" ;;
esac
"""
)


@dataclass
class Machine:
    home: Path
    root: Path
    bin: Path

    def fake(self, name: str, script: str, *, at: Path | None = None) -> None:
        path = (at or self.bin) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script, encoding="utf-8")
        path.chmod(0o755)

    def dev(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        env = {
            "HOME": str(self.home),
            "PATH": str(self.bin),
            "CALLS": str(self.home / "calls"),
            "SDK": str(self.home / "sdk"),
            "FAKES": str(self.home / "fakes"),
            **environment,
        }
        return subprocess.run(
            [str(self.root / "dev"), *arguments], env=env, capture_output=True, text=True, timeout=60, check=False
        )

    @property
    def cache(self) -> Path:
        return self.home / ".cache/lora-pods"

    def calls(self) -> list[str]:
        """What the fakes were asked since the last look, paths below home shortened."""
        log = self.home / "calls"
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return [line.replace(str(self.root), "ROOT").replace(str(self.cache), "CACHE") for line in lines]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """One with podman, uv and go, where no download succeeds."""
    made = Machine(tmp_path / "home", tmp_path / "home/checkout", tmp_path / "bin")
    made.bin.mkdir()
    for pattern in COPIED:
        for source in ROOT.glob(pattern):
            target = made.root / source.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    plugin = made.root / "bootstrap/command-plugin"
    plugin.mkdir(exist_ok=True)
    (plugin / "main.go").write_text("package main\n", encoding="utf-8")
    workflow = made.root / ".github/workflows/preview.yml"
    workflow.parent.mkdir(parents=True)
    workflow.touch()
    made.fake("build.sh", BUILD_IMAGES, at=made.root / "bootstrap/sandbox")
    made.fake("pulumi-language-python-exec", "#!/bin/sh\n", at=made.home / "sdk/python/cmd")
    made.fake("pulumi-resource-pulumi-python", "#!/bin/sh\n", at=made.home / "sdk/python/dist")
    made.fake("pulumi", PULUMI.replace("$PULUMI_SAYS", PULUMI_VERSION), at=made.home / "fakes")
    made.fake("python", PYTHON, at=made.home / "fakes")
    made.fake("ruff", LINTER, at=made.home / "fakes")
    made.fake("mypy", LINTER, at=made.home / "fakes")
    for tool in REAL_TOOLS:
        (made.bin / tool).symlink_to(shutil.which(tool) or f"/missing/{tool}")
    for name in ("podman", "runc", "newuidmap", "slirp4netns", "debootstrap", "git", "ssh-keygen"):
        made.fake(name, "#!/bin/sh\n")
    for name in ("sudo", "apt-get"):
        made.fake(name, RECORD + "exit 1\n")
    made.fake("curl", RECORD + "exit 6\n")
    made.fake("uv", UV)
    made.fake("go", GO)
    return made


def test_help_lists_every_verb(machine: Machine) -> None:
    told = re.findall(r"^  ([a-z]+) ", machine.dev("help").stdout, re.MULTILINE)
    dispatched = re.findall(r"^    ([a-z]+)(?: \| [^)]*)?\) ", (ROOT / "dev").read_text(encoding="utf-8"), re.MULTILINE)
    assert told == dispatched
    verbs = {"setup", "demo", "down", "test", "chaos", "lint", "bench", "lock", "pulumi", "image", "env", "help"}
    assert verbs == set(told)


def test_an_unknown_verb_is_refused(machine: Machine) -> None:
    result = machine.dev("destroy")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "error: no verb named destroy; ./dev help lists them\n"


def test_where_no_download_succeeds_everything_is_built(machine: Machine) -> None:
    result = machine.dev("setup")
    assert result.returncode == 0, result.stderr
    calls = [re.sub(r" -ldflags .*? -o ", " … -o ", call) for call in machine.calls()]
    build = "build -trimpath -buildvcs=false … -o"
    home = f"CACHE/pulumi-{PULUMI_VERSION}.aside"
    plugin = re.findall(r"command-plugin-[0-9a-f]{12}", " ".join(calls))[0]
    assert [call for call in calls if not call.startswith(("go env", "pulumi version", "uv --version"))] == [
        "uv venv --clear --python >=3.10 ROOT/.venv",
        "uv pip sync --offline --quiet --python ROOT/.venv/bin/python --require-hashes ROOT/requirements-dev.txt",
        INSTALL,
        f"curl -fsSL --connect-timeout 5 --max-time 30 https://get.pulumi.com -o {home}/install.sh",
        f"go -C ROOT/bootstrap/pulumi {build} {home}/bin/pulumi github.com/pulumi/pulumi/pkg/v3/cmd/pulumi",
        f"go -C ROOT/bootstrap/language-python {build} {home}/bin/pulumi-language-python"
        " github.com/pulumi/pulumi/sdk/v3/python/cmd/pulumi-language-python",
        "go -C ROOT/bootstrap/language-python list -m -f {{.Dir}} github.com/pulumi/pulumi/sdk/v3",
        "curl -sS --head --connect-timeout 5 --max-time 10 https://api.github.com/",
        "curl -sS --head --connect-timeout 5 --max-time 10 https://get.pulumi.com/",
        f"go -C ROOT/bootstrap/command-plugin {build} CACHE/{plugin}.aside/pulumi-resource-command .",
    ]
    assert sorted(path.name for path in (machine.cache / f"pulumi-{PULUMI_VERSION}/bin").iterdir()) == [
        "pulumi",
        "pulumi-language-python",
        "pulumi-language-python-exec",
        "pulumi-resource-pulumi-python",
    ]
    assert not list(machine.cache.glob("*.aside"))
    assert "the official installer cannot be reached" in result.stderr
    assert (
        "command plugin: this repository's stand-in, because the official 1.2.1 could not be downloaded here\n"
        in result.stderr
    )


def test_a_second_setup_only_looks(machine: Machine) -> None:
    machine.dev("setup")
    machine.calls()
    result = machine.dev("setup")
    assert result.returncode == 0, result.stderr
    assert set(machine.calls()) == {"pulumi version"}
    assert result.stderr.splitlines()[-1] == "setup: done"


def test_a_changed_lock_makes_the_venv_follow(machine: Machine) -> None:
    machine.dev("setup")
    machine.calls()
    with (machine.root / "requirements-dev.txt").open("a", encoding="utf-8") as lock:
        lock.write("# changed\n")
    machine.dev("setup")
    # .venv itself stays: others may be running in it.
    assert [call for call in machine.calls() if call.startswith("uv ") and call != "uv --version"] == [
        "uv pip sync --offline --quiet --python ROOT/.venv/bin/python --require-hashes ROOT/requirements-dev.txt",
        INSTALL,
    ]


SYNC = "uv pip sync --offline --quiet --python ROOT/.venv/bin/python --require-hashes ROOT/requirements-dev.txt"


def syncs(machine: Machine) -> list[str]:
    return [call for call in machine.calls() if call.startswith("uv pip sync")]


def test_an_extra_that_was_asked_for_once_stays_until_it_is_taken_away(machine: Machine) -> None:
    machine.dev("setup")
    assert syncs(machine) == [SYNC]
    result = machine.dev("setup", "--with", "aws")
    assert result.returncode == 0, result.stderr
    assert syncs(machine) == [f"{SYNC} ROOT/requirements-aws.txt"]
    assert "python: making .venv from requirements-dev.txt, with the extra aws\n" in result.stderr
    for verb in (("setup",), ("setup", "--with", "aws"), ("test", "--fast"), ("env",)):
        assert machine.dev(*verb).returncode == 0
        assert syncs(machine) == []
    with (machine.root / "requirements-aws.txt").open("a", encoding="utf-8") as lock:
        lock.write("# changed\n")
    machine.dev("test", "--fast")
    assert syncs(machine) == [f"{SYNC} ROOT/requirements-aws.txt"]
    machine.dev("setup", "--without", "aws")
    assert syncs(machine) == [SYNC]
    machine.dev("setup")
    assert syncs(machine) == []


def test_an_extra_outlives_a_python_that_is_gone(machine: Machine) -> None:
    machine.dev("setup", "--with", "aws")
    # So that `uv venv --clear` is asked for, and forgets what lay in .venv.
    machine.fake("uv", UV.replace("mkdir -p", 'rm -rf "$dir" && mkdir -p'))
    (machine.root / ".venv/bin/python").unlink()
    machine.calls()
    assert machine.dev("test", "--fast").returncode == 0
    assert syncs(machine) == [f"{SYNC} ROOT/requirements-aws.txt"]


@pytest.mark.parametrize("python_is_gone", [False, True])
def test_an_extra_that_could_not_be_installed_is_not_remembered(machine: Machine, python_is_gone: bool) -> None:
    machine.dev("setup")
    if python_is_gone:
        (machine.root / ".venv/bin/python").unlink()
    machine.fake("uv", UV.replace("pip)", 'pip)\n  case "$*" in *-aws.txt*) echo "uv: no route"; exit 2 ;; esac'))
    result = machine.dev("setup", "--with", "aws")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-2:] == ["uv: no route", "error: the Python environment could not be made"]
    machine.calls()
    assert machine.dev("env").returncode == 0
    assert set(syncs(machine)) <= {SYNC}


def test_an_extra_is_not_taken_from_the_environment(machine: Machine) -> None:
    assert machine.dev("setup", EXTRA="aws").returncode == 0
    assert syncs(machine) == [SYNC]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--with", "azure"], "setup: after --with comes aws, not azure"),
        (["--without"], "setup: after --without comes aws"),
        (["aws"], "setup takes --with aws, --without aws and --retry, not aws"),
    ],
)
def test_setup_says_what_it_takes(machine: Machine, arguments: list[str], told: str) -> None:
    result = machine.dev("setup", *arguments)
    assert (result.returncode, result.stderr) == (1, f"error: {told}\n")
    assert machine.calls() == []


def test_beside_the_stand_in_setup_says_how_to_have_the_plugin_for_aws(machine: Machine) -> None:
    version = re.findall(r"^pulumi-aws==([\d.]+)", (ROOT / "requirements-aws.txt").read_text(encoding="utf-8"), re.M)[0]
    told = (
        "aws plugin: beside the stand-in pulumi fetches none by itself. "
        f"To have it: pulumi plugin install resource aws {version}\n"
    )
    assert told not in machine.dev("setup").stderr
    assert told in machine.dev("setup", "--with", "aws", "--retry").stderr
    machine.fake("pulumi-resource-command", "#!/bin/sh\n")
    assert told not in machine.dev("setup").stderr


def test_a_venv_without_the_lora_command_gets_it(machine: Machine) -> None:
    machine.dev("setup")
    (machine.root / ".venv/bin/lora").unlink()
    machine.calls()
    assert machine.dev("setup").returncode == 0
    assert INSTALL in machine.calls()
    # What is installed says where the code is, so another place of the checkout is another venv.
    assert str(machine.root) in (machine.root / ".venv/.lock-stamp").read_text(encoding="utf-8")


def test_a_command_that_was_added_is_installed(machine: Machine) -> None:
    machine.dev("setup")
    with (machine.root / "pyproject.toml").open("a", encoding="utf-8") as project:
        project.write("# changed\n")
    machine.calls()
    machine.dev("setup")
    assert INSTALL in machine.calls()


def test_a_refused_download_is_tried_again_after_a_day_or_when_told_to(machine: Machine) -> None:
    machine.fake("curl", CURL_HEAD)
    machine.dev("setup")
    install = "pulumi plugin install resource command 1.2.1"
    assert machine.calls().count(install) == 1
    machine.dev("setup", "--retry")
    assert machine.calls().count(install) == 1
    machine.dev("setup")
    assert machine.calls().count(install) == 0
    refusal = machine.cache / "refused/command-plugin"
    for hours, asked in ((23, 0), (25, 1)):
        os.utime(refusal, (time.time() - hours * 3600,) * 2)
        machine.dev("setup")
        assert machine.calls().count(install) == asked


def test_where_no_host_answers_pulumi_is_not_asked_for_the_plugin(machine: Machine) -> None:
    machine.dev("setup")
    assert not [call for call in machine.calls() if call.startswith("pulumi plugin")]
    machine.dev("setup")
    assert not [call for call in machine.calls() if call.startswith("curl")]


def test_a_mirror_for_plugins_is_asked_without_a_probe(machine: Machine) -> None:
    machine.dev("setup", PULUMI_PLUGIN_DOWNLOAD_URL_OVERRIDES="=https://mirror.example")
    calls = machine.calls()
    assert not [call for call in calls if "--head" in call]
    assert "pulumi plugin install resource command 1.2.1" in calls


def test_a_slow_download_is_no_refusal(machine: Machine) -> None:
    machine.fake("curl", CURL_HEAD)
    (machine.bin / "timeout").unlink()
    machine.fake("timeout", RECORD + "exit 124\n")
    for _ in range(2):
        result = machine.dev("setup")
        assert result.returncode == 0, result.stderr
        asked = [call for call in machine.calls() if "plugin install" in call]
        assert [call.split()[:4] for call in asked] == [["timeout", "-k", "5", "300"]]
        assert "the download took more than 300 s; it is tried again the next time\n" in result.stderr
        assert result.stderr.splitlines()[-2].startswith("command plugin: this repository's stand-in")
    assert not (machine.cache / "refused/command-plugin").exists()


@pytest.mark.parametrize(
    ("command", "status"), [("exit 3", 3), ("sleep 9", 124), ("trap '' TERM; sleep 0.1; kill -9 $$", 124)]
)
def test_a_limit_says_when_it_was_the_time(command: str, status: int) -> None:
    script = '. bootstrap/lib.sh; with_limit 0.5 sh -c "$0" && echo 0 || echo $?'
    result = subprocess.run(["bash", "-c", script, command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == f"{status}\n"


def test_what_the_machine_has_is_used(machine: Machine) -> None:
    machine.fake("pulumi", PULUMI)
    machine.fake("pulumi-language-python", "#!/bin/sh\n")
    machine.fake("pulumi-resource-command", "#!/bin/sh\n")
    result = machine.dev("env", PULUMI_SAYS="3.237.0")
    assert result.returncode == 0, result.stderr
    assert result.stdout == (f"export PATH={machine.root}/.venv/bin:{machine.bin}\nexport PULUMI_SKIP_UPDATE_CHECK=1\n")
    assert not [call for call in machine.calls() if call.startswith(("curl", "go", "pulumi plugin"))]


def test_a_pulumi_that_is_too_old_is_passed_over(machine: Machine) -> None:
    machine.fake("pulumi", PULUMI)
    machine.fake("pulumi-language-python", "#!/bin/sh\n")
    result = machine.dev("setup", PULUMI_SAYS="3.236.9")
    assert f"pulumi: {PULUMI_VERSION}, in this project's cache (built from Go modules)\n" in result.stderr


def test_a_pulumi_without_its_python_host_is_passed_over(machine: Machine) -> None:
    machine.fake("pulumi", PULUMI)
    result = machine.dev("env", PULUMI_SAYS="3.999.0")
    assert result.returncode == 0, result.stderr
    assert f":{machine.cache}/pulumi-{PULUMI_VERSION}/bin:" in result.stdout


def test_versions_are_compared_by_number() -> None:
    pairs = ["3.237.0 3.237.0", "3.1000.0 3.237.0", "4 3.237.0", "3.99.9 3.237.0", "2.999.0 3.237.0", "0 0.7.0"]
    script = '. bootstrap/lib.sh; while read -r a b; do version_ge "$a" "$b" && echo yes || echo no; done'
    result = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, input="\n".join([*pairs, ""]), capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["yes", "yes", "yes", "no", "no", "no"]


def test_the_printed_environment_finds_itself_again(machine: Machine) -> None:
    first = machine.dev("env")
    plugin = next(machine.cache.glob("command-plugin-*"))
    path = f"{machine.root}/.venv/bin:{machine.cache}/pulumi-{PULUMI_VERSION}/bin:{plugin}:{machine.bin}"
    assert first.stdout == (
        f"export PATH={path}\nexport PULUMI_SKIP_UPDATE_CHECK=1\nexport PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION=1\n"
        "# The stand-in for the command plugin is in use, so pulumi downloads no plugins in this shell, "
        "for any project. To undo that: unset PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION\n"
    )
    assert machine.dev("env", PATH=path).stdout == first.stdout
    for evaluate in ('eval "$0"', "eval $0"):
        script = f'{evaluate}; echo "$PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION $PATH"'
        result = subprocess.run(
            ["bash", "-c", script, first.stdout], env={"PATH": "/bin"}, capture_output=True, text=True, check=True
        )
        assert (result.stdout, result.stderr) == (f"1 {path}\n", "")


def test_a_build_that_fails_ends_with_its_reason(machine: Machine) -> None:
    result = machine.dev("setup", GO_FAILS="yes")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-3:] == [
        f"the last lines of {machine.cache}/logs/pulumi-build.log:",
        "go: no such module",
        "error: pulumi could not be installed",
    ]


def test_without_root_or_sudo_the_command_to_run_is_named(machine: Machine) -> None:
    (machine.bin / "curl").unlink()
    (machine.bin / "id").unlink()
    machine.fake("id", "#!/bin/sh\necho 1000\n")
    result = machine.dev("setup")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        "error: packages are missing, and installing them needs root. Run: sudo apt-get install -y curl"
    )
    assert not [call for call in machine.calls() if call.startswith("apt-get")]


def test_a_lock_left_by_a_killed_run_is_taken_over(machine: Machine) -> None:
    left = machine.cache / "locks/pulumi"
    left.mkdir(parents=True)
    (left / "pid").write_text("999999999\n", encoding="utf-8")
    assert machine.dev("setup").returncode == 0
    assert not left.exists()


def test_fast_needs_no_pulumi_and_hands_on_arguments_and_exit_code(machine: Machine) -> None:
    machine.fake("actionlint", LINTER)
    result = machine.dev("test", "--fast", "tests/unit", "-x", PYTHON_EXIT="3")
    assert result.returncode == 3, result.stderr
    assert [call for call in machine.calls() if not call.startswith("uv")] == [
        "ruff check --quiet .",
        "ruff format --quiet --check .",
        "mypy ",
        "actionlint -no-color .github/workflows/preview.yml",
        "python -m pytest -m not pod and not vllm tests/unit -x",
    ]


def pulumi_aws_site(machine: Machine) -> Path:
    (site,) = (machine.cache / "tools").glob("pulumi-aws-*")
    return site


@pytest.mark.parametrize("verb", [("test", "--fast"), ("test",)])
def test_tests_are_given_pulumi_aws_in_a_directory_of_its_own(machine: Machine, verb: tuple[str, ...]) -> None:
    for name in ("strace", "sshd"):
        machine.fake(name, "#!/bin/sh\n")
    machine.dev("setup")
    machine.fake(
        "python", PYTHON.replace("python $*", "python $LORA_PODS_PULUMI_AWS_SITE"), at=machine.root / ".venv/bin"
    )
    machine.calls()
    result = machine.dev(*verb)
    assert result.returncode == 0, result.stderr
    site = pulumi_aws_site(machine)
    version, pin = re.findall(
        r"^pulumi-aws==([\d.]+) ((?:\\\n    --hash=sha256:[0-9a-f]{64} ?)+)\n",
        (ROOT / "requirements-aws.txt").read_text(encoding="utf-8"),
        re.MULTILINE,
    )[0]
    assert re.fullmatch(rf"pulumi-aws-{version}-[0-9a-f]{{12}}", site.name)
    assert (site / "requirements.txt").read_text(encoding="utf-8") == f"pulumi-aws=={version} {pin}\n"
    aside = f"CACHE/tools/{site.name}.aside"
    installing = (
        f"uv pip install --offline --quiet --target {aside} --python ROOT/.venv/bin/python --no-deps --require-hashes"
        f" -r {aside}/requirements.txt"
    )
    calls = machine.calls()
    assert [call for call in calls if call.startswith("uv pip")] == [installing]
    assert calls[-1] == f"python CACHE/tools/{site.name}"
    # The second time it is there.
    assert machine.dev(*verb).returncode == 0
    calls = machine.calls()
    assert [call for call in calls if call.startswith("uv")] == []
    assert calls[-1] == f"python CACHE/tools/{site.name}"


def test_another_pulumi_aws_in_the_lock_is_another_directory(machine: Machine) -> None:
    machine.dev("test", "--fast")
    first = pulumi_aws_site(machine)
    lock = machine.root / "requirements-aws.txt"
    lock.write_text(
        re.sub(r"(?m)^(pulumi-aws==.*\n    --hash=sha256:)....", r"\1ffff", lock.read_text(encoding="utf-8")),
        encoding="utf-8",
    )
    assert f"LORA_PODS_PULUMI_AWS_SITE={first}\n" not in machine.dev("env").stdout
    assert machine.dev("test", "--fast").returncode == 0
    (second,) = set((machine.cache / "tools").glob("pulumi-aws-*")) - {first}
    assert f"export LORA_PODS_PULUMI_AWS_SITE={second}\n" in machine.dev("env").stdout


def test_a_pulumi_aws_that_cannot_be_had_leaves_nothing_and_says_why(machine: Machine) -> None:
    machine.dev("setup")
    machine.fake("uv", UV.replace("pip)\n", 'pip)\n  { echo "uv: no such file"; exit 2; }\n'))
    result = machine.dev("test", "--fast")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-3:] == [
        f"the last lines of {machine.cache}/logs/pulumi-aws-install.log:",
        "uv: no such file",
        "error: pulumi-aws could not be installed for the tests",
    ]
    assert "LORA_PODS_PULUMI_AWS_SITE" not in machine.dev("env").stdout
    assert [call for call in machine.calls() if call.startswith("python -m")] == []


def test_actionlint_is_built_once_where_a_go_is(machine: Machine) -> None:
    for builds in (1, 0):
        result = machine.dev("lint")
        assert result.returncode == 0, result.stderr
        assert len([call for call in machine.calls() if call.endswith("rhysd/actionlint/cmd/actionlint")]) == builds
        assert "lint: ruff, mypy, actionlint\n" in result.stderr


def test_without_actionlint_the_rest_is_linted_and_one_line_says_so(machine: Machine) -> None:
    for builds in (1, 0):  # what could not be built is not tried at every run
        result = machine.dev("lint", GO_FAILS="yes")
        assert result.returncode == 0, result.stderr
        assert len([call for call in machine.calls() if " build " in call]) == builds
        told = "lint: no actionlint is here and none can be built, so the workflows are not looked at\n"
        assert result.stderr.count(told) == 1
        assert "the last lines of" not in result.stderr
    (machine.bin / "go").unlink()
    (machine.cache / "refused/actionlint").unlink()
    assert told in machine.dev("lint").stderr


def test_a_lint_that_fails_stops_before_the_tests(machine: Machine) -> None:
    result = machine.dev("test", "--fast", LINT_EXIT="1")
    assert (result.returncode, result.stderr.splitlines()[-1]) == (1, "error: lint failed; see above")
    assert [call for call in machine.calls() if call.startswith("python")] == []


def test_demo_makes_tools_and_image_and_hands_over(machine: Machine) -> None:
    result = machine.dev("demo", "--keep", PYTHON_EXIT="4")
    assert result.returncode == 4, result.stderr
    calls = machine.calls()
    assert "build.sh sandbox" in calls
    assert calls[-1] == "python -m bootstrap.demo up --keep"


@pytest.mark.parametrize("needs", ["", "standin", "sandbox standin"])
def test_bench_makes_the_images_that_its_programs_need(machine: Machine, needs: str) -> None:
    for name in ("strace", "openssl", "scp"):
        machine.fake(name, "#!/bin/sh\n")
    result = machine.dev("bench", "digests", "--quick", BENCH_NEEDS=needs)
    assert result.returncode == 0, result.stderr
    calls = machine.calls()
    assert [call for call in calls if call.startswith("build.sh")] == ([f"build.sh {needs}"] if needs else [])
    assert [call for call in calls if call.startswith("python -m bench")] == [
        "python -m bench --images digests --quick",
        "python -m bench digests --quick",
    ]


def test_the_container_engine_is_told_once(machine: Machine) -> None:
    assert machine.dev("demo").stderr.count("containers: podman\n") == 1


def test_setup_does_without_containers_and_says_so(machine: Machine) -> None:
    (machine.bin / "podman").unlink()
    result = machine.dev("setup")
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines()[0] == (
        "containers: neither podman nor a running docker was found; sandbox pods, `./dev demo` and the tests need one"
    )
    assert result.stderr.splitlines()[-1] == "setup: done"
    assert not [call for call in machine.calls() if call.startswith(("sudo", "apt-get"))]


@pytest.mark.parametrize("verb", ["demo", "image", "test"])
def test_what_needs_containers_installs_podman(machine: Machine, verb: str) -> None:
    for name in ("strace", "sshd"):
        machine.fake(name, "#!/bin/sh\n")
    (machine.bin / "podman").unlink()
    (machine.bin / "id").unlink()
    machine.fake("id", "#!/bin/sh\necho 0\n")
    result = machine.dev(verb)
    assert (result.returncode, result.stderr.splitlines()[-1]) == (1, "error: apt could not install: podman")
    assert "apt-get install -y -q podman" in machine.calls()


def test_test_makes_every_image_and_runs_every_test(machine: Machine) -> None:
    for name in ("strace", "sshd"):
        machine.fake(name, "#!/bin/sh\n")
    result = machine.dev("test", "-k", "some")
    assert result.returncode == 0, result.stderr
    calls = machine.calls()
    assert "build.sh pod standin sandbox" in calls
    assert calls[-1] == "python -m pytest -k some"


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_image_that_cannot_be_made_stops_the_other_build(machine: Machine, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    result = machine.dev("demo", GO_HANGS=str(pid), IMAGES_FAIL_AFTER=str(pid))
    assert result.returncode == 1
    assert result.stderr.splitlines()[-4:] == [
        f"the last lines of {machine.cache}/logs/images.log:",
        "no space left",
        "error: the images could not be made",
        "error: setting up failed; see above",
    ]
    # The signal has been sent; that it has arrived is awaited.
    deadline = time.monotonic() + 10
    while running(int(pid.read_text(encoding="utf-8"))):
        assert time.monotonic() < deadline, "the build of pulumi is still running"
        time.sleep(0.05)
    assert [call for call in machine.calls() if call.startswith("python -m")] == []
