// The GPT of model_config.h once more, as the papers write it: fp64, one token after the other, no kernel, no table. It shares nothing with
// the product but the names and shapes of the parameters, so a fault that every backend has shows against it.
//   RMSNorm: Zhang and Sennrich 2019; RoPE: Su et al. 2021, in halves as GPT-NeoX; SwiGLU: Shazeer 2020; GELU: Hendrycks and Gimpel 2016;
//   normalized queries and keys: Qwen3; experts: Mixtral, DeepSeek-V3; auxiliary losses: Fedus et al. 2021, Zoph et al. 2022.
#pragma once

#include <algorithm>
#include <map>
#include <numbers>

#include "data/batch.h"
#include "models/gpt.h"
#include "testing.h"

namespace mantissa::test {

class PlainGpt {
 public:
  using Row = std::vector<double>;

  // Parameters in fp32 or fp64: a value in bf16 is no master.
  PlainGpt(const ModelConfig& config, const ParameterSet& parameters) : c_(config) {
    for (const Parameter& parameter : parameters.all()) weights_[parameter.name] = values(parameter.value());
  }

  // The model with every weight moved by `distance` times its gradient.
  PlainGpt moved(const ParameterSet& gradients, double distance) const {
    PlainGpt out = *this;
    for (const Parameter& parameter : gradients.all()) {
      const Row gradient = values(parameter.leaf.grad);
      for (size_t i = 0; i < gradient.size(); ++i) out.weights_[parameter.name][i] += distance * gradient[i];
    }
    return out;
  }

  // The mean of -log p(target) over the targets that count; p is over the vocabulary without its padding.
  double loss(const Batch& batch) const { return both(batch).loss; }
  // The loss with the auxiliary losses of routers, each sequence being a micro batch.
  double objective(const Batch& batch) const {
    const Losses losses = both(batch);
    return losses.loss + losses.auxiliary / static_cast<double>(batch.sequences);
  }

 private:
  struct Losses {
    double loss, auxiliary;
  };
  Losses both(const Batch& batch) const {
    double sum = 0.0, auxiliary = 0.0;
    for (int64_t sequence = 0; sequence < batch.sequences; ++sequence) {
      const std::vector<Row> rows = hidden(batch, sequence, auxiliary);
      for (size_t t = 0; t < rows.size(); ++t) {
        const int32_t target = batch.targets[static_cast<size_t>(sequence * batch.length) + t];
        if (target != kNoTarget) sum -= log_probability(rows[t], target);
      }
    }
    return {sum / static_cast<double>(batch.target_count), auxiliary};
  }

  const Row& weight(const std::string& name) const { return weights_.at(name); }
  double bias(const std::string& path, size_t i) const {
    const auto found = weights_.find(path + ".bias");
    return found == weights_.end() ? 0.0 : found->second[i];
  }

  static double dot(const double* a, const double* b, size_t n) {
    double sum = 0.0;
    for (size_t i = 0; i < n; ++i) sum += a[i] * b[i];
    return sum;
  }
  static void add(Row& to, const Row& x) {
    for (size_t i = 0; i < to.size(); ++i) to[i] += x[i];
  }

  Row linear(const Row& x, const std::string& path) const {
    const Row& w = weight(path + ".weight");
    Row out(w.size() / x.size());
    for (size_t i = 0; i < out.size(); ++i) out[i] = dot(&w[i * x.size()], x.data(), x.size()) + bias(path, i);
    return out;
  }

  Row norm(Row x, const std::string& path) const {
    const auto n = static_cast<double>(x.size());
    double mean = 0.0;
    for (const double value : x) mean += c_.norm == Norm::layer ? value / n : 0.0;
    for (double& value : x) value -= mean;
    const double root = std::sqrt(dot(x.data(), x.data(), x.size()) / n + c_.norm_eps);
    for (size_t i = 0; i < x.size(); ++i) x[i] = x[i] / root * weight(path + ".weight")[i] + bias(path, i);
    return x;
  }

  Row head(const Row& qkv, int64_t index) const {
    const auto begin = qkv.begin() + index * c_.head_size();
    return {begin, begin + c_.head_size()};
  }

  // The frequency of pair i: theta^(-2i/d), part of which rope_scaling divides by its factor. Llama 3: by how often it turns within the
  // first length. YaRN: by where i lies between the pairs that turn beta_fast and beta_slow times.
  double frequency(size_t i, size_t d) const {
    const double plain = std::pow(c_.rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(d));
    if (!c_.rope_scaling) return plain;
    const RopeScalingConfig& scaling = *c_.rope_scaling;
    const double length = static_cast<double>(scaling.original_max_position_embeddings), wave = 2.0 * std::numbers::pi / plain;
    if (scaling.type == RopeScaling::llama3) {
      if (length / wave > 4.0) return plain;
      if (length / wave < 1.0) return plain / scaling.factor;
      const double smooth = (length / wave - 1.0) / 3.0;
      return (1.0 - smooth) * plain / scaling.factor + smooth * plain;
    }
    const auto pair_of = [&](double turns) {  // theta^(2 pair / d) = length / (2 pi turns)
      return static_cast<double>(d) / 2.0 * std::log(length / (2.0 * std::numbers::pi * turns)) / std::log(c_.rope_theta);
    };
    const double low = std::max(0.0, pair_of(*scaling.beta_fast)),
                 high = std::min(static_cast<double>(d) - 1.0, pair_of(*scaling.beta_slow));
    const double ramp = std::min(1.0, std::max(0.0, (static_cast<double>(i) - low) / (high - low)));
    return plain / scaling.factor * ramp + plain * (1.0 - ramp);
  }

  // A query or key: normalized over the root of its mean square, then each pair (i, i + d/2) turned by position * frequency; YaRN makes
  // both longer.
  Row query_or_key(Row x, const std::string& path, int32_t position) const {
    const size_t d = x.size();
    if (c_.qk_norm) {
      const double root = std::sqrt(dot(x.data(), x.data(), d) / static_cast<double>(d) + c_.norm_eps);
      for (size_t i = 0; i < d; ++i) x[i] = x[i] / root * weight(path + ".weight")[i];
    }
    if (c_.position != Position::rope) return x;
    for (size_t i = 0; i < d / 2; ++i) {
      const double angle = position * frequency(i, d);
      const double first = x[i], second = x[i + d / 2];
      x[i] = first * std::cos(angle) - second * std::sin(angle);
      x[i + d / 2] = second * std::cos(angle) + first * std::sin(angle);
    }
    const bool yarn = c_.rope_scaling && c_.rope_scaling->type == RopeScaling::yarn;
    for (double& value : x) value *= yarn ? 0.1 * std::log(c_.rope_scaling->factor) + 1.0 : 1.0;
    return x;
  }

  // Row t attends to rows starts[t] .. t, of these to the last `window`.
  std::vector<Row> attention(const std::vector<Row>& x, const std::string& path, const int32_t* positions, const int32_t* starts,
                             size_t window) const {
    std::vector<Row> qkv, out;
    for (const Row& row : x) qkv.push_back(linear(row, path + ".qkv"));
    for (size_t t = 0; t < x.size(); ++t) {
      Row joined;
      for (int64_t h = 0; h < c_.num_attention_heads; ++h) {
        const int64_t key = c_.num_attention_heads + h / (c_.num_attention_heads / c_.kv_heads()), value = key + c_.kv_heads();
        const Row q = query_or_key(head(qkv[t], h), path + ".q_norm", positions[t]);
        Row mixed(q.size());
        double sum = c_.attention_sinks ? std::exp(weight(path + ".sinks")[static_cast<size_t>(h)]) : 0.0;
        for (auto s = static_cast<size_t>(starts[t]); s <= t; ++s) {
          if (t - s >= window) continue;
          const Row k = query_or_key(head(qkv[s], key), path + ".k_norm", positions[s]), v = head(qkv[s], value);
          const double share = std::exp(dot(q.data(), k.data(), q.size()) / std::sqrt(static_cast<double>(q.size())));
          sum += share;
          for (size_t i = 0; i < mixed.size(); ++i) mixed[i] += share * v[i];
        }
        for (const double m : mixed) joined.push_back(m / sum);
      }
      out.push_back(linear(joined, path + ".out"));
    }
    return out;
  }

  double gelu(double x) const {
    if (c_.activation == Activation::gelu_erf) return 0.5 * x * (1.0 + std::erf(x / std::numbers::sqrt2));
    return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
  }

  Row mlp(const Row& x, const std::string& path) const {
    if (c_.activation == Activation::gelu_tanh || c_.activation == Activation::gelu_erf) {
      Row up = linear(x, path + ".up");
      for (double& value : up) value = gelu(value);
      return linear(up, path + ".down");
    }
    return linear(swiglu(linear(x, path + ".gate_up")), path + ".down");
  }

  Row swiglu(const Row& both) const {
    Row product(both.size() / 2);
    for (size_t i = 0; i < product.size(); ++i) {
      double gate = both[i], up = both[product.size() + i], slope = 1.0;
      if (c_.activation == Activation::swiglu_clamped) {
        const double limit = c_.swiglu_limit.value_or(7.0);
        gate = std::min(gate, limit), up = std::clamp(up, -limit, limit) + 1.0, slope = 1.702;
      }
      product[i] = gate / (1.0 + std::exp(-slope * gate)) * up;
    }
    return product;
  }

  // Matrix `expert` of a grouped weight times x, and its bias.
  Row of_expert(const Row& x, const std::string& path, size_t expert) const {
    const Row& grouped = weight(path + ".weight");
    const size_t rows = grouped.size() / x.size() / static_cast<size_t>(c_.moe->num_experts);
    Row out(rows);
    for (size_t i = 0; i < rows; ++i)
      out[i] = dot(&grouped[(expert * rows + i) * x.size()], x.data(), x.size()) + bias(path, expert * rows + i);
    return out;
  }

  // Softmax over all experts, or sigmoid of each.
  Row scores(const Row& logits) const {
    Row out;
    double sum = 0.0;
    for (const double z : logits) sum += std::exp(z);
    for (const double z : logits) out.push_back(c_.moe->score == RouterScore::softmax ? std::exp(z) / sum : 1.0 / (1.0 + std::exp(-z)));
    return out;
  }

  // Among the groups whose best scores have the largest sums, chooses the experts with the largest scores.
  std::vector<size_t> chosen(const Row& score) const {
    const MoeConfig& moe = *c_.moe;
    const size_t groups = static_cast<size_t>(moe.n_group), kept = static_cast<size_t>(moe.topk_group), size = score.size() / groups;
    const auto k = static_cast<size_t>(moe.num_experts_per_tok);
    std::vector<std::pair<double, size_t>> of_groups, of_experts;
    for (size_t g = 0; g < groups; ++g) {
      Row in(score.begin() + static_cast<int64_t>(g * size), score.begin() + static_cast<int64_t>((g + 1) * size));
      std::sort(in.rbegin(), in.rend());
      double sum = 0.0;
      for (size_t i = 0; i < std::min(size, k / kept); ++i) sum += in[i];
      of_groups.emplace_back(-sum, g);
    }
    std::sort(of_groups.begin(), of_groups.end());
    for (size_t g = 0; g < kept; ++g)
      for (size_t i = 0; i < size; ++i) of_experts.emplace_back(-score[of_groups[g].second * size + i], of_groups[g].second * size + i);
    std::sort(of_experts.begin(), of_experts.end());
    std::vector<size_t> out;
    for (size_t j = 0; j < k; ++j) out.push_back(of_experts[j].second);
    return out;
  }

  // Sums over the tokens of one micro batch in one layer.
  struct Router {
    Row counts, probabilities;
    double squares = 0.0;  // sum of the squares of log-sum-exp of the logits
  };

  Row moe(const Row& x, const std::string& path, Router& router) const {
    const MoeConfig& moe = *c_.moe;
    const Row logits = linear(x, path + ".router"), score = scores(logits);
    const std::vector<size_t> experts = chosen(score);
    double exponentials = 0.0, all = 0.0, of_chosen = 0.0;
    for (size_t e = 0; e < score.size(); ++e) exponentials += std::exp(logits[e]), all += score[e];
    for (const size_t e : experts) of_chosen += score[e];
    router.counts.resize(score.size());
    router.probabilities.resize(score.size());
    for (size_t e = 0; e < score.size(); ++e) router.probabilities[e] += score[e] / all;
    router.squares += std::log(exponentials) * std::log(exponentials);
    Row out(x.size());
    for (const size_t e : experts) {
      router.counts[e] += 1.0;
      const bool divides = moe.norm_topk_prob.value_or(moe.num_experts_per_tok > 1) || moe.softmax_after_topk;
      const double share = score[e] / (divides ? of_chosen : 1.0) * moe.routed_scaling_factor;
      const Row y = of_expert(swiglu(of_expert(x, path + ".experts.gate_up", e)), path + ".experts.down", e);
      for (size_t i = 0; i < out.size(); ++i) out[i] += share * y[i];
    }
    if (moe.shared_intermediate_size > 0) add(out, mlp(x, path + ".shared"));
    return out;
  }

  // Here a micro batch is one sequence, so both losses of balance are the same but for their coefficients.
  double auxiliary_loss(const Router& router, int64_t tokens) const {
    const MoeConfig& moe = *c_.moe;
    const auto n = static_cast<double>(tokens);
    double sum = 0.0;
    for (size_t e = 0; e < router.counts.size(); ++e) sum += router.counts[e] * router.probabilities[e];
    const double balance = static_cast<double>(router.counts.size()) / (static_cast<double>(moe.num_experts_per_tok) * n * n) * sum;
    return (moe.aux_loss_coef + moe.seq_aux_loss_coef) * balance + moe.z_loss_coef * router.squares / n;
  }

  // One sequence, after the final norm.
  std::vector<Row> hidden(const Batch& batch, int64_t sequence, double& auxiliary) const {
    const auto first = static_cast<size_t>(sequence * batch.length);
    std::vector<Row> x;
    for (size_t t = first; t < first + static_cast<size_t>(batch.length); ++t) {
      x.push_back(row_of("embed.weight", batch.tokens[t]));
      if (c_.position == Position::learned) add(x.back(), row_of("position.weight", batch.positions[t]));
    }
    for (int64_t layer = 0; layer < c_.num_layers; ++layer) {
      const std::string path = text("layers.", layer);
      std::vector<Row> normed;
      for (const Row& row : x) normed.push_back(norm(row, path + ".attn_norm"));
      const bool slides = c_.sliding_window && (c_.sliding_layers.empty() || std::ranges::count(c_.sliding_layers, layer) > 0);
      const size_t window = slides ? static_cast<size_t>(*c_.sliding_window) : x.size();
      const std::vector<Row> attended = attention(normed, path + ".attn", &batch.positions[first], &batch.segment_starts[first], window);
      Router router;
      for (size_t t = 0; t < x.size(); ++t) {
        add(x[t], attended[t]);
        const Row row = norm(x[t], path + ".mlp_norm");
        add(x[t], c_.has_experts(layer) ? moe(row, path + ".moe", router) : mlp(row, path + ".mlp"));
      }
      if (c_.has_experts(layer)) auxiliary += auxiliary_loss(router, batch.length);
    }
    for (Row& row : x) row = norm(row, "final_norm");
    return x;
  }

  Row row_of(const std::string& name, int32_t index) const {
    const auto begin = weight(name).begin() + index * c_.hidden_size;
    return {begin, begin + c_.hidden_size};
  }

  double log_probability(const Row& x, int32_t target) const {
    const Row logits = linear(x, c_.tie_word_embeddings ? "embed" : "output");
    double sum = 0.0;
    for (size_t i = 0; i < static_cast<size_t>(*c_.vocab_size); ++i) sum += std::exp(logits[i]);
    return logits[static_cast<size_t>(target)] - std::log(sum);
  }

  ModelConfig c_;
  std::map<std::string, Row> weights_;
};

// Norm weights about 1 and biases about 0, drawn: as they start, the order of a norm and a rotation would not matter.
inline void draw_vectors(ParameterSet& parameters) {
  uint32_t what = 100;
  for (const Parameter& parameter : parameters.all()) {
    if (parameter.decays()) continue;
    assign(parameter.value(), random_values(parameter.shape.elements(), ++what, 0.4, parameter.name.ends_with(".bias") ? 0.0 : 1.0));
  }
}

}  // namespace mantissa::test
