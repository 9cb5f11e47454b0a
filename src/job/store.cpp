#include "job/store.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

#include "base/file.h"
#include "base/host_name.h"
#include "job/frames.h"
#include "job/rendezvous.h"
#include "job/store_server.h"

namespace mantissa {
namespace {

constexpr size_t kBlockSpareBytes = 1024;  // for the key and counts of a gathered block
constexpr double kLeaveSeconds = 5;        // for the main thread to notice that the job has failed

Socket new_wake(const Launch& launch) {
  require_descriptors(launch);
  Socket wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  require(static_cast<bool>(wake), ExitCode::environment, "no eventfd: ", system_message(errno));
  return wake;
}

}  // namespace

// A rank's end of the store: a thread that reads, sends heartbeats and watches rank 0. Waits sleep until there is an answer or the job has
// failed.
class Store::Client {
 public:
  Client(const Launch& launch, const StoreOptions& options)
      : launch_(launch), options_(options), wake_(new_wake(launch)), connection_(connect()) {
    connection_.send(Message::join, Fields().text(host_name()).number(launch.local_rank).number(launch.local_size));
    thread_ = std::thread([this] { run(); });
  }

  ~Client() { end(); }

  // Rank 0 waits for the others.
  void leave() {
    leaving_ = true;  // rank 0 closes the connection, maybe before this rank does
    if (!raised_) post(Message::leave, {});
    end();
  }

  void post(Message message, const Fields& fields) {
    {
      const std::lock_guard lock(mutex_);
      if (!closed_) connection_.send(message, fields);
    }
    wake();
  }

  // Returns the reply; `what` names what this waits for.
  std::string request(Message message, double timeout_s, const std::string& what, const std::string& name) {
    std::unique_lock lock(mutex_);
    throw_failure();
    const uint32_t number = ++requests_;
    Fields fields = Fields().number(number);
    if (message == Message::barrier) fields.number(timeout_s);
    connection_.send(message, fields.text(name));
    wake();
    // Rank 0 is the first to know that a barrier is late, and who is missing.
    const double limit = message == Message::barrier ? timeout_s + 2 * options_.heartbeat_timeout_s : timeout_s;
    const auto answered = [&] { return failure_ || replies_.contains(number); };
    const double deadline = monotonic_now() + limit;
    while (!changed_.wait_for(lock, std::chrono::duration<double>(kLookSeconds), answered)) {
      const bool stop = options_.stop_asked && options_.stop_asked();
      if (!stop && monotonic_now() < deadline) continue;
      lock.unlock();
      const std::string waited_for = text(what, " '", name, "': ");
      const std::string message_text = stop ? waited_for + "asked to stop while waiting" : text(waited_for, "waited ", timeout_s, " s");
      const ExitCode code = stop ? ExitCode::stopped : ExitCode::peer_lost;
      fail_all(code, message_text);
      fail(code, message_text);
    }
    const auto reply = replies_.find(number);
    if (reply == replies_.end()) throw_failure();
    std::string value = std::move(reply->second);
    replies_.erase(reply);
    return value;
  }

  void fail_all(ExitCode code, const std::string& message) {
    std::unique_lock lock(mutex_);
    const Failure failure{.code = code, .rank = launch_.rank, .message = message};
    if (failure_) return;
    if (!closed_) send_abort(failure);
    wake();
    // A rank that leaves before all know the cause would be taken for the cause, and so would those that its launcher then ends.
    const std::chrono::duration<double> until_known(options_.cause_timeout_s + kFailureReportSeconds);
    if (code == ExitCode::peer_lost) changed_.wait_for(lock, until_known, [&] { return closed_ || failure_; });
    raise(failure);
    changed_.wait_for(lock, std::chrono::duration<double>(kFailureReportSeconds), [&] { return closed_ || !connection_.waiting(); });
  }

  void check() const {
    if (!raised_) return;
    const std::lock_guard lock(mutex_);
    throw_failure();
  }
  std::optional<Failure> failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
  }
  const std::atomic<bool>& raised() const { return raised_; }
  double timeout_or_default(double timeout_s) const { return timeout_s > 0 ? timeout_s : options_.init_timeout_s; }
  const Launch& launch() const { return launch_; }
  Progress& progress() { return progress_; }
  void watch(Watch watch) {
    const std::lock_guard lock(mutex_);
    watch_ = std::move(watch);
  }

 private:
  Connection connect() {
    if (launch_.rank > 0) return connect_to_root(launch_, options_);
    int ends[2] = {-1, -1};
    const bool made = ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0;
    require(made, ExitCode::environment, "no socket: ", system_message(errno));
    Socket mine(ends[0]), servers(ends[1]);
    server_ = std::make_unique<StoreServer>(launch_, options_, listen_for_ranks(launch_, options_), std::move(servers));
    configure(mine, options_.heartbeat_timeout_s);
    return Connection(std::move(mine));
  }

  void wake() {
    const uint64_t one = 1;
    if (::write(wake_.fd(), &one, sizeof one) < 0) return;  // full: it is awake
  }

  void end() {
    ending_ = true;
    wake();
    if (thread_.joinable()) thread_.join();
    connection_ = Connection(Socket());
    server_.reset();
  }

  void throw_failure() const {
    if (failure_) throw Error(failure_->code, failure_->message);
  }

  // Call it with the lock held. The first failure stays.
  void raise(const Failure& failure) {
    if (failure_) return;
    if (failure.stuck && watch_.report) watch_.report(failure.message);
    failure_ = failure;
    failed_at_ = monotonic_now();
    raised_ = true;
    changed_.notify_all();
  }

  void raise_loss(const std::string& how, bool silent = false) {
    const std::lock_guard lock(mutex_);
    if (!ending_ && !leaving_) raise({.code = ExitCode::peer_lost, .rank = 0, .message = text("rank 0 ", how), .stuck = silent});
  }

  // Call it with the lock held.
  void send_abort(const Failure& failure) {
    connection_.send(Message::abort,
                     Fields().number(static_cast<uint8_t>(failure.code)).number(uint8_t{failure.stuck}).text(failure.message));
  }

  // Checks whether the main thread of this rank makes progress, and, once the job has failed, whether it leaves.
  void watch_over(double now, double running_since) {
    const std::lock_guard lock(mutex_);
    if (ending_) return;
    if (failure_) {
      if (watch_.leave && now > failed_at_ + kLeaveSeconds) watch_.leave(*failure_);
      return;
    }
    const std::string late = watch_.report && !reported_stuck_ ? watchdog_timeout(progress_, watch_.timeouts, now, running_since) : "";
    if (late.empty()) return;
    reported_stuck_ = true;  // rank 0 knows who is behind, and tells all, this rank too
    send_abort({.code = ExitCode::peer_lost, .rank = launch_.rank, .message = late, .stuck = true});
  }

  void run() {
    try {
      double ended = 0;
      for (double now = monotonic_now(); !finished(now, ended); now = monotonic_now()) {
        wait_for_input();
        const bool open = connection_.receive();
        while (std::optional<Frame> frame = connection_.next()) handle(*frame);  // the reason of an end comes before it
        if (!open) {
          raise_loss("closed its connection");
          break;
        }
        const double running_since = stops_.running_since(now);
        if (now > std::max(connection_.heard(), running_since) + options_.heartbeat_timeout_s)
          raise_loss(text("sent no heartbeat for ", options_.heartbeat_timeout_s, " s (parallel.heartbeat_timeout_s)"), true);
        watch_over(now, running_since);
        write(now);
      }
    } catch (const std::exception& error) {
      raise_loss(text("sent an unreadable message: ", error.what()));
    }
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
      changed_.notify_all();
    }
    while (!ending_) {  // the main thread still has to leave
      const double now = monotonic_now();
      watch_over(now, stops_.running_since(now));
      pollfd wait{.fd = wake_.fd(), .events = POLLIN, .revents = 0};
      ::poll(&wait, 1, 500);
      forget_calls();
    }
  }

  void forget_calls() {
    uint64_t times = 0;
    if (::read(wake_.fd(), &times, sizeof times) < 0) return;  // nobody called
  }

  bool finished(double now, double& ended) {
    if (!ending_) return false;
    if (ended == 0) ended = now;
    const std::lock_guard lock(mutex_);
    return !connection_.waiting() || now > ended + kFailureReportSeconds;
  }

  void wait_for_input() {
    const double period = std::clamp(options_.heartbeat_timeout_s / 10, 0.01, kLookSeconds);
    pollfd waits[] = {{.fd = connection_.fd(), .events = POLLIN, .revents = 0}, {.fd = wake_.fd(), .events = POLLIN, .revents = 0}};
    {
      const std::lock_guard lock(mutex_);
      if (connection_.waiting()) waits[0].events |= POLLOUT;
    }
    ::poll(waits, 2, static_cast<int>(period * 1e3));
    forget_calls();
  }

  void handle(Frame& frame) {
    const std::lock_guard lock(mutex_);
    if (frame.message() == Message::reply) {
      const auto number = frame.number<uint32_t>();
      replies_[number] = frame.text();
      changed_.notify_all();
    } else if (frame.message() == Message::abort) {
      const auto code = static_cast<ExitCode>(frame.number<uint8_t>());
      const bool stuck = frame.number<uint8_t>() != 0;
      const auto rank = frame.number<int32_t>();
      raise({.code = code, .rank = rank, .message = frame.text(), .stuck = stuck});
    }
  }

  double heartbeat_period() const { return options_.heartbeat_timeout_s / 5; }

  void write(double now) {
    const std::lock_guard lock(mutex_);
    // A new step is reported at once, within limits, so that others know the step of a rank that dies.
    const bool moved = progress_.step() != reported_step_ && now > next_heartbeat_ - heartbeat_period() + kLookSeconds;
    if (now >= next_heartbeat_ || moved) {
      reported_step_ = progress_.step();
      if (watch_.collectives) progress_.collective(static_cast<uint32_t>(watch_.collectives()), 0);
      connection_.send(
          Message::heartbeat,
          Fields().number(progress_.step()).number(progress_.sequence()).number(progress_.operation()).text(progress_.section()));
      next_heartbeat_ = now + heartbeat_period();
    }
    if (!connection_.waiting()) return;
    connection_.flush();
    changed_.notify_all();  // fail_all() waits until its word is out
  }

  const Launch launch_;
  const StoreOptions options_;
  Socket wake_;
  std::unique_ptr<StoreServer> server_;  // rank 0
  Connection connection_;                // this thread reads, the lock guards what is written
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint32_t, std::string> replies_;
  uint32_t requests_ = 0;
  std::optional<Failure> failure_;
  Watch watch_;
  bool closed_ = false, reported_stuck_ = false;
  double failed_at_ = 0;
  double next_heartbeat_ = 0;
  int64_t reported_step_ = 0;
  Stops stops_{options_.heartbeat_timeout_s / 2};
  std::atomic<bool> raised_{false}, leaving_{false}, ending_{false};
  Progress progress_;
  std::thread thread_;
};

Store::Store(const Launch& launch, const StoreOptions& options) {
  require(launch.world > 1, "one rank alone has no store");
  client_ = std::make_unique<Client>(launch, options);
  barrier(".start");
}

Store::~Store() = default;

void Store::set(const std::string& key, const std::string& value) {
  require(key.size() + value.size() <= kMostValueBytes, "value of ", value.size(), " bytes for the store; at most ", kMostValueBytes);
  client_->check();
  client_->post(Message::set, Fields().text(key).text(value));
}

std::string Store::get(const std::string& key, double timeout_s) {
  return client_->request(Message::get, client_->timeout_or_default(timeout_s), "value of", key);
}

void Store::barrier(const std::string& name, double timeout_s) {
  client_->request(Message::barrier, client_->timeout_or_default(timeout_s), "barrier", name);
}

// Rank 0 sets blocks as large as values may be: the number of values in each, then the values.
std::vector<std::string> Store::gather(const std::string& name, const std::string& value) {
  const auto world = static_cast<size_t>(client_->launch().world);
  const std::string key = ".gathered/" + name + "/", block_key = key + "block ";
  std::vector<std::string> all;
  if (client_->launch().rank > 0) {
    set(key + std::to_string(client_->launch().rank), value);
    for (size_t block = 0; all.size() < world; ++block) {
      Frame values(Message::set, get(block_key + std::to_string(block)));
      for (auto left = values.number<uint32_t>(); left > 0; --left) all.push_back(values.text());
    }
    return all;
  }
  size_t blocks = 0;
  uint32_t count = 0;
  Fields block;
  const auto put = [&] {
    set(block_key + std::to_string(blocks++), Fields().number(std::exchange(count, 0)).bytes() + std::exchange(block, {}).bytes());
  };
  for (size_t rank = 0; rank < world; ++rank) {
    all.push_back(rank == 0 ? value : get(key + std::to_string(rank)));
    if (count > 0 && block.bytes().size() + all.back().size() > kMostValueBytes - kBlockSpareBytes) put();
    block.text(all.back());
    ++count;
  }
  put();
  return all;
}

void Store::compare(const std::vector<NamedHash>& items) {
  const std::string key = text(".inputs/", compared_++, "/");
  set(key + std::to_string(client_->launch().rank), inputs_text(items));
  if (client_->launch().rank > 0) {
    get(key + "equal");
    return;
  }
  std::vector<RankInputs> ranks;
  for (int rank = 0; rank < client_->launch().world; ++rank) ranks.push_back(read_inputs(get(key + std::to_string(rank))));
  const std::string mismatch = mismatching_items(ranks);
  if (!mismatch.empty()) fail_all(ExitCode::usage, "the ranks were started with different inputs: " + mismatch);
  check();
  set(key + "equal", "");
}

void Store::fail_all(ExitCode code, const std::string& message) { client_->fail_all(code, message); }
const std::atomic<bool>& Store::aborted() const { return client_->raised(); }
std::optional<Failure> Store::failure() const { return client_->failure(); }
void Store::check() const { client_->check(); }
Progress& Store::progress() { return client_->progress(); }
void Store::watch(Watch watch) { client_->watch(std::move(watch)); }
void Store::leave() { client_->leave(); }

}  // namespace mantissa
