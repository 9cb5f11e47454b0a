#include "base/limits.h"

#include <execinfo.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <fstream>
#include <span>
#include <sstream>

#include "base/hash.h"
#include "base/host_name.h"
#include "mantissa/base/error.h"
#include "mantissa/base/text.h"

namespace mantissa {
namespace {

constexpr int64_t kPageBytes = 4096;

std::string limit_text(decltype(RLIMIT_AS) resource, const char* what, const char* option) {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return {};
  return text("; ", what, " limited to ", limit.rlim_cur / 1024, " KiB (ulimit ", option, ")");
}

// A stack grows when it is touched, and where that fails the process ends.
[[gnu::noinline]] void touch_stack() {
  volatile std::byte block[kStackBytes - 4 * kPageBytes];
  for (size_t i = sizeof block; i > static_cast<size_t>(kPageBytes); i -= static_cast<size_t>(kPageBytes)) block[i - 1] = {};
}

}  // namespace

std::string memory_limits() { return limit_text(RLIMIT_AS, "the address space is", "-v") + limit_text(RLIMIT_DATA, "data are", "-d"); }

std::string process_limit() {
  rlimit limit{};
  const bool limited = ::getrlimit(RLIMIT_NPROC, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  const std::string processes =
      limited ? text("; this user may have ", limit.rlim_cur, " processes and threads (ulimit -u), perhaps fewer in a container") : "";
  return processes + memory_limits() + "; ask for fewer threads (training.threads, --threads)";
}

void require_memory(int64_t bytes, const std::string& purpose) {
  void* const place = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (place != MAP_FAILED) ::munmap(place, static_cast<size_t>(bytes));
  require(place != MAP_FAILED, ExitCode::environment, purpose, " needs ", bytes / 1024, " KiB more memory than the system gives",
          memory_limits());
}

void require_stack() {
  pthread_attr_t attributes;
  void* end = nullptr;
  size_t size = 0;
  const bool has_attributes = ::pthread_getattr_np(::pthread_self(), &attributes) == 0;
  const bool known = has_attributes && ::pthread_attr_getstack(&attributes, &end, &size) == 0;
  if (has_attributes) ::pthread_attr_destroy(&attributes);
  const int64_t left = known ? static_cast<std::byte*>(__builtin_frame_address(0)) - static_cast<std::byte*>(end) : 0;  // below this frame
  require(!known || left >= kStackBytes, ExitCode::environment, "kernels need ", kStackBytes / 1024, " KiB of stack, and this thread has ",
          left / 1024, " KiB left", limit_text(RLIMIT_STACK, "it is", "-s"));
  require_memory(kStackBytes, "the stack of this thread");
  touch_stack();
}

void require_unwinding() {
  void* frame = nullptr;
  require(::backtrace(&frame, 1) > 0, ExitCode::environment, "libgcc_s cannot be loaded", memory_limits());
}

namespace {

namespace fs = std::filesystem;

// Names the entries of a version of control groups.
struct GroupFiles {
  const char *limit, *usage, *kills;
  std::span<const char* const> droppable;  // entries of memory.stat: pages of files, and what the kernel keeps of folders and files
};
constexpr std::array kDroppable2 = {"inactive_file", "active_file", "slab_reclaimable"};
constexpr std::array kDroppable1 = {"total_inactive_file", "total_active_file"};  // it does not tell the rest
constexpr GroupFiles kVersion2{"memory.max", "memory.current", "memory.events", kDroppable2};
constexpr GroupFiles kVersion1{"memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", kDroppable1};

// A control group of a process, and the one that its hierarchy is mounted at.
struct Group {
  fs::path folder, top;
  const GroupFiles* files;
};

// Returns nothing for "max", too.
std::optional<int64_t> number_in(const fs::path& file) {
  std::ifstream in(file);
  int64_t number = 0;
  return in >> number ? std::optional(number) : std::nullopt;
}

// Returns the number behind a name at the start of a line.
std::optional<int64_t> number_of(const fs::path& file, const std::string& name) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    std::string key;
    int64_t number = 0;
    if (words >> key >> number && key == name) return number;
  }
  return {};
}

bool lists(const std::string& names, const std::string& name) { return ("," + names + ",").find("," + name + ",") != std::string::npos; }

// Returns the path of a process in the hierarchy of a mount: of v2 the line "0::PATH", of v1 that of the memory controller.
std::optional<std::string> path_in(const fs::path& root, const std::string& process, bool version2) {
  std::ifstream in(root / "proc" / process / "cgroup");
  for (std::string line; std::getline(in, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (version2 ? controllers.empty() : lists(controllers, "memory")) return line.substr(second + 1);
  }
  return {};
}

std::vector<Group> groups_of(const std::string& process, const fs::path& root) {
  std::vector<Group> groups;
  std::ifstream in(root / "proc/self/mountinfo");
  for (std::string line; std::getline(in, line);) {  // where a hierarchy is mounted, and which of its groups that is
    std::istringstream words(line);
    std::string word, mounted, point, type, options;
    words >> word >> word >> word >> mounted >> point;
    while (words >> word && word != "-") continue;
    words >> type >> word >> options;
    const bool version2 = type == "cgroup2";
    if (!version2 && (type != "cgroup" || !lists(options, "memory"))) continue;
    const std::optional<std::string> path = path_in(root, process, version2);
    if (!path) continue;
    const fs::path top = root / fs::path(point).relative_path(), below = fs::path(*path).lexically_relative(mounted);
    // In a container the path may lie outside of what is mounted, whose top is then its own group.
    const bool at_top = below.empty() || *below.begin() == ".." || below == ".";
    groups.push_back({.folder = at_top ? top : top / below, .top = top, .files = version2 ? &kVersion2 : &kVersion1});
  }
  return groups;
}

// Searches from a group up to the one that its hierarchy is mounted at.
template <class Wanted>
std::optional<fs::path> upwards(const Group& group, const Wanted& is_wanted) {
  for (fs::path folder = group.folder;; folder = folder.parent_path()) {
    if (is_wanted(folder)) return folder;
    if (folder == group.top || !folder.has_relative_path()) return {};
  }
}

// Returns the nearest group that counts kills. v2 counts those below, too, and a group without the controller has no such file.
std::optional<fs::path> counting_folder(const Group& group) {
  return upwards(group, [&](const fs::path& folder) { return number_of(folder / group.files->kills, "oom_kill").has_value(); });
}

// Returns what a group with a limit leaves.
std::optional<int64_t> left_in(const fs::path& folder, const GroupFiles& files) {
  const std::optional<int64_t> limit = number_in(folder / files.limit), usage = number_in(folder / files.usage);
  constexpr int64_t kNoLimit = int64_t{1} << 60;  // v1 says 2^63 less a page
  if (!limit || !usage || *limit >= kNoLimit) return {};
  int64_t left = *limit - *usage;
  for (const char* const name : files.droppable) left += number_of(folder / "memory.stat", name).value_or(0);
  return std::clamp<int64_t>(left, 0, *limit);
}

// Identifies the host: no other has it since it was booted. Containers have names of their own, and share the memory of their host.
std::string boot_of(const fs::path& root) {
  std::ifstream in(root / "proc/sys/kernel/random/boot_id");
  std::string boot;
  std::getline(in, boot);
  return boot.empty() ? host_name() : boot;
}

}  // namespace

std::vector<FreeMemory> free_memory(const fs::path& root) {
  std::vector<FreeMemory> out;
  const std::optional<int64_t> available = number_of(root / "proc/meminfo", "MemAvailable:");
  if (available) out.push_back({.bytes = *available * 1024, .of = "host " + host_name(), .place = xxh64(boot_of(root)).value});
  for (const Group& group : groups_of("self", root)) {
    upwards(group, [&](const fs::path& folder) {
      const std::optional<int64_t> left = left_in(folder, *group.files);
      if (!left) return false;
      struct stat status {};
      const bool known = ::stat(folder.c_str(), &status) == 0;
      out.push_back({.bytes = *left,
                     .of = "control group " + folder.string(),
                     .place = xxh64(text(boot_of(root), ' ', known ? status.st_ino : 0)).value});
      return false;
    });
  }
  return out;
}

std::optional<int64_t> out_of_memory_kills(const fs::path& root) {
  for (const Group& group : groups_of("self", root)) {
    const std::optional<fs::path> folder = counting_folder(group);
    if (folder) return number_of(*folder / group.files->kills, "oom_kill");
  }
  return {};
}

bool counts_kills_of(int64_t process, const fs::path& root) {
  const std::vector<Group> theirs = groups_of(std::to_string(process), root);
  for (const Group& group : groups_of("self", root)) {
    const std::optional<fs::path> folder = counting_folder(group);
    if (!folder) continue;
    const auto same = std::ranges::find(theirs, group.top, &Group::top);
    // v1 forgets the group of a process when it ends.
    if (same == theirs.end() || group.files == &kVersion1) return true;
    return upwards(*same, [&](const fs::path& above) { return above == *folder; }).has_value();
  }
  return true;
}

int64_t peak_resident_bytes(const fs::path& root) { return number_of(root / "proc/self/status", "VmHWM:").value_or(0) * 1024; }

}  // namespace mantissa
