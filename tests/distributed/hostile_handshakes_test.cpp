// Ten thousand unauthenticated connections at the port where the ranks of a run met: none gets in, and no loss is another than without
// them.
#include <signal.h>

#include <atomic>
#include <functional>
#include <random>

#include "launched_training.h"
#include "raw_connection.h"

namespace mantissa::hostile_handshakes_test {

using test::RawConnection;

const std::string kSecret = "0123456789abcdef0123456789abcdef";
constexpr int kRanks = 2;

int free_port() {
  const Socket socket(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof name;
  require(::bind(socket.fd(), reinterpret_cast<sockaddr*>(&name), size) == 0 &&
              ::getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&name), &size) == 0,
          "no free port");
  return ntohs(name.sin_port);
}

// What each kind saw, counted: an unauthenticated connection gets the 32 bytes of a hello, who has the secret a MAC and the reason why it
// has no place.
struct Seen {
  std::atomic<int> garbage{0}, replays{0}, wrong_secrets{0}, duplicates{0}, slow{0}, odd{0};
  int all() const { return garbage + replays + wrong_secrets + duplicates + slow; }
};

class HostileHandshakes : public test::LaunchedTraining {
 protected:
  // The words that start the ranks of a run with its port and token; each writes its number before it becomes mantissa.
  static std::vector<std::string> ranks_at(int port, const std::string& name) {
    const std::string script = "export WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=" + std::to_string(port) +
                               " MANTISSA_SECRET=" + kSecret +
                               R"(
      for rank in 0 1; do
        RANK=$rank LOCAL_RANK=$rank sh -c 'echo $$ > pid.$RANK; exec "$@"' sh "$@" &
        ranks="$ranks $!"
      done
      code=0
      for rank in $ranks; do wait $rank || code=$?; done
      exit $code)";
    std::vector<std::string> words = {"sh", "-c", script, "ranks", MANTISSA_BINARY};
    for (const std::string& word : train(name, endless("1000000"))) words.push_back(word);
    return words;
  }
  static std::vector<std::string> endless(const std::string& steps) {
    return {"--set", "schedule.type=constant", "--set", "eval.interval=0",
            "--set", "checkpoint.interval=0",  "--set", "training.steps=" + steps};
  }

  static void garbage(int port, std::mt19937& random, Seen& seen) {
    RawConnection raw(port);
    std::string bytes(64, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    raw.send(bytes);
    ++(raw.receive(100).size() == 32 ? seen.garbage : seen.odd);
  }
  static void wrong_token(int port, Seen& seen) {
    RawConnection raw(port);
    raw.authenticate({.rank = 1, .world = kRanks}, "another secret", "");
    ++(raw.receive(100).empty() ? seen.wrong_secrets : seen.odd);
  }
  static void replay(int port, const std::string& recorded, Seen& seen) {
    RawConnection raw(port);
    raw.send(recorded);
    ++(raw.receive(100).size() == 32 ? seen.replays : seen.odd);
  }
  // What it sent, for a replay.
  static std::string duplicate(int port, uint32_t rank, Seen& seen) {
    RawConnection raw(port);
    const std::string sent = raw.authenticate({.rank = rank, .world = kRanks}, kSecret, "");
    const bool refused = raw.receive(500).find("is there already") != std::string::npos;
    ++(refused ? seen.duplicates : seen.odd);
    return sent;
  }
  static void slow(int port, Seen& seen) {
    std::vector<RawConnection> open;
    for (int i = 0; i < 50; ++i) open.emplace_back(port);
    for (int byte = 0; byte < 12; ++byte) {
      for (RawConnection& raw : open) raw.send("M");
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    for (RawConnection& raw : open) ++(raw.receive(100).size() <= 32 ? seen.slow : seen.odd);
  }

  // Against a store that is gone, they give up.
  static void attack(int port, Seen& seen) {
    const auto guarded = [](const std::function<void()>& body) {
      return std::thread([body] {
        try {
          body();
        } catch (const Error& error) {
          ADD_FAILURE() << error.what();
        }
      });
    };
    std::vector<std::thread> connections;
    connections.push_back(guarded([&] { slow(port, seen); }));
    for (uint32_t thread = 0; thread < 2; ++thread) {
      connections.push_back(guarded([&, thread] {
        std::mt19937 random(thread);
        for (int i = 0; i < 4000; ++i) {
          garbage(port, random, seen);
          if (i % 8 == 0) replay(port, duplicate(port, thread, seen), seen);
          if (i % 8 == 4) wrong_token(port, seen);
        }
      }));
    }
    for (std::thread& connection : connections) connection.join();
  }

  static size_t lines_of(const std::string& path) { return static_cast<size_t>(std::ranges::count(test::read_file(path), '\n')); }
};

TEST_F(HostileHandshakes, ChangeNoLoss) {
  const int port = free_port();
  test::ProcessResult run;
  std::thread ranks([&] { run = test::run_process(ranks_at(port, "attacked"), folder_.path()); });
  EXPECT_TRUE(appears("attacked/metrics.jsonl"));
  const std::string metrics = folder_ / "attacked/metrics.jsonl";
  Seen seen;
  const size_t before = lines_of(metrics);
  attack(port, seen);
  const size_t after = lines_of(metrics);
  ::kill(std::stoi(test::read_file(folder_ / "pid.0")), SIGTERM);
  ranks.join();
  ASSERT_EQ(run.exit_code, 75) << run.errors;
  EXPECT_GT(after, before + 10) << "training went on meanwhile";
  EXPECT_GE(seen.all(), 10000);
  EXPECT_EQ(seen.odd, 0);
  EXPECT_GT(std::min({seen.garbage.load(), seen.replays.load(), seen.wrong_secrets.load(), seen.duplicates.load(), seen.slow.load()}), 40);

  const std::vector<std::string> attacked = course("attacked");
  const auto steps = static_cast<int64_t>(attacked.size());
  ASSERT_EQ(mantissa(train("alone", endless(std::to_string(steps)))).exit_code, 0);
  std::vector<std::string> alone = course("alone");
  alone.pop_back();  // the evaluation at its end
  EXPECT_EQ(attacked, alone);
  expect_equal("alone", "attacked", steps);
}

}  // namespace mantissa::hostile_handshakes_test
