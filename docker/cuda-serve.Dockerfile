# g4ir's server on an NVIDIA GPU, as an unprivileged user. torch brings the CUDA libraries; Triton and
# builds on first use need the compiler. cuda.Dockerfile is for benchmarks and tests.
#
#     docker build -f docker/cuda-serve.Dockerfile -t g4ir-cuda-serve .
#     docker run --gpus all -p 127.0.0.1:8000:8000 -v g4ir:/data g4ir-cuda-serve \
#         g4ir serve e2b --device cuda --host 0.0.0.0 --download
FROM python:3.12-slim-bookworm AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM nvidia/cuda:13.0.2-base-ubuntu24.04
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/g4ir
ENV PATH=/opt/g4ir/bin:$PATH
# pinned to the versions of cuda.Dockerfile
RUN pip install --no-cache-dir torch==2.11.0 triton==3.6.0
RUN --mount=from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(ls /wheels/*.whl)[serve,mm]"
# Kubernetes and compose.yaml name the user by this number.
RUN userdel --remove ubuntu && useradd --uid 1000 --create-home g4ir \
    && install -d -m 700 -o g4ir -g g4ir /data
ENV XDG_CACHE_HOME=/data/cache XDG_STATE_HOME=/data/state \
    TRITON_CACHE_DIR=/data/triton
USER g4ir
WORKDIR /home/g4ir
CMD ["g4ir", "--help"]
