#!/bin/sh
# Renews the expected texts of `mantissa explain`: tests/golden/explain/NAME.txt and NAME.wide.txt from
# NAME.json. Look at the difference before committing.
#   scripts/golden_explain.sh build/release/bin/mantissa
set -eu
binary=$(realpath "$1")
cd "$(dirname "$0")/../tests/golden/explain"
for config in *.json; do
  "$binary" explain "$config" > "${config%.json}.txt"
  "$binary" explain --wide "$config" > "${config%.json}.wide.txt"
done
