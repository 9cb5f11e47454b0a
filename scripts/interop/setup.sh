#!/usr/bin/env bash
# Makes .venv-interop, the Python environment of the optional comparisons: PyTorch and NumPy from PyPI. Tests labelled interop then run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

requirements=scripts/interop/requirements.txt
if cmp -s "$requirements" .venv-interop/installed; then
  echo "interop: .venv-interop is up to date"
  exit 0
fi
python3 -c 'import ensurepip' 2>/dev/null || { echo "interop: Python lacks venv; install it: apt-get install python3-venv" >&2; exit 3; }
python3 -m venv .venv-interop
.venv-interop/bin/pip install --quiet --requirement "$requirements"
.venv-interop/bin/python -c 'import torch; print("interop: torch", torch.__version__)'
cp "$requirements" .venv-interop/installed
