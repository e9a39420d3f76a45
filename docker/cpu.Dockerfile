# g4ir on a CPU, with its server. The volume keeps downloads, engines, and the record of which engines are
# trusted, for later containers.
#
#     docker build -f docker/cpu.Dockerfile -t g4ir .
#     docker run -it -v g4ir:/data g4ir g4ir chat e2b --download
#     docker run -p 127.0.0.1:8000:8000 -v g4ir:/data g4ir g4ir serve e2b --host 0.0.0.0
FROM python:3.12-slim-bookworm AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim-bookworm
# The compiler stays installed: the CPU kernels are compiled on first use.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /tmp/
RUN pip install --no-cache-dir -c /tmp/constraints.txt torch \
    --index-url https://download.pytorch.org/whl/cpu
RUN --mount=from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir -c /tmp/constraints.txt "$(ls /wheels/*.whl)[serve,mm]"
# kubernetes.yaml runs the container as this user id.
RUN useradd --uid 1000 --create-home g4ir && install -d -m 700 -o g4ir -g g4ir /data
ENV XDG_CACHE_HOME=/data/cache XDG_STATE_HOME=/data/state
USER g4ir
WORKDIR /home/g4ir
CMD ["g4ir", "--help"]
