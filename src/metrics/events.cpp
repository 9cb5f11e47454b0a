#include "mantissa/metrics/events.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <vector>

#include "mantissa/base/text.h"
#include "mantissa/formats/element.h"

namespace mantissa {
namespace {

// Lines of numbers only: short.
template <class... Values>
std::string formatted(const char* format, Values... values) {
  std::array<char, 256> buffer{};
  const int size = std::snprintf(buffer.data(), buffer.size(), format, values...);
  return {buffer.data(), std::min(buffer.size() - 1, static_cast<size_t>(size))};
}

std::string gib_text(double gib) { return bytes_text(static_cast<int64_t>(gib * 0x1p30)); }

constexpr size_t kBoxWidth = 96;  // characters of text in a line

// Lines of at most kBoxWidth characters; UTF-8 sequences stay whole.
std::vector<std::string> wrapped(const std::string& text) {
  std::vector<std::string> lines(1);
  size_t width = 0;
  for (const char c : printable(text, "\n")) {
    const bool continues = continues_character(c);
    if (c == '\n' || (!continues && width == kBoxWidth)) {
      lines.emplace_back();
      width = 0;
    }
    if (c == '\n') continue;
    lines.back() += c;
    if (!continues) ++width;
  }
  return lines;
}

}  // namespace

std::map<int, int64_t> PrecisionEvent::scale_exponents() const {
  std::map<int, int64_t> exponents;
  for (const auto& [code, blocks] : scales) {
    if (code != kScaleNan) exponents[code - 127] = blocks;
  }
  return exponents;
}

std::string duration_text(double seconds) {
  const auto total = static_cast<int64_t>(std::llround(std::max(0.0, seconds)));
  const int64_t hours = total / 3600, minutes = total / 60 % 60;
  if (hours > 0) return formatted("%lldh%02lldm", static_cast<long long>(hours), static_cast<long long>(minutes));
  if (minutes > 0) return formatted("%lldm%02llds", static_cast<long long>(minutes), static_cast<long long>(total % 60));
  return formatted("%llds", static_cast<long long>(total));
}

std::string objective_name(std::optional<double> teacher_weight) {
  if (!teacher_weight) return "loss";
  return *teacher_weight == 1.0 ? "kl" : text(*teacher_weight, " kl + ", 1.0 - *teacher_weight, " loss");
}

double mean_dropped(const std::vector<LayerRouting>& layers) {
  double sum = 0.0;
  for (const LayerRouting& layer : layers) sum += layer.dropped / static_cast<double>(layers.size());
  return sum;
}

const LayerRouting& most_uneven(const std::vector<LayerRouting>& layers) {
  return *std::ranges::max_element(layers, {}, &LayerRouting::imbalance);
}

std::string step_line(const StepEvent& event) {
  std::string line = formatted("step %5lld/%lld | ", static_cast<long long>(event.step), static_cast<long long>(event.steps));
  line += event.loss ? formatted("loss %.4f", *event.loss) : "no targets";
  if (event.divergence) line += formatted(" | kl %.4f", *event.divergence);
  if (event.cross_entropy) line += formatted(" | ce %.4f", *event.cross_entropy);
  line += formatted(" | norm %.3f | lr %.2e | %4.0f ms | %5.0f tok/s", event.gradient_norm, event.lr, event.milliseconds,
                    event.tokens_per_second);
  if (event.padding > 0.0) line += formatted(", %.1f%% padding", 100.0 * event.padding);
  line += " | ";
  line += event.mfu            ? formatted("mfu%s %.1f%%", event.other_gemms ? "(bf16)" : "", 100.0 * *event.mfu)
          : event.mfu_measured ? formatted("mfu_meas %.1f%%", 100.0 * *event.mfu_measured)
                               : "mfu n/a";
  line += " | mem " + gib_text(event.memory_gib);
  if (event.gpu_memory_gib) line += " | gpu " + gib_text(*event.gpu_memory_gib);
  line += " | eta " + duration_text(event.remaining_seconds);
  if (!event.routing.empty()) {  // "load 1.40x (worst layer 3), 2.1% dropped"
    const LayerRouting& worst = most_uneven(event.routing);
    line += formatted(" | load %.2fx (worst layer %lld)", worst.imbalance, static_cast<long long>(worst.layer));
    const double dropped = mean_dropped(event.routing);
    if (dropped > 0.0) line += formatted(", %.1f%% dropped", 100.0 * dropped);
  }
  if (event.precision) {
    const PrecisionSummary& precision = *event.precision;
    if (precision.sqnr_db)
      line += formatted(" | q-sqnr %.1f dB (worst ", *precision.sqnr_db) + precision.worst + formatted(" %.1f)", precision.worst_db);
    if (precision.fp32_gemms > 0) line += formatted(" | fp32 GEMMs %lld", static_cast<long long>(precision.fp32_gemms));
  }
  return event.skipped ? line + " | skipped" : line;
}

std::string evaluation_line(const EvaluationEvent& event) {
  const Evaluation& result = event.result;
  std::string line = formatted("eval %5lld | loss %.4f | ppl %.3f", static_cast<long long>(event.step), result.loss, std::exp(result.loss));
  if (result.divergence) line += formatted(" | kl %.4f", *result.divergence);
  line += formatted(" | %lld targets | %.1f s", static_cast<long long>(result.targets), event.seconds);
  if (event.best) line += " | best";
  if (result.sets.size() < 2) return line;
  for (const SetLoss& set : result.sets)
    line += " | " + printable(set.name) + (set.targets > 0 ? formatted(" %.4f", set.loss) : " no targets");
  return line;
}

std::string sample_box(const SampleEvent& event) {
  const auto bar = [](size_t width) {
    std::string line;
    for (size_t i = 0; i < width; ++i) line += "─";
    return line;
  };
  const std::string title = formatted(" sample at step %lld ", static_cast<long long>(event.step));
  std::string out = "┌─" + title + bar(kBoxWidth + 1 - title.size()) + "┐\n";
  for (const std::string& line : wrapped(event.prompt + event.text)) {
    const auto characters = line.size() - static_cast<size_t>(std::ranges::count_if(line, continues_character));
    out += "│ " + line + std::string(kBoxWidth - characters, ' ') + " │\n";
  }
  return out + "└" + bar(kBoxWidth + 2) + "┘";
}

// The first step warms up: it counts only as long as there is no other.
void Throughput::add(int64_t tokens, double seconds) {
  const auto count = static_cast<double>(tokens);
  if (++steps_ <= 2) average_ = mean_ = {};
  average_.weight = kDecay * average_.weight + (1.0 - kDecay);
  average_.tokens = kDecay * average_.tokens + (1.0 - kDecay) * count;
  average_.seconds = kDecay * average_.seconds + (1.0 - kDecay) * seconds;
  mean_.tokens += count;
  mean_.seconds += seconds;
}

double Throughput::tokens_per_second() const { return average_.seconds > 0.0 ? average_.tokens / average_.seconds : 0.0; }
double Throughput::mean_tokens_per_second() const { return mean_.seconds > 0.0 ? mean_.tokens / mean_.seconds : 0.0; }
double Throughput::seconds_per_step() const { return average_.weight > 0.0 ? average_.seconds / average_.weight : 0.0; }

}  // namespace mantissa
