#include "train/generate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iostream>
#include <memory>
#include <span>

#include "base/file.h"
#include "checkpoint/checkpoint.h"
#include "data/documents.h"
#include "data/open_data.h"
#include "hf/export_files.h"
#include "hf/load_model.h"
#include "mantissa/base/log.h"
#include "mantissa/base/text.h"
#include "tools/command.h"
#include "tools/rank_session.h"

namespace mantissa::tools {
namespace {

struct GenerateArguments : ModelArguments {
  std::vector<std::string> prompts, prompt_ids;
  std::optional<std::string> prompts_file, chat_file, chat_template, chat_date;
  SamplingOptions sampling = {.max_new_tokens = 200, .temperature = 0.8, .top_k = 50, .top_p = 1.0, .seed = 1234};
  std::optional<double> temperature, top_p;  // given ones; else those of the model, else those of `sampling`
  std::optional<int64_t> top_k;
};

void check_sampling(const GenerateArguments& given) {
  const int64_t most = given.sampling.max_new_tokens;
  require(most > 0 && most <= kMostNewTokens, ExitCode::usage, "--max-new-tokens: must be from 1 to ", kMostNewTokens, ", got ", most);
  const double temperature = given.temperature.value_or(0.0), top_p = given.top_p.value_or(1.0);
  require(temperature >= 0.0 && std::isfinite(temperature), ExitCode::usage, "--temperature: must be at least 0, got ", temperature);
  require(given.top_k.value_or(0) >= 0, ExitCode::usage, "--top-k: must be at least 0, got ", given.top_k.value_or(0));
  require(top_p > 0.0 && top_p <= 1.0, ExitCode::usage, "--top-p: must be in (0, 1], got ", top_p);
}

// Says what a file of the model decides, once, where a person sees it beside the text.
void print_note(const Mesh& mesh, const std::string& note) {
  if (mesh.tensor.rank() == 0) std::cerr << printable(note) << '\n';
}

// Takes what no option gives from generation_config.json of the model or, as transformers does, from the config.json of one without it.
SamplingOptions sampling_of(const Mesh& mesh, const GenerateArguments& arguments, const LoadedModel& loaded) {
  SamplingOptions sampling = arguments.sampling;
  auto file = std::ranges::find(loaded.files, "generation_config.json", &TokenizerFile::name);
  if (file == loaded.files.end()) file = std::ranges::find(loaded.files, "config.json", &TokenizerFile::name);
  const std::string source = text(loaded.path.string(), ": ", file != loaded.files.end() ? file->name : "");
  const SamplingDefaults defaults = file != loaded.files.end() ? read_sampling_defaults(file->bytes, source) : SamplingDefaults{};
  std::vector<std::string> taken;
  const auto take = [&taken](auto& into, const auto& given, const auto& by_file, const char* name) {
    if (!given && by_file) taken.push_back(text(name, ' ', *by_file));
    into = given ? *given : by_file.value_or(into);
  };
  take(sampling.temperature, arguments.temperature, defaults.temperature, "temperature");
  take(sampling.top_k, arguments.top_k, defaults.top_k, "top-k");
  take(sampling.top_p, arguments.top_p, defaults.top_p, "top-p");
  if (!taken.empty()) print_note(mesh, text(source, ": ", joined(taken)));
  if (!defaults.unused.empty()) print_note(mesh, text(source, ": not used here: ", joined(defaults.unused)));
  return sampling;
}

constexpr const char* kStandardInput = "-";

struct Prompt {
  std::string name;  // in messages
  std::string text;  // printed before the continuation: a text, ids; nothing for a conversation
  std::vector<int32_t> tokens;
};

// Returns all of standard input.
std::string standard_input(size_t most) {
  std::string content;
  for (std::array<char, 65536> block{}; std::cin.good();) {
    std::cin.read(block.data(), std::ssize(block));
    content.append(block.data(), static_cast<size_t>(std::cin.gcount()));
    require(content.size() <= most, ExitCode::usage, "standard input: has more than ", most, " bytes");
  }
  return content;
}

std::string name_of(const std::string& path) { return path == kStandardInput ? "standard input" : path; }

// Returns the lines of the file, or of standard input, without their ends.
std::vector<std::string> lines_of(const std::string& file) {
  constexpr int64_t kMostBytes = int64_t{1} << 26;
  const std::string path = name_of(file);
  const std::string content = file == kStandardInput ? standard_input(kMostBytes) : File::open_input(file).content(kMostBytes);
  std::vector<std::string> lines;
  for (std::string_view rest = content; !rest.empty();) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    std::string_view line = rest.substr(0, end);
    if (line.ends_with('\r')) line.remove_suffix(1);
    lines.emplace_back(line);
    require(!line.empty(), ExitCode::usage, path, ":", lines.size(), ": is empty; each line is a prompt");
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  require(!lines.empty(), ExitCode::usage, path, ": is empty; each line is a prompt");
  return lines;
}

std::optional<ChatTemplate> template_of(const GenerateArguments& arguments, const LoadedModel& loaded) {
  return arguments.chat_template ? choice_of<ChatTemplate>(*arguments.chat_template) : loaded.config.data.chat_template;
}

LineOptions chat_options(const GenerateArguments& arguments, const LoadedModel& loaded, bool first_rank) {
  const std::string path = loaded.path.string();
  require(loaded.tokenizer.has_value(), ExitCode::usage, path, " has no tokenizer, which --chat needs");
  const std::optional<ChatTemplate> which = template_of(arguments, loaded);
  if (which && arguments.chat_template) {
    const std::string warning =
        chat_template_warning(loaded, *which, arguments.chat_date ? arguments.chat_date : loaded.config.data.chat_date);
    if (!warning.empty() && first_rank) log_warning(warning);
  }
  require(which.has_value(), ExitCode::usage, "--chat: ", path,
          " does not name the template of its conversations; give it with --chat-template: ", joined(choice_names<ChatTemplate>()));
  for (const AddedToken& token : chat_tokens(*which))
    require(loaded.tokenizer->id_of(token.content).has_value(), ExitCode::usage, "--chat-template: ", choice_name(*which),
            " needs the token ", token.content, ", which the tokenizer of ", path, " lacks");
  std::optional<std::string> date = arguments.chat_date;
  require(!date || tells_date(*which), ExitCode::usage,
          "--chat-date: applies to the templates llama3 and harmony only, which tell the model a date");
  require(!date || is_utf8(*date), ExitCode::usage, "--chat-date: is not UTF-8");
  if (!date) date = loaded.config.data.chat_date;
  return {
      .encoder = encoder_of(*loaded.tokenizer), .vocab_size = *loaded.config.model.vocab_size, .chat_template = which, .chat_date = date};
}

std::vector<Prompt> conversations(const GenerateArguments& arguments, const LoadedModel& loaded, bool first_rank) {
  const LineOptions options = chat_options(arguments, loaded, first_rank);
  const int64_t positions = loaded.config.model.max_position_embeddings;
  const std::string file = name_of(*arguments.chat_file);
  std::vector<Prompt> prompts;
  const auto read = [&](const Json& object, const std::string& name) {
    prompts.push_back({.name = name, .text = "", .tokens = read_chat_prompt(object, options, name)});
    require(std::ssize(prompts.back().tokens) < positions, ExitCode::usage, name, ": the conversation has ", prompts.back().tokens.size(),
            " tokens, but the model has ", positions, " positions for it and the answer");
  };
  if (*arguments.chat_file == kStandardInput)
    for_each_object(standard_input(InputFile::kLongestLine), file, read);
  else
    for_each_object(InputFile(file), read);
  require(!prompts.empty(), ExitCode::usage, file, ": has no conversation");
  return prompts;
}

std::vector<Prompt> prompts_of(const GenerateArguments& arguments, const LoadedModel& loaded, bool first_rank) {
  if (arguments.chat_file) return conversations(arguments, loaded, first_rank);
  std::vector<Prompt> prompts;
  for (const std::string& ids : arguments.prompt_ids) {
    const std::vector<int32_t> tokens = parse_token_ids("--prompt-ids", ids, *loaded.config.model.vocab_size);
    prompts.push_back({.name = "--prompt-ids", .text = joined(tokens, " "), .tokens = tokens});
  }
  if (!prompts.empty()) return prompts;
  require(loaded.tokenizer.has_value(), ExitCode::usage, loaded.path.string(), " has no tokenizer; give --prompt-ids");
  std::vector<std::string> texts = arguments.prompts_file ? lines_of(*arguments.prompts_file) : arguments.prompts;
  if (texts.empty()) texts.emplace_back("\n");
  for (const std::string& one : texts) {
    const std::string name = arguments.prompts_file ? text(name_of(*arguments.prompts_file), ':', prompts.size() + 1) : "--prompt";
    prompts.push_back({.name = name, .text = one, .tokens = loaded.tokenizer->encode_prompt(one, {.name = name, .code = ExitCode::usage})});
  }
  return prompts;
}

void warn_of(std::span<const Prompt> prompts, const GenerateArguments& arguments, const LoadedModel& loaded) {
  const bool texts = !arguments.chat_file && arguments.prompt_ids.empty();
  for (const Prompt& prompt : prompts) {
    const int64_t repeated = texts && loaded.tokenizer->begins_twice(prompt.tokens) ? 1 : 0;
    for (const std::string& warning : repetition_warnings(prompt.name, {.begins = repeated})) log_warning(warning);
    if (const auto warning = context_warning(prompt.name, prompt.tokens, loaded.config.model.max_position_embeddings))
      log_warning(*warning);
  }
}

// Continuation of one prompt, printed as it grows. Characters are printed whole; one that the last token leaves cut off is U+FFFD.
class Continuation {
 public:
  Continuation(const Prompt& prompt, const std::optional<Tokenizer>& tokenizer, bool ids) : text_(prompt.text) {
    if (!ids) decoder_.emplace(*tokenizer, prompt.tokens);
  }

  void add(int32_t id) { text_ += decoder_ ? decoder_->add(id) : text(' ', id); }
  void end() {
    if (decoder_) text_ += decoder_->rest();
    if (whole_characters(text_) == text_.size()) return;
    text_.resize(whole_characters(text_));
    append_utf8(0xFFFD, text_);
  }
  void print() {
    const size_t whole = whole_characters(text_);
    std::cout << text_.substr(0, whole) << std::flush;
    text_.erase(0, whole);
  }

 private:
  std::string text_;                    // not printed yet
  std::optional<TokenStream> decoder_;  // none: ids are printed
};

// Adds the end of an answer to the end tokens of the model: a folder need not name that of the template in which it is asked.
std::vector<int32_t> end_tokens_of(const GenerateArguments& arguments, const LoadedModel& loaded) {
  std::vector<int32_t> ends = loaded.end_tokens();
  if (!arguments.chat_file) return ends;
  if (const std::optional<ChatTemplate> which = template_of(arguments, loaded))
    if (const std::optional<int32_t> end = loaded.tokenizer->id_of(end_of_answer(*which))) ends.push_back(*end);
  return ends;
}

std::vector<std::vector<int32_t>> prompt_tokens(std::span<const Prompt> prompts) {
  std::vector<std::vector<int32_t>> tokens;
  for (const Prompt& prompt : prompts) tokens.push_back(prompt.tokens);
  return tokens;
}

// All ranks draw the same tokens; the first prints them. One text is printed as it grows, several once they are whole; ids are a line each.
void continue_all(const Mesh& mesh, const GenerateArguments& arguments, const LoadedModel& loaded, const SamplingOptions& sampling,
                  std::span<const Prompt> prompts, bool grows) {
  const std::vector<int32_t> end_tokens = end_tokens_of(arguments, loaded);
  const bool prints = mesh.tensor.rank() == 0, ids = !arguments.prompt_ids.empty();
  const std::vector<std::vector<int32_t>> tokens = prompt_tokens(prompts);
  std::vector<Continuation> texts;
  for (const Prompt& prompt : prompts) texts.emplace_back(prompt, loaded.tokenizer, ids);
  if (prints && grows) texts[0].print();
  generate_batch(*loaded.model, tokens, sampling, [&](size_t i, int32_t id) {
    if (std::ranges::find(end_tokens, id) != end_tokens.end()) return false;
    texts[i].add(id);
    if (prints && grows) texts[0].print();
    return mesh.tensor.sum(std::cout.good() ? 0 : 1) == 0;
  });
  if (!prints) return;
  for (Continuation& text : texts) {
    text.end();
    text.print();
    std::cout << (ids || grows ? "\n" : "\n---------------\n");  // the line that nanoGPT draws between samples
  }
}

void generate_on(const Mesh& mesh, const GenerateArguments& arguments) {
  const LoadedModel loaded = load_model(arguments.checkpoint, device_of(arguments.device), mesh,
                                        {.dtype = dtype_of(arguments.dtype), .precision = arguments.precision});
  const std::vector<Prompt> prompts = prompts_of(arguments, loaded, mesh.tensor.rank() == 0);
  const SamplingOptions sampling = sampling_of(mesh, arguments, loaded);
  check_generation(*loaded.model, prompt_tokens(prompts), sampling);  // before anything is printed
  if (mesh.tensor.rank() == 0) warn_of(prompts, arguments, loaded);
  constexpr size_t kAtOnce = 64;  // as each has a cache of its own
  for (size_t begin = 0; begin < prompts.size(); begin += kAtOnce)
    continue_all(mesh, arguments, loaded, sampling, std::span(prompts).subspan(begin, std::min(kAtOnce, prompts.size() - begin)),
                 prompts.size() == 1);
}

void check_prompts(const GenerateArguments& arguments) {
  const bool texts = !arguments.prompts.empty(), file = arguments.prompts_file.has_value(), ids = !arguments.prompt_ids.empty();
  require(!texts || !ids, ExitCode::usage, "--prompt and --prompt-ids exclude each other");
  require(!file || !(texts || ids), ExitCode::usage, "--prompts and ", texts ? "--prompt" : "--prompt-ids", " exclude each other");
  require(!arguments.chat_file || !(texts || ids || file), ExitCode::usage,
          "--chat replaces prompts and excludes --prompt, --prompts and --prompt-ids");
  require(arguments.chat_file || !(arguments.chat_template || arguments.chat_date), ExitCode::usage,
          arguments.chat_template ? "--chat-template" : "--chat-date", ": needs --chat");
  const bool reads = arguments.prompts_file == kStandardInput || arguments.chat_file == kStandardInput;
  require(!reads || arguments.tensor == 1, ExitCode::usage, arguments.chat_file ? "--chat" : "--prompts",
          " -: only one process can read standard input, but --tensor asks for ", arguments.tensor, ": name a file");
  for (const std::string& prompt : arguments.prompts) require(!prompt.empty(), ExitCode::usage, "--prompt: must not be empty");
}

ExitCode run_generate(const GenerateArguments& arguments) {
  open_log({.level = LogLevel::warning, .console = true, .file = {}});
  check_sampling(arguments);
  check_prompts(arguments);
  on_tensor_ranks(arguments, [&](const Mesh& mesh) { generate_on(mesh, arguments); });
  return ExitCode::ok;
}

}  // namespace

Command generate_command() {
  const auto arguments = std::make_shared<GenerateArguments>();
  return {
      .name = "generate",
      .summary = "continue a text with a checkpoint",
      .example =
          "mantissa generate runs/quickstart --prompt \"The layers are\" --max-new-tokens 100 --temperature 0.7\n"
          "mantissa generate runs/quickstart --prompt \"The layers\" --prompt \"Returns\" --temperature 0",
      .options = {checkpoint_option(arguments->checkpoint),
                  {"--prompt", &arguments->prompts, "text to continue; default: \\n, a line end; repeatable: all are continued at once"},
                  {"--prompts", &arguments->prompts_file, "file with a prompt in each line; -: standard input"},
                  {"--prompt-ids", &arguments->prompt_ids, "token ids to continue, as in 1,2,3: all ids are printed, no text; repeatable"},
                  {"--chat", &arguments->chat_file,
                   "JSONL of conversations to answer, {\"messages\": [...]}; the answers are printed; -: standard input"},
                  {"--chat-template", &arguments->chat_template, "template of --chat, as data.chat_template; default: that of the run",
                   choice_names<ChatTemplate>()},
                  {"--chat-date", &arguments->chat_date, "date of --chat, as data.chat_date; default: that of the run"},
                  dtype_option(arguments->dtype),
                  precision_option(arguments->precision),
                  precision_file_option(arguments->precision_files),
                  device_option(arguments->device),
                  threads_option(arguments->threads),
                  tensor_option(arguments->tensor),
                  {"--max-new-tokens", &arguments->sampling.max_new_tokens, "tokens to write; a text ends at an end token of the model"},
                  {"--temperature", &arguments->temperature,
                   "0: always the likeliest token; default: that of the model's generation_config.json, else 0.8"},
                  {"--top-k", &arguments->top_k,
                   "draw from the k likeliest tokens; 0: from all; default: that of generation_config.json, else 50"},
                  {"--top-p", &arguments->top_p,
                   "draw from the likeliest tokens that together reach p; default: that of generation_config.json, else 1"},
                  {"--seed", &arguments->sampling.seed, "equal seeds give equal texts"}},
      .run =
          [arguments] {
            add_precision_files(arguments->precision_files, arguments->precision);
            return run_generate(*arguments);
          },
      .many_ranks = true};
}

}  // namespace mantissa::tools
