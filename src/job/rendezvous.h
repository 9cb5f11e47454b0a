// Finds rank 0 and authenticates to it; on rank 0, opens the port at which it is found.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "job/frames.h"
#include "job/launch.h"
#include "job/store.h"

namespace mantissa {

// Raises the limit of open files, which transports would otherwise hit without a message.

constexpr int kMostUnauthenticated = 128;  // connections to rank 0 that have not proved themselves

// Raises the soft limit, which protects programs that use select(), to what this rank needs. Throws Error(environment) with need and limit.
void require_descriptors(const Launch& launch);

// Authenticates both ends of a connection: each proves that it knows the job's secret before the other uses any of its bytes.
//
//   rank r -> rank 0   hello, 32 bytes
//   rank 0 -> rank r   hello, 32 bytes
//   rank r -> rank 0   HMAC-SHA256(secret, "rank" | hello of r | hello of 0 | job), 32 bytes
//   rank 0 -> rank r   HMAC-SHA256(secret, "root" | hello of r | hello of 0 | job), 32 bytes
//
//   hello  0  4  "MTSA"
//          4  2  protocol version      all numbers little-endian
//          6  2  0
//          8  4  attempt: restarts before this one
//         12  4  rank
//         16  4  world size
//         20 12  nonce from the system
//
// An unauthenticated connection is dropped after 5 s or 64 bytes. The numbers of a hello are read only after its MAC was verified.

inline constexpr uint16_t kStoreProtocol = 2;
inline constexpr size_t kMacBytes = 32;
inline constexpr double kHandshakeSeconds = 5;

using Mac = std::array<std::byte, kMacBytes>;
using HelloBytes = std::array<std::byte, 32>;

struct Hello {
  std::array<char, 4> magic = {'M', 'T', 'S', 'A'};
  uint16_t protocol = kStoreProtocol, zero = 0;
  uint32_t attempt = 0, rank = 0, world = 0;
  std::array<std::byte, 12> nonce = {};
};
static_assert(sizeof(Hello) == sizeof(HelloBytes));

HelloBytes new_hello(Hello hello);  // with a nonce of its own

enum class MacSender { rank, root };
Mac mac_of(MacSender sender, std::string_view secret, const HelloBytes& of_rank, const HelloBytes& of_root, std::string_view job);

Mac hmac_sha256(std::string_view key, std::span<const std::byte> message);
// Compares in a time that does not depend on where they differ.
bool same_mac(std::span<const std::byte> a, const Mac& b);

// Returns `bytes` random bytes as hex digits.
std::string random_hex(size_t bytes);

inline constexpr double kLookSeconds = 0.1;         // between looks at a request to stop, and between steps that are told by heartbeats
inline constexpr double kFailureReportSeconds = 1;  // for the last frames of a connection to get out

// Publication of a port and a secret that rank 0 chose, for the ranks of its host: a file of this user's, 0600, named by user, job, attempt
// and a nonce, so that files of a killed job stand in nobody's way: readers try all, and only the living one proves its secret.
struct RendezvousFile {
  int port = 0;
  std::string secret;
  bool held = true;                                      // its file is locked by the process that published it; else that has died
  std::chrono::system_clock::time_point published = {};  // not before it was
};

// Returns the folder of these files.
std::filesystem::path rendezvous_folder(const std::string& chosen);

class PublishedRendezvous {
 public:
  PublishedRendezvous(const std::string& folder, const Launch& launch, const RendezvousFile& rendezvous);
  ~PublishedRendezvous();
  PublishedRendezvous(const PublishedRendezvous&) = delete;
  PublishedRendezvous& operator=(const PublishedRendezvous&) = delete;

 private:
  std::string path_;
  Socket file_;  // holds its lock: whoever publishes next deletes whole files without one
};

std::vector<RendezvousFile> rendezvous_files(const std::string& folder, const Launch& launch);

// Rank 0's side: a listening socket, and the secret, published where required. Throws Error(environment) if the port is taken.
struct Listener {
  Socket socket;
  std::string secret;
  std::unique_ptr<PublishedRendezvous> published;
};
Listener listen_for_ranks(const Launch& launch, const StoreOptions& options);

// Returns another rank's connection, on which both ends are authenticated and rank 0 has welcomed this rank. Tries until init_timeout_s.
// Throws Error(peer_lost) earlier once rank 0 is known to have died: its connection ends after the MAC, the publisher of a file since this
// rank began is dead, or only dead ones have published for some seconds.
Connection connect_to_root(const Launch& launch, const StoreOptions& options);

}  // namespace mantissa
