#!/usr/bin/env bash
# Writes requirements.lock and torch-cuda.lock anew, from pyproject.toml: the newest versions that go together, with their hashes.
# Needs uv (pip install uv). deploy/install.sh and the Dockerfile install by them.
set -euo pipefail
cd "$(dirname "$0")/.."
torch=2.13.0
torchs='^(torch|triton|nvidia-|cuda-)'
all=$(mktemp)
trap 'rm -f "$all"' EXIT
extras=(--extra deepspeed --extra tensorboard --extra s3 --extra quantize --extra fp8)
uv pip compile pyproject.toml "${extras[@]}" --constraint <(echo "torch==$torch") --generate-hashes --no-annotate --no-header \
  --python-version 3.11 --python-platform x86_64-manylinux_2_28 --quiet --output-file "$all"
# A package is a line that begins with its name, and the lines of its hashes.
split() { awk -v torchs="$torchs" -v wanted="$1" '/^[a-z]/ { own = ($0 ~ torchs && $0 !~ /^torchao/) } own == wanted' "$all"; }
made="# Made by deploy/lock.sh for Python 3.11 and later on x86-64 Linux"
{ echo "$made: all but torch and what it alone needs."; split 0; } > deploy/requirements.lock
{ echo "$made: torch for CUDA, as it is on PyPI."; split 1; } > deploy/torch-cuda.lock
