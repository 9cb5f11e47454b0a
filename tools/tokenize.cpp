// mantissa tokenize: text or JSONL in, token files of Megatron or llm.c out, or a tokenizer that is trained on it.
#include <algorithm>
#include <filesystem>
#include <iostream>
#include <memory>

#include "mantissa/base/pending_file.h"
#include "mantissa/base/printable.h"
#include "mantissa/data/dataset.h"
#include "mantissa/data/documents.h"
#include "mantissa/data/token_writer.h"
#include "mantissa/text/bpe_trainer.h"
#include "tools/command.h"
#include "tools/report/read_progress.h"

namespace mantissa::tools {
namespace {

struct TokenizeArguments {
  std::vector<std::string> files;
  std::string tokenizer = "byte", format = "megatron", output;
  std::optional<std::string> vocabulary;
  std::optional<int64_t> eod_id, train_vocab;
  bool append_eod = false;
};

constexpr int64_t kLargestVocabularyFile = 64 << 20;

std::string vocabulary_path(const TokenizeArguments& arguments) { return arguments.output + ".tokenizer.json"; }

Tokenizer make_tokenizer(const TokenizeArguments& arguments, const std::vector<std::string>& paths) {
  require(arguments.tokenizer == "char" || !arguments.vocabulary, ExitCode::usage, "--vocabulary: goes with --tokenizer char");
  if (arguments.tokenizer == "byte") return Tokenizer::bytes();
  if (arguments.tokenizer != "char") return Tokenizer::from_path(arguments.tokenizer);
  if (arguments.vocabulary) {
    return Tokenizer::from_json(File::open_input(*arguments.vocabulary).content(kLargestVocabularyFile), *arguments.vocabulary);
  }
  std::vector<InputFile> files;
  for (const std::string& path : paths) {
    files.emplace_back(path);
    require(recognize_format(files.back()) == DataFormat::text, ExitCode::usage, path,
            ": the char tokenizer takes its characters from text files; for others give --vocabulary");
  }
  return Tokenizer::characters_of(files);
}

// Calls writer.add_document for each document of the files, one of which it holds. Returns how many there were.
template <class Writer>
int64_t add_documents(const std::vector<std::string>& paths, const Tokenizer& tokenizer, Writer& writer) {
  std::vector<int32_t> document;
  int64_t documents = 0;
  const auto end = [&] {
    documents += document.empty() ? 0 : 1;
    writer.add_document(document);
    document.clear();
  };
  DocumentEncoder encoder(tokenizer, {.ids = [&](std::span<const int32_t> ids) { document.insert(document.end(), ids.begin(), ids.end()); },
                                      .end_of_document = end});
  for (const std::string& path : paths) {
    const InputFile file(path);
    const DataFormat format = recognize_format(file);
    require(format == DataFormat::text || format == DataFormat::jsonl, ExitCode::usage, path, ": holds tokens of ", choice_name(format),
            " already");
    (format == DataFormat::text ? encode_text : encode_jsonl)(file, encoder, {});
  }
  return documents;
}

template <class Writer>
std::string write_all(Writer& writer, const std::vector<std::string>& paths, const Tokenizer& tokenizer, const std::string& names) {
  const int64_t documents = add_documents(paths, tokenizer, writer);
  require(documents > 0, ExitCode::usage, "there is no text in the input");
  const int64_t tokens = writer.finish();
  return text(printable(names), ": ", count_text(documents, "document"), ", ", count_text(tokens, "token"), ", model.vocab_size ");
}

// The id that goes with each document; none without --append-eod.
std::optional<int32_t> end_token_of(const TokenizeArguments& arguments, const Tokenizer& tokenizer) {
  require(arguments.append_eod || !arguments.eod_id, ExitCode::usage, "--eod-id: goes with --append-eod");
  if (!arguments.append_eod) return std::nullopt;
  if (!arguments.eod_id) {
    require(tokenizer.end_token().has_value(), ExitCode::usage, "--append-eod: needs --eod-id, as the tokenizer names no end token",
            tokenizer.files() == nullptr ? text("; the next free id is ", tokenizer.size()) : " in a tokenizer_config.json beside it");
    return tokenizer.end_token();
  }
  require(*arguments.eod_id >= 0 && *arguments.eod_id <= tokenizer.size(), ExitCode::usage, "--eod-id: must be from 0 to ",
          tokenizer.size(), ", the next free id, got ", *arguments.eod_id);
  return static_cast<int32_t>(*arguments.eod_id);
}

// Returns what there is to say of the files.
std::string write_files(const TokenizeArguments& arguments, const std::vector<std::string>& paths) {
  const Tokenizer tokenizer = make_tokenizer(arguments, paths);
  const std::optional<int32_t> eod = end_token_of(arguments, tokenizer);
  const int64_t vocab_size = std::max(tokenizer.size(), eod ? int64_t{*eod} + 1 : 0);
  const TokenWriterOptions writer_options{.vocab_size = vocab_size, .eod_id = eod};
  std::string reported;
  if (arguments.format == "megatron") {
    MegatronWriter writer(arguments.output, writer_options);
    reported = write_all(writer, paths, tokenizer, arguments.output + ".bin, .idx");
  } else {
    LlmcWriter writer(arguments.output + ".bin", writer_options);
    reported = write_all(writer, paths, tokenizer, arguments.output + ".bin");
  }
  reported += text(vocab_size, '\n');
  if (tokenizer.kind() != TokenizerKind::character) return reported;
  write_file_atomically(vocabulary_path(arguments), tokenizer.to_json());
  return reported + printable(vocabulary_path(arguments)) + ": the characters by id; give it as --vocabulary for further files\n";
}

// Adds a text, or the key "text" of each line of JSONL.
void add_to_trainer(const InputFile& file, BpeTrainer& trainer) {
  const DataFormat format = recognize_format(file);
  require(format == DataFormat::text || format == DataFormat::jsonl, ExitCode::usage, file.path(), ": holds tokens of ",
          choice_name(format), " already");
  const auto origin = [&file](int64_t offset) { return TextOrigin{.name = file.path(), .code = ExitCode::data, .offset = offset}; };
  if (format == DataFormat::text) {
    file.for_each_window([&](std::string_view window, int64_t offset) { trainer.add(window, origin(offset)); });
    return trainer.end_text(origin(file.size()));
  }
  const auto add = [&](const std::string& content, const TextOrigin& of) {
    trainer.add(content, of);
    trainer.end_text(of);
  };
  for_each_text(file, add);
}

std::string train_tokenizer(const TokenizeArguments& arguments, const std::vector<std::string>& paths) {
  BpeTrainer trainer;
  for (const std::string& path : paths) add_to_trainer(InputFile(path), trainer);
  const std::string file = trainer.train(*arguments.train_vocab);
  const int64_t tokens = BpeTokenizer::from_json(file, arguments.output).size();
  write_file_atomically(arguments.output, file);
  return text(printable(arguments.output), ": ", count_text(tokens, "token"),
              tokens < *arguments.train_vocab ? ", as no further pair occurs twice" : "", "; give it as --tokenizer or data.tokenizer\n");
}

// Token files are data, perhaps of a run that reads them: none is replaced. Nor is a tokenizer.
void require_new_files(const TokenizeArguments& arguments) {
  std::vector<std::string> extensions = {".bin", ".idx", ".tokenizer.json"};
  if (arguments.train_vocab) extensions = {""};
  for (const std::string& extension : extensions) {
    const std::string file = arguments.output + extension;
    require_output_file(file);
    std::error_code error;
    require(!std::filesystem::exists(std::filesystem::symlink_status(file, error)), ExitCode::usage, file,
            ": is there already; delete it, or give another --output");
  }
}

void check_train_vocab(const TokenizeArguments& arguments) {
  if (!arguments.train_vocab) return;
  require(arguments.tokenizer == "byte" && !arguments.vocabulary && !arguments.append_eod && !arguments.eod_id, ExitCode::usage,
          "--train-vocab: writes a tokenizer, no tokens; --tokenizer, --vocabulary, --append-eod and --eod-id go without it");
  require(*arguments.train_vocab >= BpeTrainer::kFewestTokens && *arguments.train_vocab <= 1 << 24, ExitCode::usage,
          "--train-vocab: must be from ", BpeTrainer::kFewestTokens, " to ", 1 << 24, ", got ", *arguments.train_vocab);
}

ExitCode tokenize(const TokenizeArguments& arguments) {
  check_train_vocab(arguments);
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
  return {.name = "tokenize",
          .summary = "turn text or JSONL into token files",
          .example = "mantissa tokenize --tokenizer byte --format megatron --output tokens --append-eod --eod-id 256 'src/*/*.cpp'",
          .options = {{.name = "FILES",
                       .target = &arguments->files,
                       .description = "text files, JSONL files (key \"text\") or globs",
                       .required = true},
                      {.name = "--output",
                       .target = &arguments->output,
                       .description = "PREFIX of the files to write; with --train-vocab, the file",
                       .required = true},
                      {.name = "--tokenizer",
                       .target = &arguments->tokenizer,
                       .description = "byte: 256 ids; char: one id per character; or a tokenizer.json, or a folder that holds one"},
                      {.name = "--train-vocab",
                       .target = &arguments->train_vocab,
                       .description = "train a tokenizer.json of so many tokens (BPE of bytes) on FILES instead"},
                      {.name = "--vocabulary",
                       .target = &arguments->vocabulary,
                       .description = "char: the PREFIX.tokenizer.json of an earlier run instead of the characters of FILES"},
                      {.name = "--format",
                       .target = &arguments->format,
                       .description = "megatron: PREFIX.bin and PREFIX.idx; llmc: PREFIX.bin",
                       .choices = {"megatron", "llmc"}},
                      {.name = "--append-eod",
                       .target = &arguments->append_eod,
                       .description = "mark documents with --eod-id: after each in megatron files, before each in llmc files"},
                      {.name = "--eod-id",
                       .target = &arguments->eod_id,
                       .description = "end-of-document id; default: the end token of tokenizer_config.json"}},
          .run = [arguments] { return tokenize(*arguments); }};
}

}  // namespace mantissa::tools
