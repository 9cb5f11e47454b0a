#include "mantissa/data/batch.h"

#include <algorithm>
#include <numeric>

#include "mantissa/base/integers.h"

namespace mantissa {
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
