// Two thousand unauthenticated connections at the port where the ranks of a run met: none gets in, and no loss is another than without
// them.
#include <signal.h>

#include <atomic>
#include <random>

#include "launched_training.h"
#include "raw_connection.h"

namespace mantissa::hostile_handshakes_test {

using test::RawConnection;

const std::string kSecret = "0123456789abcdef0123456789abcdef";

// Counts of what each kind of connection saw: an unauthenticated one gets the 32 bytes of a hello, one with the secret a MAC and the reason
// why it has no place.
struct Seen {
  std::atomic<int> garbage{0}, replays{0}, wrong_secrets{0}, duplicates{0}, odd{0};
};

class HostileHandshakes : public test::LaunchedTraining {
 protected:
  static int free_port() {
    const Socket socket(::socket(AF_INET, SOCK_STREAM, 0));
    sockaddr_in name{};
    name.sin_family = AF_INET;
    socklen_t size = sizeof name;
    EXPECT_EQ(::bind(socket.fd(), reinterpret_cast<sockaddr*>(&name), size), 0);
    EXPECT_EQ(::getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&name), &size), 0);
    return ntohs(name.sin_port);
  }
  static std::vector<std::string> train_for(const std::string& name, int64_t steps) {
    return train(name, {"--set", "eval.interval=0", "--set", "checkpoint.interval=0", "--set", text("training.steps=", steps)});
  }
  size_t steps_of(const std::string& name) const {
    return static_cast<size_t>(std::ranges::count(test::read_file(folder_ / (name + "/metrics.jsonl")), '\n'));
  }

  std::string receive(const std::string& sent) const {
    RawConnection raw(port_);
    raw.send(sent);
    return raw.receive(100);
  }
  void attack(uint32_t thread, Seen& seen) const {
    std::mt19937 random(thread);
    for (int i = 0; i < 800; ++i) {
      std::string garbage(64, '\0');
      for (char& c : garbage) c = static_cast<char>(random());
      ++(receive(garbage).size() == 32 ? seen.garbage : seen.odd);
      const Hello hello{.rank = thread, .world = 2};
      if (i % 8 == 0) {
        RawConnection raw(port_);
        const std::string sent = raw.authenticate(hello, kSecret, job_);
        ++(raw.receive(500).find("has joined already") != std::string::npos ? seen.duplicates : seen.odd);
        ++(receive(sent).size() == 32 ? seen.replays : seen.odd);
      } else if (i % 8 == 4) {
        RawConnection raw(port_);
        raw.authenticate(hello, "another secret", job_);
        ++(raw.receive(100).empty() ? seen.wrong_secrets : seen.odd);
      }
    }
  }
  int port_ = free_port();
  std::string job_;
};

TEST_F(HostileHandshakes, ChangeNoLoss) {
  std::vector<std::string> words = {"env",           "MANTISSA_SECRET=" + kSecret, MANTISSA_BINARY,
                                    "launch",        "--nproc-per-node",           "2",
                                    "--master-port", std::to_string(port_),        "--"};
  for (const std::string& word : train_for("attacked", 1000000)) words.push_back(word);
  test::BackgroundProcess run(words, folder_.path(), folder_ / "out");
  job_ = text("mantissa-", run.pid(), "-", port_);
  ASSERT_TRUE(appears("attacked/metrics.jsonl")) << run.output();
  Seen seen;
  const size_t before = steps_of("attacked");
  std::vector<std::thread> connections;
  for (const uint32_t thread : {0U, 1U}) connections.emplace_back([&, thread] { attack(thread, seen); });
  for (std::thread& connection : connections) connection.join();
  EXPECT_GT(steps_of("attacked"), before + 10) << "training went on meanwhile";
  run.send(SIGTERM);
  ASSERT_EQ(run.wait(), 75) << run.output();
  EXPECT_EQ(seen.odd, 0);
  EXPECT_EQ(seen.garbage, 1600);
  for (const int count : {seen.replays.load(), seen.wrong_secrets.load(), seen.duplicates.load()}) EXPECT_EQ(count, 200);

  const std::vector<std::string> attacked = course("attacked");
  ASSERT_EQ(mantissa(train_for("quiet", std::ssize(attacked))).exit_code, 0);
  std::vector<std::string> quiet = course("quiet");
  quiet.pop_back();  // the evaluation at its end
  EXPECT_EQ(attacked, quiet);
  expect_equal("quiet", "attacked", std::ssize(attacked));
}

}  // namespace mantissa::hostile_handshakes_test
