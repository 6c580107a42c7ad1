"""Whether an adapter is one that vLLM serves as it was trained: `adapter_check` asks all the rules here."""
