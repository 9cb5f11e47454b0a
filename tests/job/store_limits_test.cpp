// Ends at a limit of seconds, and cases without one: ranks that die or fall silent before and after all have met, connections that say
// nothing, and main threads without progress. The cases wait at the same time.
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "raw_ranks.h"

namespace mantissa::store_limits_test {

using test::Errors;
using test::expect_error;
using test::expect_no_errors;
using test::joined_rank;
using test::kSecret;
using test::on_ranks;
using test::pause_ms;
using test::port;
using test::proved_root;
using test::RawConnection;
using test::seconds_since;
using test::StoreCase;
using test::StoreJob;
using test::wait_for_failure;
using Clock = std::chrono::steady_clock;

// ---- before all have met

// Rank 1 dies; rank 0 still has a rank to tell, for 5 s. What is done beside it ends before. Where the machine does not let it, both are
// done again.
Errors before_rank_0_reports(const StoreJob& job, const std::function<void(const std::string& again)>& beside) {
  std::atomic<bool> reported{true};
  bool late = true;
  Errors errors;
  for (int tries = 0; late && tries < 5; ++tries) {
    const std::string again = std::to_string(tries);
    reported = false;
    errors = on_ranks(2, [&](int thread) {
      if (thread == 0) {
        test::error_of([&] { Store store(job.launch(0, 3, "waits" + again), job.options(2)); });
        reported = true;
        return;
      }
      joined_rank(job, 3, "waits" + again);
      beside(again);
      late = reported;
    });
  }
  EXPECT_FALSE(late);
  return errors;
}

// All were there, or who comes has no time left either.
Errors nobody_can_come_late(const StoreJob& job) {
  return before_rank_0_reports(job, [&](const std::string& again) {
    const Errors full = on_ranks(2, [&](int rank) {
      Store store(job.launch(rank, 2, "full" + again), job.options(2));
      if (rank == 0) wait_for_failure(store);
    });
    expect_error(full[0], ExitCode::peer_lost, "rank 1 (");
    const Error alone = test::error_of([&] { Store store(job.launch(0, 2, "alone" + again), job.options(2, 0.1)); });
    expect_error(alone, ExitCode::peer_lost, "not all ranks joined within 0.1 s");
  });
}

Errors asked_to_stop_while_waiting(const StoreJob& job) {
  return before_rank_0_reports(job, [&](const std::string& again) {
    std::thread dies([&] { joined_rank(job, 3, "asked" + again); });
    StoreOptions asked = job.options(2);
    asked.stop_asked = [start = Clock::now()] { return seconds_since(start) > 0.5; };
    test::error_of([&] { Store store(job.launch(0, 3, "asked" + again), asked); });
    dies.join();
  });
}

Errors with_unauthenticated_ends(const StoreJob& job) {
  return on_ranks(3, [&](int thread) {
    if (thread == 2) {
      const int at = port(job, job.launch(0, 2));
      for (int i = 0; i < 20; ++i) {
        RawConnection silent(at), half(at), wrong(at);
        half.send(new_hello({.rank = 1, .world = 2}));
        half.receive(sizeof(HelloBytes));
        wrong.authenticate({.rank = 1, .world = 2}, "another secret");
        EXPECT_TRUE(wrong.is_closed());
      }
      return;
    }
    if (thread == 1) pause_ms(1000);
    Store store(job.launch(thread, 2), job.options());
    store.leave();
  });
}

// Rank 0 ends when rank 1 has been told.
Errors with_another_secret(const StoreJob& job) {
  std::atomic<bool> told{false};
  const Errors errors = on_ranks(2, [&](int rank) {
    StoreOptions of = job.options();
    if (rank == 1) of.secret = "another secret of this length";
    if (rank == 0) of.stop_asked = [&] { return told.load(); };
    const Error error = test::error_of([&] { Store store(job.launch(rank, 2), of); });
    told = true;
    throw error;
  });
  return {errors[1]};
}

Launch at_free_port(const StoreJob& job) {
  Launch of = job.launch(0, 2);
  const Listener free = listen_for_ranks(of, job.options());
  of.port = port(job, of);
  return of;
}

// The port of a job may for a while be that of the one before.
Errors refused_for_a_while(const StoreJob& job) {
  const Launch of = at_free_port(job);
  return on_ranks(2, [&](int rank) {
    if (rank == 0) {
      StoreOptions other = job.options(20, 1);
      other.secret = "another secret of this length";
      test::error_of([&] { Store before(of, other); });
    }
    Launch own = of;
    own.rank = own.local_rank = rank;
    Store store(own, job.options());
    store.leave();
  });
}

// Rank 0 comes later than a refusal or a death takes to be believed.
Errors late_rank_0(const StoreJob& job, bool with_port) {
  const Launch of = with_port ? at_free_port(job) : job.launch(0, 2);
  return on_ranks(2, [&](int rank) {
    Launch own = of;
    own.rank = own.local_rank = rank;
    pause_ms(rank == 0 ? 6000 : 0);
    Store store(own, job.options());
    store.leave();
  });
}

// The program that answers at the port of a job is another's.
Errors answered(const StoreJob& job, const std::function<void(RawConnection&)>& how) {
  Launch of = job.launch(0, 2);
  const Listener listener = listen_for_ranks(of, job.options());
  of.port = port(job, of);
  of.rank = of.local_rank = 1;
  std::atomic<bool> over{false};
  std::thread other([&] {
    for (std::vector<RawConnection> open; !over; pause_ms(5)) {
      if (Socket socket = test::accepted(listener)) how(open.emplace_back(std::move(socket)));
    }
  });
  const Errors errors = on_ranks(1, [&](int) { Store store(of, job.options(20, 6)); });
  over = true;
  other.join();
  return errors;
}

Errors rank_0_dies(const StoreJob& job, bool welcomes) {
  return on_ranks(2, [&](int thread) {
    if (thread == 1) {
      Store store(job.launch(1, 2), job.options());
      return;
    }
    const Listener listener = listen_for_ranks(job.launch(0, 2), job.options());
    Connection connection = proved_root(listener).take();
    if (welcomes) connection.send(Message::welcome);
    connection.flush();
  });
}

// The file that says where rank 0 listens outlives a kill; its lock does not.
void leave_file_of_dead(const StoreJob& job) {
  std::string path;
  {
    const PublishedRendezvous living(job.folder.path(), job.launch(0, 2), {.port = 1, .secret = kSecret});
    path = std::filesystem::directory_iterator(job.folder.path())->path();
    EXPECT_TRUE(rendezvous_files(job.folder.path(), job.launch(0, 2)).at(0).held);
  }
  test::write_file(path, "mantissa 1 " + kSecret + "\n");
  ::chmod(path.c_str(), 0600);
  EXPECT_FALSE(rendezvous_files(job.folder.path(), job.launch(0, 2)).at(0).held);
}

// A file that may be of an earlier job is given 5 s for its place to be taken.
Errors after_rank_0_died(const StoreJob& job, bool of_job_before, double init_timeout_s) {
  leave_file_of_dead(job);
  StoreOptions hurried = job.options(20, init_timeout_s);
  if (of_job_before) hurried.began = std::chrono::system_clock::now() + std::chrono::hours(1);
  return on_ranks(1, [&](int) { Store store(job.launch(1, 2), hurried); });
}

Errors beside_file_of_dead_job(const StoreJob& job) {
  leave_file_of_dead(job);
  StoreOptions later = job.options();
  later.began = std::chrono::system_clock::now() + std::chrono::milliseconds(100);
  return on_ranks(2, [&](int rank) {
    pause_ms(rank == 0 ? 1000 : 0);
    Store store(job.launch(rank, 2), later);
    store.leave();
  });
}

std::vector<StoreCase> rendezvous_cases() {
  const auto closes = [](RawConnection& raw) { const RawConnection ended(std::move(raw)); };
  const auto greets = [closes](RawConnection& raw) {
    raw.receive(sizeof(HelloBytes));
    raw.send("SSH-2.0-" + std::string(40, 'x'));  // a hello and less than a MAC
    closes(raw);
  };
  const auto hangs = [](RawConnection& raw) { raw.send(new_hello({.world = 2})); };
  const ExitCode lost = ExitCode::peer_lost;
  const auto third_comes_late = [](const StoreJob& job) {
    return on_ranks(3, [&](int rank) {
      if (rank == 1) return void(joined_rank(job, 3));
      pause_ms(rank == 2 ? 1500 : 0);
      Store store(job.launch(rank, 3), job.options());
    });
  };
  return {
      {"third comes late", third_comes_late, 2, lost, "rank 1 \\(raw\\) closed its connection; last seen at step 0 \\(start\\)"},
      {"nobody can come late", nobody_can_come_late},
      {"asked to stop while waiting", asked_to_stop_while_waiting},
      {"unauthenticated", with_unauthenticated_ends},
      {"another secret", with_another_secret, 1, ExitCode::usage,
       "rank 1: rank 0 at 127.0.0.1:0 refuses its secret: MANTISSA_SECRET or MANTISSA_SECRET_FILE must"},
      {"refused for a while", refused_for_a_while},
      {"rank 0 late", [](const StoreJob& job) { return late_rank_0(job, false); }},
      {"rank 0 late, port", [](const StoreJob& job) { return late_rank_0(job, true); }},
      {"a proxy", [=](const StoreJob& job) { return answered(job, closes); }, 1, lost, "rank 1 did not reach rank 0"},
      {"another protocol", [=](const StoreJob& job) { return answered(job, greets); }, 1, lost, "rank 1 did not reach rank 0"},
      {"a rank 0 that hangs", [=](const StoreJob& job) { return answered(job, hangs); }, 1, lost, "rank 1 did not reach rank 0"},
      {"rank 0 dies", [](const StoreJob& job) { return rank_0_dies(job, false); }, 1, lost,
       "rank 0 closed its connection before it welcomed this rank"},
      {"rank 0 dies later", [](const StoreJob& job) { return rank_0_dies(job, true); }, 1, lost, "rank 0 closed its connection$"},
      {"rank 0 has died", [](const StoreJob& job) { return after_rank_0_died(job, false, 2); }, 1, lost,
       "rank 1 did not reach rank 0, which has died: .*mantissa-test"},
      {"of the job before, for long", [](const StoreJob& job) { return after_rank_0_died(job, true, 60); }, 1, lost, "which has died"},
      {"of the job before", [](const StoreJob& job) { return after_rank_0_died(job, true, 2); }, 1, lost,
       "within 2 s \\(parallel.init_timeout_s\\)"},
      {"file of a dead job", beside_file_of_dead_job},
  };
}

// ---- silence

// Rank 1 of `world` joins and says no more until rank 0 has left.
Errors silent_rank(const StoreJob& job, int world) {
  std::atomic<bool> over{false};
  return on_ranks(2, [&](int rank) {
    if (rank == 1) {
      const Connection silent = joined_rank(job, world);
      while (!over) pause_ms(10);
      return;
    }
    const Error error = test::error_of([&] {
      Store store(job.launch(0, world), job.options(1));
      wait_for_failure(store);
    });
    over = true;
    throw error;
  });
}

Errors silent_rank_0(const StoreJob& job) {
  std::atomic<bool> over{false};
  return on_ranks(2, [&](int rank) {
    if (rank == 1) {
      const Error error = test::error_of([&] {
        Store store(job.launch(1, 2), job.options(1));
        wait_for_failure(store);
      });
      over = true;
      throw error;
    }
    const Listener listener = listen_for_ranks(job.launch(0, 2), job.options(1));
    Connection silent = proved_root(listener).take();
    silent.send(Message::welcome);
    silent.send(Message::reply, Fields().number(uint32_t{1}).text(""));  // the start
    silent.flush();
    while (!over) pause_ms(10);
  });
}

// Connections that say too little for a proof are closed after 5 s.
Errors slow_connections(const StoreJob& job) {
  std::atomic<bool> over{false};
  return on_ranks(3, [&](int rank) {
    if (rank < 2) {
      Store store(job.launch(rank, 2), job.options());
      while (!over) pause_ms(10);
      return store.leave();
    }
    const int at = port(job, job.launch(0, 2));
    RawConnection silent(at), slow(at);
    const auto start = Clock::now();
    for (int i = 0; i < 40 && seconds_since(start) < 4; ++i) {
      slow.send("x");
      pause_ms(100);
    }
    EXPECT_EQ(slow.receive(100).size(), 32U);
    EXPECT_TRUE(silent.is_closed());
    EXPECT_GE(seconds_since(start), 4.5);
    over = true;
  });
}

std::vector<StoreCase> silence_cases() {
  const std::string silent = " sent no heartbeat for 1 s \\(parallel.heartbeat_timeout_s\\)";
  return {{"silent before all are there", [](const StoreJob& job) { return silent_rank(job, 3); }, 1, ExitCode::peer_lost,
           "rank 1 \\(raw\\)" + silent},
          {"silent", [](const StoreJob& job) { return silent_rank(job, 2); }, 1, ExitCode::peer_lost,
           "rank 1 \\(raw\\)" + silent + "; last seen at step 0 \\(start\\)"},
          {"silent rank 0", silent_rank_0, 1, ExitCode::peer_lost, "rank 0" + silent},
          {"slow", slow_connections}};
}

// ---- main threads

// Collects the report of each rank.
class Reports {
 public:
  Watch watch(int rank, const WatchdogTimeouts& timeouts) {
    return {.timeouts = timeouts, .report = [this, rank](const std::string& why) {
              const std::lock_guard lock(mutex_);
              of_[rank] += why + "\n";
            }};
  }
  std::string of(int rank) { return of_[rank]; }

 private:
  std::mutex mutex_;
  std::map<int, std::string> of_;
};

// Rank 1 makes no progress; the other two would wait for ever.
Errors stuck(const StoreJob& job) {
  Reports reports;
  const Errors errors = job.in_store(3, job.options(2), [&](Store& store, int rank) {
    store.progress().set_phase(4, "step");
    store.watch(reports.watch(rank, {.step_timeout_s = rank == 1 ? 0.5 : 1000}));
    wait_for_failure(store);
  });
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_THAT(reports.of(rank), ::testing::HasSubstr("no progress for 0.5 s"));
    EXPECT_EQ(std::ranges::count(reports.of(rank), '\n'), 1) << "once";
  }
  return errors;
}

Errors behind(const StoreJob& job) {
  Reports reports;
  return job.in_store(3, job.options(2), [&](Store& store, int rank) {
    store.progress().set_phase(4, "step");
    Watch of = reports.watch(rank, {.step_timeout_s = rank == 0 ? 2.5 : 1000});
    of.collectives = [rank] { return rank == 2 ? 17 : 18; };
    store.watch(of);
    wait_for_failure(store);
  });
}

// Sections that are begun again and again, and no watch.
Errors progress_or_no_watch(const StoreJob& job) {
  Reports reports;
  const Errors errors = job.in_store(2, job.options(), [&](Store& store, int rank) {
    store.watch(reports.watch(rank, {.section_timeout_s = 6}));
    for (int i = 0; i < 65; ++i) {
      store.progress().set_phase(1, "evaluation");
      pause_ms(100);
    }
    store.check();
    store.watch(reports.watch(rank, {.section_timeout_s = 0.1}));
    store.watch({});
    pause_ms(700);
    store.check();
  });
  EXPECT_EQ(reports.of(0) + reports.of(1), "");
  return errors;
}

Errors died_watched(const StoreJob& job) {
  Reports reports;
  const Errors errors = on_ranks(3, [&](int rank) {
    Store store(job.launch(rank, 3), job.options(2));
    store.watch(reports.watch(rank, {}));
    store.barrier("begin");
    if (rank != 1) wait_for_failure(store);
  });
  EXPECT_EQ(reports.of(0) + reports.of(2), "") << "no reason for reports";
  return errors;
}

Errors left_behind(const StoreJob& job) {
  std::atomic<int> left{0};
  job.in_store(2, job.options(2), [&](Store& store, int rank) {
    if (rank == 0) return store.fail_all(ExitCode::data, "x.bin: damaged");
    Watch of;
    of.leave = [&](const Failure& failure) {
      EXPECT_EQ(failure.code, ExitCode::data);
      EXPECT_THAT(failure.message, ::testing::HasSubstr("x.bin: damaged"));
      ++left;
    };
    store.watch(of);
    test::eventually([&] { return left > 0; });
  });
  EXPECT_GE(left, 1);
  return {};
}

std::vector<StoreCase> watch_cases() {
  return {
      {"stuck", stuck, 3, ExitCode::peer_lost, "^rank 1 \\(.*no progress for 0.5 s \\(parallel.step_timeout_s\\), at step 4 \\(step\\)"},
      {"behind", behind, 3, ExitCode::peer_lost,
       "no progress for 2.5 s.*; rank 2 \\(.*\\) is behind: at collective 17 \\(step 4, step\\), others at 18"},
      {"progress", progress_or_no_watch},
      {"died", died_watched, 2, ExitCode::peer_lost, "rank 1"},
      {"left behind", left_behind}};
}

TEST(StoreLimits, EndWhatTheyAreForAndNothingElse) {
  std::vector<StoreCase> all = rendezvous_cases();
  for (const std::vector<StoreCase>& more : {silence_cases(), watch_cases()}) all.insert(all.end(), more.begin(), more.end());
  test::expect_at_once(all);
}

}  // namespace mantissa::store_limits_test
