// training.threads is the number of threads that train. Needs a process of its own, as CTest gives each test: threads, once started, stay.
#include <gtest/gtest.h>

#include "base/parallel.h"
#include "training.h"

namespace mantissa::threads_test {

class ThreadsTest : public test::TrainingTest {
 protected:
  struct Seen {
    int reported = 0, process = 0;
  };

  // A step with several pieces for every thread.
  Seen train_with(int threads) const {
    Seen seen;
    TrainEvents events;
    events.started = [&seen](const StartEvent& report) { seen.reported = report.threads; };
    const std::string name = text("threads-", threads);
    train(config(name, {"model.hidden_size=256", "model.intermediate_size=768", "model.num_layers=1", "training.steps=1",
                        text("training.threads=", threads)}),
          {"test"}, events);
    for ([[maybe_unused]] const auto& task : std::filesystem::directory_iterator("/proc/self/task")) ++seen.process;
    return seen;
  }
};

TEST_F(ThreadsTest, AsManyTrainAsTheConfigSays) {
  const Seen one = train_with(1);
  EXPECT_EQ(one.reported, 1);
  EXPECT_EQ(num_threads(), 1);
  const Seen five = train_with(5);
  EXPECT_EQ(five.reported, 5);
  EXPECT_EQ(num_threads(), 5);
  EXPECT_EQ(five.process, one.process + 4);
  const Seen three = train_with(3);
  EXPECT_EQ(three.reported, 3);
  EXPECT_EQ(three.process, five.process) << "they sleep until they are wanted again";
}

}  // namespace mantissa::threads_test
