#include "flag_words.hpp"

#include <cctype>
#include <cstddef>
#include <string_view>
#include <utility>

namespace chevron::train {
namespace {

constexpr std::pair<std::string_view, std::string_view> phrases[] = {
    {"a lower learning rate, clip_grad_norm, or not_finite::skip", "a lower --learning-rate, or a smaller --clip-grad-norm"},
    {"; where a loss is a mean over targets that count and a microbatch may have none (all of its labels ignored, say), "
     "trainer_options::loss_weight, by which microbatches that count 0 are left out",
     ""},
    {"; in a program's own C++ chevron::weight_names", ""},
    {"; in a program's own C++ also names as the folder has them (chevron::weight_names), or load_weights_options::may_stay for "
     "tensors that the model does not need",
     ""},
    {"trainer_options::master_parameters, or load_weights and a new optimizer", "--master-parameters as that run had it"},
    {"shard = sharding::optimizer", "--shard"},
    {"shard = sharding::gradients", "--shard gradients"},
    {"sharding::optimizer", "--shard"},
    {"sharding::nothing", "no --shard"},
    {"nccl_transport, --backend nccl", "--backend nccl"},
};

/// Options of a trainer that are flags of the programs; the flag has dashes.
constexpr std::string_view options[] = {"learning_rate", "clip_grad_norm", "master_parameters", "post_validation",
                                        "overlap_gather"};

bool is_part_of_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '/' || c == '.'; }

void replace_all(std::string& text, std::string_view word, std::string_view by, bool whole) {
  for (std::size_t at = 0; (at = text.find(word, at)) != std::string::npos;) {
    std::size_t const end = at + word.size();
    bool const inside = whole && ((at > 0 && is_part_of_word(text[at - 1])) ||
                                  (end < text.size() && is_part_of_word(text[end]) && text[end] != '.'));
    if (inside) {
      at = end;
      continue;
    }
    text.replace(at, word.size(), by);
    at += by.size();
  }
}

}  // namespace

std::string in_flags(std::string sentence) {
  for (auto const& [phrase, words] : phrases) replace_all(sentence, phrase, words, false);
  for (std::string_view const option : options) {
    std::string flag = "--" + std::string(option);
    replace_all(flag, "_", "-", false);
    replace_all(sentence, "trainer_options::" + std::string(option), flag, true);
    replace_all(sentence, option, flag, true);
  }
  return sentence;
}

}  // namespace chevron::train
