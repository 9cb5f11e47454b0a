// Names of the instructions of oneDNN's GEMMs, for `doctor`, `bench` and the comparison of tensor ranks.
#include <gtest/gtest.h>

#include "backend/ceilings.h"
#include "backend/cpu/fast/gemm/onednn_matmul.h"
#include "backend/cpu/fast/gemm/packed_gemm.h"

namespace mantissa::onednn_isa_test {

using dnnl::cpu_isa;

TEST(OnednnIsa, IsNamedByWhatItsGemmsRunIn) {
  EXPECT_STREQ(isa_name(cpu_isa::sse41), "SSE4.1");
  EXPECT_STREQ(isa_name(cpu_isa::avx), "AVX");
  EXPECT_STREQ(isa_name(cpu_isa::avx2), "AVX2");
  EXPECT_STREQ(isa_name(cpu_isa::avx2_vnni), "AVX2") << "the largest number of 2.6 has no AVX-512";
  EXPECT_STREQ(isa_name(cpu_isa::avx512_core), "AVX-512");
  EXPECT_STREQ(isa_name(cpu_isa::avx512_core_vnni), "AVX-512");
  EXPECT_STREQ(isa_name(cpu_isa::avx512_core_bf16), "AVX-512 bf16");
  EXPECT_STREQ(isa_name(cpu_isa::avx512_core_amx), "AMX bf16");
}

TEST(OnednnIsa, NamesWhatGemmsAreChosenBy) {
  const std::string name = gemm_instruction_set();
  EXPECT_EQ(name, isa_name(dnnl::get_effective_cpu_isa()));
  EXPECT_EQ(name.find("bf16") != std::string::npos, onednn_has_bf16());
  EXPECT_EQ(name.starts_with("AMX"), onednn_has_amx());
}

}  // namespace mantissa::onednn_isa_test
