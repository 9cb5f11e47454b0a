// The peak that mfu refers to: that of a data sheet, or none.
#include "train/gpu_peak.h"

#include <gtest/gtest.h>

namespace mantissa::gpu_peak_test {

Gpu gpu(const char* name, uint64_t place) { return {.name = name, .place = place}; }

TEST(DataSheetPeak, IsTheDenseOneOfBf16) {
  EXPECT_EQ(data_sheet_peak("NVIDIA A100-SXM4-80GB"), 312e12);
  EXPECT_EQ(data_sheet_peak("NVIDIA A100 80GB PCIe"), 312e12);
  EXPECT_EQ(data_sheet_peak("NVIDIA H100 80GB HBM3"), 989e12);
  EXPECT_EQ(data_sheet_peak("NVIDIA H100 NVL"), 835e12);
  EXPECT_EQ(data_sheet_peak("NVIDIA H100 PCIe"), 756e12);
  EXPECT_EQ(data_sheet_peak("NVIDIA H200"), 989e12);
  EXPECT_EQ(data_sheet_peak("NVIDIA GH200 480GB"), 989e12);
  EXPECT_EQ(data_sheet_peak("NVIDIA B200"), 2250e12);
  EXPECT_EQ(data_sheet_peak("NVIDIA GB200"), 2500e12);
  EXPECT_EQ(data_sheet_peak("NVIDIA GeForce RTX 4090"), 165e12);
  EXPECT_EQ(data_sheet_peak("NVIDIA GeForce RTX 5090"), 209.5e12);
}

TEST(DataSheetPeak, OfANameThatIsNotInTheTableIsNone) {
  for (const char* const name : {"", "NVIDIA", "host executor", "NVIDIA H100", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H200 NVL",
                                 "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "nvidia h200"})
    EXPECT_FALSE(data_sheet_peak(name)) << name;
}

TEST(DataSheetPeak, OfSeveralRanksIsThatOfTheirGpus) {
  const Gpu h100 = gpu("NVIDIA H100 80GB HBM3", 1), h200 = gpu("NVIDIA H200", 2), b200 = gpu("NVIDIA B200", 3), other = gpu("another", 4);
  EXPECT_EQ(data_sheet_peak(std::vector{h100}), 989e12);
  EXPECT_EQ(data_sheet_peak(std::vector{h100, h200, b200}), 989e12 + 989e12 + 2250e12);
  EXPECT_EQ(data_sheet_peak(std::vector{h100, h100, h200}), 2 * 989e12) << "two ranks share the first";
  EXPECT_FALSE(data_sheet_peak(std::vector{h100, other}));
}

TEST(DataSheetPeak, OfACpuIsNone) {
  EXPECT_FALSE(data_sheet_peak(*make_backend("cpu"), {}));
  EXPECT_FALSE(data_sheet_peak(*make_backend("cpu_reference"), {}));
}

}  // namespace mantissa::gpu_peak_test
