#include "checkpoint/precision_setup.h"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>

#include "base/hash.h"
#include "base/parallel.h"
#include "json/json_fields.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/integers.h"
#include "mantissa/base/log.h"

namespace mantissa {
namespace {

// Views the bytes of a row-major matrix.
struct MatrixBytes {
  std::span<const std::byte> all;
  int64_t row;  // in one row

  void append_to(std::vector<std::byte>& cell, int64_t begin, int64_t end, int64_t first, int64_t last) const {
    for (int64_t i = begin; i < end; ++i) {
      const auto part = all.subspan(static_cast<size_t>(i * row + first), static_cast<size_t>(last - first));
      cell.insert(cell.end(), part.begin(), part.end());
    }
  }
};

// Holds a row block of a shard in host memory.
class RowBlock {
 public:
  RowBlock(const QuantizedTensor& codes, int64_t cell_rows, int64_t cell_cols)
      : how_(codes.how),
        shape_(codes.shape),
        cell_rows_(cell_rows),
        cell_cols_(cell_cols),
        code_bytes_(codes.codes),
        scale_bytes_(codes.scales),
        decoded_(decoded(codes, Dtype::f32)),
        value_bytes_(decoded_),
        codes_{code_bytes_.get(), codes.codes.dim(1)},
        scales_{scale_bytes_.get(), codes.scales.dim(1)},
        values_{value_bytes_.get(), codes.shape[1] * kValueBytes} {}

  // Hashes row number i of cells, of which `rows` rows count; the first cell has this seed.
  CodeSums sums(int64_t i, int64_t rows, uint64_t seed) const {
    CodeSums sums;
    std::vector<std::byte> cell;
    const int64_t begin = i * cell_rows_, end = std::min(begin + cell_rows_, rows), elements_per_byte = shape_[1] / codes_.row;
    for (int64_t first = 0; first < shape_[1]; first += cell_cols_, ++seed) {
      const int64_t last = std::min(first + cell_cols_, shape_[1]);
      cell.clear();
      codes_.append_to(cell, begin, end, first / elements_per_byte, last / elements_per_byte);
      scales_.append_to(cell, begin / how_.block_rows, ceil_div(end, how_.block_rows), first / how_.block_cols,
                        ceil_div(last, how_.block_cols));
      sums.codes += xxh64(cell, seed).value;
      cell.clear();
      values_.append_to(cell, begin, end, first * kValueBytes, last * kValueBytes);
      sums.values += xxh64(cell, seed).value;
    }
    return sums;
  }

 private:
  static constexpr int64_t kValueBytes = sizeof(float);

  Quantization how_;
  Shape shape_;
  int64_t cell_rows_, cell_cols_;
  HostBytes code_bytes_, scale_bytes_;
  Tensor decoded_;
  HostBytes value_bytes_;
  MatrixBytes codes_, scales_, values_;
};

}  // namespace

CodeSums code_sums(const QuantizedTensor& shard, const CodePlace& place) {
  const int64_t matrices = place.matrix_rows > 0 ? ceil_div(place.first_row + place.rows, place.matrix_rows) : 1;
  std::vector<CodeSums> sums(static_cast<size_t>(matrices));
  add_code_sums(shard, place, sums);
  return std::reduce(sums.begin(), sums.end(), CodeSums(), [](CodeSums a, const CodeSums& b) { return a += b; });
}

void add_code_sums(const QuantizedTensor& shard, const CodePlace& place, std::span<CodeSums> sums) {
  constexpr int64_t kRowBlockElements = 1 << 20;
  const int64_t whole_cell = std::max<int64_t>(32, shard.how.block_rows), cell_cols = round_up<int64_t>(32, shard.how.block_cols);
  const int64_t cell_rows = std::gcd(whole_cell, place.matrix_rows);
  require(cell_rows % shard.how.block_rows == 0, "code_sums: the blocks of ", shard.how, " do not divide a cell of ", cell_rows, " x ",
          cell_cols);
  require(place.rows <= shard.shape[0], "code_sums: ", place.rows, " rows of a shard that is ", shard.shape);
  require(place.first_row % cell_rows == 0 && place.first_col % cell_cols == 0, "code_sums: a shard at ", place.first_row, ", ",
          place.first_col, " begins inside a cell of ", shard.how);
  const int64_t cells_per_row = ceil_div(place.columns, cell_cols),
                row_block = round_up(ceil_div(kRowBlockElements, shard.shape[1]), cell_rows);
  const int64_t cells_per_matrix = place.matrix_rows > 0 ? place.matrix_rows / cell_rows : std::numeric_limits<int64_t>::max();
  for (int64_t begin = 0; begin < place.rows; begin += row_block) {
    const RowBlock rows(slice(shard, begin, std::min(begin + row_block, shard.shape[0])), cell_rows, cell_cols);
    const int64_t count = ceil_div(std::min(row_block, place.rows - begin), cell_rows), first_cell = (place.first_row + begin) / cell_rows;
    std::vector<CodeSums> parts(static_cast<size_t>(count));
    parallel_for(count, 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const int64_t seed = (first_cell + i) * cells_per_row + place.first_col / cell_cols;
        parts[static_cast<size_t>(i)] = rows.sums(i, place.rows - begin, static_cast<uint64_t>(seed));
      }
    });
    for (int64_t i = 0; i < count; ++i) sums[static_cast<size_t>((first_cell + i) / cells_per_matrix)] += parts[static_cast<size_t>(i)];
  }
}

namespace {

constexpr std::array kSums = {"codes_sum", "values_sum"};
constexpr std::array kByExpert = {"codes_by_expert", "values_by_expert"};

Json entry_of(const WeightCodes& weight) {
  CodeSums whole;
  std::vector<std::string> codes, values;
  for (const CodeSums& sums : weight.sums) {
    whole += sums;
    codes.push_back(Hash64{sums.codes}.text());
    values.push_back(Hash64{sums.values}.text());
  }
  Json entry = {{"how", weight.how}, {kSums[0], Hash64{whole.codes}.text()}, {kSums[1], Hash64{whole.values}.text()}};
  if (weight.sums.size() < 2) return entry;
  entry[kByExpert[0]] = codes;
  entry[kByExpert[1]] = values;
  return entry;
}

// Reads what an entry says of all experts together.
Json whole_of(Json entry) {
  if (entry.is_object())
    for (const char* key : kByExpert) entry.members().erase(key);
  return entry;
}

// Reads what an entry says of one expert; null: nothing.
Json expert_of(const Json& entry, size_t expert) {
  Json out;
  for (size_t i = 0; i < kSums.size(); ++i) {
    const Json& list = entry.get(kByExpert[i]);
    if (!list.is_list() || expert >= list.size()) return {};
    out[kSums[i]] = list.at(expert);
  }
  return out;
}

// Returns the experts that both entries know and that differ.
std::vector<size_t> differing_experts(const Json& a, const Json& b) {
  std::vector<size_t> experts;
  for (size_t e = 0; !expert_of(a, e).is_null() && !expert_of(b, e).is_null(); ++e) {
    if (expert_of(a, e) != expert_of(b, e)) experts.push_back(e);
  }
  return experts;
}

// Returns "expert 3", "experts 1, 3 and 5 more".
std::string experts_text(const std::vector<size_t>& experts) {
  constexpr size_t kShown = 8;
  std::string out = experts.size() == 1 ? "expert " : "experts ";
  for (size_t i = 0; i < std::min(kShown, experts.size()); ++i) out += text(i == 0 ? "" : ", ", experts[i]);
  return experts.size() > kShown ? out + text(" and ", experts.size() - kShown, " more") : out;
}

// Lists what the GEMMs of a module read; gemms follows from the others and from what the recipe lists.
constexpr std::array kFormats = {"compute",  "weight",  "input",    "output_grad", "weight_fake_quant",
                                 "simulate", "columns", "backward", "gemms"};

bool same_formats(const Json& a, const Json& b) {
  return std::all_of(kFormats.begin(), kFormats.end(), [&](const char* key) { return a.get(key) == b.get(key); });
}

// Returns "mxfp8 -> high"; for recipes of one name, what it meant and means: "mine (input null -> {...})".
std::string change_of(const Json& before, const Json& now) {
  const auto name = [](const Json& module) {
    const Json& recipe = module.get("recipe");
    return recipe.is_string() ? recipe.string() : recipe.dump();
  };
  if (name(before) != name(now)) return name(before) + " -> " + name(now);
  std::string list;
  for (const char* key : kFormats) {
    const Json &was = before.get(key), &is = now.get(key);
    const bool follows = key == kFormats.back() && !list.empty();
    if (was != is && !follows) list += text(list.empty() ? "" : ", ", key, ' ', was.dump(), " -> ", is.dump());
  }
  return name(now) + " (" + list + ")";
}

std::map<std::string, Json> modules_by_path(const Json& plan, const std::string& source) {
  require(plan.get("modules").is_list(), ExitCode::data, source, ": plan must be an object with a list \"modules\"");
  std::map<std::string, Json> modules;
  for (const Json& module : plan.at("modules").entries()) {
    require(module.get("module").is_string(), ExitCode::data, source, ": plan.modules must be objects with a string \"module\"");
    modules[module.at("module").string()] = module;
  }
  return modules;
}

const Json& module_of(const std::map<std::string, Json>& modules, const std::string& path, const std::string& source) {
  const auto found = modules.find(path);
  require(found != modules.end(), ExitCode::data, source, ": plan.modules has no ", path);
  return found->second;
}

// Locates the sums of a weight among those of all weights.
struct SumsPlace {
  size_t first, count;
  int64_t matrix_rows;  // rows of each expert; 0: no stack
};

}  // namespace

CodesByWeight codes_by_weight(const ParameterSet& parameters, const PrecisionPlan& plan, const std::vector<ParameterShard>& own,
                              const Communicator& ranks) {
  std::map<const Parameter*, SumsPlace> places;
  size_t count = 0;
  for (const Parameter& parameter : parameters.all()) {
    if (!parameter.quantized) continue;
    const ModuleShape& module = plan.module_of(parameter.name).module;
    const auto matrices = static_cast<size_t>(module.matrices);
    places.emplace(&parameter, SumsPlace{.first = count, .count = matrices, .matrix_rows = matrices > 1 ? module.out : 0});
    count += matrices;
  }
  std::vector<CodeSums> all(count * static_cast<size_t>(ranks.size()));
  const auto mine = std::span(all).subspan(count * static_cast<size_t>(ranks.rank()), count);
  for (const ParameterShard& shard : own) {
    if (!shard.of->quantized || shard.of->sharding.is_copy()) continue;
    const SumsPlace& place = places.at(shard.of);
    for (const ParameterShard::Chunk& chunk : shard.chunks()) {
      const CodePlace held{.rows = chunk.end - chunk.begin,
                           .columns = shard.of->stored_shape()[-1],
                           .first_row = chunk.row,
                           .first_col = chunk.column,
                           .matrix_rows = place.matrix_rows};
      const int64_t end = chunk.end == shard.stored_end() ? shard.end : chunk.end;  // whole blocks
      add_code_sums(slice(shard.of->codes(), chunk.begin, end), held, mine.subspan(place.first, place.count));
    }
  }
  const std::vector<int64_t> bytes(static_cast<size_t>(ranks.size()), static_cast<int64_t>(mine.size_bytes()));
  ranks.all_gather(std::as_writable_bytes(std::span(all)), bytes, Purpose::control);
  for (size_t i = count; i < all.size(); ++i) all[i % count] += all[i];
  CodesByWeight codes;
  for (const auto& [parameter, place] : places) {
    const auto sums = std::span(all).subspan(place.first, place.count);
    codes[parameter->name] = {.how = text(parameter->quantized), .sums = {sums.begin(), sums.end()}};
  }
  return codes;
}

std::string plan_manifest(const PrecisionPlan& plan, const CodesByWeight& codes) {
  Json out = plan.to_json();
  out["quantized"] = Json::Members();
  for (const auto& [name, weight] : codes) out["quantized"][name] = entry_of(weight);
  return out.dump();
}

std::vector<std::string> allowed_plan_changes(const std::string& saved, const PrecisionPlan& plan, const std::string& source,
                                              LoadFor purpose) {
  const std::map<std::string, Json> before = modules_by_path(parse_json(saved, source), source);
  struct Change {  // one line for all layers with the same change
    std::string what;
    std::vector<std::string> paths;
  };
  std::vector<Change> changes;
  const Json now = plan.to_json();
  for (const Json& module : now.at("modules").entries()) {
    const std::string path = module.at("module").string();
    const Json& was = module_of(before, path, source);
    if (same_formats(was, module)) continue;
    const std::string what = change_of(was, module);
    const auto alike = std::ranges::find_if(
        changes, [&](const Change& one) { return one.what == what && any_layer(one.paths.front()) == any_layer(path); });
    (alike == changes.end() ? changes.emplace_back(Change{.what = what, .paths = {}}) : *alike).paths.push_back(path);
  }
  std::vector<std::string> allowed, refused;
  for (const Change& change : changes) {
    const bool may = purpose == LoadFor::resume_changed || change.paths.front() == "output";
    (may ? allowed : refused).push_back(joined_path(change.paths) + ": " + change.what);
  }
  constexpr size_t kShown = 4;
  const std::span<const std::string> shown = std::span(refused).first(std::min(kShown, refused.size()));
  require(refused.empty(), ExitCode::usage, source, ": this run has other recipes than the checkpoint was trained with:\n  ",
          joined(shown, "\n  "), refused.size() > kShown ? text("\n  and ", refused.size() - kShown, " more") : "",
          "\ncontinue with those of the checkpoint, or set checkpoint.allow_recipe_change to true to continue with those of this run");
  return allowed;
}

std::string precision_text(const PrecisionConfig& config) {
  std::string out = text(dtype_name(config.dtype), ", ", config.recipe);
  if (!config.rules.empty()) out += ", " + count_text(static_cast<int64_t>(config.rules.size()), "rule");
  if (config.fp8_output_proj.enabled) out += ", fp8_output_proj";
  if (config.fp8_param_gather) out += ", fp8_param_gather";
  return out;
}

void require_same_codes(const std::string& saved, const PrecisionPlan& plan, const CodesByWeight& codes, const std::string& source,
                        LoadFor purpose) {
  const Json manifest = parse_json(saved, source);
  const std::map<std::string, Json> before = modules_by_path(manifest, source);
  const Json& quantized = manifest.get("quantized");
  require(quantized.is_object(), ExitCode::data, source, ": plan.quantized must be an object");
  const Json now = plan.to_json();
  for (const Json& module : now.at("modules").entries()) {
    const std::string path = module.at("module").string(), name = path + ".weight";
    const auto weight = codes.find(name);
    if (weight == codes.end()) continue;
    const Json& was = quantized.get(name);
    const bool same_codes_asked = was.get("how") == weight->second.how;
    if (!same_codes_asked && !same_formats(module_of(before, path, source), module)) continue;
    const Json is = entry_of(weight->second);
    if (was == is) continue;
    const std::vector<size_t> experts = differing_experts(was, is);
    const Json there = experts.empty() ? whole_of(was) : expert_of(was, experts.front()),
               here = experts.empty() ? whole_of(is) : expert_of(is, experts.front());
    const std::string message =
        text(source, ": plan.quantized: the codes of ", name, experts.empty() ? "" : ", " + experts_text(experts) + ",",
             " are not those that the checkpoint was written with: hash ", there.dump(), " there, ", here.dump(),
             " when its master is quantized again");
    require(purpose == LoadFor::resume_changed, ExitCode::data, message, "\nthe checkpoint is damaged, or this build quantizes differently",
            purpose == LoadFor::resume ? "; to continue with the new codes, set checkpoint.allow_recipe_change to true" : "");
    log_warning(message);
  }
}

std::vector<CodesDifference> codes_that_differ(const std::string& plan, const std::string& other) {
  std::vector<CodesDifference> out;
  const Json ours = parse_json(plan, "plan"), theirs = parse_json(other, "plan");
  for (const auto& [name, a] : ours.get("quantized").members()) {
    const Json &b = theirs.get("quantized").get(name), &how = a.get("how");
    if (!how.is_string() || b.get("how") != how || whole_of(a) == whole_of(b)) continue;
    const std::vector<size_t> experts = differing_experts(a, b);
    const std::string list = experts.empty() ? "" : text(", ", experts_text(experts), " of ", a.at(kByExpert[0]).size());
    out.push_back({.weight = name, .what = how.string() + list});
  }
  return out;
}

}  // namespace mantissa
