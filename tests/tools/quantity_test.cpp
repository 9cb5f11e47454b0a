// Numbers with units, as options take them.

#include <gmock/gmock.h>

#include "error_messages.h"
#include "tools/command.h"

namespace mantissa::quantity_test {

TEST(Quantity, IsANumberWithAtMostOneUnit) {
  for (const auto& [word, value] : {std::pair("1", 1.0),
                                    {"2.5", 2.5},
                                    {"4e12", 4e12},
                                    {".5", 0.5},
                                    {"4k", 4e3},
                                    {"3M", 3e6},
                                    {"3.2G", 3.2e9},
                                    {"4T", 4e12},
                                    {"1P", 1e15},
                                    {"1.5E", 1.5e18},
                                    {"1e3k", 1e6},
                                    {"64Ki", 65536.0},
                                    {"1Mi", 1048576.0},
                                    {"80Gi", 80.0 * (1 << 30)},
                                    {"2Ti", 2 * 0x1p40},
                                    {"1Pi", 0x1p50},
                                    {"1Ei", 0x1p60}})
    EXPECT_DOUBLE_EQ(tools::quantity("--x", word), value) << word;
}

TEST(Quantity, RefusesEverythingElse) {
  for (const char* const word : {"",   "0",   "-1",  "+1", "0T",  "-2G",  "inf", "nan", "1e400", "1e31", "1e30k", "fast", "4X",  "4K", "4t",
                                 "4g", "4TB", "4 T", " 4", "4ki", "4Gib", "4GG", "4i",  "0x10",  "1,5",  "1_000", "T",    "4T4", "\n"}) {
    const std::string outcome = test::outcome_of([&] { tools::quantity("--x", word); });
    EXPECT_TRUE(outcome.starts_with("2, --x: must be a positive number, as 4e12 or 4T, ")) << word << ": " << outcome;
  }
}

}  // namespace mantissa::quantity_test
