#!/usr/bin/env bash
# setup.sh [4 | cublas]: makes .venv-interop, the Python environment of the optional comparisons: PyTorch, NumPy, transformers, mlx-lm, gguf of
# PyPI. Tests labeled interop then run. With 4 also .venv-interop4, which has transformers 4 and takes the rest from .venv-interop. With cublas
# only .venv-cublas, which has cuBLASLt 13.10, later than that of PyTorch, for its descriptors.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[[ "$*" =~ ^(4|cublas)?$ ]] || { echo "interop: usage: setup.sh [4 | cublas]" >&2; exit 2; }
if [ "$*" = cublas ]; then
  python3 -m venv .venv-cublas
  exec .venv-cublas/bin/python -m pip install --quiet --no-deps nvidia-cublas==13.10.0.20
fi

make() {  # folder, requirements, the folder whose packages it also sees
  if cmp -s "$2" "$1/installed"; then
    echo "interop: $1 is up to date"
    return
  fi
  python3 -c 'import ensurepip' 2>/dev/null || { echo "interop: Python lacks venv; install it: apt-get install python3-venv" >&2; exit 3; }
  python3 -m venv "$1"
  if [ $# = 3 ]; then
    packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
    packages "$3" >"$(packages "$1")/interop.pth"
  fi
  "$1/bin/python" -m pip install --quiet --requirement "$2"
  "$1/bin/python" -c 'import torch, transformers; print("interop: torch", torch.__version__, "transformers", transformers.__version__)'
  cp "$2" "$1/installed"
}

make .venv-interop scripts/interop/requirements.txt
if [ "${1:-}" = 4 ]; then make .venv-interop4 scripts/interop/requirements4.txt .venv-interop; fi
