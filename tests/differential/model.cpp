#include "model.hpp"

#include <ATen/ATen.h>
#include <torch/nn/functional/loss.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cstdlib>
#include <utility>

#include "blocks.hpp"
#include "data.hpp"

namespace differential {

void pieceImpl::add(std::shared_ptr<block_module> const& one, block const& of) {
  int const carries = carries_of(of);
  one->carried.resize(static_cast<std::size_t>(carries));
  carries_.insert(carries_.end(), static_cast<std::size_t>(carries), of.has("det"));
  register_module("b" + std::to_string(blocks_.size()), one);
  blocks_.push_back(one);
}

tensors pieceImpl::run(tensors values) {
  std::size_t const own = values.size() - carries_.size();
  tensors const came(values.begin() + static_cast<std::ptrdiff_t>(own), values.end());
  values.resize(own);
  tensors left;
  for (auto const& one : blocks_) {
    std::size_t const first = left.size();
    for (std::size_t k = 0; k < one->carried.size(); ++k) one->carried[k] = came[first + k];
    one->run(values);
    for (at::Tensor& t : one->carried) left.push_back(std::exchange(t, {}));
  }
  values.insert(values.end(), left.begin(), left.end());
  return values;
}

one_tensorImpl::one_tensorImpl(std::shared_ptr<block_module> only) : block(std::move(only)) { register_module("b", block); }
at::Tensor one_tensorImpl::forward(at::Tensor x) {
  tensors values{std::move(x)};
  block->run(values);
  if (values.size() != 1) throw meaningless("a Sequential's block gave several tensors");
  return values[0];
}

at::ScalarType dtype_of(program const& p) {
  std::string const name = p.get("dtype", "f32");
  if (name == "f64") return at::kDouble;
  if (name == "bf16") return at::kBFloat16;
  return at::kFloat;
}

flow flow_of_input(program const& p) {
  auto const words = split(p.get("in", "vec:4"), ':');
  auto const number = [&](std::size_t i) { return i < words.size() ? std::atoi(words[i].c_str()) : 4; };
  if (words[0] == "tok") return {flow::kind::tokens, 1};
  if (words[0] == "seq") return {flow::kind::sequence, number(2)};
  if (words[0] == "img") return {flow::kind::image, number(1)};
  return {flow::kind::vector, number(1)};
}

flow flow_after(flow f, block const& b) {
  using kind = flow::kind;
  std::string const& n = b.name;
  auto const needs = [&](bool holds) {
    if (!holds) throw meaningless("`" + text_of(b) + "` does not fit what comes before it");
  };
  auto const one_of = [&](std::initializer_list<char const*> names) {
    for (char const* name : names) {
      if (n == name) return true;
    }
    return false;
  };
  bool const last_is_width = f.what == kind::vector || f.what == kind::sequence;
  if (n == "emb" || n == "bag") {
    needs(f.what == kind::tokens);
    return {n == "emb" ? kind::sequence : kind::vector, b.number(0, 4), f.others};
  }
  needs(f.what != kind::tokens);
  if (one_of({"push", "pushc", "pushv", "pushn", "int", "bool", "undef", "empty", "expd", "cx", "dbl", "det"})) {
    ++f.others;
  } else if (n == "max") {
    f.others += 2;
  } else if (n == "split") {
    needs(last_is_width && f.width % 2 == 0);
    ++f.others;
    f.width /= 2;
  } else if (n == "half") {
    needs(last_is_width && f.width % 2 == 0 && f.width > 2);
    f.width /= 2;
  } else if (one_of({"pop", "del"})) {
    needs(f.others > 0);
    --f.others;
  } else if (n == "lin") {
    needs(last_is_width);
    f.width = b.number(0, f.width);
  } else if (one_of({"lin3", "res", "ln", "fn2", "buf", "pen", "cplx", "idle", "eff", "hook", "moe", "tp"})) {
    needs(last_is_width);
  } else if (n == "att") {
    needs(f.what == kind::sequence);
  } else if (n == "mem") {
    needs(last_is_width);
  } else if (n == "lstm" || n == "gru") {
    needs(f.what == kind::sequence);
    f.width = b.number(0, f.width);
  } else if (n == "mha" || n == "enc") {
    needs(f.what == kind::sequence && f.width % b.number(0, 1) == 0);
  } else if (n == "conv1") {
    needs(f.what == kind::channels);
    f.width = b.number(0, f.width);
  } else if (n == "conv2") {
    needs(f.what == kind::image);
    f.width = b.number(0, f.width);
  } else if (n == "bn") {
    needs(f.what != kind::sequence);
  } else if (n == "gn") {
    needs(f.what != kind::sequence && f.width % 2 == 0);
  } else if (n == "in") {
    needs(f.what == kind::channels || f.what == kind::image);
  } else if (n == "tr") {
    needs(f.what == kind::sequence || f.what == kind::channels);
    f.what = f.what == kind::sequence ? kind::channels : kind::sequence;
  } else if (n == "viewt") {
    needs(f.what == kind::sequence);
  } else if (n == "last" || n == "avg") {
    needs(f.what == kind::sequence);
    f.what = kind::vector;
  } else if (n == "mean") {
    needs(f.what == kind::channels || f.what == kind::image);
    f.what = kind::vector;
  } else if (n == "rep") {
    needs(f.what == kind::vector);
    f.what = kind::sequence;
  } else if (n == "img") {
    needs(f.what == kind::vector);
    f.what = kind::image;
    f.width = b.number(0, f.width);
  } else if (n == "flat") {
    needs(f.what == kind::image);
    f.what = kind::sequence;
  } else if (n == "cl") {
    needs(f.what == kind::image);
  } else if (!one_of({"aux", "tally", "drop", "tanh", "gelu", "sig", "relu", "relu_", "add_", "mul_", "part_", "dbl2", "soft", "sort",
                      "cont", "cols", "gaps", "noise"})) {
    throw meaningless("there is no block `" + n + "`");
  }
  needs(f.others <= 4);
  return f;
}

std::vector<piece> build_stage(program const& p, int stage, rank_groups groups) {
  flow f = flow_of_input(p);
  for (int s = 0; s < stage; ++s) {
    for (block const& b : p.stages[static_cast<std::size_t>(s)].blocks) f = flow_after(f, b);
  }
  stage_text const& text = p.stages[static_cast<std::size_t>(stage)];
  if (text.blocks.empty()) throw meaningless("a stage without blocks");
  std::vector<piece> out;
  int others = 0;  // tensors that go along where the last piece begins
  for (std::size_t i = 0; i < text.blocks.size(); ++i) {
    block const& b = text.blocks[i];
    // A tied parameter begins as the lowest stage's; seeds go by place otherwise.
    at::manual_seed(p.seed() * 4096 + static_cast<std::uint64_t>(stage) * 64 + i);
    auto const made = make_block(b, f, groups);
    if (text.form.name == "seq" && f.others > 0) throw meaningless("a Sequential that takes several tensors");
    flow const before = f;
    f = flow_after(f, b);
    if (text.form.name == "seq" && f.others > 0) throw meaningless("a Sequential that gives several tensors");
    bool const complex = b.name == "cplx";
    if (!complex && b.name != "tally" && dtype_of(p) != at::kFloat) made->to(dtype_of(p));
    if (complex && dtype_of(p) == at::kDouble) {
      for (auto& q : made->parameters()) q.set_data(q.to(at::kComplexDouble));
    }
    if (b.has("frozen")) {
      for (auto& q : made->parameters()) q.requires_grad_(false);
    }
    if (b.has("eval")) made->eval();
    if (out.empty() || text.form.name == "parts") {
      out.push_back(std::make_shared<pieceImpl>());
      others = before.others;
    }
    out.back()->add(made, b);
    if (text.form.name == "seq" && carries_of(b) > 0) throw meaningless("a Sequential that carries");
    if (1 + static_cast<std::size_t>(others) + out.back()->carries().size() > 8) throw meaningless("more than eight tensors");
  }
  if (text.form.has("eval")) {
    for (piece const& each : out) each->eval();
  }
  return out;
}

std::vector<cut_parameter> cut_of(program const& p, int stage, std::vector<piece> const& pieces) {
  std::vector<cut_parameter> out;
  stage_text const& text = p.stages[static_cast<std::size_t>(stage)];
  for (std::size_t i = 0; i < text.blocks.size(); ++i) {
    block const& b = text.blocks[i];
    if (b.name != "tp") continue;
    auto const& made = text.form.name == "parts" ? pieces[i]->blocks()[0] : pieces[0]->blocks()[i];
    auto const named = made->named_parameters(false);
    out.push_back({named["columns"], "columns", 0, b.has("fused") ? 2 : 1, b.flags});
    out.push_back({named["rows"], "rows", 1, 1, b.flags});
    out.push_back({named["bias"], "bias", 0, 0, b.flags});
  }
  return out;
}

tensors summed_of(program const& p, int stage, std::vector<piece> const& pieces) {
  tensors out;
  stage_text const& text = p.stages[static_cast<std::size_t>(stage)];
  for (std::size_t i = 0; i < text.blocks.size(); ++i) {
    if (text.blocks[i].name != "tally") continue;
    auto const& made = text.form.name == "parts" ? pieces[i]->blocks()[0] : pieces[0]->blocks()[i];
    for (at::Tensor const& q : made->buffers()) out.push_back(q);
  }
  return out;
}

tensors of_experts(program const& p, int stage, std::vector<piece> const& pieces) {
  tensors out;
  stage_text const& text = p.stages[static_cast<std::size_t>(stage)];
  for (std::size_t i = 0; i < text.blocks.size(); ++i) {
    if (text.blocks[i].name != "moe") continue;
    auto const& made = text.form.name == "parts" ? pieces[i]->blocks()[0] : pieces[0]->blocks()[i];
    for (at::Tensor const& q : made->parameters()) out.push_back(q);
    for (at::Tensor const& q : made->buffers()) out.push_back(q);
  }
  return out;
}

std::vector<std::pair<std::string, at::Tensor>> tied_of(program const& p, int stage, std::vector<piece> const& pieces) {
  std::vector<std::pair<std::string, at::Tensor>> out;
  stage_text const& text = p.stages[static_cast<std::size_t>(stage)];
  for (std::size_t i = 0; i < text.blocks.size(); ++i) {
    for (std::string const& flag : text.blocks[i].flags) {
      if (!flag.starts_with("tie")) continue;
      auto const& made = text.form.name == "parts" ? pieces[i]->blocks()[0] : pieces[0]->blocks()[i];
      out.emplace_back(flag, made->parameters().at(0));
    }
  }
  return out;
}

bool stands_apart(program const& p, int stage, bool tied) {
  std::vector<int> const with = tied_stages(p);
  return (p.get("groups") == "tied" && tied) || (p.get("groups") == "part" && !with.empty() && with.front() == stage);
}

std::unique_ptr<torch::optim::Optimizer> optimizer_of(program const& p, tensors const& apart, tensors const& others) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  std::string const kind = p.get("opt", "sgd");
  for (bool const own : {false, true}) {
    if ((own ? apart : others).empty()) continue;
    auto& group = groups.emplace_back(own ? apart : others);
    double const rate = (kind == "adamw" ? 0.01 : 0.05) * (own && !p.has("lr") ? 0.5 : 1) * (p.has("slower") ? 0.25 : 1);
    double const decay = !own && (kind == "adamw" || p.has("groups")) ? 0.1 : 0;
    if (kind == "adamw") {
      group.set_options(std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(rate).weight_decay(decay)));
    } else {
      auto const with = torch::optim::SGDOptions(rate).momentum(kind == "mom" ? 0.9 : 0).weight_decay(decay);
      group.set_options(std::make_unique<torch::optim::SGDOptions>(with));
    }
  }
  if (kind == "adamw") return std::make_unique<torch::optim::AdamW>(groups);
  return std::make_unique<torch::optim::SGD>(groups, torch::optim::SGDOptions(0.05));
}

at::Tensor factor_of(program const& p, at::Tensor const& target) {
  return p.has("side") ? target.select(1, 1).abs() : at::Tensor();
}

at::Tensor loss_of(program const& p, tensors const& outputs, at::Tensor const& target, at::Tensor const& factor) {
  if (p.by_sequences()) {
    at::Tensor const& y = outputs.at(0);
    if (y.dim() != 3 || y.size(1) != target.size(1)) throw meaningless("outputs without a token for each of the targets");
    return at::mse_loss(y, target.narrow(2, 0, y.size(2)));
  }
  at::Tensor const y = outputs.at(0).reshape({outputs[0].size(0), -1});
  at::Tensor const rows = rows_of(target), wanted = rows.narrow(1, 0, y.size(1)).to(y.scalar_type());
  at::Tensor loss;
  if (p.has("weigh")) {
    at::Tensor const counts = rows.select(1, 0).gt(0).to(y.scalar_type());
    loss = ((y - wanted).square().mean(1) * counts).sum() / counts.sum();
  } else {
    loss = at::mse_loss(y, wanted);
  }
  for (std::size_t i = 1; i < outputs.size(); ++i) {
    if (outputs[i].defined() && outputs[i].is_floating_point() && outputs[i].numel() > 0) loss = loss + outputs[i].mean() * 0.1;
  }
  return factor.defined() ? loss * factor.to(loss.scalar_type()).mean() : loss;
}

}  // namespace differential
