"""What vLLM and PEFT make of adapters: run by test_contract_adapters.py inside the sandbox image.

Reads `{"base": config.json's content, "paths": [...]}` from stdin and prints one line of answers. vLLM's are those of
its own worker's manager on a small base without trained weights: what it says while loading, and after activation every
module's delta. PEFT's are those of PeftModel.from_pretrained on the same base.
"""

import copy
import json
import pathlib
import sys
import tempfile
import warnings

import torch
import transformers
from peft import PeftConfig, PeftModel, load_peft_weights
from peft.tuners.lora import LoraLayer
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype


def told(error):
    return f"{type(error).__name__}: {error}"[:500]


class Vllm:
    def __init__(self, base):
        with tempfile.TemporaryDirectory() as directory:
            pathlib.Path(directory, "config.json").write_text(json.dumps(base))
            engine = EngineArgs(
                model=directory,
                skip_tokenizer_init=True,
                load_format="dummy",
                dtype="float32",
                enforce_eager=True,
                max_model_len=64,
                enable_lora=True,
                max_lora_rank=512,
            ).create_engine_config()
        with set_current_vllm_config(engine):
            init_distributed_environment(1, 0, "file://" + tempfile.mktemp(), 0, backend="gloo")
            ensure_model_parallel_initialized(1, 1)
            with set_default_torch_dtype(torch.float32), torch.device("cpu"):
                model = initialize_model(engine)
                self.worker = LRUCacheWorkerLoRAManager(engine, torch.device("cpu"), model.embedding_modules)
                self.worker.create_lora_manager(model, engine)
        self.manager = self.worker._adapter_manager

    def answer(self, path, number):
        request = LoRARequest(lora_name=f"a{number}", lora_int_id=number, lora_path=path)
        try:
            self.worker._load_adapter(request)
        except Exception as error:
            return {"refused": told(error), "at": "load"}, {}
        try:
            self.worker.add_adapter(request)
            return {}, self.deltas(self.manager.lora_index_to_id.index(number))
        except Exception as error:
            return {"refused": told(error), "at": "activation"}, {}
        finally:
            self.worker.remove_adapter(number)
            self.manager.lora_index_to_id = [None] * len(self.manager.lora_index_to_id)
            self.manager._active_adapters.clear()

    def deltas(self, slot):
        found = {}
        for name, module in self.manager.modules.items():
            parent, _, last = name.rpartition(".")
            if isinstance(module.lora_a_stacked, torch.Tensor):
                a, b = module.lora_a_stacked[slot].squeeze(0), module.lora_b_stacked[slot].squeeze(0)
                # An embedding's A holds a row for every token.
                found[name] = (a @ b.T).float() if last == "embed_tokens" else (b @ a).float()
                continue
            children = self.manager.packed_modules_mapping.get(last, [last])
            for child, a, b in zip(children, module.lora_a_stacked, module.lora_b_stacked, strict=True):
                found[f"{parent}.{child}".lstrip(".")] = (b[slot, 0] @ a[slot, 0]).float()
        return used(found)


class Peft:
    def __init__(self, base):
        self.base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**base))

    def answer(self, path):
        # It would wait for somebody to write into the pipe.
        if any(entry.is_fifo() for entry in pathlib.Path(path).iterdir()):
            return {"refused": "a pipe", "at": "weights"}, {}
        try:
            PeftConfig.from_pretrained(path)
        except Exception as error:
            return {"refused": told(error), "at": "config"}, {}
        try:
            names = set(load_peft_weights(path, device="cpu"))
            model = PeftModel.from_pretrained(copy.deepcopy(self.base), path)
            deltas = {
                name.removeprefix("base_model.model."): module.get_delta_weight("default").detach().float()
                for name, module in model.named_modules()
                if isinstance(module, LoraLayer)
            }
        except Exception as error:
            return {"refused": told(error), "at": "weights"}, {}
        here = {name.replace(".default", "") for name in model.state_dict()}
        return {"foreign": len(names - here)}, used(deltas)


def used(deltas):
    return {name: delta for name, delta in deltas.items() if not torch.all(delta == 0)}


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(
        ours[name].shape == theirs[name].shape and torch.allclose(ours[name], theirs[name], rtol=1e-3) for name in ours
    )


def main():
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    asked = json.load(sys.stdin)
    vllm, peft = Vllm(asked["base"]), Peft(asked["base"])
    answers = []
    for number, path in enumerate(asked["paths"], 1):
        of_vllm, served = vllm.answer(path, number)
        of_peft, trained = peft.answer(path)
        of_vllm["modules"], of_peft["modules"] = len(served), len(trained)
        answers.append({"vllm": of_vllm, "peft": of_peft, "same": same(served, trained)})
    print("ANSWERS " + json.dumps(answers))


main()
