"""What is in the pod's directory, where, and who may change it at a time."""

from __future__ import annotations

import hashlib
import json
import os
import re
from typing import ContextManager, List, NamedTuple, Optional

from . import files, tars
from .names import hex_of, unit_name
from .said import Refusal


class Ref(NamedTuple):
    stack: str
    model: str
    digest: str
    base: Optional[str]


class Store:
    """The directory of the pod: its paths, and what is in it. Creates nothing by itself."""

    def __init__(self, root: str, units_dir: str) -> None:
        self.root = os.path.abspath(root)
        self.units_dir = os.path.abspath(units_dir)
        self.whose = ""  # what a lock says of who holds it, after the verb

    def path(self, *parts: str) -> str:
        return os.path.join(self.root, *parts)

    def blob(self, hexdigest: str) -> str:
        return self.path("blobs", "sha256", hexdigest)

    def staged(self, hexdigest: str, suffix: str = ".tar") -> str:
        return self.path("staging", hexdigest + suffix)

    def claim(self, hexdigest: str, engine: Optional[str]) -> str:
        """What keeps a blob until `place` is done with it, of one engine; or of nobody who says who they are."""
        # Hashed, since a name as long as an engine's may be would be longer than a file's.
        whose = "" if engine is None else hashlib.sha256(engine.encode("utf-8")).hexdigest()[:12] + "."
        return self.staged(hexdigest, ".%sclaim" % whose)

    def unit_file(self, engine: str) -> str:
        return os.path.join(self.units_dir, unit_name(engine))

    def make_staging(self) -> None:
        """The first directories of a pod: open to the engines' users, except what is on its way."""
        files.make_dirs(self.path("staging"), 0o700)

    def hold(self, purpose: str, path: str, seconds: float = files.LOCK_SECONDS) -> ContextManager[None]:
        return files.hold(path, purpose + self.whose, seconds)

    def lock(self, purpose: str) -> ContextManager[None]:
        return self.hold(purpose, self.path(".lock"))

    def lock_engine(self, engine: str, purpose: str, seconds: float = files.LOCK_SECONDS) -> ContextManager[None]:
        return self.hold(purpose, self.engine_lock(engine), seconds)

    def engine_lock(self, engine: str) -> str:
        return self.path(".lock-" + engine)

    def has_blob(self, hexdigest: str, size: Optional[int] = None) -> bool:
        """Whether the blob is there with both files and, where the bundle's `size` is known, of the right length.

        One that was found to be altered is not.
        """
        total = tars.tar_size(self.blob(hexdigest))
        return total is not None and size in (None, total) and not self.is_altered(hexdigest)

    def is_altered(self, hexdigest: str) -> bool:
        return os.path.exists(self.staged(hexdigest, ".altered"))

    def blobs(self) -> List[str]:
        return [name for name in files.listed(self.path("blobs", "sha256")) if re.fullmatch(r"[0-9a-f]{64}", name)]

    def staged_bytes(self, hexdigest: str, suffix: str = ".tar") -> Optional[int]:
        try:
            return os.stat(self.staged(hexdigest, suffix)).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def refs(self) -> List[Ref]:
        found = []
        for stack in files.listed(self.path("refs")):
            for model in files.listed(self.path("refs", stack)):
                path = self.path("refs", stack, model)
                try:
                    held = json.loads((files.read_file(path) or b"").decode("utf-8"))
                    found.append(Ref(stack, model, "sha256:" + hex_of(held["digest"]), held["base"]))
                except (ValueError, KeyError, TypeError, Refusal):
                    raise Refusal(
                        "%s is damaged, so nothing can be collected: run `pulumi up` for stack %s again, "
                        "or remove that file" % (path, stack)
                    ) from None
        return found

    def set_ref(self, ref: Ref) -> None:
        data = json.dumps({"digest": ref.digest, "base": ref.base}, sort_keys=True).encode("utf-8") + b"\n"
        path = self.path("refs", ref.stack, ref.model)
        if files.read_file(path) != data:
            files.write_file(path, data)
