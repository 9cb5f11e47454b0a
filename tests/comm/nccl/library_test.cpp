// The library of NCCL as this host has it, which needs no GPU to be opened.
#include <gmock/gmock.h>

#include <vector>

#include "comm/nccl/calls.h"
#include "comm/nccl_link.h"

namespace mantissa::library_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(NcclLibrary, ReasonsNameEveryPathThatWasTried) {
  const std::vector<std::string> paths = {"/nowhere/libnccl.so.2", "/nor/here/libnccl.so.2"};
  const NcclLibrary library = open_nccl(paths);
  EXPECT_FALSE(library.calls.has_value());
  EXPECT_THAT(library.text, AllOf(HasSubstr("/nowhere/libnccl.so.2: cannot open"), HasSubstr("/nor/here/libnccl.so.2: cannot open")));
}

TEST(NcclLibrary, OneWithoutItsFunctionsIsRefused) {
  const std::vector<std::string> paths = {"/nowhere/libnccl.so.2", "libm.so.6"};
  const NcclLibrary library = open_nccl(paths);
  EXPECT_FALSE(library.calls.has_value());
  EXPECT_THAT(library.text, HasSubstr("libm.so.6 has no function nccl"));
}

TEST(NcclLibrary, ThatOfThisHostReportsItsVersionAndFile) {
  const Nccl nccl = find_nccl();
  if (!nccl.usable) GTEST_SKIP() << nccl.text;
  EXPECT_THAT(nccl.text, ::testing::MatchesRegex(R"(2\.[0-9]+\.[0-9]+ of /.*/libnccl\.so\.2.*)"));
}

}  // namespace mantissa::library_test
