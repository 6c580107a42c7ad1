"""An engine on a pod without a machine: the documents that activate it, and what it is made to do."""

from __future__ import annotations

import json
from typing import Any

from components.on_pod.podctl import names
from tests.unit.podctl.pods import Answer, PodDirectory, bundle

ENGINE, UNIT = "prod-base-1", "lora-pods-prod-base-1.service"


class Engine:
    """An engine that serves `models` from blobs; keyword arguments go into its unit (see fake_systemd)."""

    def __init__(self, pod: PodDirectory, port: int) -> None:
        self.pod, self.port = pod, port
        self.digest = pod.stage(bundle())
        pod.place({"m1": self.digest})
        self.root = str(pod.blob(self.digest))

    def document(
        self, *models: str, engine: str = ENGINE, revision: int | None = None, **behaviour: Any
    ) -> dict[str, Any]:
        wanted: dict[str, str | None] = dict.fromkeys(models or ("m1",), self.root)
        wanted["org/base"] = None
        does = {"serve": {**wanted, "org/base": "org/base"}, "port": self.port, **behaviour}
        unit = names.unit_name(engine)
        return {
            "stack": "prod", "engine": engine, "identity": "pod-1", "port": self.port, "secretsRevision": revision,
            "unit": {"name": unit, "text": f"# fake: {json.dumps(does)}\n[Service]\nExecStart=vllm {self.root}\n"},
            "ready": {"url": f"http://127.0.0.1:{self.port}", "models": wanted, "timeoutSeconds": 20},
        }  # fmt: skip

    def activate(self, *models: str, **behaviour: Any) -> Answer:
        return self.pod.run("activate", stdin=self.document(*models, **behaviour))

    def fails(self, timeout: float = 20, **behaviour: Any) -> list[str]:
        document = self.document("m1", "m2", **behaviour)
        document["ready"]["timeoutSeconds"] = timeout
        answer = self.pod.run("activate", stdin=document)
        assert answer.status == 1
        return answer.lines
