#include "tools/trace/step_shares.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>

#include "mantissa/base/error.h"
#include "mantissa/base/text.h"
#include "plan/plan_table.h"

namespace mantissa::tools {
namespace {

// Others of its track follow a step: an evaluation, a save.
bool is_step(const TracedSpan& span) { return span.track == Track::step && span.name == "step"; }

bool is_covering(Track track) { return track == Track::kernel || track == Track::exchange || track == Track::wait; }

double& time_of(Times& times, Track track) {
  return track == Track::kernel ? times.kernels : track == Track::exchange ? times.exchanges : times.waits;
}

// Returns the path with * for the number of each layer: "layers.*.mlp.down".
std::string kind_of(const std::string& path) {
  std::vector<std::string> parts = split(path, '.');
  for (std::string& part : parts) {
    if (!part.empty() && part.find_first_not_of("0123456789") == std::string::npos) part = "*";
  }
  return joined(parts, ".");
}

// A span that has begun, with what it lies in.
struct Frame {
  const TracedSpan* span;
  std::string pass = kInNone, module = kInNone, gemm{};
  bool covered;        // lies in a kernel, an exchange or a wait
  double inner = 0.0;  // microseconds of the spans directly in it
};

// Goes through the spans of the computing thread of a rank and adds up what they and their remainders took.
class Walk {
 public:
  Walk(const RankTrace& rank, const std::set<int64_t>& steps, RankShares& own, StepShares& all)
      : rank_(rank), steps_(steps), own_(own), all_(all) {}

  void take(const TracedSpan& span) {
    while (!frames_.empty() && span.middle() >= frames_.back().span->end()) leave();
    if (frames_.empty()) {
      if (is_step(span) && steps_.contains(span.number)) enter(span, Frame{.span = &span, .covered = false});
      if (span.track == Track::step && !is_step(span) && steps_.contains(span.number)) {
        Cost& cost = all_.between[span.name];
        ++cost.calls;
        cost.seconds += span.duration * 1e-6;
      }
      return;
    }
    constexpr double kRounding = 5.0;  // microseconds, of the clock of a device
    const Frame& outer = frames_.back();
    require(span.end() <= outer.span->end() + kRounding && span.begin >= outer.span->begin - kRounding, ExitCode::data, rank_.file,
            ": rank ", rank_.rank, ": ", span.name, " at ", span.begin, " overlaps ", outer.span->name, " at ", outer.span->begin);
    frames_.back().inner += span.duration;
    Frame frame{.span = &span,
                .pass = span.track == Track::pass ? span.name : outer.pass,
                .module = span.track == Track::module ? kind_of(span.name) : outer.module,
                .gemm = span.track == Track::gemm     ? span.name
                        : span.track == Track::module ? ""
                                                      : outer.gemm,
                .covered = outer.covered || is_covering(outer.span->track)};
    enter(span, std::move(frame));
  }
  void finish() {
    while (!frames_.empty()) leave();
  }

 private:
  void enter(const TracedSpan& span, Frame frame) {
    if (span.track == Track::pass || span.track == Track::step) ++all_.passes[frame.pass].calls;
    if (span.track == Track::module) ++all_.modules[frame.module].calls;
    if (span.track == Track::kernel && !frame.covered) {  // others are a part of theirs
      add_work(all_.modules[frame.module], span);
      all_.flops += span.flops;
    }
    if (is_covering(span.track) && !frame.covered) {
      Cost& cost = all_.kernels[row_of(frame)];
      ++cost.calls;
      cost.seconds += span.duration * 1e-6;
      add_work(cost, span);
      time_of(own_.times, span.track) += span.duration * 1e-6;
      time_of(all_.passes[frame.pass].times, span.track) += span.duration * 1e-6;
    }
    frames_.push_back(std::move(frame));
  }

  // Time in a span that is in no span within it belongs to its module; it is the rest unless a kernel, an exchange or a wait runs.
  void leave() {
    const Frame frame = std::move(frames_.back());
    frames_.pop_back();
    const double left = (frame.span->duration - frame.inner) * 1e-6;
    all_.modules[frame.module].seconds += left;
    if (frame.covered || is_covering(frame.span->track)) return;
    own_.times.rest += left;
    all_.passes[frame.pass].times.rest += left;
  }

  static void add_work(Cost& cost, const TracedSpan& span) {
    cost.flops += span.flops;
    cost.bytes += static_cast<double>(span.bytes);
  }
  static std::string row_of(const Frame& frame) {
    const TracedSpan& span = *frame.span;
    if (span.track == Track::exchange) return "exchange of " + span.name;
    return span.flops > 0.0 && !frame.gemm.empty() ? span.name + " " + frame.gemm : span.name;
  }

  const RankTrace& rank_;
  const std::set<int64_t>& steps_;
  RankShares& own_;
  StepShares& all_;
  std::vector<Frame> frames_;
};

std::vector<const TracedSpan*> steps_of(const RankTrace& rank) {
  std::vector<const TracedSpan*> out;
  for (const TracedSpan& span : rank.spans) {
    if (is_step(span)) out.push_back(&span);
  }
  return out;
}

// Returns the spans of a thread so that each stands behind those that it lies in. Inner spans end first, and stand first in the file.
std::vector<const TracedSpan*> outer_first(const RankTrace& rank, int thread) {
  std::vector<const TracedSpan*> out;
  for (auto span = rank.spans.rbegin(); span != rank.spans.rend(); ++span) {
    if (span->thread == thread) out.push_back(&*span);
  }
  std::ranges::stable_sort(
      out, [](const TracedSpan* a, const TracedSpan* b) { return a->begin != b->begin ? a->begin < b->begin : a->duration > b->duration; });
  return out;
}

RankShares shares_of(const RankTrace& rank, const std::set<int64_t>& steps, StepShares& all) {
  RankShares own{.rank = rank.rank, .ended = rank.ended, .times = {}};
  const std::vector<const TracedSpan*> traced = steps_of(rank);
  const int thread = traced.front()->thread;
  Walk walk(rank, steps, own, all);
  for (const TracedSpan* span : outer_first(rank, thread)) walk.take(*span);
  walk.finish();
  for (const TracedSpan& span : rank.spans) {
    if (span.thread == thread || span.track != Track::exchange) continue;
    const bool inside = std::ranges::any_of(traced, [&](const TracedSpan* step) {
      return steps.contains(step->number) && span.middle() >= step->begin && span.middle() < step->end();
    });
    if (!inside) continue;
    Cost& cost = all.beside["exchange of " + span.name];
    ++cost.calls;
    cost.seconds += span.duration * 1e-6;
    cost.bytes += static_cast<double>(span.bytes);
    own.beside += span.duration * 1e-6;
  }
  return own;
}

// Returns the steps that all ranks have whole.
std::set<int64_t> whole_steps(const ReadTrace& trace) {
  std::set<int64_t> all;
  for (const RankTrace& rank : trace.parts) {
    std::set<int64_t> own, both;
    for (const TracedSpan* step : steps_of(rank)) own.insert(step->number);
    std::ranges::set_intersection(all, own, std::inserter(both, both.end()));
    all = &rank == &trace.parts.front() ? own : both;
  }
  require(!all.empty(), ExitCode::data, trace.parts.front().file, ": holds no whole step",
          trace.parts.size() > 1 ? " that all ranks have" : "");
  return all;
}

}  // namespace

Times StepShares::times() const {
  Times sum;
  for (const RankShares& rank : by_rank) {
    sum.kernels += rank.times.kernels, sum.exchanges += rank.times.exchanges;
    sum.waits += rank.times.waits, sum.rest += rank.times.rest;
  }
  return sum;
}

StepShares step_shares(const ReadTrace& trace, std::optional<int64_t> step) {
  std::set<int64_t> steps = whole_steps(trace);
  if (step) {
    require(steps.contains(*step), ExitCode::usage, "--step: must be one of ", joined(steps), ", which are traced, got ", *step);
    steps = {*step};
  }
  StepShares out{.steps = {steps.begin(), steps.end()},
                 .ranks = trace.ranks,
                 .device = trace.parts.front().device,
                 .by_rank = {},
                 .passes = {},
                 .kernels = {},
                 .modules = {},
                 .beside = {},
                 .between = {}};
  for (const RankTrace& rank : trace.parts) out.by_rank.push_back(shares_of(rank, steps, out));
  out.kernels[kNoKernel].seconds = out.times().rest;
  return out;
}

namespace {

std::string milliseconds(double seconds) { return rounded(seconds * 1e3, 2); }
std::string percent(double part, double of) { return rounded(of > 0.0 ? 100.0 * part / of : 0.0, 1) + "%"; }
std::string rate(double work, double seconds, double unit) {
  if (!(work > 0.0 && seconds > 0.0)) return "";
  const double units = work / seconds / unit;
  return units < 0.05 ? "<0.1" : rounded(units, 1);
}
std::string calls_text(double calls) { return rounded(calls, calls == std::floor(calls) ? 0 : 2); }

// Returns the entries by descending seconds.
template <class Entry, class Seconds>
std::vector<std::pair<std::string, Entry>> largest_first(const std::map<std::string, Entry>& entries, const Seconds& seconds) {
  std::vector<std::pair<std::string, Entry>> out(entries.begin(), entries.end());
  std::ranges::stable_sort(out, [&](const auto& a, const auto& b) { return seconds(a.second) > seconds(b.second); });
  return out;
}

std::vector<std::string> rank_row(const std::string& name, const Times& times, double beside, double steps) {
  const double all = times.all();
  return {name,
          milliseconds(all / steps),
          percent(times.kernels, all),
          percent(times.exchanges, all),
          percent(times.waits, all),
          percent(times.rest, all),
          percent(beside, all)};
}

std::string ranks_table(const StepShares& shares, size_t top) {
  std::vector<std::vector<std::string>> rows = {{"rank", "ms a step", "kernels", "exchanges", "waits", "rest", "beside"}};
  std::vector<RankShares> ranks = shares.by_rank;
  const auto steps = static_cast<double>(shares.steps.size());
  const RankShares slowest =
      *std::ranges::max_element(ranks, {}, [](const RankShares& rank) { return rank.times.all() - rank.times.waits; });
  if (ranks.size() > top) ranks.resize(top);
  double beside = 0.0;
  for (const RankShares& rank : shares.by_rank) beside += rank.beside;
  for (const RankShares& rank : ranks) rows.push_back(rank_row(text(rank.rank), rank.times, rank.beside, steps));
  if (shares.by_rank.size() > 1) {
    rows.push_back(rank_row("mean", shares.times(), beside, shares.rank_steps()));
    rows.push_back(rank_row(text("busiest: ", slowest.rank), slowest.times, slowest.beside, steps));
  }
  return aligned(rows, Columns::numbers);
}

std::string passes_table(const StepShares& shares) {
  std::vector<std::vector<std::string>> rows = {{"pass", "ms a step", "share", "calls", "kernels", "exchanges", "waits", "rest"}};
  const double all = shares.times().all(), steps = shares.rank_steps();
  for (const auto& [name, pass] : largest_first(shares.passes, [](const PassCost& each) { return each.times.all(); })) {
    const Times& times = pass.times;
    rows.push_back({name, milliseconds(times.all() / steps), percent(times.all(), all), calls_text(static_cast<double>(pass.calls) / steps),
                    percent(times.kernels, all), percent(times.exchanges, all), percent(times.waits, all), percent(times.rest, all)});
  }
  return aligned(rows, Columns::numbers);
}

std::string costs_table(const char* title, const std::map<std::string, Cost>& costs, const StepShares& shares, size_t top) {
  std::vector<std::vector<std::string>> rows = {{title, "ms a step", "share", "calls", "GFLOP/s", "GB/s"}};
  const double all = shares.times().all(), steps = shares.rank_steps();
  Cost others;
  size_t left = 0;
  const auto add = [&](const std::string& name, const Cost& cost) {
    rows.push_back({name, milliseconds(cost.seconds / steps), percent(cost.seconds, all),
                    cost.calls > 0 ? calls_text(static_cast<double>(cost.calls) / steps) : "", rate(cost.flops, cost.seconds, 1e9),
                    rate(cost.bytes, cost.seconds, 1e9)});
  };
  for (const auto& [name, cost] : largest_first(costs, [](const Cost& each) { return each.seconds; })) {
    if (rows.size() <= top) {
      add(name, cost);
      continue;
    }
    ++left;
    others.seconds += cost.seconds, others.flops += cost.flops, others.bytes += cost.bytes, others.calls += cost.calls;
  }
  if (left > 0) add(text(left, " others"), others);
  return aligned(rows, Columns::numbers);
}

// Returns what followed the steps: how often on each rank, and its time beside that of the steps.
std::string between_table(const StepShares& shares) {
  std::vector<std::vector<std::string>> rows = {{"between steps", "ms each", "times", "of the steps' time"}};
  const auto ranks = static_cast<double>(shares.by_rank.size());
  for (const auto& [name, cost] : largest_first(shares.between, [](const Cost& each) { return each.seconds; })) {
    const auto calls = static_cast<double>(cost.calls);
    rows.push_back({name, milliseconds(cost.seconds / calls), calls_text(calls / ranks), percent(cost.seconds, shares.times().all())});
  }
  return aligned(rows, Columns::numbers);
}

// Returns "1, 3" or "1, 2, 3, 4, 5, 6, 7, 8, ..."; "" if none is missing.
std::string missing_ranks(const StepShares& shares) {
  constexpr size_t kMost = 8;
  std::vector<std::string> missing;
  for (int rank = 0; rank < shares.ranks && missing.size() <= kMost; ++rank) {
    const bool here = std::ranges::any_of(shares.by_rank, [&](const RankShares& own) { return own.rank == rank; });
    if (!here) missing.push_back(missing.size() < kMost ? text(rank) : "...");
  }
  return joined(missing);
}

Json json_of(const Times& times, double steps) {
  return {{"seconds", times.all() / steps},
          {"kernels", times.kernels / steps},
          {"exchanges", times.exchanges / steps},
          {"waits", times.waits / steps},
          {"rest", times.rest / steps}};
}

Json json_of(const std::map<std::string, Cost>& costs, double steps) {
  Json out = Json::Members();
  for (const auto& [name, cost] : largest_first(costs, [](const Cost& each) { return each.seconds; })) {
    out.add(name, {{"seconds", cost.seconds / steps},
                   {"calls", static_cast<double>(cost.calls) / steps},
                   {"flops", cost.flops / steps},
                   {"bytes", cost.bytes / steps}});
  }
  return out;
}

}  // namespace

std::string shares_table(const StepShares& shares, const std::string& name, size_t top) {
  const Times all = shares.times();
  const double steps = shares.rank_steps();
  std::string out = text(name, " | ", shares.steps.size() == 1 ? "step " : "steps ", shares.steps.front(),
                         shares.steps.size() == 1 ? "" : text(" to ", shares.steps.back()), " | ", count_text(shares.ranks, "rank"), " on ",
                         shares.device, " | ", milliseconds(all.all() / steps), " ms a step | ", rounded(shares.flops / all.all() / 1e9, 1),
                         " GFLOP/s of each rank | ", percent(all.rest, all.all()), " in no kernel, exchange or wait\n");
  for (const RankShares& rank : shares.by_rank) {
    if (!rank.ended) out += text("the trace of rank ", rank.rank, " has no end: its run was killed, or still goes on\n");
  }
  if (const std::string missing = missing_ranks(shares); !missing.empty())
    out += text("the traces of ", shares.ranks - std::ssize(shares.by_rank), " of ", shares.ranks, " ranks are not here: ", missing, '\n');
  out += '\n' + ranks_table(shares, top) + '\n' + passes_table(shares) + '\n' + costs_table("kernel", shares.kernels, shares, top);
  if (!shares.beside.empty()) out += '\n' + costs_table("beside the computation", shares.beside, shares, top);
  out += '\n' + costs_table("module", shares.modules, shares, top);
  if (!shares.between.empty()) out += '\n' + between_table(shares);
  return out;
}

Json shares_json(const StepShares& shares, const std::string& name) {
  Json::Entries ranks;
  for (const RankShares& rank : shares.by_rank) {
    Json times = json_of(rank.times, static_cast<double>(shares.steps.size()));
    Json entry{{"rank", rank.rank}, {"ended", rank.ended}};
    for (const auto& [key, value] : times.members()) entry.add(key, value);
    entry.add("beside", rank.beside / static_cast<double>(shares.steps.size()));
    ranks.push_back(std::move(entry));
  }
  const double steps = shares.rank_steps();
  Json passes = Json::Members();
  for (const auto& [pass, cost] : shares.passes) {
    Json entry = json_of(cost.times, steps);
    entry.add("calls", static_cast<double>(cost.calls) / steps);
    passes.add(pass, std::move(entry));
  }
  const Times all = shares.times();
  return {{"name", name},
          {"steps", shares.steps},
          {"ranks", shares.ranks},
          {"device", shares.device},
          {"flops", shares.flops / steps},
          {"mean", json_of(all, steps)},
          {"by_rank", std::move(ranks)},
          {"passes", std::move(passes)},
          {"kernels", json_of(shares.kernels, steps)},
          {"modules", json_of(shares.modules, steps)},
          {"beside", json_of(shares.beside, steps)},
          {"between", json_of(shares.between, steps)}};
}

}  // namespace mantissa::tools
