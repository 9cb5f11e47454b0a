#!/usr/bin/env bash
# Runs a test as on another CPU:   tests/under.sh MANTISSA SETTING PROGRAM [ARGUMENT]...
# SETTING is ONEDNN_MAX_CPU_ISA=… for the GEMMs of the library, MANTISSA_MAX_CPU_LEVEL=… for the kernels, or "qemu" for both on an emulated
# CPU without AVX-512. Exit code 77 (skipped) where this CPU has nothing to leave out, because then the other tests run so, or without qemu.
set -euo pipefail
mantissa=$1 setting=$2
shift 2

skip() {
  echo "SKIPPED: $1"
  exit 77
}

instructions() { "$@" "$mantissa" doctor | grep -E '^(matmuls|other kernels) ' | sed 's/ (MANTISSA_MAX_CPU_LEVEL.*//'; }

if [ "$setting" = qemu ]; then
  command -v qemu-x86_64 > /dev/null || skip "no qemu-x86_64 (Debian: qemu-user)"
  exec qemu-x86_64 -cpu max "$@"
fi
own=$(instructions env) other=$(instructions env "$setting")
[ "$own" != "$other" ] || skip "$setting leaves out nothing that is used on this CPU"
printf '%s\n' "$other"
exec env "$setting" "$@"
