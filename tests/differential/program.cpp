#include "program.hpp"

#include <algorithm>
#include <cstdlib>

namespace differential {

std::vector<std::string> split(std::string const& text, char at) {
  std::vector<std::string> out;
  std::size_t from = 0;
  for (std::size_t to = text.find(at); to != std::string::npos; to = text.find(at, from)) {
    out.push_back(text.substr(from, to - from));
    from = to + 1;
  }
  out.push_back(text.substr(from));
  return out;
}

std::uint64_t dice::next() {
  std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ULL);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

std::string program::get(std::string const& key, std::string const& otherwise) const {
  auto const found = options.find(key);
  return found == options.end() ? otherwise : found->second;
}
long program::number(std::string const& key, long otherwise) const {
  auto const found = options.find(key);
  return found == options.end() ? otherwise : std::atol(found->second.c_str());
}
double program::real(std::string const& key, double otherwise) const {
  auto const found = options.find(key);
  return found == options.end() ? otherwise : std::atof(found->second.c_str());
}

namespace {
std::string plan_part(program const& p, std::size_t which) {
  auto const parts = split(p.get("plan", "1F1B,1,1"), ',');
  if (parts.size() != 3) throw meaningless("plan=name,ranks,microbatches");
  return parts[which];
}

block block_of(std::string const& word) {
  auto const flags = split(word, '+');
  auto const numbers = split(flags[0], ':');
  block out{numbers[0]};
  for (std::size_t i = 1; i < numbers.size(); ++i) out.numbers.push_back(std::atoi(numbers[i].c_str()));
  for (std::size_t i = 1; i < flags.size(); ++i) out.flags.insert(flags[i]);
  return out;
}
}  // namespace

std::string program::schedule() const { return plan_part(*this, 0); }
int program::ranks() const { return std::atoi(plan_part(*this, 1).c_str()); }
int program::micro_batches() const { return std::atoi(plan_part(*this, 2).c_str()); }

bool gives_loss(block const& b) { return b.name == "aux" && !b.has("frozen"); }
bool gives_losses(program const& p) {
  return std::any_of(p.stages.begin(), p.stages.end(),
                     [](stage_text const& s) { return std::any_of(s.blocks.begin(), s.blocks.end(), gives_loss); });
}

std::vector<std::string> planted_faults(program const& p) {
  std::vector<std::string> out;
  for (stage_text const& s : p.stages) {
    for (block const& b : s.blocks) {
      for (std::string const& f : b.flags) {
        if (f.starts_with("no") || f.starts_with("wrong")) out.push_back(f);
      }
    }
  }
  return out;
}

int carries_of(block const& b) { return b.name == "att" || b.name == "mem" ? 2 : 0; }

bool learns(block const& b) {
  static std::set<std::string> const those{"lin",  "lin3", "res", "lstm", "gru", "mha", "enc", "conv1", "conv2",
                                           "ln",   "gn",   "bn",  "in",   "emb", "bag", "img", "fn2",   "pen",
                                           "cplx", "idle", "eff", "hook", "aux", "att", "mem", "moe", "tp"};
  return those.contains(b.name) || (b.name == "rep" && b.has("scaled"));
}

std::vector<int> tied_stages(program const& p) {
  std::vector<int> out;
  for (std::size_t s = 0; s < p.stages.size(); ++s) {
    auto const& blocks = p.stages[s].blocks;
    if (std::any_of(blocks.begin(), blocks.end(), [](block const& b) { return b.has("tie1"); })) out.push_back(static_cast<int>(s));
  }
  return out;
}

std::string text_of(block const& b) {
  std::string out = b.name;
  for (int const n : b.numbers) out += ":" + std::to_string(n);
  for (auto const& f : b.flags) out += "+" + f;
  return out;
}

std::string text_of(program const& p) {
  std::string out;
  for (auto const& [key, value] : p.options) out += key + "=" + value + " ";
  out += "::";
  for (std::size_t s = 0; s < p.stages.size(); ++s) {
    out += (s == 0 ? " " : " | ") + text_of(p.stages[s].form);
    for (block const& b : p.stages[s].blocks) out += " " + text_of(b);
  }
  return out;
}

program program_of(std::string const& text) {
  program out;
  bool stages = false, begins = true;
  for (std::string const& word : split(text, ' ')) {
    if (word.empty()) continue;
    if (word == "::") {
      stages = true;
    } else if (!stages) {
      auto const at = word.find('=');
      if (at == std::string::npos) throw meaningless("`" + word + "` is no option: key=value");
      out.options[word.substr(0, at)] = word.substr(at + 1);
    } else if (word == "|") {
      begins = true;
    } else if (begins) {
      out.stages.push_back({block_of(word), {}});
      begins = false;
    } else {
      out.stages.back().blocks.push_back(block_of(word));
    }
  }
  if (out.stages.empty()) throw meaningless("a program needs stages after `::`");
  return out;
}

}  // namespace differential
