# packtrain with locked versions, as a user that is not root.
#   docker build -t packtrain .                                                                       for CUDA GPUs
#   docker build -t packtrain:cpu --build-arg BASE=ubuntu:24.04 --build-arg TORCH=cpu --build-arg FLASH= .   without GPU
#   docker run --rm --gpus all --ipc=host -v "$PWD:/work" packtrain packtrain sft run.yaml
# The CUDA base has nvcc and a C++ compiler, which DeepSpeed's optimizers and torch.compile need at the first run. BASE has to have Python 3.11 or later.
ARG BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04
FROM ${BASE}

RUN apt-get update && apt-get install --yes --no-install-recommends \
      python3 python3-venv python3-dev g++ git openssh-client libibverbs1 && rm -rf /var/lib/apt/lists/*

ARG TORCH=cuda
# FlashAttention 4, for Hopper and Blackwell; empty for none
ARG FLASH=flash-attn-4==4.0.0b36
COPY . /opt/packtrain
RUN /opt/packtrain/deploy/install.sh /opt/venv && if [ -n "${FLASH}" ]; then /opt/venv/bin/pip install --no-cache-dir "${FLASH}"; fi
ENV PATH=/opt/venv/bin:${PATH} PYTHONUNBUFFERED=1

RUN useradd --create-home trainer
USER trainer
WORKDIR /work
# Exit code 3 where the machine is not fit to train.
HEALTHCHECK --interval=10m --timeout=2m --start-period=1m CMD packtrain env --json > /dev/null
CMD ["packtrain", "env"]
