// The peak that mfu refers to: that of a data sheet, or none.
#include <gtest/gtest.h>

#include "train/gemm_rate.h"

namespace mantissa::gpu_peak_test {

TEST(DataSheetPeak, IsTheDenseOneOfBf16) {
  const std::pair<const char*, double> peaks[] = {{"NVIDIA A100-SXM4-80GB", 312},
                                                  {"NVIDIA A100 80GB PCIe", 312},
                                                  {"NVIDIA H100 80GB HBM3", 989},
                                                  {"NVIDIA H100 NVL", 835},
                                                  {"NVIDIA H100 PCIe", 756},
                                                  {"NVIDIA H200", 989},
                                                  {"NVIDIA GH200 480GB", 989},
                                                  {"NVIDIA B200", 2250},
                                                  {"NVIDIA GB200", 2500},
                                                  {"NVIDIA GeForce RTX 4090", 165},
                                                  {"NVIDIA GeForce RTX 5090", 209.5}};
  for (const auto& [name, tera] : peaks) EXPECT_EQ(data_sheet_peak(name), tera * 1e12) << name;
  for (const char* const name : {"", "NVIDIA", "host executor", "NVIDIA H100", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H200 NVL",
                                 "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "nvidia h200"})
    EXPECT_FALSE(data_sheet_peak(name)) << name;
}

TEST(DataSheetPeak, OfSeveralRanksIsThatOfTheirGpus) {
  const Gpu h100{.name = "NVIDIA H100 80GB HBM3", .place = 1}, h200{.name = "NVIDIA H200", .place = 2},
      b200{.name = "NVIDIA B200", .place = 3}, other{.name = "another", .place = 4};
  EXPECT_EQ(data_sheet_peak(std::vector{h100, h200, b200}), 989e12 + 989e12 + 2250e12);
  EXPECT_EQ(data_sheet_peak(std::vector{h100, h100, h200}), 2 * 989e12) << "two ranks share the first";
  EXPECT_FALSE(data_sheet_peak(std::vector{h100, other}));
  for (const char* const cpu : {"cpu", "cpu_reference"}) EXPECT_FALSE(data_sheet_peak(*make_backend(cpu), {}));
}

}  // namespace mantissa::gpu_peak_test
