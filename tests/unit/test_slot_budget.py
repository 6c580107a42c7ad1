"""How many adapters share a batch where the GPU's memory and the base's sizes are known, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.core.capacity import GIB, BaseSizes, Unknown
from components.core.engine_options import EngineOptions, PlannedAdapter
from components.core.engine_plan import plan_engine
from components.core.errors import UserError
from components.core.lora_flags import PlannedFlag
from components.core.naming import blob_path
from components.core.slot_budget import Budget, Memory
from tests.unit.test_capacity import AWQ, LLAMA_8B, sizes


def memory(gpu_gib: float, base: BaseSizes | Unknown | None = None) -> Memory:
    return Memory(int(gpu_gib * GIB), sizes(LLAMA_8B) if base is None else base)


L4 = EngineOptions(port=8000, max_model_len=8192, memory=memory(22.35))
H100 = replace(L4, memory=memory(80))


def flags(ranks: Sequence[int], options: EngineOptions) -> tuple[PlannedFlag, ...]:
    adapters = [PlannedAdapter(f"m{index:02}", f"sha256:{index:064x}", rank) for index, rank in enumerate(ranks)]
    plan = plan_engine("org/base", "/opt/python", adapters, [], options, blob_path)
    for flag in plan.flags:
        assert plan.argv[plan.argv.index(f"--{flag.name}") + 1] == flag.value
    return plan.flags


def max_loras(ranks: Sequence[int], options: EngineOptions) -> tuple[str, str]:
    flag = flags(ranks, options)[0]
    assert flag.name == "max-loras"
    return flag.value, flag.reason


def test_all_adapters_share_a_batch_where_there_is_room_for_more_than_the_cap() -> None:
    assert max_loras([16] * 40, H100) == (
        "40",
        "40 adapters, all may share a batch: 15.0 GiB of weights and 40 × 88 MiB of slots leave 55.2 GiB of 73.6 GiB",
    )


def test_the_kv_cache_keeps_room_for_four_requests() -> None:
    # 20.56 GiB less 14.96 of weights and 4 x 1 of KV cache are 1.61: more than a quarter of what the weights leave.
    assert max_loras([64] * 12, L4) == (
        "4",
        "12 adapters, as many as leave the KV cache its share: 15.0 GiB of weights and 4 × 352 MiB of slots leave "
        "4.2 GiB of 20.6 GiB",
    )
    assert max_loras([64] * 12, replace(L4, max_model_len=1024))[0] == "4"
    assert max_loras([64] * 12, replace(L4, max_model_len=10240))[0] == "1"


def test_one_slot_there_is_where_the_rule_leaves_none_and_a_request_fits() -> None:
    assert max_loras([64] * 2, replace(L4, max_model_len=32768)) == (
        "1",
        "2 adapters, one at a time, and even that leaves the KV cache too little: 15.0 GiB of weights and "
        "1 × 352 MiB of slots leave 5.3 GiB of 20.6 GiB",
    )


def test_slots_that_come_to_next_to_nothing_are_granted_where_four_requests_take_all() -> None:
    """maxModelLen as the base has it is for a few long requests, and clients would queue for half a GiB."""
    long = replace(H100, max_model_len=131072)
    assert max_loras([8] * 12, long) == (
        "12",
        "12 adapters, all may share a batch: 15.0 GiB of weights and 12 × 44 MiB of slots leave 58.1 GiB of 73.6 GiB",
    )
    assert max_loras([64] * 12, long) == (
        "5",
        "12 adapters, as many as come to a thirty-second of what the weights leave: 15.0 GiB of weights and 5 × 352 "
        "MiB of slots leave 56.9 GiB of 73.6 GiB",
    )


def test_a_single_request_that_takes_nearly_all_leaves_as_much_to_others_as_to_slots() -> None:
    """Activations and CUDA graphs lie there too: vLLM would end after it had loaded."""
    assert [max_loras([8] * 12, replace(L4, max_model_len=tokens))[0] for tokens in (44000, 45000, 45500)] == [
        "2", "1", "1",
    ]  # fmt: skip
    assert max_loras([8] * 12, replace(L4, max_model_len=44000))[1].startswith(
        "12 adapters, as many as come to half of what a single request leaves: "
    )
    with pytest.raises(UserError, match=r"need 20\.6 GiB, and vLLM gets 20\.6 GiB \(\d+ MiB less\) of the GPU"):
        flags([8] * 12, replace(L4, max_model_len=45800))


def test_no_more_slots_than_requests_share_a_batch() -> None:
    assert max_loras([8] * 300, H100) == (
        "256",
        "300 adapters, capped at 256 since a slot takes time as well; engine.args: maxNumSeqs sets another cap: "
        "15.0 GiB of weights and 256 × 44 MiB of slots leave 47.6 GiB of 73.6 GiB",
    )
    assert max_loras([8] * 400, replace(H100, max_cpu_loras=300))[0] == "256"
    assert max_loras([8] * 256, H100)[1].startswith("256 adapters, all may share a batch: ")
    assert max_loras([8] * 300, replace(H100, args={"maxNumSeqs": 1024}))[0] == "300"


def test_one_adapter_of_a_large_rank_is_told_whom_it_makes_wait() -> None:
    assert [flag.reason for flag in flags([16] * 11 + [64], L4)][1] == (
        "largest rank is 64 (m11), and raises it from 16 for all slots; without it, 11 adapters could share a batch"
    )


def test_nor_is_it_blamed_for_what_something_else_limits() -> None:
    for limit in ({"max_cpu_loras": 4}, {"args": {"maxNumSeqs": 4}}):
        reason = flags([16] * 39 + [64], replace(H100, **limit))[1].reason
        assert reason.endswith("raises it from 16 for all slots, +1.0 GiB"), reason


def test_several_gpus_are_told_as_each_of_them() -> None:
    two = replace(L4, args={"tensorParallelSize": 2}, gpu_memory_utilization=0.5)
    assert max_loras([16], two)[1].endswith("leave 3.6 GiB of 11.2 GiB on each of 2 GPUs")
    with pytest.raises(UserError) as raised:
        flags([], replace(two, gpu_memory_utilization=0.3))
    assert str(raised.value).endswith(
        "and vLLM gets 6.7 GiB of each of 2 GPUs; take a larger engine.gpuMemoryUtilization, a larger GPU, more GPUs "
        "(engine.args: {tensorParallelSize: 4}) or a smaller base"
    )


def test_one_adapter_of_a_large_rank_is_told_what_it_costs() -> None:
    assert flags([16, 64, 8], H100)[1] == PlannedFlag(
        "max-lora-rank", "64", "largest rank is 64 (m01), and raises it from 16 for all slots, +793 MiB"
    )
    assert flags([64, 64, 8], H100)[1].reason == "largest rank is 64 (m00)"
    assert flags([64], H100)[1].reason == "largest rank is 64 (m00)"
    assert flags([16, 64], replace(H100, max_lora_rank=128))[1].reason == "engine.maxLoraRank"


def test_what_cannot_start_is_refused_with_its_numbers() -> None:
    for options in (replace(L4, memory=memory(17)), replace(L4, memory=memory(17), max_loras=1)):
        with pytest.raises(UserError) as raised:
            flags([64, 64], options)
        assert str(raised.value) == (
            "weights of 15.0 GiB, a slot for adapters of rank 64 (352 MiB) and the KV cache of one request of 8192 "
            "tokens (1.0 GiB) need 16.3 GiB, and vLLM gets 15.6 GiB of the GPU; take a larger GPU, more GPUs "
            "(engine.args: {tensorParallelSize: 2}), a smaller base or a smaller engine.maxModelLen"
        )
    assert max_loras([64, 64], replace(L4, memory=memory(17), gpu_memory_utilization=0.97))[0] == "1"
    more_gpus = "more GPUs (engine.args: {tensorParallelSize: 2})"
    for options, rank, ways in (
        (replace(L4, memory=memory(16)), 64, f"a larger GPU, {more_gpus} or a smaller base"),
        (
            replace(L4, memory=memory(17.3), max_model_len=4096),
            256,
            f"a larger GPU, {more_gpus}, a smaller base or adapters of a smaller rank",
        ),
        (
            replace(L4, memory=memory(17.3), max_model_len=131072),
            8,
            f"a larger GPU, {more_gpus}, a smaller base or a smaller engine.maxModelLen",
        ),
    ):
        with pytest.raises(UserError) as raised:
            flags([rank], options)
        assert str(raised.value).partition("; take ")[2] == ways


def test_what_the_stack_file_chooses_wins_and_is_checked() -> None:
    assert max_loras([64] * 12, replace(L4, max_loras=12)) == (
        "12",
        "engine.maxLoras: 15.0 GiB of weights and 12 × 352 MiB of slots leave 1.5 GiB of 20.6 GiB",
    )
    with pytest.raises(UserError) as raised:
        flags([64] * 12, replace(L4, max_loras=14))
    assert str(raised.value) == (
        "weights of 15.0 GiB, 14 slots for adapters of rank 64 (4.8 GiB) and the KV cache of one request of 8192 "
        "tokens (1.0 GiB) need 20.8 GiB, and vLLM gets 20.6 GiB of the GPU; lower engine.maxLoras to 4, or "
        "leave it out"
    )
    value, reason = max_loras([16] * 40, replace(H100, max_cpu_loras=10))
    assert (value, reason.split(":")[0]) == ("10", "40 adapters, capped by engine.maxCpuLoras")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"memory": memory(80, Unknown("nobody knows"))}, "nobody knows"),
        ({"max_model_len": None}, "engine.maxModelLen is not given"),
        ({"vllm": "0.25.0"}, "what vLLM 0.25 allocates is not known here"),
        ({"args": {"cpuOffloadGb": 4}}, "what engine.args: cpu-offload-gb changes of it is not known here"),
        ({"args": {"tensor-parallel": 2}}, "what engine.args: tensor-parallel changes of it is not known here"),
        (
            {"args": {"pipelineParallelSize": 2}},
            "what engine.args: pipeline-parallel-size changes of it is not known here",
        ),
        ({"args": {"kvCacheDtype": "nvfp4"}}, "engine.args: kv-cache-dtype has a value that is not known here"),
        (
            {"args": {"tensorParallelSize": "all"}},
            "engine.args: tensor-parallel-size has a value that is not known here",
        ),
        ({"args": {"quantization": "gguf"}}, "what a weight takes by engine.args: quantization is not known here"),
        ({"memory": memory(80, sizes(LLAMA_8B, sliding_window=1))}, "its layers attend to a sliding window"),
    ],
)
def test_what_is_not_known_changes_nothing_and_is_said(changes: dict[str, Any], reason: str) -> None:
    options = replace(H100, **changes)
    for ranks in ([8, 64], [16] * 40):
        told, plain = flags(ranks, options), flags(ranks, replace(options, memory=None))
        reason_of_all = plain[0].reason.split(";")[0]
        assert told == (
            replace(plain[0], reason=f"{reason_of_all}; the GPU's memory is not counted: {reason}"),
            *plain[1:],
        )


def test_what_cannot_be_shared_by_so_many_gpus_is_refused() -> None:
    three = replace(H100, args={"tensorParallelSize": 3})
    with pytest.raises(UserError) as caught:
        flags([8], three)
    assert str(caught.value) == (
        "engine.args: tensorParallelSize is 3, and vLLM cannot share the base's 32 attention heads among so many "
        "GPUs; among how many it can: 1, 2, 4, 8, 16, 32"
    )
    with pytest.raises(UserError, match="attention heads"):
        flags([], three)
    # phi-4: each of the numbers that divide its heads fails of something else.
    phi = sizes(LLAMA_8B, num_attention_heads=40, num_key_value_heads=10, intermediate_size=17920, vocab_size=100352)
    for split, what in (
        (3, "40 attention heads"),
        (4, "10 heads of keys"),
        (8, "10 heads of keys"),
        (5, "vocabulary of 100352 tokens"),
    ):
        with pytest.raises(UserError) as caught:
            flags([8], replace(H100, memory=memory(80, phi), args={"tensorParallelSize": split}))
        assert str(caught.value) == (
            f"engine.args: tensorParallelSize is {split}, and vLLM cannot share the base's {what} among so many GPUs; "
            "among how many it can: 1, 2"
        )
    # Which may be others than config.json has.
    assert flags([8], replace(three, args={**three.args, "hfOverrides": {"num_attention_heads": 33}}))[0].value == "1"
    sharded = {"tensorParallelSize": 16, "fullyShardedLoras": True}
    with pytest.raises(UserError) as caught:
        flags([8], replace(H100, args=sharded))
    assert str(caught.value) == (
        "engine.args: fullyShardedLoras shares rank 8 among 16 GPUs, which do not divide it; set engine.maxLoraRank "
        "to one that they divide, or leave fullyShardedLoras out"
    )
    assert flags([], replace(H100, args=sharded)) == ()


def test_no_more_adapters_share_a_batch_than_requests_do() -> None:
    """A slot that no batch can use costs memory, and time in every step."""
    for requests in (8, 8.0, "8"):
        value, reason = max_loras([16] * 40, replace(H100, args={"maxNumSeqs": requests}))
        assert value == "8"
        assert reason.startswith("40 adapters, as many as requests share a batch (maxNumSeqs): ")
    assert max_loras([16] * 4, replace(H100, args={"maxNumSeqs": 8}))[0] == "4"
    assert max_loras([16] * 40, replace(H100, args={"maxNumSeqs": 2}, max_cpu_loras=4))[0] == "2"
    assert max_loras([16] * 40, replace(H100, args={"maxNumSeqs": 8}, max_cpu_loras=4))[0] == "4"
    assert max_loras([16] * 40, replace(H100, args={"maxNumSeqs": 8}, max_loras=10))[0] == "10"


def test_a_base_alone_that_cannot_start_is_refused_too() -> None:
    small = replace(H100, memory=memory(16, sizes(LLAMA_8B)))
    with pytest.raises(UserError, match=r"^weights of 15.0 GiB and the KV cache of one request of \d+ tokens "):
        flags([], small)
    assert flags([], H100) == ()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dtype": "half"}, "15.0 GiB of weights and 1 × 88 MiB of slots"),
        ({"args": {"tensorParallelSize": 2.0}}, "7.5 GiB of weights and 1 × 62 MiB of slots"),
        (
            {"args": {"fullyShardedLoras": True, "tensorParallelSize": 4}},
            "3.7 GiB of weights and 1 × 28 MiB of slots",
        ),
        ({"args": {"loraTargetModules": ["q_proj"]}}, "15.0 GiB of weights and 1 × 18 MiB of slots"),
        ({"args": {"quantization": "fp8"}}, "8.5 GiB of weights and 1 × 88 MiB of slots"),
        (
            {"memory": memory(80, sizes(LLAMA_8B, quantization_config=AWQ))},
            "5.3 GiB of weights and 1 × 88 MiB of slots",
        ),
        ({"args": {"maxNumSeqs": 64, "enforceEager": True}}, "15.0 GiB of weights and 1 × 88 MiB of slots"),
    ],
)
def test_what_an_engine_is_told_counts(changes: dict[str, Any], told: str) -> None:
    assert (
        max_loras([16], replace(H100, **changes))[1].split(" leave ")[0] == f"1 adapter, all may share a batch: {told}"
    )


def test_keys_in_one_byte_leave_room_for_more() -> None:
    short = replace(L4, max_model_len=10240)
    assert max_loras([64] * 12, replace(short, args={"kvCacheDtype": "fp8"}))[0] == "4"


budgets = st.builds(
    Budget,
    share=st.integers(0, 10**6),
    weights=st.integers(0, 10**6),
    slot=st.integers(1, 10**4),
    request=st.integers(1, 10**5),
    tokens=st.just(1),
    rank=st.just(8),
)


@given(budgets)
def test_what_keeps_to_the_rule_fits_and_one_more_does_not_keep_to_it(budget: Budget) -> None:
    left = budget.share - budget.weights
    for slots in (budget.most, budget.most + 1):
        taken = slots * budget.slot
        due = 4 * taken <= left and taken + 4 * budget.request <= left
        keeps = due or (32 * taken <= left and taken + budget.request <= left)
        assert keeps == (slots == budget.most) or budget.most == 0
    assert budget.most == 0 or budget.fits(budget.most)


@given(budgets, st.integers(0, 10**6))
def test_more_memory_never_makes_fewer(budget: Budget, more: int) -> None:
    assert replace(budget, share=budget.share + more).most >= budget.most
