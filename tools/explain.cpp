#include <algorithm>
#include <iomanip>
#include <iostream>
#include <memory>

#include "checkpoint/checkpoint.h"
#include "config/open_device.h"
#include "job/launch.h"
#include "mantissa/base/text.h"
#include "mantissa/json/json.h"
#include "mantissa/metrics/events.h"
#include "mantissa/plan/estimate.h"
#include "mantissa/train/load_config.h"
#include "mantissa/train/train.h"
#include "plan/cost.h"
#include "plan/plan_table.h"
#include "tools/command.h"
#include "tools/explain_search.h"

namespace mantissa::tools {
namespace {

struct ExplainArguments {
  ConfigSources sources;
  std::optional<int64_t> world, ranks_per_host;
  std::optional<std::string> flops, link, host_link, price, memory;
  std::string device;  // whose GEMMs are shown; empty: none
  bool search = false, json = false, wide = false;
};

std::optional<double> quantity_of(const char* option, const std::optional<std::string>& word) {
  return word ? std::optional(quantity(option, *word)) : std::nullopt;
}

Rates rates_of(const ExplainArguments& arguments) {
  const int64_t ranks = arguments.ranks_per_host.value_or(1);
  require(ranks >= 1 && ranks <= kMostRanks, ExitCode::usage, "--nproc-per-node: must be 1 to ", kMostRanks, ", got ", ranks);
  require(!arguments.host_link || arguments.ranks_per_host, ExitCode::usage,
          "--host-link needs --nproc-per-node, how many ranks a host has");
  return {.flops = quantity_of("--flops", arguments.flops),
          .link = quantity_of("--link", arguments.link),
          .host_link = quantity_of("--host-link", arguments.host_link),
          .ranks_per_host = arguments.ranks_per_host.value_or(0)};
}

// Returns "native" where all GEMMs of codes multiply them as codes, "emulated" where none does, or "partly native".
const char* quantized_gemms(const std::vector<PlannedGemm>& gemms) {
  int64_t native = 0, emulated = 0;
  for (const PlannedGemm& gemm : gemms) {
    const bool codes = gemm.form.a.how || gemm.form.b.how;
    if (codes) ++(is_native(gemm.route.path) ? native : emulated);
  }
  return native == 0 ? "emulated" : emulated == 0 ? "native" : "partly native";
}

// Returns the device of the run, or another one whose GEMMs are asked about. A GPU is opened only where it is asked for as "here"; for a
// run on GPUs, where there may be none, the one of this host is taken, or one of 8.0, with attention by cuDNN of 9.0.
GemmDevice gemm_device_of(const ExplainArguments& arguments, const RunConfig& config, const PrecisionPlan& plan) {
  GemmDevice out;
  if (arguments.device == "here") {
    out = make_backend(DeviceChoice::automatic)->gemm_device();
  } else if (!arguments.device.empty()) {
    out = gemm_device(arguments.device);
  } else if (backend_name(config.training.device) == "cuda") {
    const int found = find_gpus().architecture;
    const int supposed = config.training.attention == AttentionBy::cudnn ? 90 : 80;
    out = {.architecture = found > 0 ? found : supposed, .library = kSupposedLibrary};
  }
  const std::optional<RecipeProblem> problem = out.architecture > 0 ? plan.needs_cpu() : std::nullopt;
  if (problem) fail(ExitCode::usage, problem->key, ": ", problem->message, ": use --device cpu");
  out.native = config.precision.native_products == NativeProducts::automatic;
  out.grouped = config.precision.grouped_gemms == GroupedGemms::automatic;
  return out;
}

// All layers have the same attention in what the table asks for: dtype, heads and length.
struct PlannedAttention {
  const char* by;       // "refused": the run asks for cuDNN, and would end at its start
  std::string because;  // empty: by cuDNN
};
PlannedAttention planned_attention(const RunConfig& config, const GemmDevice& gemms) {
  const AttentionDevice device{.architecture = gemms.architecture, .library = kSupposedCudnn, .by = config.training.attention};
  const AttentionObstacle why = obstacle_of_cudnn(config.attention_form(), device);
  const char* const otherwise = config.training.attention == AttentionBy::cudnn ? "refused" : "own";
  return {.by = why == AttentionObstacle::none ? "cudnn" : otherwise, .because = obstacle_text(why, config.attention_form(), device)};
}

// Everything that explain reports of a run.
struct Explanation {
  RunConfig config;
  PrecisionPlan plan;
  std::string device;
  MemoryEstimate memory;
  StepBytes bytes;
  GatherBytes gather;
  Rates rates;
  StepTime time;
  std::optional<double> price;  // that of a rank hour
  GemmDevice gemm_device;
  std::vector<PlannedGemm> gemms;
  std::vector<std::string> warnings;
  std::string epochs = {};  // the length of a run that training.epochs gives
};

// Opens the data of a run of epochs, if they are there, to say its steps.
std::string length_of_epochs(LoadedConfig& loaded) {
  const TrainingConfig& training = loaded.config.training;
  if (!training.epochs) return "";
  try {
    resolve_by_data(loaded);
    return length_text(*training.steps, training.epochs);
  } catch (const Error& error) {
    if (error.code() != ExitCode::usage) throw;
    return text("training.epochs ", *training.epochs, ", and its steps are not known: ", printable(error.what()));
  }
}

Explanation explanation(const ExplainArguments& arguments) {
  const Rates rates = rates_of(arguments);
  LoadedConfig loaded = load_run_config(arguments.sources, Inputs::unchecked, ranks_of(arguments.world));
  const std::string epochs = length_of_epochs(loaded);
  RunConfig& config = loaded.config;
  set_vocabulary(config);
  PrecisionPlan plan = resolve_plan(config);
  Explanation out{.config = config,
                  .plan = plan,
                  .device = backend_name(config.training.device),
                  .memory = estimate_memory(config, plan),
                  .bytes = step_bytes(config, plan, rates.ranks_per_host),
                  .gather = gather_bytes(config, plan),
                  .rates = rates,
                  .time = step_time(config, plan, rates),
                  .price = quantity_of("--price", arguments.price),
                  .gemm_device = gemm_device_of(arguments, config, plan),
                  .gemms = {},
                  .warnings = run_warnings(config, plan),
                  .epochs = epochs};
  require(!out.price || out.time.step, ExitCode::usage, "--price needs the time of a step: give --flops",
          config.parallel.world() == 1 ? "" : ", --link and, with --nproc-per-node, --host-link");
  require(!out.price || config.training.steps, ExitCode::usage, "--price needs the steps of the run: ", epochs);
  if (arguments.device.empty() && out.device == "cuda" && find_gpus().architecture == 0)
    out.warnings.emplace_back("there is no GPU here: GEMMs are shown as on sm_80; choose another with --device");
  out.gemms = planned_gemms(out.config, out.plan, out.gemm_device);
  return out;
}

// Formats numbers of bytes for reading, or with all digits.
struct Amount {
  PlanTable form;
  std::string operator()(int64_t bytes) const { return form == PlanTable::wide ? text(bytes, " B") : bytes_text(bytes); }
};

const char* split_name(Split split) {
  return split == Split::none ? "none" : split == Split::column_parallel ? "column_parallel" : "row_parallel";
}

Json json_of(const StepBytes& bytes) {
  const Traffic& sent = bytes.sent;
  return {{"gradients", sent.gradients},
          {"parameters", sent.parameters},
          {"activations", sent.activations},
          {"control", sent.control},
          {"other", sent.other},
          {"buckets", bytes.buckets},
          {"busiest_rank", bytes.busiest},
          {"between_hosts",
           {{"gradients", bytes.between_hosts.gradients},
            {"parameters", bytes.between_hosts.parameters},
            {"activations", bytes.between_hosts.activations}}}};
}

Json json_of(const StepTime& time, const Rates& rates) {
  return {{"flops", rates.flops},
          {"link", rates.link},
          {"host_link", rates.host_link},
          {"compute", time.compute},
          {"activations", time.activations},
          {"exchange", time.exchange},
          {"gather", time.gather},
          {"exchange_not_hidden", time.exchange_not_hidden},
          {"gather_not_hidden", time.gather_not_hidden},
          {"step", time.step}};
}

Json json_of(const std::vector<PlannedGemm>& gemms, const GemmDevice& device) {
  Json::Entries entries;
  for (const PlannedGemm& gemm : gemms) {
    const GemmRoute& route = gemm.route;
    entries.push_back(Json{{"module", gemm.module},
                           {"gemm", gemm_name(gemm.role)},
                           {"operands", gemm.operands},
                           {"shape", {gemm.form.m, gemm.form.n, gemm.form.k}},
                           {"path", gemm_path_name(route.path)},
                           {"because", obstacle_text(route.obstacle, gemm.form, device)},
                           {"dequantized", route.dequantized},
                           {"widened", route.widened},
                           {"transposed", route.transposed},
                           {"scales", route.scales},
                           {"bound", route.bound}});
  }
  return {{"device", gemm_device_text(device)}, {"of", entries}};
}

int64_t parameters_of_muon(const PrecisionPlan& plan) {
  int64_t out = 0;
  for (const ModulePrecision& entry : plan.modules()) {
    if (entry.training.muon && !entry.training.frozen()) out += entry.module.weight_elements();
  }
  return out;
}

void print_json(const Explanation& explained) {
  const auto& [config, plan, device, memory, bytes, gather, rates, time, price, gemm_device, gemms, warnings, epochs] = explained;
  Json all = plan.to_json();
  if (!epochs.empty()) all["length"] = epochs;
  for (size_t i = 0; i < plan.modules().size(); ++i) {
    const ModulePrecision& entry = plan.modules()[i];
    const ModuleShape held = entry.module.on_rank(config.parallel.ranks());
    const Json shape = held.experts ? Json{held.matrices, held.out, held.in} : held.in == 0 ? Json{held.out} : Json{held.out, held.in};
    all["modules"][i]["on_rank"] = {{"split", config.parallel.tensor > 1 ? split_name(held.split) : "none"},
                                    {"shape", shape},
                                    {"bytes", entry.bytes_on_rank(config.parallel.ranks())}};
  }
  all["buffers"] = plan.buffers();
  if (plan.trained_parameters() < plan.parameters()) all["trained_parameters"] = plan.trained_parameters();
  if (const int64_t by_muon = parameters_of_muon(plan); by_muon > 0) all["parameters_of_muon"] = by_muon;
  all["device"] = device;
  all["quantized_gemms"] = plan.quantizes_operands() ? Json(quantized_gemms(gemms)) : Json();
  all["gemms"] = json_of(gemms, gemm_device);
  const PlannedAttention attention = planned_attention(config, gemm_device);
  all["attention"] = {{"by", attention.by}, {"because", attention.because}};
  all["layout"] = {{"tensor", config.parallel.tensor}, {"data", config.parallel.data}, {"expert", config.parallel.expert}};
  all["memory"] = {{"masters", memory.masters},     {"weights", memory.values},          {"gradients", memory.gradients},
                   {"optimizer", memory.optimizer}, {"activations", memory.activations}, {"workspace", memory.workspace},
                   {"exchange", memory.exchange},   {"program", memory.program},         {"total", memory.total()}};
  if (memory.on_gpu()) {
    all["memory"]["inputs"] = memory.inputs;
    all["memory"]["cuda_context"] = memory.cuda_context;
    all["memory"]["cublaslt"] = memory.cublaslt;
    all["memory"]["nccl"] = memory.nccl;
  }
  if (config.teacher) all["memory"]["teacher"] = memory.teacher;
  all["bytes_per_step"] = json_of(bytes);
  all["gather"] = {{"bytes_per_code", gather.codes}, {"bytes_per_value", gather.values}};
  all["seconds_per_step"] = json_of(time, rates);
  if (time.step && config.training.steps) {
    const RunPrice run = run_price(*config.training.steps, config.parallel.world(), *time.step);
    all["run"] = {{"steps", *config.training.steps},
                  {"sequences_per_step", *config.training.global_batch_size},
                  {"tokens", *config.training.steps * config.training.tokens_per_step()},
                  {"seconds", run.seconds},
                  {"rank_hours", run.rank_hours},
                  {"price", price},
                  {"cost", price ? Json(*price * run.rank_hours) : Json()}};
  }
  all["warnings"] = warnings;
  std::cout << all.dump(1) << '\n';
}

std::string seconds(double value) {
  return value < 1e-3 ? text(std::setprecision(3), value * 1e6, " us")
         : value < 1  ? text(std::setprecision(3), value * 1e3, " ms")
                      : text(std::setprecision(4), value, " s");
}

std::string share_text(const char* name, const std::optional<double>& all, const std::optional<double>& not_hidden, const char* behind) {
  if (!all) return "";
  return text(" | ", name, ' ', seconds(*all), not_hidden ? text(", ", seconds(*not_hidden), " of it not behind ", behind) : "");
}

std::string time_line(const Explanation& explained) {
  const int64_t ranks = explained.config.parallel.world();
  const auto& [compute, activations, exchange, gather, exchange_not_hidden, gather_not_hidden, step] = explained.time;
  std::string line = step ? text("time | ", seconds(*step), " a step, ", std::fixed, std::setprecision(0),
                                 static_cast<double>(explained.config.training.tokens_per_step()) / *step, " tokens/s, ",
                                 std::setprecision(2), *compute / *step, " of it computing")
                          : "time of a step | not known";
  if (compute) line += text(" | compute ", seconds(*compute));
  if (activations && explained.config.parallel.ranks().several()) line += text(" | activations ", seconds(*activations));
  if (ranks > 1) {
    line += share_text("exchange", exchange, exchange_not_hidden, "backward") + share_text("gather", gather, gather_not_hidden, "forward");
  }
  if (!explained.rates.flops) line += " | give --flops, FLOP/s of a rank, which bench train or bench gemm measures";
  const int64_t per_host = explained.rates.ranks_per_host > 0 ? explained.rates.ranks_per_host : ranks;
  if (!explained.rates.link && ranks > 1 && per_host > 1) line += " | give --link, bytes/s of a rank, which bench comm measures";
  if (!explained.rates.host_link && ranks > per_host)
    line += " | give --host-link, bytes/s of a rank to other hosts, which bench comm measures on two hosts";
  return line;
}

// Evaluations, samples and saves are no part of the model of time.
std::string run_line(const Explanation& explained) {
  const RunConfig& config = explained.config;
  const RunPrice run = run_price(*config.training.steps, config.parallel.world(), *explained.time.step);
  constexpr double kDay = 86'400;
  const std::string duration = run.seconds < kDay ? duration_text(run.seconds) : text(std::setprecision(3), run.seconds / kDay, " days");
  std::string line =
      text("run | ", count_text(*config.training.steps, "step"), " of ", count_text(*config.training.global_batch_size, "sequence"), ", ",
           *config.training.steps * config.training.tokens_per_step(), " tokens | ", duration, " | ", std::setprecision(4), run.rank_hours,
           explained.device == "cuda" ? " GPU hours" : " rank hours");
  if (explained.price)
    line += text(" | cost ", std::setprecision(4), *explained.price * run.rank_hours, " at ", *explained.price, " an hour");
  return line + " | without evaluations, samples and saves";
}

std::string memory_line(const MemoryEstimate& memory, bool together, const Amount& amount) {
  // Memory beside tensors, and the parts that only a GPU has.
  const std::string rest = !memory.on_gpu()
                               ? text(" | program ", amount(memory.program))
                               : text(" | inputs ", amount(memory.inputs), " | CUDA context ", amount(memory.cuda_context), " | cuBLASLt ",
                                      amount(memory.cublaslt), together ? text(" | NCCL ", amount(memory.nccl)) : "");
  return text(memory.on_gpu() ? "GPU memory" : "memory", together ? " of a rank | total " : " | total ", amount(memory.total()),
              " | masters ", amount(memory.masters), " | weights beside them ", amount(memory.values), " | gradients ",
              amount(memory.gradients), " | optimizer ", amount(memory.optimizer), " | activations ", amount(memory.activations),
              " | workspace ", amount(memory.workspace), together ? text(" | exchange ", amount(memory.exchange)) : "",
              memory.teacher > 0 ? text(" | teacher ", amount(memory.teacher)) : "", rest);
}

std::string gather_line(const GatherBytes& gather) {
  std::string line = "a gather moves";
  const auto add = [&](double bytes, const char* what) {
    if (bytes > 0) line += text(line.ends_with("moves") ? " " : " | ", std::fixed, std::setprecision(3), bytes, " B per ", what);
  };
  add(gather.codes, "parameter that is codes");
  add(gather.values, "parameter that is a value");
  return line;
}

void print_text(const Explanation& explained, PlanTable form) {
  const auto& [config, plan, device, memory, bytes, gather, rates, time, price, gemm_device, gemms, warnings, epochs] = explained;
  const bool together = config.parallel.world() > 1;
  const Amount amount{form};
  const auto print = [&](const std::string& line) { std::cout << (form == PlanTable::wide ? line + '\n' : folded(line, kNarrowColumns)); };
  print(text("device ", device, " | ", layout_text(config.parallel), " | precision.dtype ", dtype_name(config.precision.dtype),
             " | precision.recipe ", printable(config.precision.recipe)));
  if (plan.quantizes_operands()) {
    const std::string how = quantized_gemms(gemms);
    const std::string where = gemm_device.architecture == 0 ? "this device" : text(gemm_device_text(gemm_device), " (supposed)");
    print(text("quantized GEMMs are ", how, " on ", where, ": ",
               how == "emulated" ? "codes are dequantized, which is exact, and multiplied with fp32 accumulation"
                                 : "explain --device here shows how each is multiplied"));
  }
  std::cout << '\n' << printable(plan_table(plan, form, config.parallel.ranks()), "\n") << '\n';
  if (form == PlanTable::narrow) {
    for (const std::string& line : recipe_lines(plan)) print(printable(line));
  }
  const int64_t by_muon = parameters_of_muon(plan);
  const double per_parameter = static_cast<double>(plan.bytes()) / static_cast<double>(plan.parameters());
  print(text(plan.parameters(), " parameters",
             plan.active_parameters() < plan.parameters() ? text(", ", plan.active_parameters(), " of them active") : "",
             plan.trained_parameters() < plan.parameters() ? text(", ", plan.trained_parameters(), " of them trained") : "",
             by_muon > 0 ? text(", ", by_muon, " of them by Muon") : "",
             plan.buffers() > 0 ? text(", and expert biases of ", plan.buffers(), " elements, which are not trained") : "",
             " | resident weights ", amount(plan.bytes()), ", ", std::fixed, std::setprecision(3), per_parameter, " B per parameter"));
  const std::string held = amount(plan.bytes_on_rank(config.parallel.ranks()));
  if (const int64_t ranks = config.parallel.tensor; ranks > 1)
    print(text("parallel.tensor ", ranks, ": a rank holds ", held, " of the weights | vocabulary ", *config.model.vocab_size, " in ",
               config.model.padded_vocab_size(),
               " rows, a multiple of parallel.tensor and model.pad_vocab_to: ", config.model.padded_vocab_size() / ranks,
               " on each rank | tokens of norms and residuals ", config.parallel.sequence_parallel ? "divided" : "whole on each rank"));
  if (const int64_t ranks = config.parallel.expert; ranks > 1)
    print(text("parallel.expert ", ranks, ": a rank holds ", config.model.moe->num_experts / ranks, " of the ",
               config.model.moe->num_experts, " experts of a layer, and ", held,
               " of the weights | permuted tokens are dispatched to the ranks of their experts"));
  print(memory_line(memory, together, amount));
  if (!epochs.empty()) print("length | " + epochs);
  const Traffic& sent = bytes.sent;
  if (together)
    print(text("bytes sent a step, all ranks | gradients ", amount(sent.gradients), " | parameters ", amount(sent.parameters),
               " | activations ", amount(sent.activations), " | control ", amount(sent.control), " | other ", amount(sent.other), " | in ",
               count_text(bytes.buckets, "bucket"), ", ", amount(bytes.busiest), " of the busiest rank"));
  if (rates.ranks_per_host > 0 && rates.ranks_per_host < config.parallel.world())
    print(text("of these between hosts of ", count_text(rates.ranks_per_host, "rank"), " | gradients ",
               amount(bytes.between_hosts.gradients), " | parameters ", amount(bytes.between_hosts.parameters), " | activations ",
               amount(bytes.between_hosts.activations)));
  if (config.parallel.data > 1) print(gather_line(gather));
  if (together || rates.flops || rates.link) print(time_line(explained));
  if (time.step && config.training.steps) print(run_line(explained));
  if (const auto advice = plan.gather_advice(); advice && !together) print(*advice);
  if (const auto& advice = plan.dispatch_advice(); advice && config.parallel.expert == 1) print(*advice);
  if (const auto cost = plan.cost_of_rows()) print(*cost);
  for (const std::string& warning : warnings) print("warning: " + printable(warning));
  print("plan " + plan.to_json().at("hash").string());
}

// Returns the run on so many ranks; where its own layout or batch does not fit them, on as many as it asks for.
LoadedConfig searched_run(const ExplainArguments& arguments, int64_t world) {
  try {
    return load_run_config(arguments.sources, Inputs::unchecked, world);
  } catch (const Error& error) {
    if (error.code() != ExitCode::usage) throw;
    return load_run_config(arguments.sources, Inputs::unchecked);
  }
}

ExitCode search(const ExplainArguments& arguments) {
  std::vector<std::string> missing;
  if (!arguments.world) missing.emplace_back("--world");
  if (!arguments.flops) missing.emplace_back("--flops");
  if (!arguments.memory) missing.emplace_back("--memory, the bytes that a rank may use, as in 80G");
  require(missing.empty(), ExitCode::usage, "--search needs ", joined(missing, " and "));
  require(!arguments.wide && arguments.device.empty(), ExitCode::usage, "--search shows layouts alone: leave out --wide and --device");
  const Rates rates = rates_of(arguments);
  const int64_t world = ranks_of(arguments.world);
  LoadedConfig loaded = searched_run(arguments, world);
  const std::string epochs = length_of_epochs(loaded);
  RunConfig& config = loaded.config;
  set_vocabulary(config);
  require(!arguments.price || config.training.steps, ExitCode::usage, "--price needs the steps of the run: ", epochs);
  const bool several_hosts = rates.ranks_per_host > 0 && rates.ranks_per_host < world;
  const bool inside = rates.ranks_per_host != 1;
  require(world == 1 || ((rates.link || !inside) && (rates.host_link || !several_hosts)), ExitCode::usage,
          "--search of several ranks needs --link and, if --nproc-per-node divides them among hosts, --host-link");
  const double memory = std::min(1e18, quantity("--memory", *arguments.memory)),
               price = quantity_of("--price", arguments.price).value_or(0.0);
  const FoundLayouts layouts = search_layouts(arguments.sources, config, world, rates, memory);
  require(layouts.least_memory > 0, ExitCode::usage, "no layout of ", count_text(world, "rank"),
          " divides the run: that of data ranks must divide the ", count_text(*config.training.global_batch_size, "sequence"),
          " of a step (training.global_batch_size), and that of tensor ranks the ", config.model.num_attention_heads,
          " attention heads and the sizes of the layers", layouts.refusal.empty() ? "" : "; the configuration refuses the first with\n",
          layouts.refusal);
  const std::vector<LayoutChoice>& found = layouts.fastest_first;
  require(!found.empty(), ExitCode::usage, "no layout of ", count_text(world, "rank"), " fits into ",
          bytes_text(static_cast<int64_t>(memory)), " of a rank; the smallest takes ", bytes_text(layouts.least_memory),
          ": give more memory or ranks, or a smaller batch");
  if (arguments.json) {
    std::cout << layouts_json(found, price).dump(1, Json::Order::keys) << '\n';
    return ExitCode::ok;
  }
  std::cout << count_text(found.size(), "layout") << " of " << count_text(world, "rank") << " with "
            << count_text(*config.training.global_batch_size, "sequence") << " a step fit into " << bytes_text(static_cast<int64_t>(memory))
            << " of a rank; the fastest of them\n\n"
            << layout_table(found, price);
  return ExitCode::ok;
}

ExitCode explain(const ExplainArguments& arguments) {
  require(arguments.search || !arguments.memory, ExitCode::usage, "--memory is for --search");
  if (arguments.search) return search(arguments);
  const Explanation all = explanation(arguments);
  const PlanTable form = arguments.wide ? PlanTable::wide : PlanTable::narrow;
  if (arguments.json) {
    print_json(all);
  } else if (arguments.device.empty()) {
    print_text(all, form);
  } else {
    std::cout << "GEMMs on " << gemm_device_text(all.gemm_device)
              << ", m x n x k of a micro batch; bound: largest |error| / sum of |a b|\n\n"
              << printable(gemm_table(all.gemms, all.gemm_device, form), "\n");
    const PlannedAttention attention = planned_attention(all.config, all.gemm_device);
    std::cout << "attention of all layers: " << attention.by << (attention.because.empty() ? "" : ", because ") << attention.because
              << '\n';
  }
  return ExitCode::ok;
}

}  // namespace

Command explain_command() {
  const auto arguments = std::make_shared<ExplainArguments>();
  return {.name = "explain",
          .summary = "show what each module of a run computes, stores, sends and exports, and what the run needs",
          .example =
              "mantissa explain configs/quickstart.json --set precision.recipe=mxfp8\n"
              "mantissa explain configs/gpt2-124m.json --world 64 --nproc-per-node 8 --flops 4T --link 100G --host-link 12G --price 2\n"
              "mantissa explain configs/gpt2-124m.json --world 64 --flops 4T --link 3.2G --search --memory 16G\n"
              "mantissa explain configs/gpt2-124m.json --device sm_90",
          .options = config_options(
              arguments->sources,
              {world_option(arguments->world),
               {"--flops", &arguments->flops,
                "FLOP/s of a rank, as in 4T, for the time of a step; bench train measures it, bench gemm its upper bound"},
               {"--link", &arguments->link,
                "bytes/s that a rank sends while it receives at the same rate, as in 3.2G, for the time of a step; bench comm measures it"},
               {"--host-link", &arguments->host_link, "the same to ranks on other hosts; bench comm measures it on two hosts"},
               {"--nproc-per-node", &arguments->ranks_per_host, "ranks on each host (all), in their order"},
               {"--price", &arguments->price, "price of a rank hour, for the cost of the run"},
               {"--search", &arguments->search,
                "instead of the plan, the fastest layouts of --world ranks that fit into --memory, with the global batch of the run"},
               {"--memory", &arguments->memory, "with --search: bytes that a rank may use, as in 80G"},
               {"--device", &arguments->device,
                "how each GEMM is multiplied on cpu, sm_80, sm_86, sm_89, sm_90, sm_100, sm_103, sm_120, or here"},
               {"--wide", &arguments->wide, "also show the operands of each module's GEMMs and the exported format; cut nothing"},
               {"--json", &arguments->json, "one JSON object, every module by itself"}}),
          .run = [arguments] { return explain(*arguments); }};
}

}  // namespace mantissa::tools
