// The number formats on a GPU against the same header on the host: every encoder over all 2^32 fp32 inputs, every scale rule over all
// amaxes, every code at every scale, every exponent shift; and the GPU's own conversion instructions against the encoders. The slice
// formats of scripts/gpu.sh. Exit code 0: equal; 1: not; 77: no device.
#include <cuda_fp4.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <nv/target>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "backend/cuda/codes/scaled_codes.h"
#include "mantissa/formats/block_scale.h"

namespace {

using namespace mantissa;

constexpr int kSkipped = 77;
constexpr uint32_t kChunk = 1U << 26;

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

// Each maps the number of a case to a result; the same code runs on both sides.
template <class E>
struct Encode {
  using Result = uint8_t;
  MANTISSA_HOST_DEVICE Result operator()(uint32_t x) const { return E::encode(x, 127); }
};

// All inputs in a block of a scale that depends on the input, so that all scales occur.
template <class E>
struct EncodeInBlock {
  using Result = uint8_t;
  ScaleRule rule;
  MANTISSA_HOST_DEVICE Result operator()(uint32_t x) const {
    return encode_in_block<E>(x, static_cast<uint8_t>((x >> 23) + (x * 2654435761U >> 30)), rule);
  }
};

// Every bf16 at every scale in a pack of eight, as kernels encode.
template <class E>
struct EncodeInPack {
  using Result = uint8_t;
  ScaleRule rule;
  __device__ Result in_pack(uint32_t x, uint8_t scale, unsigned place) const {
    const uint32_t two = x | x >> 16;
    const gpu::Words words{{two, two, two, two}};
    const bool exactly = rule == ScaleRule::flashinfer && !gpu::are_ordinary(words, scale);
    return exactly ? encode_in_block<E>(x, scale, rule) : gpu::encoded<E>(words, gpu::factor_of<E>(scale, scale == kScaleNan)).at(place);
  }
  MANTISSA_HOST_DEVICE Result operator()(uint32_t i) const {
    const uint32_t x = i >> 8 << 16;
    const bool poisons = (x & ~kFp32Sign) >= kFp32Inf && rule != ScaleRule::flashinfer;
    const auto scale = poisons ? kScaleNan : static_cast<uint8_t>(i % 256 == 254 ? 127 : i);
    NV_IF_TARGET(NV_IS_DEVICE, (return in_pack(x, scale, i % gpu::kPack);), (return encode_in_block<E>(x, scale, rule);))
  }
};

// Decodes in a pack of eight, at scales that are not extreme; cases are numbered as in Decode.
template <class E>
struct DecodeInPack {
  using Result = uint32_t;
  __device__ float in_pack(uint8_t code, uint8_t scale, unsigned place) const {
    gpu::PackOfCodes<E> codes{};
    for (unsigned n = 0; n < gpu::kPack; ++n) codes.put(n, code);
    return gpu::nonfinite_bits(codes) != 0 ? __uint_as_float(E::decode(code, scale))
                                           : gpu::elements_of(codes).at[place] * gpu::power_of(scale);
  }
  MANTISSA_HOST_DEVICE Result operator()(uint32_t i) const {
    const auto code = static_cast<uint8_t>((i >> 8) % (2 * E::sign_bit)), given = static_cast<uint8_t>(i);
    const uint8_t scale = extreme_scale<E>(given) ? uint8_t{127} : given;
    NV_IF_TARGET(NV_IS_DEVICE, (return __float_as_uint(in_pack(code, scale, i % gpu::kPack));), (return E::decode(code, scale);))
  }
};

template <class E>
struct Scale {
  using Result = uint8_t;
  ScaleRule rule;
  MANTISSA_HOST_DEVICE Result operator()(uint32_t amax) const { return block_scale<E>(amax & ~kFp32Sign, rule); }
};

// Scales that are searched, of a block of 32: amax, and elements below it that depend on the input.
struct SearchedScale {
  using Result = uint8_t;
  MANTISSA_HOST_DEVICE Result operator()(uint32_t x) const {
    const uint32_t amax = x & ~kFp32Sign;
    ScaleErrors errors;
    errors.add(amax, amax);
    for (uint32_t i = 1; i < 32; ++i) {
      const uint32_t word = (x + i) * 2654435761U, drop = (word >> 28) % 5 << 23;
      errors.add(amax > drop ? (amax - drop) ^ (word & 0x007F0000U) : amax, amax);
    }
    return searched_scale<E2M1>(amax, errors, {});
  }
};

template <class E>
struct Decode {
  using Result = uint32_t;
  ScaleRule rule;
  MANTISSA_HOST_DEVICE Result operator()(uint32_t i) const {
    return decode_in_block<E>(static_cast<uint8_t>((i >> 8) % (2 * E::sign_bit)), static_cast<uint8_t>(i), rule);
  }
};

template <class E>
struct DecodeBf16 {
  using Result = uint32_t;
  MANTISSA_HOST_DEVICE Result operator()(uint32_t i) const {
    return E::decode_bf16(static_cast<uint8_t>((i >> 8) % (2 * E::sign_bit)), static_cast<uint8_t>(i));
  }
};

template <class E>
struct Shift {
  using Result = uint8_t;
  MANTISSA_HOST_DEVICE Result operator()(uint32_t i) const {
    const auto from = static_cast<uint8_t>(i >> 8), to = static_cast<uint8_t>(i);
    return from == kScaleNan ? uint8_t{0} : shift_in_block<E>(static_cast<uint8_t>((i >> 16) % (2 * E::sign_bit)), from, to);
  }
};

constexpr unsigned kThreads = 256;

template <class Function>
__global__ void __launch_bounds__(kThreads) evaluate(Function function, uint32_t begin, uint32_t count, typename Function::Result* out) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = function(begin + i);
}

// The number of cases in [begin, begin + device.size()) that differ on the host; `example` becomes the smallest.
template <class Function>
uint64_t differences(Function function, uint32_t begin, const std::vector<typename Function::Result>& device, uint32_t& example) {
  const size_t threads = std::max(1U, std::thread::hardware_concurrency());
  std::vector<uint64_t> counts(threads);
  std::vector<size_t> firsts(threads, device.size());
  std::vector<std::thread> workers;
  for (size_t t = 0; t < threads; ++t) {
    workers.emplace_back([&, t] {
      for (size_t i = device.size() * t / threads; i < device.size() * (t + 1) / threads; ++i) {
        if (function(begin + static_cast<uint32_t>(i)) == device[i]) continue;
        if (counts[t]++ == 0) firsts[t] = i;
      }
    });
  }
  uint64_t total = 0;
  for (size_t t = 0; t < threads; ++t) {
    workers[t].join();
    total += counts[t];
  }
  example = begin + static_cast<uint32_t>(*std::min_element(firsts.begin(), firsts.end()));
  return total;
}

bool report(const std::string& name, uint64_t cases, uint64_t wrong, uint32_t example) {
  std::printf("%s %-44s %llu cases", wrong == 0 ? "pass" : "FAIL", name.c_str(), static_cast<unsigned long long>(cases));
  if (wrong > 0) std::printf(", %llu differ, one of them %08x", static_cast<unsigned long long>(wrong), example);
  std::printf("\n");
  std::fflush(stdout);
  return wrong == 0;
}

template <class Function>
bool sweep(const std::string& name, Function function, uint64_t cases) {
  using Result = typename Function::Result;
  const auto chunk = static_cast<uint32_t>(std::min<uint64_t>(cases, kChunk));
  Result* memory = nullptr;
  check(cudaMalloc(&memory, chunk * sizeof(Result)), "cudaMalloc");
  std::vector<Result> results(chunk);
  uint64_t wrong = 0;
  uint32_t example = 0;
  for (uint64_t begin = 0; begin < cases; begin += chunk) {
    const auto first = static_cast<uint32_t>(begin);
    evaluate<<<(chunk + kThreads - 1) / kThreads, kThreads>>>(function, first, chunk, memory);
    check(cudaGetLastError(), "evaluate");
    check(cudaMemcpy(results.data(), memory, chunk * sizeof(Result), cudaMemcpyDeviceToHost), "cudaMemcpy");
    uint32_t found = 0;
    const uint64_t count = differences(function, first, results, found);
    if (wrong == 0 && count > 0) example = found;
    wrong += count;
  }
  check(cudaFree(memory), "cudaFree");
  return report(name, cases, wrong, example);
}

// The result of the device's own conversion: one instruction from sm_89 (FP8) and sm_100a (FP4) on, software before.
template <class E>
__device__ uint8_t converted(float x) {
  if constexpr (std::is_same_v<E, E4M3>) return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
  if constexpr (std::is_same_v<E, E5M2>) return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2);
  if constexpr (std::is_same_v<E, E2M1>) return __nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest);
}

template <class E>
__global__ void __launch_bounds__(kThreads) compare_conversion(uint32_t begin, unsigned long long* wrong, unsigned int* example) {
  const uint32_t x = begin + blockIdx.x * blockDim.x + threadIdx.x;
  if (converted<E>(__uint_as_float(x)) == E::encode(x, 127)) return;
  if (atomicAdd(wrong, 1ULL) == 0) *example = x;
}

template <class E>
bool sweep_conversion(const std::string& name) {
  unsigned long long* wrong = nullptr;
  unsigned int* example = nullptr;
  check(cudaMallocManaged(&wrong, sizeof *wrong), "cudaMallocManaged");
  check(cudaMallocManaged(&example, sizeof *example), "cudaMallocManaged");
  *wrong = 0, *example = 0;
  for (uint64_t begin = 0; begin < 1ULL << 32; begin += kChunk) {
    compare_conversion<E><<<kChunk / kThreads, kThreads>>>(static_cast<uint32_t>(begin), wrong, example);
    check(cudaGetLastError(), "compare_conversion");
  }
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  const bool same = report(name + " the device's conversion", 1ULL << 32, *wrong, *example);
  check(cudaFree(wrong), "cudaFree"), check(cudaFree(example), "cudaFree");
  return same;
}

template <class E>
bool sweep_format(const std::string& name, bool flashinfer) {
  const uint64_t all = 1ULL << 32, codes = 2 * E::sign_bit;
  bool same = sweep(name + " encode", Encode<E>{}, all);
  same &= sweep(name + " encode in poisoned and other blocks", EncodeInBlock<E>{ScaleRule::rceil}, all);
  same &= sweep(name + " encode in packs", EncodeInPack<E>{ScaleRule::rceil}, 1 << 24);
  same &= sweep(name + " decode in packs", DecodeInPack<E>{}, codes * 256);
  same &= sweep(name + " scale, rceil", Scale<E>{ScaleRule::rceil}, all / 2);
  same &= sweep(name + " scale, floor", Scale<E>{ScaleRule::floor}, all / 2);
  same &= sweep(name + " scale, even", Scale<E>{ScaleRule::even}, all / 2);
  same &= sweep(name + " scale, ceil", Scale<E>{ScaleRule::ceil}, all / 2);
  if (!searches_scale<E>(ScaleRule::mse)) same &= sweep(name + " scale, mse", Scale<E>{ScaleRule::mse}, all / 2);
  same &= sweep(name + " decode", Decode<E>{ScaleRule::rceil}, codes * 256);
  same &= sweep(name + " decode to bf16", DecodeBf16<E>{}, codes * 256);
  same &= sweep(name + " shift", Shift<E>{}, codes << 16);
  if (flashinfer) {
    same &= sweep(name + " encode in blocks, flashinfer", EncodeInBlock<E>{ScaleRule::flashinfer}, all);
    same &= sweep(name + " encode in packs, flashinfer", EncodeInPack<E>{ScaleRule::flashinfer}, 1 << 24);
    same &= sweep(name + " scale, mse", SearchedScale(), all / 2);
    same &= sweep(name + " scale, flashinfer", Scale<E>{ScaleRule::flashinfer}, all / 2);
    same &= sweep(name + " decode, flashinfer", Decode<E>{ScaleRule::flashinfer}, codes * 256);
  }
  return sweep_conversion<E>(name) && same;
}

}  // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("SKIPPED: no CUDA device\n");
    return kSkipped;
  }
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  std::printf("%s, sm_%d%d\n", properties.name, properties.major, properties.minor);
  bool same = sweep_format<E4M3>("e4m3", false);
  same &= sweep_format<E5M2>("e5m2", false);
  same &= sweep_format<E2M1>("e2m1", true);
  return same ? 0 : 1;
}
