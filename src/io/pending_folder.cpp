#include "io/pending_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <ctime>
#include <span>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "base/hash.h"
#include "base/host_name.h"
#include "mantissa/base/log.h"

namespace mantissa {
namespace {

// Returns "host NAME, process PID, since TIME, job JOB", cut to a sane length, since anybody may have written it.
std::string read_record(int fd) {
  std::array<char, 1024> record{};
  const ssize_t got = ::pread(fd, record.data(), record.size(), 0);
  std::string out(record.data(), static_cast<size_t>(got < 0 ? 0 : got));
  return out.substr(0, out.find('\n'));
}

bool of_this_host(const std::string& record) { return record.starts_with("host " + host_name() + ","); }

void write_record(int fd, const std::filesystem::path& path, const std::string& job) {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  std::array<char, 32> since{};
  std::strftime(since.data(), since.size(), "%Y-%m-%dT%H:%M:%SZ", &parts);
  const std::string record = text("host ", host_name(), ", process ", ::getpid(), ", since ", since.data(), ", job ", job, "\n");
  bool ok = ::ftruncate(fd, 0) == 0;
  for (size_t done = 0; ok && done < record.size();) {  // a write that took a part says nothing; the next one says why
    const ssize_t count = ::pwrite(fd, record.data() + done, record.size() - done, static_cast<off_t>(done));
    ok = count > 0;
    if (ok) done += static_cast<size_t>(count);
  }
  if (!ok) log_warning(path.string(), ": the owner record could not be written: ", system_message(errno));
}

// Returns 0, or why not.
int lock_error(int fd, int operation) {
  int result = 0;
  do result = ::flock(fd, operation | LOCK_NB);
  while (result != 0 && errno == EINTR);
  return result == 0 ? 0 : errno;
}

// Returns false once the file was removed or replaced.
bool has_name(int fd, const std::filesystem::path& path) {
  struct stat held {};
  struct stat named {};
  return ::fstat(fd, &held) == 0 && ::lstat(path.c_str(), &named) == 0 && held.st_ino == named.st_ino && held.st_dev == named.st_dev;
}

// Opens and locks the file. Throws Error(environment) naming the owner if another process has it.
int open_locked(const std::filesystem::path& path, int flags, int operation) {
  const int fd = ::open(path.c_str(), flags | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0666);  // no waiting for the writer of a pipe
  require(fd >= 0, ExitCode::environment, path.string(), ": cannot be opened: ", system_message(errno));
  struct stat status {};
  if (::fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(fd);
    fail(ExitCode::usage, path.string(), ": is not a regular file");
  }
  const int error = lock_error(fd, operation);
  if (error == 0) return fd;
  const std::string owner = read_record(fd);
  ::close(fd);
  require(error == EWOULDBLOCK, ExitCode::environment, path.string(), ": cannot be locked: ", system_message(error));
  fail(ExitCode::environment, path.parent_path().string(), ": is in use by ", owner.empty() ? "another process" : owner);
}

}  // namespace

void require_unlocked(const std::filesystem::path& folder) {
  std::error_code missing;
  if (std::filesystem::exists(folder / "LOCK", missing)) ::close(open_locked(folder / "LOCK", O_RDONLY, LOCK_SH));
}

OpenRecord::OpenRecord(OpenRecord&& other) noexcept : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)) {}

OpenRecord& OpenRecord::operator=(OpenRecord&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(path_, other.path_);
  return *this;
}

OpenRecord::~OpenRecord() {
  if (fd_ >= 0) ::close(fd_);
}

FolderLock::FolderLock(const std::filesystem::path& folder, const std::string& job)
    : OpenRecord(open_locked(folder / "LOCK", O_RDWR | O_CREAT, LOCK_EX), folder / "LOCK") {
  const std::string owner = read_record(fd_);
  if (!owner.empty())
    log_warning(folder.string(), ": taken over from ", owner, ", which did not end properly",
                of_this_host(owner) ? "" : "; make sure that it no longer runs there");
  write_record(fd_, path_, job);
}

FolderLock::~FolderLock() {
  // An empty record says that the owner ended properly.
  if (fd_ >= 0 && ::ftruncate(fd_, 0) != 0) log_warning(path_.string(), ": the owner record could not be cleared");
}

bool FolderLock::still_ours() const { return has_name(fd_, path_); }

std::optional<OwnerFile> OwnerFile::create(const std::filesystem::path& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
  const bool forbidden = errno == EACCES || errno == EPERM || errno == EROFS || errno == ENOENT;  // ENOENT: of /proc and its like
  require(fd >= 0, forbidden ? ExitCode::environment : ExitCode::storage, path.string(),
          ": creating the file failed: ", system_message(errno));
  OwnerFile file(fd, path);
  const int error = lock_error(fd, LOCK_EX);
  if (error != 0 && error != EWOULDBLOCK) file.remove();
  require(error == 0 || error == EWOULDBLOCK, ExitCode::environment, path.string(), ": cannot be locked: ", system_message(error));
  if (error != 0 || !has_name(fd, path)) return {};
  write_record(fd, path, "export");
  return file;
}

std::optional<OwnerFile> OwnerFile::left_at(const std::filesystem::path& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return {};
  OwnerFile file(fd, path);
  if (lock_error(fd, LOCK_EX) != 0) return {};  // without a name by now, it guards nothing: no other ever gets the name
  const std::string owner = read_record(fd);
  if (owner.empty() || of_this_host(owner)) return file;
  log_warning(path.string(), ": belongs to ", owner, "; if that process no longer runs, delete the file and the folder beside it");
  return {};
}

void OwnerFile::remove() const { ::unlink(path_.c_str()); }

namespace fs = std::filesystem;

std::string unique_id() {
  Hash64 id;
  require(::getrandom(&id.value, sizeof id.value, 0) == sizeof id.value, ExitCode::environment,
          "getrandom failed: ", system_message(errno));
  return id.text();
}

bool remove_leftover(const fs::path& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) log_warning(path.string(), ": could not be deleted: ", error.message());
  return !error;
}

void discard(const fs::path& path) {
  const fs::path trash = path.parent_path() / (".trash-" + path.filename().string() + "-" + unique_id());
  rename_path(path, trash);
  remove_leftover(trash);
}

namespace {

constexpr std::string_view kPrefix = ".tmp-", kLock = ".lock";
constexpr size_t kIdLetters = 16, kAround = kPrefix.size() + 1 + kIdLetters + kLock.size();

// Returns NAME of .tmp-NAME-<id>.lock.
std::optional<std::string> pending_name(const std::string& lock) {
  if (lock.size() <= kAround || !lock.starts_with(kPrefix) || !lock.ends_with(kLock)) return {};
  const size_t dash = lock.size() - kLock.size() - kIdLetters - 1;
  if (lock[dash] != '-' || !Hash64::parse(lock.substr(dash + 1, kIdLetters))) return {};
  return lock.substr(kPrefix.size(), dash - kPrefix.size());
}

// Returns the path of the folder. Throws Error(usage) as the constructor does.
fs::path checked_target(const fs::path& target) {
  require(!target.empty(), ExitCode::usage, "\"\" is not the name of a folder");
  const fs::path path = fs::absolute(target.has_filename() ? target : target.parent_path());
  require(path.filename().string().size() + kAround <= NAME_MAX, ExitCode::usage, target.string(), ": the name is longer than ",
          NAME_MAX - kAround, " bytes");
  std::error_code error;
  require(!fs::exists(fs::symlink_status(path, error)), ExitCode::usage, target.string(), ": exists already; give another name");
  require(fs::is_directory(path.parent_path(), error), ExitCode::usage, target.string(), ": there is no folder ",
          path.parent_path().string());
  return path;
}

}  // namespace

void sweep_pending_folders(const fs::path& folder, const std::optional<std::string>& name) {
  std::error_code unread;  // then nothing is known to be left
  std::vector<fs::path> locks;
  for (fs::directory_iterator entry(folder, unread), end; !unread && entry != end; entry.increment(unread)) {
    const std::optional<std::string> of = pending_name(entry->path().filename().string());
    if (of && of == name.value_or(*of)) locks.push_back(entry->path());
  }
  for (const fs::path& lock : locks) {
    const std::optional<OwnerFile> owner = OwnerFile::left_at(lock);
    if (owner && remove_leftover(lock.parent_path() / lock.stem())) owner->remove();
  }
}

PendingFolder::PendingFolder(const fs::path& target) : target_(checked_target(target)) {
  const std::string name = target_.filename().string();
  sweep_pending_folders(target_.parent_path(), name);
  while (!owner_) {
    temporary_ = target_.parent_path() / text(kPrefix, name, "-", unique_id());
    owner_ = OwnerFile::create(temporary_.string() + std::string(kLock));
  }
  try {
    make_directory(temporary_);
  } catch (...) {
    owner_->remove();
    throw;
  }
}

PendingFolder::~PendingFolder() {
  if (published_ || remove_leftover(temporary_)) owner_->remove();
}

void PendingFolder::publish() {
  sync_directory(temporary_);
  require(rename_folder_to_new(temporary_, target_), ExitCode::storage, target_.string(),
          ": was created by another process in the meantime");
  published_ = true;
  sync_directory(target_.parent_path());
}

}  // namespace mantissa
