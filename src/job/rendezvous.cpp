#include "job/rendezvous.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <openssl/crypto.h>
#include <openssl/hmac.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <functional>
#include <thread>
#include <utility>

#include "base/file.h"
#include "base/hash.h"
#include "mantissa/base/error.h"
#include "mantissa/base/log.h"

namespace mantissa {

void require_descriptors(const Launch& launch) {
  constexpr int kFiles = 64;  // files of the run, and what UCX opens before it has found a peer
  const auto need = static_cast<rlim_t>(launch.world + kFiles + (launch.rank == 0 ? kMostUnauthenticated : 0));
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= need) return;
  const rlim_t found = std::exchange(limit.rlim_cur, need);
  require(limit.rlim_max >= need && ::setrlimit(RLIMIT_NOFILE, &limit) == 0, ExitCode::environment, "rank ", launch.rank, " of ",
          launch.world, " needs ", need, " open files, and the limit is ", limit.rlim_max >= need ? found : limit.rlim_max,
          " (ulimit -Hn)");
}

namespace {

void fill_random(std::span<std::byte> out) {
  while (!out.empty()) {
    const ssize_t got = ::getrandom(out.data(), out.size(), 0);
    require(got >= 0 || errno == EINTR, ExitCode::environment, "the system has no random bytes: ", system_message(errno));
    out = out.subspan(static_cast<size_t>(std::max<ssize_t>(got, 0)));
  }
}

}  // namespace

HelloBytes new_hello(Hello hello) {
  fill_random(hello.nonce);
  return std::bit_cast<HelloBytes>(hello);
}

Mac mac_of(MacSender sender, std::string_view secret, const HelloBytes& of_rank, const HelloBytes& of_root, std::string_view job) {
  std::vector<std::byte> message;
  const auto add = [&](std::span<const std::byte> bytes) { message.insert(message.end(), bytes.begin(), bytes.end()); };
  add(std::as_bytes(std::span(std::string_view(sender == MacSender::rank ? "rank" : "root"))));
  add(of_rank);
  add(of_root);
  add(std::as_bytes(std::span(job)));
  return hmac_sha256(secret, message);
}

Mac hmac_sha256(std::string_view key, std::span<const std::byte> message) {
  Mac out{};
  unsigned length = 0;
  const unsigned char* const made =
      ::HMAC(::EVP_sha256(), key.data(), static_cast<int>(key.size()), reinterpret_cast<const unsigned char*>(message.data()),
             message.size(), reinterpret_cast<unsigned char*>(out.data()), &length);
  require(made != nullptr && length == out.size(), "libcrypto did not compute an HMAC-SHA256");
  return out;
}

bool same_mac(std::span<const std::byte> a, const Mac& b) {
  return a.size() == b.size() && ::CRYPTO_memcmp(a.data(), b.data(), b.size()) == 0;
}

std::string random_hex(size_t bytes) {
  std::vector<std::byte> random(bytes);
  fill_random(random);
  std::string out;
  for (const std::byte byte : random) {
    for (const int digit : {std::to_integer<int>(byte >> 4), std::to_integer<int>(byte & std::byte{15})}) out += "0123456789abcdef"[digit];
  }
  return out;
}

namespace {

namespace fs = std::filesystem;
constexpr int64_t kMostSecretBytes = 4096;
constexpr std::chrono::milliseconds kClockTick{10};  // times of files are those of the last one

const std::chrono::system_clock::time_point kProcessBegan = std::chrono::system_clock::now();

std::string without_space_at_end(std::string secret) {
  secret.erase(secret.find_last_not_of(" \t\r\n") + 1);
  return secret;
}

// A secret_file is named by the user, and root may use another user's. A rendezvous_file is found in a folder that all may write.
enum class SecretSource { secret_file, rendezvous_file };

// Opens a file of this user that nobody else may read.
Socket opened_secret(const std::string& path, SecretSource kind) {
  const int follow = kind == SecretSource::rendezvous_file ? O_NOFOLLOW : 0;
  Socket file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | follow));
  require(static_cast<bool>(file), ExitCode::usage, path, ": cannot be opened: ", system_message(errno));
  struct stat status {};
  require(::fstat(file.fd(), &status) == 0 && S_ISREG(status.st_mode), ExitCode::usage, path, ": is not a regular file");
  require((status.st_mode & 077) == 0, ExitCode::usage, path, ": other users can read this secret; run chmod 600 on it");
  const bool is_ours = status.st_uid == ::geteuid() || (kind == SecretSource::secret_file && ::geteuid() == 0);
  require(is_ours, ExitCode::usage, path, ": belongs to another user");
  return file;
}

std::string content_of(const Socket& file, const std::string& path) {
  std::string out(kMostSecretBytes, '\0');
  const ssize_t got = ::pread(file.fd(), out.data(), out.size(), 0);
  require(got >= 0, ExitCode::usage, path, ": cannot be read: ", system_message(errno));
  out.resize(static_cast<size_t>(got));
  return out;
}

std::string user_prefix() { return text("mantissa-", ::geteuid(), "-"); }

std::string rendezvous_prefix(const Launch& launch) {
  const Hash64 key = xxh64(text(launch.job, '\n', launch.port));
  return text(user_prefix(), key, "-", launch.restart, "-");
}

std::optional<RendezvousFile> parsed_rendezvous(const std::string& content) {
  const size_t space = content.find(' ', 9);
  if (!content.starts_with("mantissa ") || space == std::string::npos || !content.ends_with('\n')) return {};
  const int port = std::atoi(content.substr(9, space - 9).c_str());
  if (port <= 0 || port >= 65536) return {};
  return RendezvousFile{.port = port, .secret = without_space_at_end(content.substr(space + 1))};
}

// Calls body(path, file, rendezvous) for every rendezvous file of this user's whose name begins with `prefix`.
void for_rendezvous_files(const fs::path& folder, const std::string& prefix,
                          const std::function<void(const std::string&, const Socket&, const RendezvousFile&)>& body) {
  std::error_code unreadable;
  for (const auto& entry : fs::directory_iterator(folder, unreadable)) {
    if (!entry.path().filename().string().starts_with(prefix)) continue;
    try {  // gone meanwhile, somebody else's, or not yet written
      const std::string path = entry.path().string();
      const Socket file = opened_secret(path, SecretSource::rendezvous_file);
      if (const std::optional<RendezvousFile> rendezvous = parsed_rendezvous(content_of(file, path))) body(path, file, *rendezvous);
    } catch (const Error&) {
      continue;
    }
  }
}

}  // namespace

std::chrono::system_clock::time_point process_began() { return kProcessBegan; }

fs::path rendezvous_folder(const std::string& chosen) {
  if (!chosen.empty()) return chosen;
  const Environment environment = process_environment();
  const auto runtime = environment.find("XDG_RUNTIME_DIR");
  struct stat status {};  // sudo and containers leave the variable of somebody else, or of a folder that is not there
  const bool is_ours = runtime != environment.end() && ::stat(runtime->second.c_str(), &status) == 0 && S_ISDIR(status.st_mode) &&
                       status.st_uid == ::geteuid();
  if (is_ours) return runtime->second;
  std::error_code problem;
  const fs::path temporary = fs::temp_directory_path(problem);
  require(!problem, ExitCode::environment, "there is no temporary folder for the rendezvous file: ", problem.message(),
          "; set TMPDIR to a folder");
  return temporary;
}

std::optional<std::string> job_secret(const Environment& environment) {
  const auto value = environment.find("MANTISSA_SECRET"), file = environment.find("MANTISSA_SECRET_FILE");
  if (value == environment.end() && file == environment.end()) return {};
  require(value == environment.end() || file == environment.end(), ExitCode::usage,
          "MANTISSA_SECRET and MANTISSA_SECRET_FILE are both set");
  const char* const name = file == environment.end() ? "MANTISSA_SECRET" : "MANTISSA_SECRET_FILE";
  std::string secret;
  try {
    secret = without_space_at_end(
        file == environment.end() ? value->second : content_of(opened_secret(file->second, SecretSource::secret_file), file->second));
  } catch (const Error& error) {
    fail(error.code(), name, ": ", error.what());
  }
  require(!secret.empty() && secret.size() < static_cast<size_t>(kMostSecretBytes), ExitCode::usage, name, ": a secret must have 1 to ",
          kMostSecretBytes - 1, " bytes, got ", secret.size());
  if (secret.size() < 16)
    log_warning(name, ": the secret has ", secret.size(), " bytes and can be guessed; take 32 random bytes as hex digits");
  return secret;
}

std::string new_secret() { return random_hex(32); }

PublishedRendezvous::PublishedRendezvous(const std::string& folder, const Launch& launch, const RendezvousFile& rendezvous)
    : path_((rendezvous_folder(folder) / (rendezvous_prefix(launch) + random_hex(8))).string()) {
  // Files that rank 0 of a killed job left behind have no locks.
  for_rendezvous_files(rendezvous_folder(folder), user_prefix(), [](const std::string& path, const Socket& file, const RendezvousFile&) {
    if (::flock(file.fd(), LOCK_EX | LOCK_NB) == 0) ::unlink(path.c_str());
  });
  const std::string content = text("mantissa ", rendezvous.port, " ", rendezvous.secret, "\n");
  file_ = Socket(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  // The file is locked before it has content, so a whole file without a lock is from a dead process.
  const bool written = file_ && ::flock(file_.fd(), LOCK_EX | LOCK_NB) == 0 &&
                       ::write(file_.fd(), content.data(), content.size()) == static_cast<ssize_t>(content.size());
  const int error = errno;
  if (file_ && !written) ::unlink(path_.c_str());
  require(written, ExitCode::environment, path_,
          ": cannot be written, and so the other ranks cannot find this one: ", system_message(error));
}

PublishedRendezvous::~PublishedRendezvous() { ::unlink(path_.c_str()); }

std::vector<RendezvousFile> rendezvous_files(const std::string& folder, const Launch& launch) {
  std::vector<RendezvousFile> out;
  for_rendezvous_files(
      rendezvous_folder(folder), rendezvous_prefix(launch), [&](const std::string&, const Socket& file, RendezvousFile rendezvous) {
        struct stat status {};
        if (::fstat(file.fd(), &status) == 0) {
          const auto since = std::chrono::seconds(status.st_mtim.tv_sec) + std::chrono::nanoseconds(status.st_mtim.tv_nsec);
          rendezvous.published += std::chrono::duration_cast<std::chrono::system_clock::duration>(since) + kClockTick;
        }
        rendezvous.held = ::flock(file.fd(), LOCK_SH | LOCK_NB) != 0;
        out.push_back(rendezvous);
      });
  return out;
}

namespace {

// A dead job of the same name may have left its file; rank 0 of this one sweeps it when it comes.
constexpr double kDeadRendezvousSeconds = 5;
constexpr double kRefusedSeconds = 5;  // in which rank 0 of another job may free the port

void look_for_stop(const Launch& launch, const StoreOptions& options) {
  require(!options.stop_asked || !options.stop_asked(), ExitCode::stopped, "rank ", launch.rank,
          ": asked to stop before it reached rank 0");
}

struct Address {
  sockaddr_storage bytes{};
  socklen_t size = 0;
  bool loopback = false;
};

bool is_loopback(const sockaddr* address) {
  if (address->sa_family == AF_INET) return ntohl(reinterpret_cast<const sockaddr_in*>(address)->sin_addr.s_addr) >> 24 == 127;
  return address->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

// Returns no address if the name service asks to try again.
std::vector<Address> resolve(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int problem = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (problem == EAI_AGAIN) return {};
  require(problem == 0, ExitCode::environment, "MASTER_ADDR=", host, ": ", ::gai_strerror(problem));
  std::vector<Address> out;
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    Address& address = out.emplace_back();
    std::memcpy(&address.bytes, entry->ai_addr, entry->ai_addrlen);
    address.size = entry->ai_addrlen;
    address.loopback = is_loopback(entry->ai_addr);
  }
  ::freeaddrinfo(found);
  return out;
}

std::vector<Address> resolve_within(const Launch& launch, const StoreOptions& options, double deadline) {
  for (;;) {
    look_for_stop(launch, options);
    std::vector<Address> out = resolve(launch.address, launch.port);
    if (!out.empty()) return out;
    require(monotonic_now() < deadline, ExitCode::environment, "MASTER_ADDR=", launch.address, ": the name service does not answer");
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
}

// Returns true if the secret is published in a file of this host. Throws Error(usage) if one is required and missing.
bool secret_is_published(const Launch& launch, const StoreOptions& options, const std::vector<Address>& addresses) {
  if (options.secret) return false;
  const bool is_local =
      launch.local_size == launch.world && std::all_of(addresses.begin(), addresses.end(), [](const Address& a) { return a.loopback; });
  require(
      is_local, ExitCode::usage, "ranks that meet at ", launch.address, ":", launch.port,
      ", which other hosts may reach, need a secret: set MANTISSA_SECRET or MANTISSA_SECRET_FILE to the same 32 random bytes for all of "
      "them");
  return true;
}

Socket bound(const Launch& launch, Address address) {
  if (address.loopback && launch.local_size < launch.world) {  // the name of a host may mean its loopback address on the host itself
    if (address.bytes.ss_family == AF_INET) reinterpret_cast<sockaddr_in*>(&address.bytes)->sin_addr.s_addr = INADDR_ANY;
    if (address.bytes.ss_family == AF_INET6) reinterpret_cast<sockaddr_in6*>(&address.bytes)->sin6_addr = in6addr_any;
  }
  Socket socket(::socket(address.bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;  // connections of the attempt before may linger; two listeners remain impossible
  if (socket) ::setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  const bool ok = socket && ::bind(socket.fd(), reinterpret_cast<const sockaddr*>(&address.bytes), address.size) == 0 &&
                  ::listen(socket.fd(), 1024) == 0;
  if (ok) return socket;
  const int error = errno;
  require(error != EADDRINUSE, ExitCode::environment, "MASTER_PORT=", launch.port, ": the port is in use on ", launch.address);
  errno = error;
  return Socket();
}

int port_of(const Socket& socket) {
  sockaddr_storage name{};
  socklen_t size = sizeof name;
  require(::getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&name), &size) == 0, ExitCode::environment,
          "getsockname: ", system_message(errno));
  return ntohs(name.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&name)->sin6_port
                                          : reinterpret_cast<sockaddr_in*>(&name)->sin_port);
}

// 32 bytes fit into the buffer of a new connection.
bool write_all(const Socket& socket, std::span<const std::byte> bytes) {
  return ::send(socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
}

// Tries to reach rank 0, and keeps the latest problem for the message of the last try.
class Caller {
 public:
  Caller(const Launch& launch, const StoreOptions& options)
      : launch_(launch), options_(options), deadline_(monotonic_now() + options.init_timeout_s) {}

  Connection call() {
    const std::vector<Address> addresses = resolve_within(launch_, options_, deadline_);
    const bool published = launch_.port == 0 || secret_is_published(launch_, options_, addresses);
    for (int pause = 20;; pause = std::min(pause + pause / 4, 500)) {
      look_for_stop(launch_, options_);
      if (!published) {
        if (std::optional<Connection> found = try_addresses(addresses, *options_.secret)) return std::move(*found);
      } else {
        problem_ = "no file in " + rendezvous_folder(options_.folder).string() + " says where rank 0 listens";
        const std::vector<RendezvousFile> files = rendezvous_files(options_.folder, launch_);
        look_for_death(files);
        for (const RendezvousFile& rendezvous : files) {
          const std::vector<Address> local = resolve(launch_.address, rendezvous.port);
          if (std::optional<Connection> found = try_addresses(local, options_.secret.value_or(rendezvous.secret))) return std::move(*found);
        }
      }
      require(monotonic_now() < deadline_, ExitCode::peer_lost, "rank ", launch_.rank, " did not reach rank 0 at ", launch_.address, ":",
              launch_.port, " within ", options_.init_timeout_s, " s (parallel.init_timeout_s): ", problem_);
      std::this_thread::sleep_for(std::chrono::milliseconds(pause));
    }
  }

 private:
  void look_for_death(const std::vector<RendezvousFile>& files) {
    const double now = monotonic_now();
    const bool any_alive = files.empty() || std::ranges::any_of(files, &RendezvousFile::held);
    if (any_alive) alive_at_ = now;
    const auto of_this_job = [&](const RendezvousFile& rendezvous) { return rendezvous.published >= options_.began; };
    const bool died = !any_alive && std::ranges::any_of(files, of_this_job);
    require(!died && now < alive_at_ + kDeadRendezvousSeconds, ExitCode::peer_lost, "rank ", launch_.rank,
            " did not reach rank 0, which has died: ", rendezvous_folder(options_.folder).string(), " says where it listened");
  }

  // Waits for `events` until the deadline.
  bool ready(const Socket& socket, short events, double deadline) const {
    for (;;) {
      look_for_stop(launch_, options_);
      pollfd wait{.fd = socket.fd(), .events = events, .revents = 0};
      const double left = deadline - monotonic_now();
      const int found = ::poll(&wait, 1, static_cast<int>(std::ceil(std::clamp(left, 0.0, kLookSeconds) * 1e3)));
      if (found > 0) return true;
      if (left <= 0 || (found < 0 && errno != EINTR)) return false;
    }
  }

  bool read_exactly(const Socket& socket, std::span<std::byte> out, double deadline) const {
    while (!out.empty()) {
      const ssize_t got = ready(socket, POLLIN, deadline) ? ::recv(socket.fd(), out.data(), out.size(), 0) : 0;
      if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
      if (got <= 0) return false;
      out = out.subspan(static_cast<size_t>(got));
    }
    return true;
  }

  std::optional<Connection> try_addresses(const std::vector<Address>& addresses, const std::string& secret) {
    for (const Address& address : addresses) {
      const double until = std::min(deadline_, monotonic_now() + kHandshakeSeconds);
      Socket socket(::socket(address.bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
      if (!socket) continue;
      configure(socket, options_.heartbeat_timeout_s);
      int error = ::connect(socket.fd(), reinterpret_cast<const sockaddr*>(&address.bytes), address.size) == 0 ? 0 : errno;
      if (error == EINPROGRESS) {
        socklen_t size = sizeof error;
        if (!ready(socket, POLLOUT, until))
          error = ETIMEDOUT;
        else
          ::getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
      }
      if (error != 0) {
        look_for_refusal(false);
        problem_ = system_message(error);
      } else if (authenticate(socket, secret, until)) {
        Connection connection(std::move(socket));
        if (welcomed(connection, until)) return connection;
      }
    }
    return {};
  }

  // A peer that answers with a hello and closes without a MAC has found that this rank's MAC is wrong.
  void look_for_refusal(bool refused) {
    const double now = monotonic_now();
    if (!refused) accepted_at_ = now;
    require(!options_.secret || now < accepted_at_ + kRefusedSeconds, ExitCode::usage, "rank ", launch_.rank, ": rank 0 at ",
            launch_.address, ":", launch_.port,
            " refuses its secret: MANTISSA_SECRET or MANTISSA_SECRET_FILE must be the same for all ranks, and so must the job name of the "
            "launcher");
  }

  bool authenticate(const Socket& socket, const std::string& secret, double until) {
    problem_ = "the process that listens there does not know the secret: it belongs to another job, or has another MANTISSA_SECRET";
    const HelloBytes mine = new_hello({.attempt = static_cast<uint32_t>(launch_.restart),
                                       .rank = static_cast<uint32_t>(launch_.rank),
                                       .world = static_cast<uint32_t>(launch_.world)});
    HelloBytes root{};
    Mac mac{};
    const bool met = write_all(socket, mine) && read_exactly(socket, root, until) && std::bit_cast<Hello>(root).magic == Hello{}.magic &&
                     write_all(socket, mac_of(MacSender::rank, secret, mine, root, launch_.job));
    const bool answered = met && read_exactly(socket, mac, until);
    look_for_refusal(met && !answered && monotonic_now() < until);
    return answered && same_mac(mac, mac_of(MacSender::root, secret, mine, root, launch_.job));
  }

  // Returns false if a later try may succeed.
  bool welcomed(Connection& connection, double until) {
    problem_ = "rank 0 closed the connection";
    while (monotonic_now() < until) {
      if (std::optional<Frame> frame = connection.next()) {
        if (frame->message() == Message::welcome) return true;
        const auto code = static_cast<ExitCode>(frame->number<uint8_t>());
        const bool later = frame->number<uint8_t>() != 0;
        problem_ = "rank 0 refuses it: " + frame->text();
        require(later, code, "rank ", launch_.rank, ": ", problem_);
        return false;
      }
      look_for_stop(launch_, options_);
      pollfd wait{.fd = connection.fd(), .events = POLLIN, .revents = 0};
      const bool open = ::poll(&wait, 1, static_cast<int>(kLookSeconds * 1e3)) <= 0 || connection.receive();
      require(open, ExitCode::peer_lost, "rank ", launch_.rank, ": rank 0 closed its connection before it welcomed this rank");
    }
    return false;
  }

  const Launch& launch_;
  const StoreOptions& options_;
  double deadline_, alive_at_ = monotonic_now(), accepted_at_ = alive_at_;
  std::string problem_;
};

}  // namespace

Listener listen_for_ranks(const Launch& launch, const StoreOptions& options) {
  const std::vector<Address> addresses = resolve_within(launch, options, monotonic_now() + options.init_timeout_s);
  const bool make_secret = secret_is_published(launch, options, addresses);
  Listener out;
  out.secret = make_secret ? new_secret() : *options.secret;
  for (size_t i = 0; i < addresses.size() && !out.socket; ++i) out.socket = bound(launch, addresses[i]);
  require(static_cast<bool>(out.socket), ExitCode::environment, "MASTER_ADDR=", launch.address, " MASTER_PORT=", launch.port,
          ": rank 0 cannot listen there: ", system_message(errno));
  ::fcntl(out.socket.fd(), F_SETFL, O_NONBLOCK);
  if (make_secret || launch.port == 0)
    out.published = std::make_unique<PublishedRendezvous>(options.folder, launch, RendezvousFile{port_of(out.socket), out.secret});
  return out;
}

Connection connect_to_root(const Launch& launch, const StoreOptions& options) { return Caller(launch, options).call(); }

}  // namespace mantissa
