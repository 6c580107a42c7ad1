"""What vLLM's command line and environment accept, as far as this project must know it.

Read in vLLM 0.32.0: `vllm/config/lora.py`, `vllm/entrypoints/launchers/cli_args.py`, `vllm/engine/arg_utils.py`,
`vllm/utils/argparse_utils.py`, `vllm/envs.py`. `tests/e2e/test_contract_vllm.py` holds all of it against the
installed vLLM.
"""

from __future__ import annotations

from types import MappingProxyType

SERVER_MODULE = "vllm.entrypoints.openai.api_server"

_OWN_KEY = "set {} beside engine.args"
_COMPUTED = "it is computed from the models; set {} to choose it"
_READINESS = "the engine is proven ready over plain HTTP on its own port"

OWNED_FLAGS = MappingProxyType(
    {
        "model": "it is the pod's base",
        "served-model-name": "it is made of the base and the models without an adapter",
        "host": _OWN_KEY.format("engine.listen"),
        "port": _OWN_KEY.format("engine.port"),
        "uds": _READINESS,
        "dtype": _OWN_KEY.format("engine.dtype"),
        "max-model-len": _OWN_KEY.format("engine.maxModelLen"),
        "gpu-memory-utilization": _OWN_KEY.format("engine.gpuMemoryUtilization"),
        "enable-lora": "it is set when a model has an adapter",
        "lora-modules": "it is made of the models that have an adapter",
        "max-loras": _COMPUTED.format("engine.maxLoras"),
        "max-lora-rank": _COMPUTED.format("engine.maxLoraRank"),
        "max-cpu-loras": _COMPUTED.format("engine.maxCpuLoras"),
        "api-key": "a secret must not stand in a command line; set lora-pods:apiKey",
        "hf-token": "a secret must not stand in a command line; set lora-pods:hfToken",
        "config": "a file on the pod would override what preview shows; write its flags into engine.args",
        "headless": _READINESS,
        "grpc": _READINESS,
        "grpc-port": _READINESS,
        "tokens-only": _READINESS,
        "ssl-keyfile": _READINESS + "; put TLS in front of it",
        "ssl-certfile": _READINESS + "; put TLS in front of it",
        "ssl-ca-certs": _READINESS + "; put TLS in front of it",
        "ssl-cert-reqs": _READINESS + "; put TLS in front of it",
        "ssl-ciphers": _READINESS + "; put TLS in front of it",
        "enable-ssl-refresh": _READINESS + "; put TLS in front of it",
        "help": "vLLM would print its help and end",
    }
)
"""Flags (without dashes in front) that `engine.args` may not hold, and why: a clause that ends a sentence."""

NO_SUCH_FLAGS = MappingProxyType(
    {
        "lora-extra-vocab-size": "vLLM removed it in 0.12",
        "long-lora-scaling-factors": "vLLM removed it",
        "enable-lora-bias": "vLLM removed it, and LoRA biases with it",
        "lora-path": "vLLM never had it; an adapter is named by a model's adapter key",
        "allow-runtime-lora-updating": "it is a variable of vLLM, off here: the stack file says what is served",
    }
)
"""Flags people try that vLLM does not have, and what to know of them."""

SECRET_ENVIRONMENT = MappingProxyType(
    {
        "VLLM_API_KEY": "lora-pods:apiKey",
        "HF_TOKEN": "lora-pods:hfToken",
        "HUGGING_FACE_HUB_TOKEN": "lora-pods:hfToken",
    }
)
"""Variables vLLM and huggingface_hub read a secret from, and the stack secret to use instead."""

OWNED_ENVIRONMENT = MappingProxyType(
    {
        "HOME": "it is the unit's state directory, the only place the engine can write",
        "HF_HOME": (
            "it lies in the unit's state directory, the only place the engine can write "
            "(HF_HUB_CACHE may name a directory of the pod to read models from)"
        ),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "the stack file alone says which adapters are served",
    }
)
"""Variables `engine.env` may not hold, and why."""
