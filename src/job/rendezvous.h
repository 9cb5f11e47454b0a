// Finds rank 0 and authenticates to it; on rank 0, opens the port at which it is found. Rendezvous files are in rendezvous_file.cpp.
#pragma once

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "job/frames.h"
#include "mantissa/job/store.h"

namespace mantissa {

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
