#include "data/open_data.h"

#include <algorithm>
#include <filesystem>

#include "data/token_file.h"

namespace mantissa {
namespace {

// A path or glob and its key in the configuration.
struct Input {
  std::string pattern, key;
};

std::vector<Input> inputs_of(const std::vector<WeightedPath>& sets, const char* list) {
  std::vector<Input> inputs;
  for (const WeightedPath& set : sets) inputs.push_back({set.path, text(list, '.', inputs.size(), ".path")});
  return inputs;
}

std::vector<Input> training_inputs(const DataConfig& config) {
  return config.path ? std::vector<Input>{{*config.path, "data.path"}} : inputs_of(config.train, "data.train");
}

std::string content_of(const std::string& path) {
  constexpr int64_t kLargest = 64 << 20;
  return File::open_input(path).content(kLargest);
}

// Characters of token files, which lie beside them: PREFIX.tokenizer.json (mantissa tokenize) or meta.json (nanoGPT's meta.pkl as JSON; the
// pickle itself is never read, as a pickle is a program).
struct Characters {
  std::string file;
  Tokenizer tokenizer;
};

Characters characters_beside(const std::string& path) {
  const std::string own = with_extension(path, ".tokenizer.json");
  if (file_exists(own)) return {own, Tokenizer::from_json(content_of(own), own)};
  const std::string meta = (std::filesystem::path(path).parent_path() / "meta.json").string();
  require(file_exists(meta), ExitCode::usage, "data.tokenizer: char needs the characters of ", path, ": neither ", own, " nor ", meta,
          R"( ({"itos": {"0": "\n", ...}}) exists; ids of bytes are read with data.tokenizer=byte)");
  return {meta, Tokenizer::from_nanogpt_meta(content_of(meta), meta)};
}

Tokenizer characters_of_training_data(const DataConfig& config, const Progressed& progressed) {
  std::vector<InputFile> files;
  for (const Input& input : training_inputs(config))
    for (const std::string& path : expand_paths(input.pattern, input.key)) files.emplace_back(path);
  for (const InputFile& file : files) {
    const DataFormat format = config.format == DataFormat::automatic ? recognize_format(file, progressed) : config.format;
    require(format != DataFormat::jsonl, ExitCode::usage, "data.tokenizer: char takes its characters from text files; tokenize ",
            file.path(), " with mantissa tokenize --vocabulary");
    if (format != DataFormat::text) return characters_beside(file.path()).tokenizer;
  }
  return Tokenizer::characters_of(files, progressed);
}

// Opens the files of one path and keeps them in `data`.
class Opener {
 public:
  Opener(const DataConfig& config, const DataOptions& options, Data& data) : config_(config), data_(data) {
    options_ = {.format = config.format,
                .dtype = config.dtype,
                .tokenizer = data.tokenizer ? &*data.tokenizer : nullptr,
                .vocab_size = data.vocab_size,
                .eod_id = {},
                .append_eod = config.append_eod,
                .chat_template = config.chat_template,
                .chat_date = config.chat_date,
                .row_tokens = options.seq_len,
                .progressed = options.progressed};
    if (!config.eod_id) {
      if (data.tokenizer) options_.eod_id = data.tokenizer->end_token();
      return;
    }
    require(*config.eod_id < data.vocab_size, ExitCode::usage, "data.eod_id: ", *config.eod_id, " is not below the vocabulary size ",
            data.vocab_size);
    options_.eod_id = static_cast<int32_t>(*config.eod_id);
  }

  TokenDataset open(const Input& input) {
    std::vector<TokenFile> files;
    for (const std::string& path : expand_paths(input.pattern, input.key)) {
      files.emplace_back(path, options_);
      require_same_characters(files.back());
    }
    const TokenDataset& opened = data_.files.emplace_back(std::move(files));
    if (opened.has_examples()) {
      for (const TokenFile& file : opened.files()) {
        require(file.examples().examples > 0, ExitCode::usage, input.pattern, ": ", file.path(),
                " has no fine-tuning examples, but other files have; list them in data.train as separate sets");
      }
      const char* const off = config_.document_mask == false ? "data.document_mask" : "data.reset_position_ids";
      require(config_.document_mask != false && config_.reset_position_ids != false, ExitCode::usage, off, ": ", input.pattern,
              " has fine-tuning examples, which must not attend to each other: leave it out, or set it to true");
    }
    const bool bounded = config_.mask_eod_loss || config_.resets_positions() || config_.masks_documents();
    require(!bounded || opened.has_documents(), ExitCode::usage,
            "data.mask_eod_loss, data.reset_position_ids and data.document_mask need to know where documents end, but ", input.pattern,
            " does not mark it; set data.eod_id");
    return opened;
  }

 private:
  // Ids mean nothing without their characters, and files that number them differently look alike.
  void require_same_characters(const TokenFile& file) {
    if (is_text(file.format()) || !data_.tokenizer || data_.tokenizer->kind() != TokenizerKind::character) return;
    const Characters beside = characters_beside(file.path());
    require(beside.tokenizer.to_json() == data_.tokenizer->to_json(), ExitCode::usage, beside.file, ": has other characters than ",
            characters_from_);
    characters_from_ = beside.file;
  }

  const DataConfig& config_;
  Data& data_;
  std::string characters_from_ = "the tokenizer of the run";
  TokenFileOptions options_;
};

// Returns where the short form divides `files`: examples between rows.
int64_t split_of(const TokenDataset& files, double valid_fraction, int64_t seq_len) {
  const int64_t split = training_tokens(files.tokens(), valid_fraction);
  if (!files.has_examples()) return split;
  require(split >= seq_len, ExitCode::usage, "data.path: its examples fill ", count_text(files.tokens() / seq_len, "row"),
          " of training.seq_len ", seq_len, ", too few to split off data.valid_fraction ", valid_fraction,
          "; give data.train and data.valid");
  return split - split % seq_len;
}

template <class Test>
bool has_file(const Data& data, const Test& test) {
  return std::ranges::any_of(data.files, [&test](const TokenDataset& set) { return std::ranges::any_of(set.files(), test); });
}

// Throws if the data do not use the template. Ids may: it also says how the model is asked, and may have rendered them.
void require_used_template(const DataConfig& config, const Data& data) {
  const auto has_ids = [](const TokenFile& file) { return file.form() == LineForm::tokens || !is_text(file.format()); };
  if (!config.chat_template || has_conversations(data) || has_file(data, has_ids)) return;
  const TokenFile& file = data.files.front().files().front();
  fail(ExitCode::usage, "data.chat_template: ", choice_name(*config.chat_template),
       " renders \"messages\", which no file has: ", file.path(), " is ", choice_name(file.format()),
       "; leave the template out, or name conversations");
}

Data open_parts(const DataConfig& config, const DataOptions& options, bool trains) {
  Data data{.tokenizer = options.tokenizer ? options.tokenizer : make_tokenizer(config, options.progressed),
            .valid = ValidationData({}, options.seq_len, {})};
  require(data.tokenizer || options.vocab_size, ExitCode::usage,
          "model.vocab_size: null stands for the tokenizer's size, but data.tokenizer is null");
  data.vocab_size = options.vocab_size ? *options.vocab_size : data.tokenizer->size();
  require(!data.tokenizer || data.tokenizer->size() <= data.vocab_size, ExitCode::usage, "model.vocab_size: ", data.vocab_size,
          " is less than the ", data.tokenizer ? data.tokenizer->size() : 0, " ids of the tokenizer");
  Opener opener(config, options, data);
  std::vector<TokenDataset> sets;
  std::vector<double> weights;
  std::vector<ValidationSet> valid;
  const auto add_fingerprints = [&](const TokenDataset& files, std::vector<FileFingerprint>& out) {
    for (const TokenFile& file : files.files()) {
      for (const std::string& path : file.files()) {
        out.push_back(fingerprint(path));
        if (options.progressed) options.progressed();
      }
    }
  };
  const auto train_on = [&](const TokenDataset& files, int64_t tokens, double weight) {
    sets.push_back(files.part(0, tokens));
    weights.push_back(weight);
    add_fingerprints(files, data.fingerprints.train);
  };
  const std::vector<Input> inputs = training_inputs(config);
  if (config.path) {
    const TokenDataset files = opener.open(inputs.front());
    const int64_t split = split_of(files, config.valid_fraction, options.seq_len);
    if (trains) train_on(files, split, 1.0);
    if (split < files.tokens()) valid.push_back({.name = *config.path, .tokens = files.part(split, files.tokens())});
  } else {
    for (size_t i = 0; trains && i < inputs.size(); ++i) {
      const TokenDataset files = opener.open(inputs[i]);
      train_on(files, files.tokens(), config.train[i].weight);
    }
    for (const Input& input : inputs_of(config.valid, "data.valid")) {
      valid.push_back({.name = input.pattern, .tokens = opener.open(input)});
      if (trains) add_fingerprints(valid.back().tokens, data.fingerprints.valid);
    }
  }
  const DocumentOptions documents = {
      .mask_eod_loss = config.mask_eod_loss, .reset_position_ids = config.resets_positions(), .document_mask = config.masks_documents()};
  if (trains) {
    require(!sets.empty(), ExitCode::usage, "data: give data.path or data.train");
    require_used_template(config, data);
    data.train.emplace(std::move(sets), std::move(weights), options.seq_len, options.seed, documents);
  }
  data.valid = ValidationData(std::move(valid), options.seq_len, documents);
  return data;
}

}  // namespace

bool has_conversations(const Data& data) {
  return has_file(data, [](const TokenFile& file) { return file.form() == LineForm::messages; });
}

std::optional<Tokenizer> make_tokenizer(const DataConfig& config, const Progressed& progressed) {
  if (!config.tokenizer) return std::nullopt;
  if (config.uses_bytes()) return Tokenizer::bytes();
  return config.uses_characters() ? characters_of_training_data(config, progressed) : Tokenizer::from_path(*config.tokenizer);
}

Data open_data(const DataConfig& config, const DataOptions& options) { return open_parts(config, options, true); }

Data open_validation_data(const DataConfig& config, const DataOptions& options) { return open_parts(config, options, false); }

std::vector<std::string> repetition_warnings(const std::string& name, const RepeatedTokens& repeated) {
  std::vector<std::string> warnings;
  const auto warn = [&](const char* token, const char* where, int64_t texts) {
    if (texts > 0)
      warnings.push_back(text(name, ": the ", token, " token, which the tokenizer puts ", where, " each text, is also written out in ",
                              count_text(texts, "text"), ", so it appears twice there"));
  };
  warn("begin", "before", repeated.begins);
  warn("end", "after", repeated.ends);
  return warnings;
}

std::vector<std::string> data_warnings(const DataConfig& config, const Data& data, const char* row_length) {
  std::vector<std::string> warnings;
  const bool one_text_each = std::ranges::all_of(
      data.files, [](const TokenDataset& set) { return set.files().size() == 1 && set.files().front().format() == DataFormat::text; });
  const bool occurs_in_text = config.eod_id && data.tokenizer && *config.eod_id < data.tokenizer->size();
  const auto warn_if_idle = [&](const char* key, bool on) {
    if (!on || !one_text_each || occurs_in_text) return;
    warnings.push_back(text(key, " has no effect: each data set is one text, which is one document",
                            config.eod_id ? text(", and no character has the id data.eod_id ", *config.eod_id) : ""));
  };
  warn_if_idle("data.mask_eod_loss", config.mask_eod_loss);
  warn_if_idle("data.reset_position_ids", config.resets_positions());
  warn_if_idle("data.document_mask", config.masks_documents());
  const auto add = [&warnings](std::string warning) {  // its file may be in several sets
    if (std::ranges::find(warnings, warning) == warnings.end()) warnings.push_back(std::move(warning));
  };
  for (const TokenDataset& set : data.files) {
    for (const TokenFile& file : set.files()) {
      for (std::string& warning : repetition_warnings(file.path(), file.repeated())) add(std::move(warning));
      const ExampleCounts& counts = file.examples();
      if (counts.cut_examples == 0) continue;
      add(text(file.path(), ": the ends of ", counts.cut_examples, " of ", count_text(counts.examples, "example"), ", beyond ", row_length,
               ", are cut off, with ", counts.cut_targets, " of ", counts.targets + counts.cut_targets, " targets"));
    }
  }
  return warnings;
}

}  // namespace mantissa
