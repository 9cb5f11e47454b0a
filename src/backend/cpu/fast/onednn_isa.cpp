#include "backend/cpu/fast/gemm_engine.h"
#include "backend/cpu/fast/onednn_matmul.h"

namespace mantissa {
namespace {

// Each instruction set has the bits of those that it includes; their order says nothing (AVX2 with VNNI is the largest of oneDNN 2.6).
bool includes(dnnl::cpu_isa isa, dnnl::cpu_isa part) {
  const auto bits = [](dnnl::cpu_isa set) { return static_cast<unsigned>(set); };
  return (bits(isa) & bits(part)) == bits(part);
}

}  // namespace

const char* isa_name(dnnl::cpu_isa isa) {
  using dnnl::cpu_isa;
  if (includes(isa, cpu_isa::avx512_core_amx)) return "AMX bf16";
  if (includes(isa, cpu_isa::avx512_core_bf16)) return "AVX-512 bf16";
  if (includes(isa, cpu_isa::avx512_core)) return "AVX-512";
  if (includes(isa, cpu_isa::avx2)) return "AVX2";
  if (includes(isa, cpu_isa::avx)) return "AVX";
  return "SSE4.1";
}

const char* onednn_isa_name() { return isa_name(dnnl::get_effective_cpu_isa()); }

bool onednn_has_bf16() { return includes(dnnl::get_effective_cpu_isa(), dnnl::cpu_isa::avx512_core_bf16); }

bool onednn_has_amx() { return includes(dnnl::get_effective_cpu_isa(), dnnl::cpu_isa::avx512_core_amx); }

}  // namespace mantissa
