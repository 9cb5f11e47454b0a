#include "tools/command.h"

#include <charconv>
#include <cmath>
#include <string_view>

#include "base/file.h"
#include "base/parallel.h"
#include "config/open_device.h"
#include "data/open_data.h"
#include "job/launch.h"
#include "mantissa/base/text.h"

namespace mantissa::tools {

std::vector<Option> config_options(ConfigSources& sources, const std::vector<Option>& further) {
  std::vector<Option> options = {{"CONFIG", &sources.file, "run configuration (JSON with comments)"},
                                 {"--set", &sources.sets, "KEY=VALUE, as in optimizer.lr=3e-4 or data.train.0.path=a.txt; repeatable"},
                                 {"--set-file", &sources.set_files, "JSON file merged over the configuration; repeatable"}};
  options.insert(options.end(), further.begin(), further.end());
  return options;
}

Option world_option(std::optional<int64_t>& world, const char* condition) {
  return {"--world", &world, text(condition, "number of ranks to check the run for; none are started (as many as parallel needs)")};
}

int64_t ranks_of(const std::optional<int64_t>& world) {
  require(!world || (*world >= 1 && *world <= kMostRanks), ExitCode::usage, "--world: must be 1 to ", kMostRanks, ", got ",
          world.value_or(0));
  return world.value_or(0);
}

std::string layout_text(const ParallelConfig& parallel) {
  std::string out = count_text(parallel.world(), "rank");
  if (parallel.world() > 1) out += text(": data ", parallel.data);
  if (parallel.tensor > 1) out += text(" x tensor ", parallel.tensor);
  if (parallel.expert > 1) out += text(", experts over ", parallel.expert, " data ranks");
  return out;
}

std::string length_text(int64_t steps, const std::optional<double>& epochs) {
  return text(count_text(steps, "step"), epochs ? text(" (", *epochs, *epochs == 1.0 ? " epoch)" : " epochs)") : "");
}

void set_vocabulary(RunConfig& config) {
  if (!config.model.vocab_size) config.model.vocab_size = make_tokenizer(config.data)->size();
}

Option threads_option(int& threads) { return {"--threads", &threads, "CPU threads; 0: the cores this process may use"}; }

void use_threads(int threads) {
  require(threads >= 0 && threads <= kMostThreads, ExitCode::usage, "--threads: must be 0 to ", kMostThreads, ", got ", threads);
  set_num_threads(threads);
}

Option dtype_option(std::optional<std::string>& dtype) {
  return {"--dtype",
          &dtype,
          "compute type of operands that are not quantized, unless their recipe names one; default: as saved",
          {"bf16", "fp32"}};
}

std::optional<Dtype> dtype_of(const std::optional<std::string>& dtype) {
  if (!dtype) return std::nullopt;
  return *dtype == "fp32" ? Dtype::f32 : Dtype::bf16;
}

Option precision_option(std::vector<std::string>& precision) {
  return {"--set", &precision,
          "precision.KEY=VALUE: quantize the weights otherwise than the model was trained, as a run would with that value; repeatable. "
          "Codes of a folder or file are then read as numbers"};
}

Option precision_file_option(std::vector<std::string>& files) {
  return {"--set-file", &files,
          "JSON file with a section \"precision\", such as analyze --budget writes; its values, as --set takes them; repeatable"};
}

std::vector<std::string> precision_values(const Json& file, const std::string& name) {
  const Json& section = file.get("precision");
  require(file.is_object() && file.size() == 1 && section.is_object(), ExitCode::usage, printable(name),
          ": must have a section \"precision\" and no other: a model is used with other values of that section only");
  std::vector<std::string> values;
  for (const auto& [key, value] : section.members()) values.push_back("precision." + key + "=" + value.dump());
  return values;
}

void add_precision_files(const std::vector<std::string>& files, std::vector<std::string>& precision) {
  constexpr int64_t kMostBytes = int64_t{64} << 20;
  std::vector<std::string> all;
  for (const std::string& file : files) {
    const std::string content = File::open_input(file).content(kMostBytes);
    const ParsedJson parsed = parse_commented_json(content);
    if (!parsed.problems.empty())
      fail(ExitCode::usage, printable(file), ':', TextLines(content).at(parsed.problems.front().offset), ": ",
           parsed.problems.front().message);
    for (std::string& value : precision_values(parsed.root, file)) all.push_back(std::move(value));
  }
  precision.insert(precision.begin(), all.begin(), all.end());
}

std::string precision_text(const std::vector<std::string>& precision) {
  return precision.empty() ? "" : ", " + printable(joined(precision));
}

Option device_option(std::string& device) { return {"--device", &device, kDeviceChoices, choice_names<DeviceChoice>()}; }

// The parser has refused all other names.
DeviceChoice device_choice(const std::string& device) { return choice_of<DeviceChoice>(device).value(); }

std::unique_ptr<Backend> device_of(const std::string& device) {
  try {
    return make_backend(device_choice(device), "--device cpu");
  } catch (const Error& error) {
    fail(error.code(), "--device: ", error.what());
  }
}

std::vector<int32_t> parse_token_ids(const std::string& option, const std::string& ids, int64_t vocab_size) {
  std::vector<int32_t> out;
  for (const std::string& part : split(ids, ',')) {
    const size_t before = out.size();
    for (const std::string& word : split(part, ' ')) {
      if (word.empty()) continue;
      int32_t& id = out.emplace_back(0);
      const char* const end = word.data() + word.size();
      const auto [stop, error] = std::from_chars(word.data(), end, id);
      require(error == std::errc() && stop == end && id >= 0, ExitCode::usage, option, ": \"", printable(shortened(word)),
              "\" is not a token id");
      require(id < vocab_size, ExitCode::usage, option, ": the token ", id, " is outside the vocabulary of ", vocab_size);
    }
    const bool none = ids.find_first_not_of(" ,") == std::string::npos;
    require(out.size() > before, ExitCode::usage, option, ": ", none ? "there are no token ids" : "a token id is missing", " in \"",
            printable(shortened(ids)), "\"");
  }
  return out;
}

namespace {

// Returns the factor of a unit; 0 if there is no such unit.
double unit_factor(std::string_view unit) {
  if (unit.empty()) return 1.0;
  constexpr std::string_view kDecimal = "kMGTPE", kBinary = "KMGTPE";
  const bool binary = unit.size() == 2 && unit[1] == 'i';
  const size_t power = (binary ? kBinary : kDecimal).find(unit[0]);
  if (power == std::string_view::npos || unit.size() > (binary ? 2U : 1U)) return 0.0;
  return std::pow(binary ? 1024.0 : 1000.0, static_cast<double>(power + 1));
}

}  // namespace

double quantity(const std::string& option, const std::string& word) {
  double number = 0.0;
  const char* const end = word.data() + word.size();
  const auto [unit, problem] = std::from_chars(word.data(), end, number);
  const double value = problem == std::errc() ? number * unit_factor({unit, end}) : 0.0;
  require(std::isfinite(value) && value > 0.0 && value <= 1e30, ExitCode::usage, option,
          ": must be a positive number, as 4e12 or 4T, with k, M, G, T, P, E for powers of 1000 or Ki, Mi, Gi, Ti, Pi, Ei for powers of "
          "1024, got '",
          printable(shortened(word)), "'");
  return value;
}

}  // namespace mantissa::tools
