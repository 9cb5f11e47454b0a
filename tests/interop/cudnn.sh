#!/usr/bin/env bash
# cudnn.sh SIMT_TESTS INCLUDE: attention over the descriptors of the cuDNN whose header lies in INCLUDE, which makes its plans for an H200 and
# compiles them. It needs no GPU, but a libcuda.so.1, which this makes: its functions fail as those of NVIDIA's stub do, but for those that
# load what was compiled. Skipped without the library or the toolkit's stub.
set -euo pipefail
find_file() { find -L "$1/../lib64" "$1/../lib" "$1/../targets/x86_64-linux/lib" -name "$2" 2>/dev/null | head -1 || true; }
library=$(find_file "$2" libcudnn_graph.so.9)
[ -n "$library" ] || { echo "SKIPPED: no libcudnn_graph.so.9 beside $2"; exit 77; }
stub=$(find_file "$2" libcuda.so)
[ -n "$stub" ] || { echo "SKIPPED: no stubs/libcuda.so beside $2"; exit 77; }
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
{
  cat <<'C'
static char object[64];
static int fails(void) { return 34; }
static int works(void) { return 0; }
static int gives(void** out) { return *out = object, 0; }
static int gives_a_number(int* out) { return *out = 64, 0; }
int cuLibraryGetKernelCount(unsigned* count) { return *count = 1, 0; }
int cuLibraryEnumerateKernels(void** kernels, unsigned count) { while (count > 0) kernels[--count] = object; return 0; }
C
  nm -D "$stub" | awk '$2 == "T" { print $3 }' | sort -u | while read -r name; do
    case $name in
      cuLibraryGetKernelCount | cuLibraryEnumerateKernels) continue ;;
      cuLibraryLoadData | cuLibraryGetKernel | cuLibraryGetModule | cuModuleGetFunction | cuKernelGetFunction | cuModuleLoadData*) how=gives ;;
      cuKernelGetAttribute | cuFuncGetAttribute) how=gives_a_number ;;
      cuLibrary* | cuKernel* | cuModule* | cuFuncSetAttribute) how=works ;;
      *) how=fails ;;
    esac
    echo "int $name(void) __attribute__((alias(\"$how\")));"
  done
} >"$made/stub.c"
cc -shared -fPIC -w -Wl,-soname,libcuda.so.1 "$made/stub.c" -o "$made/libcuda.so.1"
LD_LIBRARY_PATH=$made:$(dirname "$library")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} MANTISSA_SIMT_CUDNN=$library \
  "$1" --gtest_brief=1 --gtest_filter='CudnnAttention.*:Cudnn.TakesTheMemory*:Cudnn.Makes*'
