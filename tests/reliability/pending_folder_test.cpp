// Folders that are written beside their place: kills at every file operation, processes at work, and names that somebody else took.
#include "io/pending_folder.h"

#include <gmock/gmock.h>

#include <csignal>
#include <span>

#include "base/file.h"
#include "checkpoint_testing.h"
#include "files.h"
#include "process.h"
#include "reliability/fault_injection.h"

namespace mantissa::test::pending_folder_test {

namespace fs = std::filesystem;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class AnyPendingFolders : public ::testing::Test {
 protected:
  ~AnyPendingFolders() override { disarm_fault(); }

  fs::path target() const { return folder_.path() / "model-hf"; }
  static void write(PendingFolder& pending) {
    File file = File::create(pending.path() / "weights");
    file.write_at(0, std::as_bytes(std::span(std::string_view("all of it"))));
    file.sync();
    file.close();
    pending.publish();
  }
  void make() const {
    PendingFolder pending(target());
    write(pending);
  }
  std::vector<std::string> names() const { return names_in(folder_.path()); }

  TemporaryFolder folder_;
};

class PendingFolders : public AnyPendingFolders, public ::testing::WithParamInterface<bool> {
 protected:
  Fault fault(Fault::Kind kind, int point) const { return {.kind = kind, .at = point, .no_exchange = GetParam()}; }
};

INSTANTIATE_TEST_SUITE_P(FileSystem, PendingFolders, ::testing::Bool(),
                         [](const auto& tested) { return tested.param ? "ThatMayReplace" : "ThatNeverReplaces"; });

TEST_P(PendingFolders, KillsLeaveNothingForTheNextOne) {
  for (int point = 1;; ++point) {
    const int status = wait_for(start_child([&] {
      arm_fault(fault(Fault::kill, point));
      make();
      return 0;
    }));
    if (!WIFSIGNALED(status)) {
      EXPECT_GT(point, 8);
      EXPECT_THAT(names(), ElementsAre("model-hf"));
      return;
    }
    // Complete or not there at all; what is left goes when the name is asked for again, not before it is known to be free.
    if (fs::exists(target())) {
      EXPECT_EQ(read_file(target() / "weights"), "all of it") << point;
      const std::vector<std::string> before = names();
      EXPECT_EQ(error_of([&] { make(); }).code(), ExitCode::usage) << point;
      EXPECT_EQ(names(), before) << point;
      fs::remove_all(target());
    }
    make();
    EXPECT_THAT(names(), ElementsAre("model-hf")) << point;
    fs::remove_all(target());
  }
}

TEST_P(PendingFolders, ErrorsLeaveNothing) {
  for (int point = 1;; ++point) {
    arm_fault(fault(Fault::error, point));
    bool failed = false;
    try {
      make();
    } catch (const Error& error) {
      failed = true;
      EXPECT_EQ(error.code(), ExitCode::storage) << point << ": " << error.what();
    }
    if (!disarm_fault()) {
      EXPECT_FALSE(failed);
      break;
    }
    const bool made = fs::exists(target());
    std::vector<std::string> left = names();
    std::erase(left, "model-hf");
    EXPECT_THAT(left, Each(EndsWith(".lock"))) << point;  // if it cannot be deleted itself
    sweep_pending_folders(folder_.path());
    EXPECT_EQ(names().size(), made ? 1U : 0U) << point;
    fs::remove_all(target());
  }
}

// Another process that writes one of the same name, and one of a name that begins alike.
TEST_F(AnyPendingFolders, OnesInUseStay) {
  std::optional<PendingFolder> first(target()), other(target().string() + "-0123456789abcdef");
  const fs::path lying = first->path(), beside = other->path();
  make();
  EXPECT_TRUE(fs::is_directory(lying));
  EXPECT_TRUE(fs::is_directory(beside));
  fs::remove_all(target());
  sweep_pending_folders(folder_.path());
  EXPECT_TRUE(fs::is_directory(lying));
  write(*first);
  EXPECT_EQ(read_file(target() / "weights"), "all of it");
  first.reset();
  other.reset();
  EXPECT_THAT(names(), ElementsAre("model-hf"));
}

// Leaves `name` as a process does that was killed.
void leave(const fs::path& name) {
  wait_for(start_child([&] {
    PendingFolder pending(name);
    write_file(pending.path() / "weights", "a part");
    return ::raise(SIGKILL);
  }));
}

// Where flock is local to a host, a lock that is found free may be held on another.
TEST_F(AnyPendingFolders, OnesOfOtherHostsStay) {
  leave(target());
  const std::vector<std::string> left = names();
  ASSERT_EQ(left.size(), 2U);
  EXPECT_THAT(read_file(folder_ / left[1]), StartsWith("host "));
  write_file(folder_ / left[1], "host another.example, process 1, since 2026-01-01T00:00:00Z, job export\n");
  make();
  EXPECT_THAT(names(), ElementsAre(left[0], left[1], "model-hf"));
  fs::remove_all(target());
  write_file(folder_ / left[1], "");
  make();
  EXPECT_THAT(names(), ElementsAre("model-hf"));
}

TEST_F(AnyPendingFolders, NamesThatCannotBeAreMistakes) {
  for (const fs::path& name : {fs::path(), folder_.path() / std::string(229, 'x'), folder_.path() / "not-there" / "model"}) {
    const Error error = error_of([&] { PendingFolder pending(name); });
    EXPECT_EQ(error.code(), ExitCode::usage) << error.what();
  }
  EXPECT_EQ(error_of([] { PendingFolder pending("/proc/model"); }).code(), ExitCode::environment);
  {
    PendingFolder longest(folder_.path() / std::string(228, 'x'));
    write(longest);
  }
  EXPECT_THAT(names(), ElementsAre(std::string(228, 'x')));
}

TEST_F(AnyPendingFolders, OfOtherNamesStay) {
  leave(target());
  leave(folder_.path() / "model");
  leave(target().string() + "-0123456789abcdef");
  write_file(folder_ / ".tmp-model-hf-0123456789abcdef", "a file of somebody else");
  write_file(folder_ / ".tmp-model-hf-0123456789abcdeX.lock", "and another");
  EXPECT_EQ(names().size(), 8U);
  make();
  EXPECT_EQ(names().size(), 7U);
  EXPECT_THAT(names(), Contains(StartsWith(".tmp-model-hf-0123456789abcdef-")));
  sweep_pending_folders(folder_.path());
  EXPECT_THAT(names(), ElementsAre(".tmp-model-hf-0123456789abcdeX.lock", ".tmp-model-hf-0123456789abcdef", "model-hf"));
}

TEST_P(PendingFolders, WhatAppearedMeanwhileIsNotReplaced) {
  const std::vector<std::function<void()>> appears = {[&] { fs::create_directory(target()); },
                                                      [&] {
                                                        fs::create_directory(target());
                                                        write_file(target() / "theirs", "");
                                                      },
                                                      [&] { write_file(target(), "theirs"); },
                                                      [&] { fs::create_symlink("nowhere", target()); }};
  for (const auto& appear : appears) {
    {
      PendingFolder pending(target());
      appear();
      arm_fault(fault(Fault::none, 0));
      const Error error = error_of([&] { write(pending); });
      disarm_fault();
      EXPECT_EQ(error.code(), ExitCode::storage);
      EXPECT_THAT(error.what(), HasSubstr("model-hf: was created by another process in the meantime"));
      EXPECT_FALSE(fs::exists(target() / "weights"));
    }
    EXPECT_THAT(names(), ElementsAre("model-hf"));
    fs::remove_all(target());
  }
}

}  // namespace mantissa::test::pending_folder_test
