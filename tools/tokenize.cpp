// mantissa tokenize: text or JSONL in, token files of Megatron or llm.c out.
#include <algorithm>
#include <filesystem>
#include <iostream>
#include <memory>

#include "mantissa/base/pending_file.h"
#include "mantissa/base/printable.h"
#include "mantissa/data/dataset.h"
#include "mantissa/data/token_writer.h"
#include "tools/command.h"
#include "tools/report/read_progress.h"

namespace mantissa::tools {
namespace {

struct TokenizeArguments {
  std::vector<std::string> files;
  std::string tokenizer = "byte", format = "megatron", output;
  std::optional<std::string> vocabulary;
  std::optional<int64_t> eod_id;
  bool append_eod = false;
};

constexpr int64_t kLargestVocabularyFile = 64 << 20;

std::string vocabulary_path(const TokenizeArguments& arguments) { return arguments.output + ".tokenizer.json"; }

Tokenizer make_tokenizer(const TokenizeArguments& arguments, const std::vector<std::string>& paths) {
  require(arguments.tokenizer == "char" || !arguments.vocabulary, ExitCode::usage, "--vocabulary: goes with --tokenizer char");
  if (arguments.tokenizer == "byte") return Tokenizer::bytes();
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

// Calls writer.add_document for each document of the file. Returns how many there were.
template <class Writer>
int64_t add_documents(const std::string& path, const TokenFileOptions& options, Writer& writer) {
  const TokenFile file(path, options);
  require(file.format() == DataFormat::text || file.format() == DataFormat::jsonl, ExitCode::usage, path, ": holds tokens of ",
          choice_name(file.format()), " already");
  constexpr int64_t kWindow = 1 << 20;
  std::vector<int32_t> document, ids(static_cast<size_t>(std::min(kWindow, file.tokens())));
  std::vector<uint8_t> marks(ids.size());
  int64_t documents = 0;
  for (int64_t begin = 0; begin < file.tokens(); begin += kWindow) {
    const auto count = static_cast<size_t>(std::min(kWindow, file.tokens() - begin));
    file.read(begin, static_cast<int64_t>(count), ids.data(), marks.data());
    for (size_t i = 0; i < count; ++i) {
      document.push_back(ids[i]);
      if (!(marks[i] & ends_document)) continue;
      writer.add_document(document);
      document.clear();
      ++documents;
    }
  }
  return documents;
}

template <class Writer>
std::string write_all(Writer& writer, const std::vector<std::string>& paths, const TokenFileOptions& options, const std::string& names) {
  int64_t documents = 0;
  for (const std::string& path : paths) documents += add_documents(path, options, writer);
  require(documents > 0, ExitCode::usage, "there is no text in the input");
  const int64_t tokens = writer.finish();
  return text(printable(names), ": ", count_text(documents, "document"), ", ", count_text(tokens, "token"), ", model.vocab_size ",
              options.vocab_size, '\n');
}

// The id that goes with each document; none without --append-eod.
std::optional<int32_t> end_token_of(const TokenizeArguments& arguments, const Tokenizer& tokenizer) {
  require(arguments.append_eod == arguments.eod_id.has_value(), ExitCode::usage,
          "--append-eod and --eod-id go together: byte and char have no end token of their own; the next free id is ", tokenizer.size());
  if (!arguments.eod_id) return std::nullopt;
  require(*arguments.eod_id >= 0 && *arguments.eod_id <= tokenizer.size(), ExitCode::usage, "--eod-id: must be from 0 to ",
          tokenizer.size(), ", the next free id, got ", *arguments.eod_id);
  return static_cast<int32_t>(*arguments.eod_id);
}

// Returns what there is to say of the files.
std::string write_files(const TokenizeArguments& arguments, const std::vector<std::string>& paths) {
  const Tokenizer tokenizer = make_tokenizer(arguments, paths);
  const std::optional<int32_t> eod = end_token_of(arguments, tokenizer);
  const int64_t vocab_size = std::max(tokenizer.size(), eod ? int64_t{*eod} + 1 : 0);
  const TokenFileOptions options{.tokenizer = &tokenizer, .vocab_size = vocab_size};
  const TokenWriterOptions writer_options{.vocab_size = vocab_size, .eod_id = eod};
  std::string reported;
  if (arguments.format == "megatron") {
    MegatronWriter writer(arguments.output, writer_options);
    reported = write_all(writer, paths, options, arguments.output + ".bin, .idx");
  } else {
    LlmcWriter writer(arguments.output + ".bin", writer_options);
    reported = write_all(writer, paths, options, arguments.output + ".bin");
  }
  if (tokenizer.kind() != TokenizerKind::character) return reported;
  write_file_atomically(vocabulary_path(arguments), tokenizer.to_json());
  return reported + printable(vocabulary_path(arguments)) + ": the characters by id; give it as --vocabulary for further files\n";
}

ExitCode tokenize(const TokenizeArguments& arguments) {
  for (const char* const extension : {".bin", ".idx", ".tokenizer.json"}) require_output_file(arguments.output + extension);
  std::vector<std::string> paths;
  for (const std::string& pattern : arguments.files) {
    for (std::string& path : expand_paths(pattern)) paths.push_back(std::move(path));
  }
  const bool collects = arguments.tokenizer == "char" && !arguments.vocabulary;
  std::cout << with_read_progress(bytes_to_tokenize(paths, collects), [&] { return write_files(arguments, paths); });
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
                      {.name = "--output", .target = &arguments->output, .description = "PREFIX of the files to write", .required = true},
                      {.name = "--tokenizer",
                       .target = &arguments->tokenizer,
                       .description = "byte: 256 ids; char: one id per character",
                       .choices = {"byte", "char"}},
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
                      {.name = "--eod-id", .target = &arguments->eod_id, .description = "end-of-document id"}},
          .run = [arguments] { return tokenize(*arguments); }};
}

}  // namespace mantissa::tools
