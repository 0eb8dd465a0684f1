#include "outcome.hpp"

#include <ATen/ATen.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>

namespace differential {

void outcome::put(std::string const& key, at::Tensor const& t) {
  if (!t.defined()) {
    values_[key] = {"undefined", ""};
    return;
  }
  at::Tensor const plain = t.detach().contiguous();
  std::ostringstream shape;
  shape << plain.scalar_type() << " " << plain.sizes();
  values_[key] = {shape.str(), std::string(static_cast<char const*>(plain.const_data_ptr()), plain.nbytes())};
}
void outcome::put(std::string const& key, double number) {
  std::string bytes(sizeof number, '\0');
  std::memcpy(bytes.data(), &number, sizeof number);
  values_[key] = {"Double []", bytes};
}
void outcome::put(std::string const& key, std::string const& words) { values_[key] = {"words", words}; }

void outcome::write(std::string const& file) const {
  std::ofstream to(file, std::ios::binary);
  for (auto const& [key, v] : values_) {
    for (std::string const* text : {&key, &v.shape, &v.bytes}) to << text->size() << "\n" << *text;
  }
}
outcome outcome::read(std::string const& file) {
  outcome out;
  std::ifstream from(file, std::ios::binary);
  auto const text = [&] {
    std::size_t size = 0;
    from >> size;
    from.get();
    std::string all(from ? size : 0, '\0');
    from.read(all.data(), static_cast<std::streamsize>(all.size()));
    return all;
  };
  while (from.peek() != std::char_traits<char>::eof()) {
    std::string const key = text();
    value v;
    v.shape = text();
    v.bytes = text();
    out.values_[key] = v;
  }
  return out;
}

std::string key_of(int step, char const* what, int stage, int replica, std::string const& name) {
  char text[256];
  std::snprintf(text, sizeof text, "step %d: %s", step, what);
  std::string out = text;
  if (stage >= 0) out += ", stage " + std::to_string(stage);
  if (replica >= 0) out += ", replica " + std::to_string(replica);
  return name.empty() ? out : out + ", " + name;
}

namespace {

template <class Number>
Number at_of(std::string const& bytes, std::size_t i) {
  Number n;
  std::memcpy(&n, bytes.data() + i * sizeof(Number), sizeof n);
  return n;
}

std::string differing(value const& a, value const& b) {
  auto const shown = [](auto number) {
    char text[64];
    std::snprintf(text, sizeof text, "%.17g", static_cast<double>(number));
    return std::string(text);
  };
  auto const look = [&]<class Number>(Number) {
    std::size_t count = 0, first = 0;
    std::size_t const all = a.bytes.size() / sizeof(Number);
    for (std::size_t i = all; i-- > 0;) {
      if (std::memcmp(a.bytes.data() + i * sizeof(Number), b.bytes.data() + i * sizeof(Number), sizeof(Number)) == 0) continue;
      ++count;
      first = i;
    }
    return "plain " + shown(at_of<Number>(a.bytes, first)) + ", Chevron " + shown(at_of<Number>(b.bytes, first)) +
           " at element " + std::to_string(first) + " of " + a.shape + " (" + std::to_string(count) + " of " +
           std::to_string(all) + " differ)";
  };
  if (a.shape != b.shape) return "plain has " + a.shape + ", Chevron " + b.shape;
  if (a.shape == "words") return "plain: " + a.bytes + "; Chevron: " + b.bytes;
  if (a.shape.starts_with("Float")) return look(0.0F);
  if (a.shape.starts_with("Double")) return look(0.0);
  if (a.shape.starts_with("Long")) return look(std::int64_t{});
  if (a.shape.starts_with("ComplexFloat")) return look(0.0F);
  return look(static_cast<unsigned char>(0));
}

}  // namespace

std::string first_difference(outcome const& expected, outcome const& found) {
  for (auto const& [key, v] : expected.values()) {
    auto const other = found.values().find(key);
    if (other == found.values().end()) return key + ": Chevron has none";
    if (!(other->second == v)) return key + ": " + differing(v, other->second);
  }
  for (auto const& [key, v] : found.values()) {
    if (!expected.values().contains(key)) return key + ": the plain loop has none";
  }
  return "";
}

std::string first_difference(outcome const& expected, outcome const& found, double within) {
  for (auto const& [key, v] : expected.values()) {
    if (key.find(": 0 loss") == std::string::npos && key.find(": 1 norm") == std::string::npos) continue;
    auto const other = found.values().find(key);
    if (other == found.values().end()) return key + ": Chevron has none";
    double const a = at_of<double>(v.bytes, 0), b = at_of<double>(other->second.bytes, 0);
    bool const same = a == b || (std::isnan(a) && std::isnan(b));
    bool const close = same || std::abs(a - b) <= within * std::max(std::abs(a), std::abs(b));
    if (!close) return key + ": " + differing(v, other->second);
  }
  return "";
}

states states_of(torch::optim::Optimizer* optimizer) {
  states out;
  if (optimizer == nullptr) return out;
  for (auto const& [key, state] : optimizer->state())
    out[key].state = std::shared_ptr<torch::optim::OptimizerParamState>(state.get(), [](auto*) {});
  return out;
}

void put_stage(outcome& out, program const& p, int step, int stage, int replica, std::vector<piece> const& pieces,
               states const& kept) {
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    std::string const before = std::to_string(i) + ".";
    for (auto const& item : pieces[i]->named_parameters(true)) {
      at::Tensor const& q = item.value();
      // Of a sharded optimizer replicas have the gradients of their shares alone, and replica 0 is given the states.
      if (q.requires_grad() && !p.has("shard"))
        out.put(key_of(step, "2 gradient", stage, replica, before + item.key()), q.grad());
      out.put(key_of(step, "3 parameter", stage, replica, before + item.key()), q);
      auto const found = kept.find(q.unsafeGetTensorImpl());
      if (found == kept.end() || (p.has("shard") && replica > 0)) continue;
      std::string const key = key_of(step, "5 optimizer", stage, replica, before + item.key());
      if (found->second.master.defined()) out.put(key + " master", found->second.master);
      if (auto* s = dynamic_cast<torch::optim::SGDParamState*>(found->second.state.get())) {
        out.put(key + " momentum", s->momentum_buffer());
      } else if (auto* w = dynamic_cast<torch::optim::AdamWParamState*>(found->second.state.get())) {
        out.put(key + " first", w->exp_avg());
        out.put(key + " second", w->exp_avg_sq());
        out.put(key + " step", static_cast<double>(w->step()));
      }
    }
    for (auto const& item : pieces[i]->named_buffers(true))
      out.put(key_of(step, "4 buffer", stage, replica, before + item.key()), item.value());
    std::string modes;
    for (auto const& item : pieces[i]->named_modules("", false))
      modes += item.key() + (item.value()->is_training() ? " trains, " : " evaluates, ");
    out.put(key_of(step, "6 modes", stage, replica, before), modes);
  }
}

}  // namespace differential
