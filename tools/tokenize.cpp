// mantissa tokenize: text or JSONL in, token files of Megatron or llm.c out, or JSONL of tokens and masks, or a tokenizer that is trained
// on it.
#include <algorithm>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>

#include "base/file.h"
#include "data/batch.h"
#include "data/documents.h"
#include "data/open_data.h"
#include "data/token_writer.h"
#include "hf/export_files.h"
#include "hf/gguf_reader.h"
#include "mantissa/base/log.h"
#include "mantissa/base/text.h"
#include "text/bpe_trainer.h"
#include "tools/command.h"
#include "tools/report/read_progress.h"

namespace mantissa::tools {
namespace {

struct TokenizeArguments {
  std::vector<std::string> files;
  std::string tokenizer = "byte", format = "megatron", input_format = "auto", output;
  std::optional<std::string> vocabulary, chat_template, chat_date;
  std::optional<int64_t> eod_id, train_vocab;
  bool append_eod = false;
};

constexpr int64_t kLargestVocabularyFile = 64 << 20;

// Returns the format of an input: text or JSONL.
DataFormat format_of(const TokenizeArguments& arguments, const InputFile& file) {
  const DataFormat given = *choice_of<DataFormat>(arguments.input_format);
  const DataFormat format = given == DataFormat::automatic ? recognize_format(file) : given;
  require(format == DataFormat::text || format == DataFormat::jsonl, ExitCode::usage, file.path(), ": holds tokens of ",
          choice_name(format), " already");
  return format;
}

std::string vocabulary_path(const TokenizeArguments& arguments) { return arguments.output + ".tokenizer.json"; }

Tokenizer make_tokenizer(const TokenizeArguments& arguments, const std::vector<std::string>& paths) {
  require(arguments.tokenizer == "char" || !arguments.vocabulary, ExitCode::usage, "--vocabulary: needs --tokenizer char");
  if (arguments.tokenizer == "byte") return Tokenizer::bytes();
  if (arguments.tokenizer != "char") return tokenizer_at(arguments.tokenizer);
  if (arguments.vocabulary) {
    return Tokenizer::from_json(File::open_input(*arguments.vocabulary).content(kLargestVocabularyFile), *arguments.vocabulary);
  }
  std::vector<InputFile> files;
  for (const std::string& path : paths) {
    files.emplace_back(path);
    require(format_of(arguments, files.back()) == DataFormat::text, ExitCode::usage, path,
            ": the char tokenizer takes its characters from text files; for others give --vocabulary");
  }
  return Tokenizer::characters_of(files);
}

// Collects the ids of one document at a time, and writes them.
template <class Writer>
class DocumentWriter {
 public:
  // options.appended: ends each text; masks are kept by some writers only.
  DocumentWriter(const Tokenizer& tokenizer, const TokenizeArguments& arguments, LineOptions options, Writer& writer)
      : arguments_(arguments),
        options_(std::move(options)),
        writer_(writer),
        encoder_(tokenizer, {.ids = [this](std::span<const int32_t> ids) { document_.insert(document_.end(), ids.begin(), ids.end()); },
                             .end_of_document =
                                 [this] {
                                   if (options_.appended && !document_.empty() && document_.back() != options_.appended)
                                     document_.push_back(*options_.appended);
                                   add({.ids = std::exchange(document_, {}), .trained = {}});
                                 }}) {}
  DocumentWriter(const DocumentWriter&) = delete;
  DocumentWriter& operator=(const DocumentWriter&) = delete;

  void add_file(const std::string& path) {
    const InputFile file(path);
    const RepeatedTokens before = encoder_.repeated();
    RepeatedTokens repeated;
    if (format_of(arguments_, file) == DataFormat::text) {
      read_text(file, encoder_);
    } else {
      const auto take = [&](const Example& example) {
        repeated.add(example.repeated);
        require(kKeepsMasks, ExitCode::usage, path,
                ": has fine-tuning examples, whose masks files of Megatron and llm.c cannot hold; use --format examples");
        add(example);
      };
      const LineForm form = read_jsonl(file, options_, {.texts = &encoder_, .example = take});
      conversations_ = conversations_ || form == LineForm::messages;
    }
    repeated.add({.begins = encoder_.repeated().begins - before.begins, .ends = encoder_.repeated().ends - before.ends});
    for (const std::string& warning : repetition_warnings(path, repeated)) log_warning(warning);
  }
  int64_t documents() const { return documents_; }
  bool has_conversations() const { return conversations_; }

 private:
  static constexpr bool kKeepsMasks = std::is_same_v<Writer, ExampleWriter>;

  // Without masks all tokens are trained.
  void add(const Example& example) {
    if (example.ids.empty()) return;
    ++documents_;
    if constexpr (kKeepsMasks) {
      std::vector<bool> trained = example.trained;
      trained.resize(example.ids.size(), true);
      trained[0] = false;  // nothing predicts it
      writer_.add_document(example.ids, trained);
    } else {
      writer_.add_document(example.ids);
    }
  }

  const TokenizeArguments& arguments_;
  LineOptions options_;
  Writer& writer_;
  std::vector<int32_t> document_;
  int64_t documents_ = 0;
  bool conversations_ = false;
  DocumentEncoder encoder_;
};

// Returns the id that goes with each document; none without --append-eod.
std::optional<int32_t> end_token_of(const TokenizeArguments& arguments, const Tokenizer& tokenizer) {
  require(arguments.append_eod || !arguments.eod_id, ExitCode::usage, "--eod-id: needs --append-eod");
  if (!arguments.append_eod) return std::nullopt;
  if (!arguments.eod_id) {
    require(tokenizer.end_token().has_value(), ExitCode::usage, "--append-eod: needs --eod-id, because the tokenizer names no end token",
            tokenizer.files() == nullptr ? text("; the next free id is ", tokenizer.size()) : " in a tokenizer_config.json beside it");
    return tokenizer.end_token();
  }
  require(*arguments.eod_id >= 0 && *arguments.eod_id <= tokenizer.size(), ExitCode::usage, "--eod-id: must be from 0 to ",
          tokenizer.size(), ", the next free id, got ", *arguments.eod_id);
  return static_cast<int32_t>(*arguments.eod_id);
}

// Returns a report on the files.
std::string write_files(const TokenizeArguments& arguments, const std::vector<std::string>& paths) {
  const Tokenizer tokenizer = make_tokenizer(arguments, paths);
  const std::optional<int32_t> eod = end_token_of(arguments, tokenizer);
  const int64_t vocab_size = std::max(tokenizer.size(), eod ? int64_t{*eod} + 1 : 0);
  LineOptions options{.encoder = encoder_of(tokenizer), .vocab_size = vocab_size, .chat_template = {}, .chat_date = arguments.chat_date};
  if (arguments.chat_template) {
    options.chat_template = choice_of<ChatTemplate>(*arguments.chat_template);
    // Examples teach a model their template, so a template of its own that renders differently causes a warning.
    if (tokenizer.kind() == TokenizerKind::bpe) {
      const std::string difference =
          chat_template_difference(files_beside_tokenizer(arguments.tokenizer), *options.chat_template, arguments.chat_date);
      if (!difference.empty()) log_warning(arguments.tokenizer, ": ", difference);
    }
  }
  const auto write = [&]<class Writer>(Writer& writer, const std::string& names) {
    DocumentWriter<Writer> documents(tokenizer, arguments, options, writer);
    for (const std::string& path : paths) documents.add_file(path);
    require(!arguments.chat_template || documents.has_conversations(), ExitCode::usage,
            "--chat-template: renders \"messages\", which no input has; leave it out, or give conversations");
    require(documents.documents() > 0, ExitCode::usage, "the input has no text");
    const int64_t tokens = writer.finish();
    return text(printable(names), ": ", count_text(documents.documents(), "document"), ", ", count_text(tokens, "token"),
                ", model.vocab_size ", vocab_size, '\n');
  };
  const TokenWriterOptions writer_options{.vocab_size = vocab_size, .eod_id = eod};
  std::string reported;
  if (arguments.format == "examples") {
    options.appended = eod;
    ExampleWriter writer(arguments.output + ".jsonl");
    reported = write(writer, arguments.output + ".jsonl");
  } else if (arguments.format == "megatron") {
    MegatronWriter writer(arguments.output, writer_options);
    reported = write(writer, arguments.output + ".bin, .idx");
  } else {
    LlmcWriter writer(arguments.output + ".bin", writer_options);
    reported = write(writer, arguments.output + ".bin");
  }
  if (tokenizer.kind() != TokenizerKind::character) return reported;
  write_file_atomically(vocabulary_path(arguments), tokenizer.to_json());
  return reported + printable(vocabulary_path(arguments)) + ": the characters by id; give it as --vocabulary for further files\n";
}

// Returns the added tokens of a tokenizer that is trained.
std::vector<AddedToken> added_tokens(const TokenizeArguments& arguments) {
  return arguments.chat_template ? chat_tokens(*choice_of<ChatTemplate>(*arguments.chat_template)) : std::vector<AddedToken>();
}

std::string train_tokenizer(const TokenizeArguments& arguments, const std::vector<std::string>& paths) {
  BpeTrainer trainer;
  for (const std::string& path : paths) {
    const InputFile file(path);
    const auto origin = [&file](int64_t offset) { return TextOrigin{.name = file.path(), .code = ExitCode::data, .offset = offset}; };
    if (format_of(arguments, file) == DataFormat::text) {
      file.for_each_window([&](std::string_view window, int64_t offset) { trainer.add(window, origin(offset)); });
      trainer.end_text(origin(file.size()));
      continue;
    }
    for_each_text(file, [&](const std::string& content, const TextOrigin& place) {
      trainer.add(content, place);
      trainer.end_text(place);
    });
  }
  const std::string json = trainer.train(*arguments.train_vocab, added_tokens(arguments));
  const int64_t tokens = BpeTokenizer::from_json(json, arguments.output).size();
  write_file_atomically(arguments.output, json);
  return text(printable(arguments.output), ": ", count_text(tokens, "token"),
              tokens < *arguments.train_vocab ? ", as no further pair occurs twice" : "", "; give it as --tokenizer or data.tokenizer\n");
}

// Token files are data, perhaps of a run that reads them: none is replaced. Nor is a tokenizer.
void require_new_files(const TokenizeArguments& arguments) {
  std::vector<std::string> extensions = {".bin", ".idx", ".jsonl", ".tokenizer.json"};
  if (arguments.train_vocab) extensions = {""};
  for (const std::string& extension : extensions) {
    const std::string file = arguments.output + extension;
    require_output_file(file);
    std::error_code error;
    require(!std::filesystem::exists(std::filesystem::symlink_status(file, error)), ExitCode::usage, file,
            ": exists already; delete it, or give another --output");
  }
}

void check_options(const TokenizeArguments& arguments) {
  const bool dated = arguments.chat_template && tells_date(*choice_of<ChatTemplate>(*arguments.chat_template));
  require(!arguments.chat_date || dated, ExitCode::usage,
          "--chat-date: applies to --chat-template llama3 and harmony only, which tell the model a date");
  if (!arguments.train_vocab) return;
  const bool encodes = arguments.tokenizer != "byte" || arguments.format != "megatron" || arguments.vocabulary || arguments.chat_date ||
                       arguments.append_eod || arguments.eod_id;
  require(!encodes, ExitCode::usage, "--train-vocab: writes a tokenizer and no tokens; leave out the options for tokens");
  const int64_t fewest = BpeTrainer::kFewestTokens + std::ssize(added_tokens(arguments)), most = 1 << 24;
  require(*arguments.train_vocab >= fewest && *arguments.train_vocab <= most, ExitCode::usage, "--train-vocab: must be from ", fewest,
          " to ", most, ", got ", *arguments.train_vocab);
}

ExitCode tokenize(const TokenizeArguments& arguments) {
  open_log({.level = LogLevel::warning, .console = true, .file = {}});
  check_options(arguments);
  require_new_files(arguments);
  std::vector<std::string> paths;
  for (const std::string& pattern : arguments.files) {
    for (std::string& path : expand_paths(pattern)) paths.push_back(std::move(path));
  }
  const bool collects = arguments.tokenizer == "char" && !arguments.vocabulary;
  std::cout << with_read_progress(bytes_to_tokenize(paths, collects), [&] {
    return arguments.train_vocab ? train_tokenizer(arguments, paths) : write_files(arguments, paths);
  });
  return ExitCode::ok;
}

}  // namespace

Command tokenize_command() {
  const auto arguments = std::make_shared<TokenizeArguments>();
  return {
      .name = "tokenize",
      .summary = "turn text or JSONL into token files, or into JSONL of tokens and masks",
      .example = "mantissa tokenize --tokenizer byte --format megatron --output tokens --append-eod --eod-id 256 'src/*/*.cpp'",
      .options =
          {{"FILES", &arguments->files, "text files, JSONL files (a text or a fine-tuning example on each line) or globs"},
           {.name = "--output",
            .target = &arguments->output,
            .description = "PREFIX of the files to write; with --train-vocab, the file",
            .required = true},
           {"--tokenizer", &arguments->tokenizer,
            "byte: 256 ids; char: one id per character; or a tokenizer.json, a folder that holds one, or a GGUF file"},
           {"--train-vocab", &arguments->train_vocab, "train a tokenizer.json with this many tokens (byte-level BPE) on FILES instead"},
           {"--vocabulary", &arguments->vocabulary, "char: the PREFIX.tokenizer.json of an earlier run instead of the characters of FILES"},
           {"--format",
            &arguments->format,
            "megatron: PREFIX.bin and PREFIX.idx; llmc: PREFIX.bin; examples: PREFIX.jsonl, which keeps masks",
            {"megatron", "llmc", "examples"}},
           {"--input-format",
            &arguments->input_format,
            "format of FILES, as data.format; text reads JSON as plain text, too",
            {"auto", "text", "jsonl"}},
           {"--chat-template", &arguments->chat_template,
            "template of JSONL with messages, as data.chat_template; --train-vocab adds its tokens", choice_names<ChatTemplate>()},
           {"--chat-date", &arguments->chat_date, "date that the template tells the model, as data.chat_date"},
           {"--append-eod", &arguments->append_eod, "mark documents with --eod-id, once: before each in llmc files, else after each"},
           {"--eod-id", &arguments->eod_id, "end-of-document id; default: the end token of tokenizer_config.json"}},
      .run = [arguments] { return tokenize(*arguments); }};
}

}  // namespace mantissa::tools
