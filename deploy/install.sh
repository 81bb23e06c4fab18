#!/usr/bin/env bash
# Installs packtrain with locked versions into a new environment: deploy/install.sh FOLDER
# TORCH=cuda (PyPI's, by its lock), cpu, or what pip takes, such as torch==2.13.0 where the index is set otherwise.
set -euo pipefail
folder=$1
here=$(cd "$(dirname "$0")" && pwd)
"${PYTHON:-python3}" -m venv "$folder"
pip=("$folder/bin/python" -m pip install --no-cache-dir --disable-pip-version-check)
case ${TORCH:-cuda} in
  cuda) "${pip[@]}" --require-hashes --no-deps -r "$here/torch-cuda.lock" ;;
  cpu) "${pip[@]}" --index-url https://download.pytorch.org/whl/cpu --no-deps torch==2.13.0 ;;
  *) "${pip[@]}" --no-deps "$TORCH" ;;
esac
"${pip[@]}" --require-hashes --no-deps -r "$here/requirements.lock"
"${pip[@]}" --no-deps "$here/.."
"$folder/bin/python" -m pip check
