// Finding rank 0 and proving oneself to it; on rank 0, the port that it is found at. The files by which they meet: meeting.cpp.
#pragma once

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "job/frames.h"
#include "mantissa/job/store.h"

namespace mantissa {

inline constexpr double kLookSeconds = 0.1;    // between looks at a request to stop, and between steps that are told by heartbeats
inline constexpr double kFarewellSeconds = 1;  // for the last frames of a connection to get out

// How rank 0 tells the ranks of its host a port and a token that it chose: a file of this user's, 0600, named by user, job, attempt and a
// nonce, so that what a killed job left behind stands in nobody's way: who reads tries all, and only the living one proves its token.
struct Meeting {
  int port = 0;
  std::string token;
  bool held = true;                                      // its file is locked by the process that published it; else that has died
  std::chrono::system_clock::time_point published = {};  // not before it was
};

// Where these files lie.
std::filesystem::path meeting_folder(const std::string& chosen);

class PublishedMeeting {
 public:
  PublishedMeeting(const std::string& folder, const Launch& launch, const Meeting& meeting);
  ~PublishedMeeting();
  PublishedMeeting(const PublishedMeeting&) = delete;
  PublishedMeeting& operator=(const PublishedMeeting&) = delete;

 private:
  std::string path_;
  Socket file_;  // holds its lock: whoever publishes next deletes whole files without one
};

std::vector<Meeting> published_meetings(const std::string& folder, const Launch& launch);

// Rank 0's side: a listening socket, and the token, published where it has to be. Throws Error(environment) if the port is taken.
struct Listener {
  Socket socket;
  std::string token;
  std::unique_ptr<PublishedMeeting> published;
};
Listener listen_for_ranks(const Launch& launch, const StoreOptions& options);

// Another rank's: a connection on which both ends have proved the token and rank 0 has welcomed this rank. Tries until init_timeout_s, and
// gives up before, with Error(peer_lost), once rank 0 is known to have died: its connection ends after the proof, who published a meeting
// since this rank began is dead, or nobody but the dead has published one for some seconds.
Connection connect_to_root(const Launch& launch, const StoreOptions& options);

}  // namespace mantissa
