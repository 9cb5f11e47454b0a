// A save needs 1.1 times its bytes free, and is refused before it writes anything.
#include <gmock/gmock.h>

#include "base/file.h"
#include "checkpoint_testing.h"
#include "reliability/fault_injection.h"

namespace mantissa::test::free_space_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class FreeSpace : public CheckpointTest {
 protected:
  ~FreeSpace() override { reported_space.reset(); }

  // Sets what this user may take, in fragments. A larger block and room kept for root must not be counted.
  static void report(int64_t fragments, unsigned long fragment_bytes) {
    struct statvfs status {};
    status.f_bsize = 1 << 20;
    status.f_frsize = fragment_bytes;
    status.f_bavail = static_cast<fsblkcnt_t>(fragments);
    status.f_bfree = status.f_blocks = 1 << 30;
    reported_space = status;
  }
};

TEST_F(FreeSpace, ATenthMoreThanTheNeedIsAsked) {
  report(1100, 1);
  EXPECT_NO_THROW(require_free_space(folder.path(), 1000));
  report(275, 4);
  EXPECT_NO_THROW(require_free_space(folder.path(), 1000));
  report(1099, 1);
  const Error error = error_of([&] { require_free_space(folder.path(), 1000); });
  EXPECT_EQ(error.code(), ExitCode::storage);
  EXPECT_THAT(error.what(), HasSubstr(folder.path().string() + ": not enough space: 1100 bytes needed, 1099 free"));
}

TEST_F(FreeSpace, SaveWithoutRoomIsRefusedBeforeItWritesAndTheNextOneWorks) {
  CheckpointDirectory directory = open_directory(folder);
  directory.save(State(1).content());
  report(8799, 1);  // two tensors of 4000 bytes
  arm_fault({});
  EXPECT_EQ(error_code_of([&] { directory.save(State(2).content()); }), ExitCode::storage);
  disarm_fault();
  EXPECT_THAT(calls_since_armed({"mkdir", "posix_fallocate", "pwrite"}), ElementsAre());
  EXPECT_EQ(newest(), 1);
  report(8801, 1);
  directory.save(State(2).content());
  EXPECT_EQ(newest(), 2);
}

}  // namespace mantissa::test::free_space_test
