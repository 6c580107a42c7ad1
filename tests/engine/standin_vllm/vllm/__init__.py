"""A stand-in for vLLM: its arguments and endpoints without a model, so that a pod can be tested in seconds."""

from importlib.metadata import version

__version__ = version("vllm")
