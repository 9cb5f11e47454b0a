// The stack of a thread that runs generated code as oneDNN's: without tables for unwinding, the stack pointer in the middle of its data.
#include <gmock/gmock.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "base/generated_call.h"
#include "base/parallel.h"
#include "tools/rank_session.h"

namespace mantissa::main_stack_test {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr size_t kMiddle = 4096, kUntouched = 16384;

// void run(void* data, void** saved, const int* go_on, int* calls): data becomes the stack pointer until *go_on is not 0.
constexpr unsigned char kCode[] = {0xff, 0x01,        // inc dword [rcx]
                                   0x48, 0x89, 0x26,  // mov [rsi], rsp
                                   0x48, 0x89, 0xfc,  // mov rsp, rdi
                                   0x8b, 0x02,        // wait: mov eax, [rdx]
                                   0x85, 0xc0,        // test eax, eax
                                   0x74, 0xfa,        // jz wait
                                   0x48, 0x8b, 0x26,  // mov rsp, [rsi]
                                   0xc3};             // ret
using Code = void (*)(void* data, void** saved, const std::atomic<int>* go_on, int* calls);

class MainStack : public ::testing::Test {
 protected:
  MainStack() : page_(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    std::memcpy(page_, kCode, sizeof kCode);
    std::memcpy(&code_, &page_, sizeof code_);
    tools::watch_main_stack();
  }
  ~MainStack() override { ::munmap(page_, 4096); }

  // Returns what this thread writes when another one asks for its stack while it runs the code.
  [[gnu::noinline]] std::string written(bool noted) {
    ::testing::internal::CaptureStderr();
    std::atomic<int> go_on{0};
    bool answered = false;
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      answered = tools::print_main_stack();
      go_on = 1;
    });
    void* saved = nullptr;
    int calls = 0;
    if (noted) {
      const GeneratedCall here;
      code_(data_.data() + kUntouched - kMiddle, &saved, &go_on, &calls);
    } else {
      code_(data_.data() + kUntouched - kMiddle, &saved, &go_on, &calls);
    }
    other.join();
    EXPECT_TRUE(answered);
    EXPECT_EQ(calls, 1) << "it goes on where it was, and not where it was called";
    return ::testing::internal::GetCapturedStderr();
  }

  void expect_untouched() const {
    EXPECT_EQ(std::count(data_.begin(), data_.end(), std::byte{0x5a}), std::ssize(data_)) << "a frame was written into the data";
  }

  const AlternateStack handlers_;
  void* page_;
  Code code_ = nullptr;
  std::vector<std::byte> data_ = std::vector<std::byte>(kUntouched, std::byte{0x5a});
};

TEST_F(MainStack, InGeneratedCodeItIsThatOfTheCall) {
  const std::string stack = written(true);
  EXPECT_THAT(stack, HasSubstr("in a kernel that oneDNN generated, called by:\n"));
  EXPECT_THAT(stack, HasSubstr("__libc_start_main")) << "down to the first function of the program";
  EXPECT_GT(std::count(stack.begin(), stack.end(), '\n'), 10) << stack;
  expect_untouched();
  EXPECT_EQ(GeneratedCall::current(), nullptr);
}

TEST_F(MainStack, InOtherGeneratedCodeItEndsThereAndWritesNothingElse) {
  const std::string stack = written(false);
  EXPECT_THAT(stack, HasSubstr("reliability_tests(")) << "the handler";
  EXPECT_THAT(stack, Not(HasSubstr("called by")));
  expect_untouched();
}

TEST_F(MainStack, ElsewhereItIsThatOfTheThread) {
  ::testing::internal::CaptureStderr();
  const GeneratedCall here;  // but it waits in the C library
  std::thread([] { EXPECT_TRUE(tools::print_main_stack()); }).join();
  const std::string stack = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(stack, Not(HasSubstr("called by")));
  EXPECT_THAT(stack, HasSubstr("__libc_start_main"));
  EXPECT_THAT(stack,
              ContainsRegex("reliability_tests\\(\\+0x[0-9a-f]+\\) mantissa::.*ElsewhereItIsThatOfTheThread_Test::TestBody\\(\\)\n"));
  EXPECT_THAT(stack,
              ContainsRegex("reliability_tests\\(\\+0x[0-9a-f]+\\) testing::UnitTest::Run\\(\\)\n|libgtest.* testing::UnitTest::Run"));
}

TEST_F(MainStack, AThreadThatHandlesNoSignalsDoesNotSayUntilItIsWatchedAgain) {
  sigset_t all, before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread([] { EXPECT_FALSE(tools::print_main_stack()); }).join();
  ::testing::internal::CaptureStderr();
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "") << "too late";
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  tools::watch_main_stack();
  ::testing::internal::CaptureStderr();
  std::thread([] { EXPECT_TRUE(tools::print_main_stack()); }).join();
  EXPECT_NE(::testing::internal::GetCapturedStderr(), "");
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace mantissa::main_stack_test
