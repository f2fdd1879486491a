# One image per process: docker build --target gateway -t gpufn-gateway .
# The versions are those that CI tests. No image has a compiler, or our sources: our wheels are made in a stage of their own,
# and of all other packages only wheels are installed.
# Built so far on Debian's Python, not on python:slim (docs/gpu.md, "What ran where").
ARG PYTHON=3.12

FROM node:20-slim AS console
WORKDIR /src
COPY scripts/console scripts/console
COPY gateway/console gateway/console
RUN rm -rf gateway/console/node_modules && mkdir -p gateway/gpufn_gateway/console && scripts/console

FROM python:${PYTHON}-slim AS wheels
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY sdk sdk
COPY gateway gateway
COPY runtime runtime
COPY builder builder
COPY --from=console /src/gateway/gpufn_gateway/console/assets gateway/gpufn_gateway/console/assets
RUN pip wheel --no-deps --wheel-dir /wheels . ./runtime
COPY .ci/requirements.txt ./
RUN sed -n '/^[^ #]*==/s/ \\$//p' requirements.txt >/wheels/constraints.txt

FROM python:${PYTHON}-slim AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 GPUFN_HOME=/var/lib/gpufn
RUN useradd --system --create-home --home-dir /var/lib/gpufn gpufn
COPY --from=wheels /wheels /wheels

FROM base AS gateway
RUN cd /wheels && pip install --only-binary :all: -c constraints.txt "$(ls gpufn-*.whl)[gateway]" \
    && pip install --no-deps gpufn_platform-*.whl
USER gpufn
ENV GPUFN_HOST=0.0.0.0 GPUFN_PORT=8090
EXPOSE 8090
CMD ["python", "-m", "gpufn_gateway"]

# The agent and the runner of one node, and the workers that they start. User code sees this image's packages: add yours
# in an image FROM this one. Root is needed for memory limits by cgroup; as another user, rlimits are used.
FROM base AS worker
RUN cd /wheels && pip install --only-binary :all: -c constraints.txt "$(ls gpufn-*.whl)[runtime]" \
    && pip install --no-deps gpufn_platform-*.whl
VOLUME /var/lib/gpufn
CMD ["python", "-m", "gpufn_runtime.runner"]

FROM worker AS agent
CMD ["python", "-m", "gpufn_runtime.agent"]

# Engines for the CPU; for GPUs put the extra `gpu` on top. It needs no other process of the node, only its name.
FROM base AS builder
RUN cd /wheels && pip install --only-binary :all: -c constraints.txt "$(ls gpufn-*.whl)[builder]" \
    && pip install --no-deps gpufn_platform-*.whl
USER gpufn
CMD ["python", "-m", "gpufn_builder"]
