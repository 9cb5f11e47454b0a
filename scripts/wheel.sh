#!/usr/bin/env bash
# Builds in dist/ the wheel of the codecs in NumPy (python/) and the archive of the golden vectors that hold them and the program:
#   scripts/wheel.sh
# pip fetches setuptools from PyPI for the wheel.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=python3
"$python" -m pip --version >/dev/null 2>&1 || { echo "wheel: Python lacks pip; install it: apt-get install python3-pip" >&2; exit 3; }
mkdir -p dist
sources=$(mktemp -d)
trap 'rm -rf "$sources"' EXIT
cp -r python/. LICENSE "$sources"
"$python" -m pip wheel --quiet --no-deps --wheel-dir dist "$sources"
tar --sort=name --owner=0 --group=0 --mtime=@0 --transform 's,^tests/golden,mantissa-golden-vectors,' \
  --transform 's,^LICENSE,mantissa-golden-vectors/LICENSE,' \
  -czf dist/mantissa-golden-vectors.tar.gz LICENSE tests/golden/manifest.json tests/golden/worked_examples.json tests/golden/*.mxg tests/golden/*.mxm
ls -l dist
