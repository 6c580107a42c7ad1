"""Makes wheels of the stand-in: ``python3 make_wheels.py PACKAGE_DIRECTORY WHEELS_DIRECTORY VERSION...``."""

import base64
import hashlib
import sys
import zipfile
from pathlib import Path
from typing import Dict


def make_wheel(package: Path, wheels: Path, version: str) -> None:
    """Writes ``vllm-<version>-py3-none-any.whl``."""
    information = f"vllm-{version}.dist-info"
    members: Dict[str, bytes] = {
        str(file.relative_to(package.parent)): file.read_bytes() for file in sorted(package.rglob("*.py"))
    }
    members[f"{information}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nRequires-Python: >=3.8\n".encode()
    )
    members[f"{information}/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in members.items()
    )
    members[f"{information}/RECORD"] = f"{record}{information}/RECORD,,\n".encode()
    with zipfile.ZipFile(wheels / f"vllm-{version}-py3-none-any.whl", "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


if __name__ == "__main__":
    for wanted in sys.argv[3:]:
        make_wheel(Path(sys.argv[1]), Path(sys.argv[2]), wanted)
