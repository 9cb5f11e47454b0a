#!/bin/sh
# Renews the expected error messages, those behind "=>" in tests/golden/errors/*.txt, by the tests that compare them. Look at the
# difference before committing.
#   scripts/golden_errors.sh build/release/bin
set -eu
MANTISSA_RENEW_ERRORS=1 "$1/layer_tests" --gtest_filter='*Messages.*' --gtest_brief=1
