# One image per process: docker build --target gateway -t gpufn-gateway .
# Built so far on Debian's Python, not on python:slim (docs/gpu.md, "What ran where").
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 GPUFN_HOME=/var/lib/gpufn
RUN useradd --system --create-home --home-dir /var/lib/gpufn gpufn
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY sdk sdk
COPY gateway gateway
COPY runtime runtime
COPY builder builder

FROM base AS gateway
RUN pip install ".[gateway]" && pip install --no-deps ./runtime
USER gpufn
ENV GPUFN_HOST=0.0.0.0 GPUFN_PORT=8090
EXPOSE 8090
CMD ["python", "-m", "gpufn_gateway"]

# The agent and the runner of one node, and the workers that they start. User code sees this image's packages: add yours
# in an image FROM this one. Root is needed for memory limits by cgroup; as another user, rlimits are used.
FROM base AS worker
RUN pip install ".[runtime]" && pip install --no-deps ./runtime
VOLUME /var/lib/gpufn
CMD ["python", "-m", "gpufn_runtime.runner"]

FROM worker AS agent
CMD ["python", "-m", "gpufn_runtime.agent"]

# Engines for the CPU; for GPUs put the extra `gpu` on top. It needs no other process of the node, only its name.
FROM base AS builder
RUN pip install ".[builder]" && pip install --no-deps ./runtime
USER gpufn
CMD ["python", "-m", "gpufn_builder"]
