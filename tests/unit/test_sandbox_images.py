"""bootstrap/sandbox/build.sh makes an image when what it is made from changed, and only then."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Says yes to `tag` when the marker is there, builds never; every call is noted.
PODMAN = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in
    *"tag localhost/"*) [ -e "$MADE" ] ;;
    *) exit 1 ;;
esac
"""


class Checkout:
    """A copy of what build.sh reads, with a podman that only notes its calls."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "some checkout"
        for part in ("bootstrap/sandbox", "tests/engine/standin_vllm"):
            shutil.copytree(ROOT / part, self.root / part)
        self.calls = directory / "calls"
        self.made = directory / "made"
        self.made.touch()
        self.path = directory / "bin"
        self.path.mkdir()
        for name in ("podman", "runc"):
            (self.path / name).write_text(PODMAN)
            (self.path / name).chmod(0o755)

    def build(self, *images: str) -> "subprocess.CompletedProcess[str]":
        self.calls.write_text("")
        environment = {
            **os.environ,
            "PATH": f"{self.path}:{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "MADE": str(self.made),
            "TMPDIR": str(self.path.parent),
        }
        environment.pop("LORA_PODS_CONTAINER_ENGINE", None)
        script = self.root / "bootstrap/sandbox/build.sh"
        return subprocess.run(["bash", script, *images], env=environment, capture_output=True, text=True, check=False)

    def tags(self, *images: str) -> list[str]:
        """The tag that each image is looked for under."""
        done = self.build(*images)
        assert (done.returncode, done.stderr) == (0, "")
        words = [line.split() for line in self.calls.read_text().splitlines()]
        assert [line[-3] for line in words] == ["tag"] * len(images)
        assert [line[-1] for line in words] == [f"localhost/lora-pods-{image}:latest" for image in images]
        return [line[-2] for line in words]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_images_that_are_there_are_only_tagged(checkout: Checkout) -> None:
    pod, standin, sandbox = checkout.tags("pod", "standin", "sandbox")
    assert [tag.rpartition(":")[0] for tag in (pod, standin, sandbox)] == [
        "localhost/lora-pods-pod",
        "localhost/lora-pods-standin",
        "localhost/lora-pods-sandbox",
    ]
    assert len({tag.rpartition(":")[2] for tag in (pod, standin, sandbox)}) == 3


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("bootstrap/sandbox/debian.packages", [True, True, True]),
        ("bootstrap/sandbox/pod/sshd.conf", [True, True, True]),
        ("tests/engine/standin_vllm/vllm/__init__.py", [False, True, False]),
        ("bootstrap/sandbox/vllm.txt", [False, False, True]),
        ("bootstrap/sandbox/build.sh", [False, False, False]),
    ],
)
def test_a_changed_input_changes_the_images_made_from_it(checkout: Checkout, file: str, changed: list[bool]) -> None:
    images = ("pod", "standin", "sandbox")
    before = checkout.tags(*images)
    with (checkout.root / file).open("a") as stream:
        stream.write("\n# changed\n")
    assert [old != new for old, new in zip(before, checkout.tags(*images), strict=True)] == changed


def test_where_the_checkout_lies_changes_nothing(checkout: Checkout, tmp_path: Path) -> None:
    before = checkout.tags("standin")
    checkout.root = checkout.root.rename(tmp_path / "elsewhere")
    assert checkout.tags("standin") == before


def test_says_which_image_failed_and_what_was_printed(checkout: Checkout) -> None:
    checkout.made.unlink()
    (checkout.path / "debootstrap").write_text("#!/bin/sh\necho no mirror answers >&2\nexit 1\n")
    (checkout.path / "debootstrap").chmod(0o755)
    (checkout.path / "sudo").write_text('#!/bin/sh\nexec "$@"\n')
    (checkout.path / "sudo").chmod(0o755)
    done = checkout.build("pod")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "building localhost/lora-pods-debian ...",
        "no container registry answers: making Debian 12 with debootstrap",
        "no mirror answers",
        "building localhost/lora-pods-debian failed",
    ]


def test_refuses_an_image_it_does_not_know(checkout: Checkout) -> None:
    done = checkout.build("pdo")
    assert (done.returncode, done.stderr) == (2, "build.sh: no image named pdo: pod, standin or sandbox\n")
