// Computes with a GGUF file by llama.cpp, on the CPU, with keys and values in fp32 and without flash attention. Usage: llama_logits FILE
// TOKENS. Answers each line of standard input with a line of numbers:
//
//   logprobs 5,7,1     log-probabilities of all tokens after the first
//   tokens 48656c6c6f  the ids of a text, which is in hexadecimal
//   go_on 3 48656c     the text, in hexadecimal, of the three likeliest tokens that follow a text one after the other
#include <llama.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

std::vector<llama_token> ids_of(const std::string& list) {
  std::vector<llama_token> ids;
  std::istringstream in(list);
  for (std::string id; std::getline(in, id, ',');) ids.push_back(std::stoi(id));
  return ids;
}

// Decodes tokens from a position on and returns the logits of each.
std::vector<std::vector<float>> logits_of(llama_context* context, const std::vector<llama_token>& ids, int first, int vocabulary) {
  llama_batch batch = llama_batch_init(static_cast<int>(ids.size()), 0, 1);
  for (size_t i = 0; i < ids.size(); ++i) {
    batch.token[i] = ids[i];
    batch.pos[i] = first + static_cast<int>(i);
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = 0;
    batch.logits[i] = 1;
  }
  batch.n_tokens = static_cast<int>(ids.size());
  std::vector<std::vector<float>> out;
  if (llama_decode(context, batch) != 0) throw std::runtime_error("llama_decode failed");
  for (size_t i = 0; i < ids.size(); ++i) {
    const float* const logits = llama_get_logits_ith(context, static_cast<int>(i));
    out.emplace_back(logits, logits + vocabulary);
  }
  llama_batch_free(batch);
  return out;
}

int main(int count, char** words) {
  if (count != 3) return 2;
  llama_log_set(
      [](ggml_log_level level, const char* text, void*) {
        if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
      },
      nullptr);
  llama_backend_init();
  llama_model* const model = llama_model_load_from_file(words[1], llama_model_default_params());
  if (model == nullptr) return 1;
  llama_context_params options = llama_context_default_params();
  options.n_ctx = options.n_batch = options.n_ubatch = static_cast<uint32_t>(std::stoi(words[2]));
  options.n_threads = options.n_threads_batch = 1;  // others would wait for each other in loops
  options.type_k = options.type_v = GGML_TYPE_F32;
  options.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  llama_context* const context = llama_init_from_model(model, options);
  if (context == nullptr) return 1;
  const llama_vocab* const vocab = llama_model_get_vocab(model);
  const int vocabulary = llama_vocab_n_tokens(vocab);
  const auto tokens_of = [&](const std::string& digits) {
    std::string text;
    for (size_t i = 0; i + 1 < digits.size(); i += 2) text += static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16));
    std::vector<llama_token> ids(text.size() + 8);
    ids.resize(static_cast<size_t>(
        llama_tokenize(vocab, text.data(), static_cast<int>(text.size()), ids.data(), static_cast<int>(ids.size()), true, true)));
    return ids;
  };
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream in(line);
    std::string task, rest;
    int steps = 0;
    in >> task;
    if (task == "go_on") in >> steps;
    in >> rest;
    llama_memory_clear(llama_get_memory(context), true);
    std::vector<llama_token> ids = task == "logprobs" ? ids_of(rest) : tokens_of(rest);
    for (size_t i = 0; task == "tokens" && i < ids.size(); ++i) std::printf("%d ", ids[i]);
    std::vector<std::vector<float>> logits;
    if (task != "tokens") logits = logits_of(context, ids, 0, vocabulary);
    for (size_t i = 0; task == "logprobs" && i + 1 < ids.size(); ++i) {
      const double most = *std::max_element(logits[i].begin(), logits[i].end());
      double sum = 0;
      for (const float logit : logits[i]) sum += std::exp(static_cast<double>(logit) - most);
      std::printf("%.9g ", static_cast<double>(logits[i][static_cast<size_t>(ids[i + 1])]) - most - std::log(sum));
    }
    for (int step = 0; step < steps; ++step) {
      const auto best = static_cast<llama_token>(std::max_element(logits.back().begin(), logits.back().end()) - logits.back().begin());
      if (llama_vocab_is_eog(vocab, best)) break;
      char piece[256];
      const int length = llama_token_to_piece(vocab, best, piece, sizeof piece, 0, false);
      for (int i = 0; i < length; ++i) std::printf("%02x", static_cast<unsigned char>(piece[i]));
      ids.push_back(best);
      logits = logits_of(context, {best}, static_cast<int>(ids.size()) - 1, vocabulary);
    }
    std::printf("\n");
    std::fflush(stdout);
  }
}
