#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <cerrno>
#include <filesystem>
#include <functional>

#include "job/handshake.h"
#include "job/rendezvous.h"
#include "mantissa/base/file.h"
#include "mantissa/base/hash.h"
#include "mantissa/base/log.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;
constexpr int64_t kMostSecretBytes = 4096;
constexpr std::chrono::milliseconds kClockTick{10};  // times of files are those of the last one

const std::chrono::system_clock::time_point kProcessBegan = std::chrono::system_clock::now();

std::chrono::system_clock::time_point time_of(const struct timespec& time) {
  const auto since = std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
  return std::chrono::system_clock::time_point(std::chrono::duration_cast<std::chrono::system_clock::duration>(since));
}

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
  require((status.st_mode & 077) == 0, ExitCode::usage, path, ": others may read this secret; chmod 600 it");
  const bool own = status.st_uid == ::geteuid() || (kind == SecretSource::secret_file && ::geteuid() == 0);
  require(own, ExitCode::usage, path, ": belongs to another user");
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

// Deletes files that rank 0 of a killed job left behind: their locks are gone.
void sweep_rendezvous_files(const fs::path& folder) {
  for_rendezvous_files(folder, user_prefix(), [](const std::string& path, const Socket& file, const RendezvousFile&) {
    if (::flock(file.fd(), LOCK_EX | LOCK_NB) == 0) ::unlink(path.c_str());
  });
}

}  // namespace

std::chrono::system_clock::time_point process_began() { return kProcessBegan; }

fs::path rendezvous_folder(const std::string& chosen) {
  if (!chosen.empty()) return chosen;
  const Environment environment = process_environment();
  const auto runtime = environment.find("XDG_RUNTIME_DIR");
  struct stat status {};  // sudo and containers leave the variable of somebody else, or of a folder that is not there
  const bool own = runtime != environment.end() && ::stat(runtime->second.c_str(), &status) == 0 && S_ISDIR(status.st_mode) &&
                   status.st_uid == ::geteuid();
  if (own) return runtime->second;
  std::error_code problem;
  const fs::path temporary = fs::temp_directory_path(problem);
  require(!problem, ExitCode::environment, "no temporary folder for what the ranks of this host publish: ", problem.message(),
          "; TMPDIR has to name a folder");
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
  require(!secret.empty() && secret.size() < static_cast<size_t>(kMostSecretBytes), ExitCode::usage, name, ": a secret has 1 to ",
          kMostSecretBytes - 1, " bytes, this one ", secret.size());
  if (secret.size() < 16)
    log_warning(name, ": the secret has ", secret.size(), " bytes and can be guessed; take 32 random bytes as hex digits");
  return secret;
}

std::string new_secret() { return random_hex(32); }

PublishedRendezvous::PublishedRendezvous(const std::string& folder, const Launch& launch, const RendezvousFile& rendezvous)
    : path_((rendezvous_folder(folder) / (rendezvous_prefix(launch) + random_hex(8))).string()) {
  sweep_rendezvous_files(rendezvous_folder(folder));
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
  for_rendezvous_files(rendezvous_folder(folder), rendezvous_prefix(launch),
                       [&](const std::string&, const Socket& file, RendezvousFile rendezvous) {
                         struct stat status {};
                         if (::fstat(file.fd(), &status) == 0) rendezvous.published = time_of(status.st_mtim) + kClockTick;
                         rendezvous.held = ::flock(file.fd(), LOCK_SH | LOCK_NB) != 0;
                         out.push_back(rendezvous);
                       });
  return out;
}

}  // namespace mantissa
