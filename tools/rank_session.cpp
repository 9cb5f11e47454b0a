#include "rank_session.h"

#include <unistd.h>

#include "mantissa/base/hash.h"
#include "mantissa/base/log.h"
#include "mantissa/base/parallel.h"
#include "mantissa/base/version.h"

namespace mantissa::tools {
namespace {

// Hosts may have another number of cores.
std::string compared(RunConfig config) {
  config.training.threads = 0;
  return xxh64(effective_config(config)).text();
}

}  // namespace

RankSession::RankSession(const Launch& launch, const RunConfig& config, const std::function<bool()>& stop_asked) {
  if (launch.world == 1) return;
  log_info(describe(launch));
  store_ = std::make_unique<Store>(launch, StoreOptions{.init_timeout_s = config.parallel.init_timeout_s,
                                                        .heartbeat_timeout_s = config.parallel.heartbeat_timeout_s,
                                                        .stop_asked = stop_asked});
  told_to_all([&] { meet(launch, config); });
}

void RankSession::meet(const Launch& launch, const RunConfig& config) {
  store_->compare({{"config", compared(config)}, {"build", build_fingerprint()}});
  Store* const store = store_.get();
  auto transport = ucx_transport(
      launch.rank, [store](const std::string& own) { return store->gather("address", own); }, [store] { store->check(); });
  mesh_ = make_mesh(Communicator(std::move(transport)), static_cast<int>(config.parallel.tensor));
}

// An error of one rank ends all, with its code.
void RankSession::told_to_all(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    store_->fail_all(error.code(), error.what());
    throw;
  } catch (const std::exception& error) {
    store_->fail_all(ExitCode::internal, error.what());
    throw;
  }
}

void RankSession::at(int64_t step, const char* section) {
  if (store_) store_->progress().at(step, section);
}

void RankSession::run(const std::function<void()>& body) {
  if (!store_) return body();
  told_to_all([&] {
    body();
    mesh_.world.barrier();
  });
  mesh_ = {};
  store_->leave();
}

Option tensor_option(int64_t& tensor) {
  return {.name = "--tensor", .target = &tensor, .description = "ranks that share the model, each started by a launcher; default: 1"};
}

void on_tensor_ranks(int64_t tensor, const std::string& checkpoint, const std::function<void(const TensorRanks&)>& body) {
  const Launch launch = launch_from_environment();
  require(tensor == launch.world, ExitCode::usage, "--tensor ", tensor, " needs ", count_text(tensor, "rank"), ", and this is ",
          describe(launch), "; start them with mantissa launch --nproc-per-node ", tensor, " -- ...");
  RunConfig config;  // what ranks compare
  config.parallel = {.data = 1, .tensor = tensor};
  config.checkpoint.init_from = checkpoint;
  share_cores(launch);
  RankSession session(launch, config);
  session.run([&] { body({.group = session.mesh().tensor}); });
}

void share_cores(const Launch& launch) {
  const auto online = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  if (launch.local_size > 1) set_default_threads(threads_of_rank(launch, num_threads(), online));
}

}  // namespace mantissa::tools
