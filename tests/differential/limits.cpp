#include "limits.hpp"

#include <functional>

namespace differential {

namespace {

bool any_block(program const& p, std::function<bool(stage_text const&, block const&)> const& holds) {
  for (stage_text const& s : p.stages) {
    for (block const& b : s.blocks) {
      if (holds(s, b)) return true;
    }
  }
  return false;
}

bool recomputes(stage_text const& s, block const& b) { return s.form.has("rc") || (s.form.name == "parts" && b.has("rc")); }

}  // namespace

std::string not_promised(program const& p) {
  // LibTorch's recurrent layers compute several layers in one oneDNN call where no graph is built, and layer by layer where one
  // is: other roundings.
  if (any_block(p, [](auto const& s, block const& b) {
        return (b.name == "lstm" || b.name == "gru") && b.number(1, 1) > 1 && recomputes(s, b);
      })) {
    return "a recurrent network of several layers that is recomputed";
  }
  // Gloo's ring adds three summands in an order of its own.
  if (p.get("line") == "far" && p.replicas() > 2) return "three replicas that are summed over by Gloo's ring";
  return "";
}

std::string must_refuse(program const& p) {
  if (any_block(p, [](auto const&, block const& b) { return b.has("sparse") && !b.has("frozen"); })) return "sparse";
  return "";
}

bool may_refuse(program const& p, std::string const& message) {
  auto const in_place = [](auto const& s, block const& b) { return b.name.ends_with("_") && recomputes(s, b); };
  if (message.find("in place") != std::string::npos && any_block(p, in_place)) return true;
  // What a recomputed part was given may also be changed by the next.
  bool const some = any_block(p, [](auto const& s, block const& b) { return recomputes(s, b); });
  bool const changes = any_block(p, [](auto const&, block const& b) { return b.name.ends_with("_"); });
  if (message.find("in place") != std::string::npos && changes && (some || p.has("pv"))) return true;
  return false;
}

bool crosses_twice(program const& p) {
  return any_block(p, [](auto const&, block const& b) {
    for (char const* name : {"push", "pushc", "pushv", "pushn", "max", "empty", "expd", "cx", "dbl", "split"}) {
      if (b.name == name) return true;
    }
    return false;
  });
}

}  // namespace differential
