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
constexpr int64_t kMostTokenBytes = 4096;
constexpr std::chrono::milliseconds kClockTick{10};  // times of files are those of the last one

const std::chrono::system_clock::time_point kProcessBegan = std::chrono::system_clock::now();

std::chrono::system_clock::time_point time_of(const struct timespec& time) {
  const auto since = std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
  return std::chrono::system_clock::time_point(std::chrono::duration_cast<std::chrono::system_clock::duration>(since));
}

std::string without_space_at_end(std::string token) {
  token.erase(token.find_last_not_of(" \t\r\n") + 1);
  return token;
}

// token_file: named by the user; root may take another's. meeting_file: found in a folder that all may write.
enum class Secret { token_file, meeting_file };

// Of a file of this user's that nobody else may read.
Socket opened_secret(const std::string& path, Secret kind) {
  const int follow = kind == Secret::meeting_file ? O_NOFOLLOW : 0;
  Socket file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | follow));
  require(static_cast<bool>(file), ExitCode::usage, path, ": cannot be opened: ", system_message(errno));
  struct stat status {};
  require(::fstat(file.fd(), &status) == 0 && S_ISREG(status.st_mode), ExitCode::usage, path, ": is not a regular file");
  require((status.st_mode & 077) == 0, ExitCode::usage, path, ": others may read this secret; chmod 600 it");
  const bool own = status.st_uid == ::geteuid() || (kind == Secret::token_file && ::geteuid() == 0);
  require(own, ExitCode::usage, path, ": belongs to another user");
  return file;
}

std::string content_of(const Socket& file, const std::string& path) {
  std::string out(kMostTokenBytes, '\0');
  const ssize_t got = ::pread(file.fd(), out.data(), out.size(), 0);
  require(got >= 0, ExitCode::usage, path, ": cannot be read: ", system_message(errno));
  out.resize(static_cast<size_t>(got));
  return out;
}

std::string user_prefix() { return text("mantissa-", ::geteuid(), "-"); }

std::string meeting_prefix(const Launch& launch) {
  const Hash64 key = xxh64(text(launch.job, '\n', launch.port));
  return text(user_prefix(), key, "-", launch.restart, "-");
}

std::optional<Meeting> parsed_meeting(const std::string& content) {
  const size_t space = content.find(' ', 9);
  if (!content.starts_with("mantissa ") || space == std::string::npos || !content.ends_with('\n')) return {};
  const int port = std::atoi(content.substr(9, space - 9).c_str());
  if (port <= 0 || port >= 65536) return {};
  return Meeting{.port = port, .token = without_space_at_end(content.substr(space + 1))};
}

// Calls body(path, file, meeting) for every meeting file of this user's whose name begins with `prefix`.
void for_meetings(const fs::path& folder, const std::string& prefix,
                  const std::function<void(const std::string&, const Socket&, const Meeting&)>& body) {
  std::error_code unreadable;
  for (const auto& entry : fs::directory_iterator(folder, unreadable)) {
    if (!entry.path().filename().string().starts_with(prefix)) continue;
    try {  // gone meanwhile, somebody else's, or not yet written
      const std::string path = entry.path().string();
      const Socket file = opened_secret(path, Secret::meeting_file);
      if (const std::optional<Meeting> meeting = parsed_meeting(content_of(file, path))) body(path, file, *meeting);
    } catch (const Error&) {
      continue;
    }
  }
}

// Files that rank 0 of a job left behind when it was killed: their locks went with it.
void sweep_meetings(const fs::path& folder) {
  for_meetings(folder, user_prefix(), [](const std::string& path, const Socket& file, const Meeting&) {
    if (::flock(file.fd(), LOCK_EX | LOCK_NB) == 0) ::unlink(path.c_str());
  });
}

}  // namespace

std::chrono::system_clock::time_point process_began() { return kProcessBegan; }

fs::path meeting_folder(const std::string& chosen) {
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

std::optional<std::string> job_token(const Environment& environment) {
  const auto value = environment.find("MANTISSA_TOKEN"), file = environment.find("MANTISSA_TOKEN_FILE");
  if (value == environment.end() && file == environment.end()) return {};
  require(value == environment.end() || file == environment.end(), ExitCode::usage, "MANTISSA_TOKEN and MANTISSA_TOKEN_FILE are both set");
  const char* const name = file == environment.end() ? "MANTISSA_TOKEN" : "MANTISSA_TOKEN_FILE";
  std::string token;
  try {
    token = without_space_at_end(file == environment.end() ? value->second
                                                           : content_of(opened_secret(file->second, Secret::token_file), file->second));
  } catch (const Error& error) {
    fail(error.code(), name, ": ", error.what());
  }
  require(!token.empty() && token.size() < static_cast<size_t>(kMostTokenBytes), ExitCode::usage, name, ": a token has 1 to ",
          kMostTokenBytes - 1, " bytes, this one ", token.size());
  if (token.size() < 16)
    log_warning(name, ": the token has ", token.size(), " bytes and can be guessed; take 32 random bytes as hex digits");
  return token;
}

std::string new_token() { return random_hex(32); }

PublishedMeeting::PublishedMeeting(const std::string& folder, const Launch& launch, const Meeting& meeting)
    : path_((meeting_folder(folder) / (meeting_prefix(launch) + random_hex(8))).string()) {
  sweep_meetings(meeting_folder(folder));
  const std::string content = text("mantissa ", meeting.port, " ", meeting.token, "\n");
  file_ = Socket(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  // Locked before it has a content: a whole file without a lock is one of the dead.
  const bool written = file_ && ::flock(file_.fd(), LOCK_EX | LOCK_NB) == 0 &&
                       ::write(file_.fd(), content.data(), content.size()) == static_cast<ssize_t>(content.size());
  const int error = errno;
  if (file_ && !written) ::unlink(path_.c_str());
  require(written, ExitCode::environment, path_,
          ": cannot be written, and so the other ranks cannot find this one: ", system_message(error));
}

PublishedMeeting::~PublishedMeeting() { ::unlink(path_.c_str()); }

std::vector<Meeting> published_meetings(const std::string& folder, const Launch& launch) {
  std::vector<Meeting> out;
  for_meetings(meeting_folder(folder), meeting_prefix(launch), [&](const std::string&, const Socket& file, Meeting meeting) {
    struct stat status {};
    if (::fstat(file.fd(), &status) == 0) meeting.published = time_of(status.st_mtim) + kClockTick;
    meeting.held = ::flock(file.fd(), LOCK_SH | LOCK_NB) != 0;
    out.push_back(meeting);
  });
  return out;
}

}  // namespace mantissa
