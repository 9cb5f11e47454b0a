#include "tools/explain_search.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <optional>
#include <tuple>

#include "mantissa/base/text.h"
#include "mantissa/train/load_config.h"
#include "tools/command.h"

namespace mantissa::tools {
namespace {

std::vector<int64_t> divisors(int64_t number) {
  std::vector<int64_t> out;
  for (int64_t i = 1; i * i <= number; ++i) {
    if (number % i != 0) continue;
    out.push_back(i);
    if (i != number / i) out.push_back(number / i);
  }
  std::ranges::sort(out);
  return out;
}

class LayoutSearch {
 public:
  LayoutSearch(const ConfigSources& sources, const RunConfig& run, int64_t world, const Rates& rates, double memory)
      : sources_(sources), run_(run), world_(world), rates_(rates), memory_(memory) {}

  FoundLayouts all() {
    std::vector<LayoutChoice> found;
    for (const int64_t tensor : divisors(world_)) {
      if (run_.model.num_attention_heads % tensor != 0) continue;
      const int64_t data = world_ / tensor;
      for (const int64_t expert : run_.model.moe ? divisors(data) : std::vector<int64_t>{1}) {
        for (const bool sequence_parallel : {false, true}) {
          if (sequence_parallel && tensor == 1) continue;
          if (auto choice = fitting({data, tensor, expert, sequence_parallel})) found.push_back(std::move(*choice));
        }
      }
    }
    const auto order = [](const LayoutChoice& choice) {
      return std::tuple(choice.step_seconds, *choice.config.training.grad_accum, choice.memory.total());
    };
    std::ranges::stable_sort(found, {}, order);
    return {.fastest_first = std::move(found), .refusal = refusal_, .least_memory = least_memory_};
  }

 private:
  struct Shape {
    int64_t data, tensor, expert;
    bool sequence_parallel;
  };

  // Returns the fastest of this shape that fits.
  std::optional<LayoutChoice> fitting(const Shape& shape) {
    if (*run_.training.global_batch_size % shape.data != 0) return {};
    std::vector<int64_t> micro_batches = divisors(*run_.training.global_batch_size / shape.data);
    std::ranges::reverse(micro_batches);
    for (const Recompute recompute : {Recompute::none, Recompute::selective, Recompute::full}) {
      for (const int64_t micro_batch : micro_batches) {
        std::optional<RunConfig> config = configured(shape, recompute, micro_batch);
        if (!config) continue;
        const PrecisionPlan plan = resolve_plan(*config);
        const MemoryEstimate memory = estimate_memory(*config, plan);
        least_memory_ = least_memory_ == 0 ? memory.total() : std::min(least_memory_, memory.total());
        if (static_cast<double>(memory.total()) > memory_) continue;
        const double seconds = step_time(*config, plan, rates_).step.value();
        return LayoutChoice{.config = std::move(*config), .memory = memory, .step_seconds = seconds};
      }
    }
    return {};
  }

  // Returns none for a layout that the configuration refuses, such as heads that do not divide.
  std::optional<RunConfig> configured(const Shape& shape, Recompute recompute, int64_t micro_batch) {
    ConfigSources sources = sources_;
    sources.sets.insert(sources.sets.end(),
                        {text("parallel.data=", shape.data), text("parallel.tensor=", shape.tensor), text("parallel.expert=", shape.expert),
                         text("parallel.sequence_parallel=", shape.sequence_parallel ? "true" : "false"),
                         text("training.recompute=", choice_name(recompute)), text("training.micro_batch_size=", micro_batch),
                         "training.grad_accum=null", text("training.global_batch_size=", *run_.training.global_batch_size)});
    try {
      RunConfig config = load_run_config(sources, Inputs::unchecked, world_).config;
      if (!config.model.vocab_size) config.model.vocab_size = run_.model.vocab_size;
      config.training.steps = run_.training.steps;
      return config;
    } catch (const Error& error) {
      if (error.code() != ExitCode::usage) throw;
      if (refusal_.empty()) refusal_ = error.what();
      return {};
    }
  }

  const ConfigSources& sources_;
  const RunConfig& run_;
  int64_t world_;
  const Rates& rates_;
  double memory_;
  std::string refusal_;
  int64_t least_memory_ = 0;
};

// Returns none for a run of epochs whose data is not there.
std::optional<double> rank_hours(const LayoutChoice& choice) {
  const std::optional<int64_t>& steps = choice.config.training.steps;
  if (!steps) return {};
  return run_price(*steps, choice.config.parallel.world(), choice.step_seconds).rank_hours;
}

std::string number_text(const char* form, double value) {
  std::array<char, 32> out{};
  std::snprintf(out.data(), out.size(), form, value);
  return out.data();
}

}  // namespace

FoundLayouts search_layouts(const ConfigSources& sources, const RunConfig& run, int64_t world, const Rates& rates, double memory) {
  return LayoutSearch(sources, run, world, rates, memory).all();
}

std::string layout_table(const std::vector<LayoutChoice>& found, double price) {
  const auto line = [price](const std::array<std::string, 11>& cells) {
    std::array<char, 160> out{};
    std::snprintf(out.data(), out.size(), "%5s  %6s  %6s  %8s  %-9s  %11s  %10s  %9s  %10s  %10s", cells[0].c_str(), cells[1].c_str(),
                  cells[2].c_str(), cells[3].c_str(), cells[4].c_str(), cells[5].c_str(), cells[6].c_str(), cells[7].c_str(),
                  cells[8].c_str(), cells[9].c_str());
    return out.data() + (price > 0 ? "  " + std::string(std::max<size_t>(10, cells[10].size()) - cells[10].size(), ' ') + cells[10] : "") +
           '\n';
  };
  std::string out =
      line({"data", "tensor", "expert", "sequence", "recompute", "micro batch", "ms a step", "tokens/s", "memory", "rank hours", "cost"});
  for (size_t i = 0; i < std::min(found.size(), kMostLayouts); ++i) {
    const auto& [config, memory, seconds] = found[i];
    const std::optional<double> hours = rank_hours(found[i]);
    out += line({text(config.parallel.data), text(config.parallel.tensor), text(config.parallel.expert),
                 config.parallel.tensor == 1         ? "-"
                 : config.parallel.sequence_parallel ? "divided"
                                                     : "whole",
                 choice_name(config.training.recompute), text(config.training.micro_batch_size), number_text("%.4g", 1e3 * seconds),
                 number_text("%.4g", static_cast<double>(config.training.tokens_per_step()) / seconds), bytes_text(memory.total()),
                 hours ? number_text("%.4g", *hours) : "-", number_text("%.4g", price * hours.value_or(0.0))});
  }
  return out;
}

Json layouts_json(const std::vector<LayoutChoice>& found, double price) {
  Json::Entries entries;
  for (size_t i = 0; i < std::min(found.size(), kMostLayouts); ++i) {
    const auto& [config, memory, seconds] = found[i];
    const std::optional<double> hours = rank_hours(found[i]);
    entries.push_back(Json{{"data", config.parallel.data},
                           {"tensor", config.parallel.tensor},
                           {"expert", config.parallel.expert},
                           {"sequence_parallel", config.parallel.sequence_parallel},
                           {"recompute", choice_name(config.training.recompute)},
                           {"micro_batch_size", config.training.micro_batch_size},
                           {"grad_accum", *config.training.grad_accum},
                           {"step", seconds},
                           {"memory", memory.total()},
                           {"rank_hours", hours},
                           {"cost", price > 0 && hours ? Json(price * *hours) : Json()}});
  }
  return {{"fit", found.size()}, {"layouts", std::move(entries)}};
}

}  // namespace mantissa::tools
