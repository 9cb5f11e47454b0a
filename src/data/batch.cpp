#include "data/batch.h"

#include <glob.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <numeric>

#include "mantissa/base/error.h"
#include "mantissa/base/integers.h"
#include "mantissa/base/rng.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;

// Returns "; FOLDER holds a, b, c": what the user might have meant.
std::string listing(const fs::path& folder) {
  std::error_code error;
  std::vector<std::string> names;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    names.push_back(entry->path().filename().string());
  }
  if (error) return text("; there is no folder ", folder.string());
  std::sort(names.begin(), names.end());
  constexpr size_t kShown = 5;
  const std::string out =
      text("; ", folder.string(), " holds ", names.empty() ? "nothing" : joined(std::span(names).first(std::min(names.size(), kShown))));
  return names.size() > kShown ? out + text(" and ", names.size() - kShown, " more") : out;
}

}  // namespace

std::vector<std::string> expand_paths(const std::string& pattern, const std::string& key) {
  require(!pattern.empty(), ExitCode::usage, "data path: is empty");
  if (file_exists(pattern)) return {pattern};
  if (file_exists(pattern + ".bin") && file_exists(pattern + ".idx")) return {pattern + ".bin"};
  std::error_code ignored;
  require(!fs::is_directory(pattern, ignored), ExitCode::usage, "data path \"", pattern, "\" is a folder; name its files, as in \"",
          (fs::path(pattern) / "*").string(), "\"", listing(pattern));
  glob_t found = {};
  const int status = ::glob(pattern.c_str(), GLOB_NOSORT | GLOB_BRACE, nullptr, &found);
  std::vector<std::string> paths;
  for (size_t i = 0; status == 0 && i < found.gl_pathc; ++i) {
    const std::string path = found.gl_pathv[i], bin = with_extension(path, ".bin");
    if (file_exists(path)) paths.push_back(path.ends_with(".idx") && file_exists(bin) ? bin : path);
  }
  ::globfree(&found);
  require(status == 0 || status == GLOB_NOMATCH, ExitCode::environment, "data path \"", pattern, "\": the folder cannot be searched");
  if (paths.empty()) {
    fs::path folder = fs::path(pattern).parent_path();  // the deepest that has no wildcard
    while (folder.string().find_first_of("*?[{") != std::string::npos) folder = folder.parent_path();
    fail(ExitCode::usage, "data path \"", pattern, "\" matches no file", listing(folder.empty() ? fs::path(".") : folder),
         key.empty() ? "" : text("; name yours with --set ", key, "=FILE"));
  }
  std::sort(paths.begin(), paths.end());
  paths.erase(std::unique(paths.begin(), paths.end()), paths.end());
  return paths;
}

TokenDataset::TokenDataset(std::vector<TokenFile> files) : files_(std::make_shared<const std::vector<TokenFile>>(std::move(files))) {
  require(!files_->empty(), "a dataset has at least one file");
  for (const TokenFile& file : *files_) ends_.push_back(end_ += file.tokens());
}

TokenDataset TokenDataset::part(int64_t begin, int64_t end) const {
  require(begin >= 0 && begin <= end && end <= tokens(), "tokens ", begin, " to ", end, " of ", tokens());
  TokenDataset out = *this;
  out.begin_ = begin_ + begin;
  out.end_ = begin_ + end;
  return out;
}

bool TokenDataset::has_documents() const {
  return std::ranges::all_of(*files_, [](const TokenFile& file) { return file.has_documents() || file.tokens() == 0; });
}

bool TokenDataset::has_mask() const { return std::ranges::any_of(*files_, &TokenFile::has_mask); }

bool TokenDataset::has_examples() const {
  return std::ranges::any_of(*files_, [](const TokenFile& file) { return file.examples().examples > 0; });
}

void TokenDataset::read(int64_t begin, int64_t count, int32_t* out, uint8_t* marks) const {
  require(begin >= 0 && count >= 0 && begin <= tokens() - count, "tokens ", begin, " + ", count, " of ", tokens());
  int64_t next = begin_ + begin;
  for (auto file = static_cast<size_t>(std::ranges::upper_bound(ends_, next) - ends_.begin()); count > 0; ++file) {
    const TokenFile& source = (*files_)[file];
    const int64_t piece = std::min(count, ends_[file] - next);
    if (piece > 0) source.read(next - (ends_[file] - source.tokens()), piece, out, marks);
    next += piece;
    count -= piece;
    out += piece;
    if (marks != nullptr) marks += piece;
  }
}

int64_t training_tokens(int64_t n, double valid_fraction) {
  return static_cast<int64_t>(std::floor(static_cast<double>(n) * (1.0 - valid_fraction)));
}

namespace {

constexpr uint32_t kRounds = 8;
constexpr int64_t kLargestSize = int64_t{1} << 62;

uint64_t low_bits(uint64_t value, int bits) { return value & ((uint64_t{1} << bits) - 1); }

}  // namespace

Permutation::Permutation(int64_t size, uint64_t seed, uint32_t dataset, uint64_t epoch)
    : size_(static_cast<uint64_t>(size)), seed_(seed), epoch_(epoch), dataset_(dataset) {
  require(size >= 1 && size <= kLargestSize, "permutation of ", size, " items");
  const int bits = static_cast<int>(std::bit_width(size_ - 1));
  left_bits_ = bits / 2;
  right_bits_ = bits - left_bits_;
}

uint64_t Permutation::shuffle(uint64_t value) const {
  uint64_t right = low_bits(value, right_bits_);
  uint64_t left = value >> right_bits_;
  for (uint32_t round = 0; round < kRounds; ++round) {
    // Each half is at most 31 bits, so the round and the dataset find room beside it; every (round, half) has a draw of its own.
    const uint64_t half = round % 2 == 0 ? right : left;
    const uint64_t index = half | (uint64_t{round} << 32) | (uint64_t{dataset_} << 36);
    const auto words = random_words({.seed = seed_ ^ (epoch_ >> 32), .stream = RngStream::data}, static_cast<uint32_t>(epoch_), index);
    if (round % 2 == 0) {
      left ^= low_bits(words[0], left_bits_);
    } else {
      right ^= low_bits(words[0], right_bits_);
    }
  }
  return (left << right_bits_) | right;
}

int64_t Permutation::operator()(int64_t index) const {
  auto value = static_cast<uint64_t>(index);
  require(index >= 0 && value < size_, "item ", index, " of a permutation of ", size_);
  do value = shuffle(value);
  while (value >= size_);
  return static_cast<int64_t>(value);
}

Sampler::Sampler(std::vector<int64_t> samples, std::vector<double> weights, uint64_t seed)
    : samples_(std::move(samples)), weights_(std::move(weights)), seed_(seed), taken_(samples_.size(), 0) {
  require(!samples_.empty() && samples_.size() == weights_.size(), "one weight for each dataset");
  const double sum = std::accumulate(weights_.begin(), weights_.end(), 0.0);
  for (size_t i = 0; i < samples_.size(); ++i) {
    require(samples_[i] >= 1 && weights_[i] > 0, "dataset ", i, ": ", samples_[i], " samples with weight ", weights_[i]);
    weights_[i] /= sum;
  }
}

int32_t Sampler::next_dataset() const {
  const auto n = static_cast<double>(drawn_ > 1 ? drawn_ : 1);
  size_t best = 0;
  double most = weights_[0] * n - static_cast<double>(taken_[0]);
  for (size_t i = 1; i < weights_.size(); ++i) {
    const double missing = weights_[i] * n - static_cast<double>(taken_[i]);
    if (missing > most) {
      most = missing;
      best = i;
    }
  }
  return static_cast<int32_t>(best);
}

SampleId Sampler::at(int64_t counter) {
  require(counter >= 0, "sample counter ", counter);
  SampleId id;
  int64_t draw = counter;
  if (samples_.size() > 1) {
    if (counter < drawn_) {
      drawn_ = 0;
      taken_.assign(taken_.size(), 0);
    }
    while (drawn_ <= counter) {
      id.dataset = next_dataset();
      draw = taken_[static_cast<size_t>(id.dataset)]++;
      ++drawn_;
    }
  }
  const int64_t size = samples_[static_cast<size_t>(id.dataset)];
  id.epoch = draw / size;
  id.sample = Permutation(size, seed_, static_cast<uint32_t>(id.dataset), static_cast<uint64_t>(id.epoch))(draw % size);
  return id;
}

namespace {

Batch empty_batch(int64_t sequences, int64_t length) {
  const auto size = static_cast<size_t>(sequences * length);
  return {.sequences = sequences,
          .length = length,
          .tokens = std::vector<int32_t>(size, 0),
          .targets = std::vector<int32_t>(size, kNoTarget),
          .positions = std::vector<int32_t>(size, 0),
          .segment_starts = std::vector<int32_t>(size, 0),
          .lengths = std::vector<int32_t>(static_cast<size_t>(sequences), 0),
          .samples = std::vector<SampleId>(static_cast<size_t>(sequences))};
}

// Fills row `row`: inputs are tokens [begin, begin + inputs) of the dataset, targets the ones after; the rest of the row is padding, as is
// what fills a row of examples. The last token of a row of examples has no target, and after that of the dataset there is none.
void fill_row(const TokenDataset& dataset, int64_t begin, int64_t inputs, const DocumentOptions& asked, int64_t row, Batch& batch) {
  std::vector<int32_t> ids(static_cast<size_t>(inputs + 1));
  std::vector<uint8_t> marks(ids.size());
  dataset.read(begin, std::min(inputs + 1, dataset.tokens() - begin), ids.data(), marks.data());
  DocumentOptions documents = asked;
  if (dataset.has_examples()) documents.reset_position_ids = documents.document_mask = true;
  const auto first = static_cast<size_t>(row * batch.length);
  int32_t document = 0;  // where the current one starts in this row
  for (int64_t t = 0; t < batch.length; ++t) {
    const auto at = static_cast<size_t>(t), to = first + at;
    if (t < inputs) {
      if (t > 0 && ((marks[at] & starts_document) || (marks[at - 1] & ends_document))) document = static_cast<int32_t>(t);
      const bool eod = documents.mask_eod_loss && (marks[at] & (end_token | ends_document));
      batch.tokens[to] = ids[at];
      if (!(marks[at] & fills_row)) batch.lengths[static_cast<size_t>(row)] = static_cast<int32_t>(t) + 1;
      if (!eod && !(marks[at] & untrained)) {
        batch.targets[to] = ids[at + 1];
        ++batch.target_count;
      }
    }
    batch.positions[to] = static_cast<int32_t>(t) - (documents.reset_position_ids ? document : 0);
    batch.segment_starts[to] = documents.document_mask ? document : 0;
  }
}

std::string name_of_set(const std::vector<TokenDataset>& datasets, size_t set) {
  return datasets.size() == 1 ? "the training data" : text("data.train[", set, "]");
}

std::vector<int64_t> sample_counts(const std::vector<TokenDataset>& datasets, int64_t seq_len) {
  std::vector<int64_t> counts;
  for (const TokenDataset& dataset : datasets) {
    const int64_t shared = dataset.has_examples() ? 0 : 1;  // the token that a sample has in common with the next one
    const int64_t samples = dataset.tokens() < 1 ? 0 : (dataset.tokens() - shared) / seq_len;
    require(samples >= 1, ExitCode::usage, name_of_set(datasets, counts.size()), ": has ", dataset.tokens(),
            " tokens, but training.seq_len ", seq_len, " needs at least ", seq_len + shared);
    counts.push_back(samples);
  }
  return counts;
}

// Requires a token that is trained: without any, steps would only decay the weights.
void require_trained_tokens(const TokenDataset& dataset, const std::string& name) {
  if (!dataset.has_mask()) return;
  constexpr int64_t kWindow = 1 << 16;
  std::vector<int32_t> ids(kWindow);
  std::vector<uint8_t> marks(kWindow);
  for (int64_t begin = 0; begin < dataset.tokens(); begin += kWindow) {
    const int64_t count = std::min(kWindow, dataset.tokens() - begin);
    dataset.read(begin, count, ids.data(), marks.data());
    if (std::any_of(marks.begin(), marks.begin() + count, [](uint8_t mark) { return (mark & untrained) == 0; })) return;
  }
  fail(ExitCode::data, name, ": all ", dataset.tokens(), " tokens are masked, so there is nothing to learn from",
       dataset.has_examples() ? "; an example that is longer than training.seq_len loses its end" : "");
}

}  // namespace

int64_t Batch::padding() const {
  return lengths.empty() ? 0 : sequences * length - std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
}

TrainData::TrainData(std::vector<TokenDataset> datasets, std::vector<double> weights, int64_t seq_len, uint64_t seed,
                     DocumentOptions documents)
    : datasets_(std::move(datasets)),
      seq_len_(seq_len),
      documents_(documents),
      sampler_(sample_counts(datasets_, seq_len), std::move(weights), seed),
      all_count_(!documents.mask_eod_loss && std::ranges::none_of(datasets_, &TokenDataset::has_mask)) {
  for (size_t i = 0; i < datasets_.size(); ++i) require_trained_tokens(datasets_[i], name_of_set(datasets_, i));
}

Batch TrainData::batch(int64_t counter, int64_t sequences) {
  Batch batch = empty_batch(sequences, seq_len_);
  batch.all_count = all_count_;
  for (int64_t row = 0; row < sequences; ++row) {
    const SampleId id = sampler_.at(counter + row);
    fill_row(datasets_[static_cast<size_t>(id.dataset)], id.sample * seq_len_, seq_len_, documents_, row, batch);
    batch.samples[static_cast<size_t>(row)] = id;
  }
  return batch;
}

int64_t TrainData::tokens() const {
  int64_t sum = 0;
  for (const TokenDataset& dataset : datasets_) sum += dataset.tokens();
  return sum;
}

int64_t TrainData::samples() const {
  int64_t sum = 0;
  for (const int64_t samples : sample_counts(datasets_, seq_len_)) sum += samples;
  return sum;
}

ValidationData::ValidationData(std::vector<ValidationSet> sets, int64_t seq_len, DocumentOptions documents)
    : sets_(std::move(sets)), seq_len_(seq_len), documents_(documents) {
  for (const ValidationSet& set : sets_) {
    require(set.tokens.tokens() >= 2, ExitCode::usage, "validation data ", set.name, ": has ", set.tokens.tokens(),
            " tokens, but a prediction needs 2");
  }
}

int64_t ValidationData::windows(int set) const {
  const int64_t targets = sets_.at(static_cast<size_t>(set)).tokens.tokens() - 1;
  return ceil_div(targets, seq_len_);
}

Batch ValidationData::batch(int set, int64_t first, int64_t count) const {
  const TokenDataset& dataset = sets_.at(static_cast<size_t>(set)).tokens;
  const int64_t rows = std::min(count, windows(set) - first);
  require(first >= 0 && rows >= 0, "validation window ", first, " of ", windows(set));
  Batch batch = empty_batch(rows, seq_len_);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t begin = (first + row) * seq_len_;
    fill_row(dataset, begin, std::min(seq_len_, dataset.tokens() - 1 - begin), documents_, row, batch);
    batch.samples[static_cast<size_t>(row)] = {.dataset = set, .epoch = 0, .sample = first + row};
  }
  return batch;
}

}  // namespace mantissa
