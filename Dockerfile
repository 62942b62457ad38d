# Kernels from specs, without a CUDA toolkit: NVRTC and the disassemblers come from PyPI.
#
#     docker build --target codegen --tag codegen .              # renders, compiles, audits; needs no GPU
#     docker build --target gpu --tag codegen-gpu .              # with torch: verifies, measures, tunes, runs
#     docker run --rm --gpus all codegen-gpu doctor
#     docker run --rm --volume "$PWD:/work" codegen render my_kernel.yaml
#
# The compiler is the one that the receipts name (tests/constraints.txt). For hosts whose driver is of CUDA 12, older
# than 580: --build-arg CUDA=cu12 --build-arg CONSTRAINTS=/dev/null. docs/guide/install.md says what was tested.

ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY sparse_kernel_codegen sparse_kernel_codegen
COPY codegen codegen
COPY runtime runtime
COPY templates templates
COPY specs specs
COPY generated generated
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim-bookworm AS codegen
ARG CUDA=cu13
ARG CONSTRAINTS=/constraints.txt
COPY tests/constraints.txt /
COPY --from=wheel /wheels /wheels
RUN python3 -m venv /opt/codegen
RUN /opt/codegen/bin/pip install --no-cache-dir --constraint "$CONSTRAINTS" \
    "sparse-kernel-codegen[${CUDA},attest,tune] @ file://$(ls /wheels/*.whl)"
ENV PATH=/opt/codegen/bin:$PATH
RUN useradd --create-home --uid 1000 codegen && install --directory --owner=codegen /work
USER 1000
WORKDIR /work
# A kernel is compiled once, in this image: what is missing shows while it is built.
RUN codegen compile h100_topk32 && codegen doctor
ENTRYPOINT ["codegen"]
CMD ["--help"]

FROM codegen AS gpu
ARG CUDA=cu13
ARG CONSTRAINTS=/constraints.txt
USER 0
RUN /opt/codegen/bin/pip install --no-cache-dir --constraint "$CONSTRAINTS" \
    "sparse-kernel-codegen[${CUDA},torch] @ file://$(ls /wheels/*.whl)"
USER 1000
# What the NVIDIA container runtime mounts: the driver's libraries, and nvidia-smi.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN python3 -c "import torch; from sparse_kernel_codegen.patterns import TopK"
