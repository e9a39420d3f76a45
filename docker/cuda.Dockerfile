# Environment for engines, kernels and the scripts of bench/ on an H100 or H200. torch, Triton and TensorRT
# are pinned to versions within pyproject.toml's bounds. The driver must support their CUDA version.
#
#     docker build -f docker/cuda.Dockerfile -t g4ir-cuda .
#     docker run --gpus all --ipc host -v "$PWD/results:/results" g4ir-cuda \
#         python -m pytest -n 1 bench/gpu --out /results/gpu
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/g4ir
ENV PATH=/opt/g4ir/bin:$PATH CUDA_HOME=/usr/local/cuda

# torch is installed first, so that no other package pulls in another build of it.
RUN pip install --no-cache-dir torch==2.11.0 triton==3.6.0 'setuptools>=77'
RUN pip install --no-cache-dir tensorrt-cu13==11.4.0.106 'onnx>=1.20'

WORKDIR /g4ir
COPY . .
RUN pip install --no-cache-dir --no-build-isolation -e '.[hf,mm,serve]' pytest pytest-xdist
CMD ["g4ir", "--help"]
