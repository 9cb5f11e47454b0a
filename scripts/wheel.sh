#!/usr/bin/env bash
# Builds wheels in dist/ (pip fetches setuptools from PyPI for the first):
#   scripts/wheel.sh            the codecs in NumPy (python/), and the archive of the golden vectors that hold them and the program
#   scripts/wheel.sh program    the program with the libraries that it links, with machine code for all GPUs where there is the CUDA toolkit
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

build_program() {
  scripts/setup.sh
  scripts/setup.sh scripts/packages-test.txt  # patchelf
  . scripts/jobs.sh
  cmake --preset release -B build/wheel -DMANTISSA_TESTS=OFF -DMANTISSA_CUDA_ARCHITECTURES=all -DMANTISSA_CUDA_FAST_COMPILE=OFF
  cmake --build build/wheel --parallel "$jobs"
  prefix=$(mktemp -d)
  trap 'rm -rf "$prefix"' EXIT
  cmake --install build/wheel --prefix "$prefix" --component runtime >/dev/null
  scripts/program_wheel.py "$prefix" dist
}

build_codecs() {
  local python=python3
  "$python" -m pip --version >/dev/null 2>&1 || { echo "wheel: Python lacks pip; install it: apt-get install python3-pip" >&2; exit 3; }
  mkdir -p dist
  sources=$(mktemp -d)
  trap 'rm -rf "$sources"' EXIT
  cp -r python/mantissa_formats python/pyproject.toml python/README.md LICENSE "$sources"
  "$python" -m pip wheel --quiet --no-deps --wheel-dir dist "$sources"
  tar --sort=name --owner=0 --group=0 --mtime=@0 --transform 's,^tests/golden,mantissa-golden-vectors,' \
    --transform 's,^LICENSE,mantissa-golden-vectors/LICENSE,' \
    -czf dist/mantissa-golden-vectors.tar.gz LICENSE tests/golden/manifest.json tests/golden/worked_examples.json tests/golden/*.mxg tests/golden/*.mxm
  ls -l dist
}

case ${1-} in
  "") build_codecs ;;
  program) build_program ;;
  -h | --help) sed -n '2,4s/^# //p' "$0" ;;
  *) echo "wheel: unknown argument '$1' (none, or program)" >&2; exit 2 ;;
esac
