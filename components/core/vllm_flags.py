"""The flags of vLLM's OpenAI server, and what each takes, by version: so that a typo is told without asking vLLM.

Generated from the parser of vLLM 0.32.0 (`make_arg_parser` in vllm/entrypoints/launchers/cli_args.py, which reads the
types and docstrings of vllm/config/ and vllm/engine/arg_utils.py), and from that of 0.33.0 (where it is
vllm/entrypoints/common/cli_args.py). `tests/e2e/test_contract_vllm.py` holds the table against the installed vLLM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType

OLDEST = (0, 32)
NEWEST = (0, 33)

OTHER_NAMES = MappingProxyType({"device-memory-utilization": "gpu-memory-utilization"})
"""Flags with a second name."""

OPPOSITES_SINCE = (0, 33)
"""Since then (`EnableDisableAction` in vllm/utils/argparse_utils.py) --enable-x has the opposite --disable-x."""

SHORT_FLAGS = MappingProxyType(
    {
        "asc": "api-server-count",
        "q": "quantization",
        "pp": "pipeline-parallel-size",
        "n": "nnodes",
        "r": "node-rank",
        "tp": "tensor-parallel-size",
        "dcp": "decode-context-parallel-size",
        "pcp": "prefill-context-parallel-size",
        "dp": "data-parallel-size",
        "dpn": "data-parallel-rank",
        "dpr": "data-parallel-start-rank",
        "dpl": "data-parallel-size-local",
        "dpa": "data-parallel-address",
        "dpp": "data-parallel-rpc-port",
        "dpb": "data-parallel-backend",
        "dph": "data-parallel-hybrid-lb",
        "dpe": "data-parallel-external-lb",
        "dpm": "data-parallel-multi-port-external-lb",
        "ep": "enable-expert-parallel",
        "sc": "speculative-config",
        "dc": "diffusion-config",
        "cc": "compilation-config",
        "ac": "attention-config",
    }
)
"""What vLLM takes after a single dash, and the flag it stands for."""

# A flag a line, with what it takes: `boolean` (--x, --no-x), `switch` (--x alone), `whole` and other numbers (`size`
# may end in k, m, g …), `text`, `json`, `any` (text or JSON), or one of several words. `?` takes None too, `+` several
# words, `*` is given once for each, `~` takes capitals and dashes for small letters and underscores.
_FLAGS = """
additional-config any
aggregate-engine-logging switch
all2all-backend allgather_reducescatter|deepep_high_throughput|deepep_low_latency|deepep_v2|flashinfer_all2allv|
  flashinfer_nvlink_one_sided|flashinfer_nvlink_two_sided|moonep|mori_high_throughput|mori_low_latency|naive|nixl_ep|
  pplx
allow-credentials boolean
allow-deprecated-quantization boolean
allowed-headers json
allowed-local-media-path text
allowed-media-domains text+
allowed-methods json
allowed-origins json
anthropic-disabled-thinking-effort auto|high|low|max|medium|none|xhigh
api-key text+
api-server-count whole
async-scheduling boolean
attention-backend text
attention-config json
aux-output-config json
block-size whole
chat-template text
chat-template-content-format auto|openai|string
code-revision text
cohere-format text
cohere-is-reasoning-model boolean
collect-detailed-traces None|all|model|worker+
compilation-config json
config text
config-format text
convert auto|classify|embed|none
cp-kv-cache-interleave-size whole
cpu-distributed-timeout-seconds whole?
cpu-offload-gb number
cpu-offload-params text+
cudagraph-capture-sizes whole+
cudagraph-metrics boolean
custom-histogram-buckets json?
data-parallel-address text
data-parallel-backend text
data-parallel-external-lb boolean
data-parallel-hybrid-lb boolean
data-parallel-multi-port-external-lb switch
data-parallel-rank whole
data-parallel-rpc-port whole
data-parallel-size whole
data-parallel-size-local whole
data-parallel-start-rank whole
data-parallel-supervisor-port whole
dbo-decode-token-threshold whole
dbo-prefill-token-threshold whole
dcp-comm-backend None|a2a|ag_rs
dcp-kv-cache-interleave-size whole
dcp-q-replicate boolean
decode-context-parallel-size whole
default-chat-template-kwargs json
default-mm-loras json?
device-ids text
diffusion-config json?
disable-access-log-for-endpoints text
disable-cascade-attn boolean deprecated
disable-chunked-mm-input boolean
disable-custom-all-reduce boolean
disable-fastapi-docs boolean
disable-hybrid-kv-cache-manager boolean
disable-log-stats switch
disable-nccl-for-dp-synchronization boolean
disable-sliding-window boolean
disable-uvicorn-access-log boolean
distributed-executor-backend text
distributed-timeout-seconds whole?
download-dir text
dp-supervisor-probe-failure-threshold whole
dp-supervisor-probe-interval-s number
dp-supervisor-probe-timeout-s number
dp-sync-interval whole
dtype auto|bfloat16|float|float16|float32|half
ec-manager-config json
ec-transfer-config json?
elastic-ep-max-dp-size whole
enable-auto-tool-choice boolean
enable-batch-sharded-sampling boolean
enable-chunked-prefill boolean
enable-cumem-allocator boolean
enable-dbo boolean
enable-elastic-ep boolean
enable-ep-weight-filter boolean
enable-eplb boolean
enable-expert-parallel boolean
enable-fault-tolerance boolean
enable-flash-late-interaction boolean
enable-flashinfer-autotune boolean
enable-force-include-usage boolean
enable-hc-sp boolean
enable-layerwise-nvtx-tracing boolean
enable-log-deltas boolean
enable-log-outputs boolean
enable-log-requests boolean
enable-logging-iteration-details boolean
enable-lora boolean
enable-mamba-cache-stochastic-rounding boolean
enable-mamba-shared-prefix-checkpoint boolean
enable-mfu-metrics boolean
enable-mixed-moe-lora-format boolean
enable-mm-embeds boolean
enable-moe-shared-loras boolean
enable-nccl-comm-suspend boolean
enable-offline-docs boolean
enable-per-request-metrics boolean
enable-prefix-caching boolean
enable-prompt-embeds boolean
enable-prompt-tokens-details boolean
enable-request-id-headers boolean
enable-return-routed-experts boolean
enable-scale-out boolean
enable-server-load-tracking boolean
enable-shm-tensor-arena boolean
enable-sleep-mode boolean
enable-ssl-refresh boolean
enable-tokenizer-info-endpoint boolean
enable-tower-connector-lora boolean
enable-trace-replay boolean
enforce-eager boolean
engram-config json?
eplb-config json
exclude-tools-when-tool-choice-none boolean
expert-placement-strategy linear|round_robin
fail-on-environ-validation boolean
fault-tolerance-config json
fingerprint-mode custom|full|hash|none
fingerprint-value text
fully-sharded-loras boolean
gdn-prefill-backend aiter_flydsl|cutedsl|flashinfer|triton
generation-config text
gpu-memory-utilization number
grpc switch
grpc-port whole?
h11-max-header-count whole
h11-max-incomplete-event-size whole
headless switch
help switch
hf-config-path text
hf-overrides any
hf-token text
host text
ignore-patterns text+
interleave-mm-strings boolean
io-processor-plugin text
ir-op-priority json
jit-monitor-mode error|warn
jit-monitor-verbose boolean
kda-decode-backend auto|flashinfer|native|triton
kda-prefill-backend auto|flashinfer|flashkda|fused|triton
kernel-config json
kv-cache-dtype auto|bfloat16|float16|fp8|fp8_ds_mla|fp8_e4m3|fp8_e5m2|fp8_inc|fp8_per_token_head|int4_per_token_head|
  int8_per_token_head|nvfp4|nvfp4_4over6|nvfp4_ds_mla|turboquant_3bit_nc|turboquant_4bit_nc|turboquant_k3v4_nc|
  turboquant_k8v4|ultraquant_4bit
kv-cache-dtype-skip-layers text+
kv-cache-memory-bytes size?
kv-cache-metrics boolean
kv-cache-metrics-sample number
kv-events-config json?
kv-offloading-backend lmcache|native
kv-offloading-size number?
kv-sharing-fast-prefill boolean
kv-transfer-config json?
language-model-only boolean
limit-mm-per-prompt json
linear-backend aiter|auto|b12x|conch|cutlass|deep_gemm|emulation|exllama|fbgemm|flashinfer_b12x|flashinfer_cudnn|
  flashinfer_cutedsl|flashinfer_cutlass|flashinfer_trtllm|humming|machete|marlin|torch|triton|xpu|xpu_woq~
load-format text
log-config-file text deprecated
log-error-stack boolean
log-level CRITICAL|DEBUG|ERROR|INFO|NOTSET|WARNING
logging-config json
logits-processors text+
logprobs-mode processed_logits|processed_logprobs|raw_logits|raw_logprobs
long-prefill-token-threshold whole
long-prefill-token-threshold-adaptive boolean
lora-dtype auto|bfloat16|float16
lora-modules text+
lora-target-modules text+
mamba-backend text
mamba-block-size whole?
mamba-cache-dtype auto|bfloat16|float16|float32
mamba-cache-mode align|none
mamba-cache-philox-rounds whole
mamba-ssm-cache-dtype auto|bfloat16|float16|float32
mamba-ssu-algorithm None|auto|horizontal|simple|vertical
master-addr text
master-port whole
max-cpu-loras whole?
max-cudagraph-capture-size whole
max-log-len whole?
max-logprobs whole
max-lora-cls-labels whole?
max-lora-rank 1|128|16|256|32|320|512|64|8
max-loras whole
max-model-len size
max-num-active-seqs whole?
max-num-batched-tokens size
max-num-queued-reqs whole?
max-num-queued-tokens size?
max-num-scheduled-tokens size?
max-num-seqs whole
max-parallel-loading-workers whole?
media-io-kwargs json
middleware text*
mm-device-do-normalize boolean
mm-encoder-attn-backend text
mm-encoder-attn-dtype None|fp8
mm-encoder-fp8-scale-path text
mm-encoder-fp8-scale-save-margin number
mm-encoder-fp8-scale-save-path text
mm-encoder-only boolean
mm-encoder-tp-mode data|weights
mm-hasher-algorithm blake3|sha256|sha512
mm-ipc-gpu-memory-gb number
mm-processor-cache-gb number
mm-processor-cache-type lru|shm
mm-processor-device auto|cpu
mm-processor-kwargs json?
mm-shm-cache-max-object-size-mb whole
mm-tensor-ipc direct_rpc|torch_shm
model text
model-class-overrides json
model-impl text
model-loader-extra-config any
moe-backend aiter|aiter_mega_moe|aiter_triton_mxfp4_bf16|auto|b12x|batched_triton|cutlass|deep_gemm|
  deep_gemm_mega_moe|emulation|flashinfer_b12x|flashinfer_cutedsl|flashinfer_cutlass|flashinfer_moe_ep_cutedsl|
  flashinfer_moe_ep_mega_deep_gemm|flashinfer_trtllm|flydsl|hpc|humming|marlin|rdna3|triton|triton_unfused~
nnodes whole
node-rank whole
num-gpu-blocks-override whole?
numa-bind boolean
numa-bind-cpus text+
numa-bind-nodes whole?+
offload-backend auto|prefetch|uva
offload-group-size whole
offload-num-in-group whole
offload-params text+
offload-prefetch-step whole
optimization-level text
otlp-traces-endpoint text
override-generation-config json
per-request-spec-decode-metrics detailed|none|summary
performance-mode balanced|interactivity|throughput
pipeline-parallel-size whole
pooler-config json?
port whole
prefill-context-parallel-size whole
prefill-schedule-interval whole
prefix-cache-retention-interval whole?
prefix-caching-hash-algo sha256|sha256_cbor|xxhash|xxhash_cbor
prefix-match-unit whole?
profiler-config json
pt-load-map-location any
quantization text
quantization-config json?
ray-workers-use-nsight boolean
reasoning-config json?
reasoning-parser text
reasoning-parser-plugin text
renderer-num-workers whole
replayssm-buffer-len whole
response-role text
return-sampling-mask boolean
return-tokens-as-token-ids boolean
revision text
root-path text
runner auto|draft|generate|pooling
safetensors-load-strategy None|eager|lazy|prefetch|torchao
safetensors-prefetch-block-size size
safetensors-prefetch-num-threads whole
scheduler-cls text
scheduler-reserve-full-isl boolean
scheduling-policy fcfs|priority
seed whole
served-model-name text+
show-hidden-metrics-for-version text
shutdown-timeout whole
skip-mm-profiling boolean
skip-tokenizer-init boolean
sleep-mode-offload-cudagraph boolean
sleep-preserve-parameter-names text+
sparse-indexer-topk-backend aiter|auto|cooperative|deep_select|flashinfer|per_row|persistent|torch~
spec-method None|bailing_hybrid_mtp|bailing_hybrid_v3_mtp|custom_class|deepseek_mtp|dflash|dots3_note_mtp|draft_model|
  dspark|eagle|eagle3|ernie_mtp|exaone4_5_mtp|exaone_moe_mtp|extract_hidden_states|gemma4_mtp|glm4_moe_lite_mtp|
  glm4_moe_mtp|glm5_next_mtp|glm_ocr_mtp|hy_v3_mtp|hy_v4_mtp|inkling_mtp|kimi_k3_mtp|longcat_flash_mtp|medusa|
  mimo_mtp|mimo_v2_mtp|minimax_m3_mtp|mlp_speculator|mtp|nemotron_h_mtp|ngram|ngram_gpu|pangu_ultra_moe_mtp|
  qwen3_5_mtp|qwen3_next_mtp|qwen4_exp_mtp|step3p5_mtp|suffix
spec-model text
spec-tokens whole
specialize-active-lora boolean
speculative-config json?
sse-keep-alive-interval whole
ssl-ca-certs text
ssl-cert-reqs whole
ssl-certfile text
ssl-ciphers text
ssl-keyfile text
stream-interval whole
structured-outputs-config json
swa-bounded-replay boolean
tensor-parallel-size whole
tokenizer text
tokenizer-mode text
tokenizer-revision text
tokens-only boolean
tool-call-parser text
tool-parser-plugin text
tool-server text
tool-strict-level auto|function|parameter
trust-remote-code boolean
trust-request-chat-template boolean
trust-request-mm-kwargs boolean
ubatch-size whole
uds text
use-fp64-gumbel boolean
use-replayssm boolean
use-tqdm-on-load boolean
uvicorn-log-level critical|debug|error|info|trace|warning
video-pruning-method evs|vidcom2
video-pruning-rate number?
watermark number
watermark-config json?
weight-transfer-config json?
worker-cls text
worker-extension-cls text
"""

# What a later version has otherwise, or beside it.
_SINCE: Mapping[tuple[int, int], str] = {
    (0, 33): """
gdn-prefill-backend aiter_flydsl|cutedsl|flashinfer|sycl|triton
kv-cache-dtype text
mamba-cache-mode align|none deprecated
moe-backend aiter|aiter_mega_moe|aiter_triton_mxfp4_bf16|aiter_triton_mxfp4_mxfp4|auto|b12x|batched_triton|cutlass|
  deep_gemm|deep_gemm_mega_moe|emulation|flashinfer_b12x|flashinfer_cutedsl|flashinfer_cutlass|
  flashinfer_moe_ep_cutedsl|flashinfer_moe_ep_mega_deep_gemm|flashinfer_trtllm|flydsl|hpc|humming|marlin|rdna3|triton|
  triton_unfused~
monokernel boolean
reasoning-effort-map json
sleep-mode-backend text
spec-method None|bailing_hybrid_mtp|bailing_hybrid_v3_mtp|custom_class|deepseek_mtp|dflash|dots3_note_mtp|draft_model|
  dspark|eagle|eagle3|ernie_mtp|exaone4_5_mtp|exaone_moe_mtp|extract_hidden_states|gemma4_mtp|glm4_moe_lite_mtp|
  glm4_moe_mtp|glm5_next_mtp|glm_ocr_mtp|hy_v3_mtp|hy_v4_mtp|inkling_mtp|kimi_k3_mtp|longcat_flash_mtp|mimo_mtp|
  mimo_v2_mtp|minimax_m3_mtp|mtp|nemotron_h_mtp|ngram|ngram_gpu|pangu_ultra_moe_mtp|qwen3_5_mtp|qwen3_next_mtp|
  qwen4_exp_mtp|step3p5_mtp|step5_mtp|suffix
tool-strict-level None|auto|function|parameter
watchdog-config json
""",
}


@dataclass(frozen=True)
class Flag:
    """What one flag takes."""

    kind: str
    choices: tuple[str, ...] = ()
    nullable: bool = False
    several: bool = False
    """Several words after it."""
    repeated: bool = False
    """Once for each value."""
    deprecated: bool = False
    loose: bool = False
    """Whether `Deep-Gemm` is `deep_gemm`."""


@cache
def flags_of(minor: tuple[int, ...]) -> Mapping[str, Flag]:
    """The flags of a version by its first two numbers; of the nearest known one where it is not known itself."""
    found = dict(_parsed(_FLAGS))
    for since, changed in sorted(_SINCE.items()):
        if since <= minor:
            found |= dict(_parsed(changed))
    if minor >= OPPOSITES_SINCE:
        for name, flag in list(found.items()):
            if flag.kind == "boolean" and opposite(name):
                found.setdefault(opposite(name), Flag("switch", deprecated=flag.deprecated))
    return MappingProxyType(found)


def nearest(minor: tuple[int, ...]) -> tuple[int, ...]:
    """The version whose flags are taken for this one's; itself where they are known."""
    return min(max(minor, OLDEST), NEWEST)


def lines_of(minor: tuple[int, ...]) -> list[str]:
    """The table of a version as its parser gives it: for the test that holds it against vLLM."""
    found = dict(_lines(_FLAGS))
    for since, changed in _SINCE.items():
        if since <= minor:
            found |= dict(_lines(changed))
    return sorted(f"{name} {rest}" for name, rest in found.items())


def unknown(name: str, minor: tuple[int, ...]) -> str | None:
    """Why this version would refuse a flag's name (a clause), with what may have been meant; None where it is known."""
    flags = flags_of(minor)
    if name in flags or name in OTHER_NAMES:
        return None
    bare = name.removeprefix("no-")
    if bare != name and bare in flags:
        return None if flags[bare].kind == "boolean" else f"has no --no- form of {bare}"
    return f"has no flag {name}{_meant(name, flags)}"


def misused(name: str, value: object, minor: tuple[int, ...]) -> str | None:
    """Why a flag of this version does not take a value: a clause; None where it does, and where the flag is unknown."""
    flags = flags_of(minor)
    bare = name.removeprefix("no-")
    if name not in flags and bare in flags:
        return None if value is True else "takes no value: write true, or the flag itself with false"
    flag = flags.get(OTHER_NAMES.get(name, name))
    if flag is None:
        return None
    if flag.kind == "switch":
        return None if value is True else "can only be given or not: write true, or leave it out"
    if flag.kind == "boolean":
        return None if isinstance(value, bool) else "must be true or false"
    if isinstance(value, bool):
        return f"needs a value: {_wanted(flag)}"
    if isinstance(value, Mapping):
        return None if flag.kind in ("json", "any") else f"takes no mapping: it must be {_wanted(flag)}"
    if isinstance(value, str | int | float):
        # Capital letters are powers of 1024, which vLLM takes without decimals.
        is_capital = flag.kind == "size" and re.fullmatch(r"\d+\.\d+[KMGT]", str(value))
        meant = f"; did you mean {str(value).lower()}?" if is_capital else ""
        return None if _fits(flag, value) else f"must be {_wanted(flag)}{meant}"
    if isinstance(value, Sequence):
        return _misused_list(flag, value)
    return None


def _misused_list(flag: Flag, items: Sequence[object]) -> str | None:
    if flag.kind in ("json", "any"):
        return None
    if not (flag.several or flag.repeated):
        return f"takes no list: it must be {_wanted(flag)}"
    fits = all(isinstance(item, str | int | float) and _fits(flag, item) for item in items)
    return None if fits else f"must hold nothing but {_wanted(flag)}"


def _fits(flag: Flag, value: str | int | float) -> bool:
    text = str(value)
    if flag.nullable and text == "None":
        return True
    if flag.choices:
        return (text.lower().replace("-", "_") if flag.loose else text) in flag.choices
    if flag.kind == "whole":
        return _is_whole(value) or re.fullmatch(r"\s*[+-]?\d+\s*", text) is not None
    if flag.kind == "size":
        # `human_readable_int` in vllm/utils/argparse_utils.py (0.32.0)
        return _is_whole(value) or re.fullmatch(r"-?\d+|\d+[kKmMgGtT]|\d+\.\d+[kmgt]", text) is not None
    if flag.kind == "number":
        return (
            not isinstance(value, str) or re.fullmatch(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", text) is not None
        )
    if flag.kind == "json":
        return not isinstance(value, str) or _is_json(value)
    return True


def _is_whole(value: str | int | float) -> bool:
    # A larger float is written 1e+300, which Python's int() does not read.
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer() and abs(value) < 2**53)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


_WANTED = {
    "whole": "a whole number",
    "number": "a number",
    "size": "a whole number, which may end in k, m, g or t",
    "text": "a text",
    "any": "a text or a mapping",
    "json": "a mapping or a list",
}


def _wanted(flag: Flag) -> str:
    return f"one of {', '.join(flag.choices)}" if flag.choices else _WANTED[flag.kind]


def _meant(name: str, flags: Mapping[str, Flag]) -> str:
    if name in SHORT_FLAGS:
        return f"; did you mean {SHORT_FLAGS[name]}?"
    positive = opposite(name)
    if positive in flags and flags[positive].kind == "boolean":
        return f"; did you mean {positive}, with the other value?"
    beginnings = [flag for flag in flags if flag.startswith(name)]
    close = beginnings if len(beginnings) == 1 else get_close_matches(name, flags, n=1, cutoff=0.8)
    return f"; did you mean {close[0]}?" if close else ""


def same_flag(name: str, minor: tuple[int, ...]) -> str:
    """One name for all that this version takes for one flag: `x` for --no-x, `enable-x` for --disable-x as well."""
    flags = flags_of(minor)
    bare = name if name in flags else name.removeprefix("no-")
    other = opposite(bare)
    positive = flags.get(other)
    is_opposite = bare in flags and flags[bare].kind == "switch" and positive and positive.kind == "boolean"
    return other if is_opposite else bare


def opposite(name: str) -> str:
    """The name of the flag that says the contrary; empty where there is none."""
    for prefix, other in (("enable-", "disable-"), ("disable-", "enable-")):
        if name.startswith(prefix):
            return other + name.removeprefix(prefix)
    return ""


def _parsed(table: str) -> Iterator[tuple[str, Flag]]:
    for name, rest in _lines(table):
        kind, _, mark = rest.partition(" ")
        bare = kind.rstrip("?+*~")
        marks = kind.removeprefix(bare)
        choices = tuple(bare.split("|")) if "|" in bare else ()
        yield (
            name,
            Flag(
                "choice" if choices else bare,
                choices,
                nullable="?" in marks,
                several="+" in marks,
                repeated="*" in marks,
                deprecated=mark == "deprecated",
                loose="~" in marks,
            ),
        )


def _lines(table: str) -> Iterator[tuple[str, str]]:
    """Names, and what follows them; a line that is indented goes on from the one before."""
    for line in re.sub(r"\n +", "", table).strip().splitlines():
        name, _, rest = line.partition(" ")
        yield name, rest
