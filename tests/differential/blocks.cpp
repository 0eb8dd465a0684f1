#include "blocks.hpp"

#include <algorithm>
#include <functional>
#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/modules/transformerlayer.h>

#include <chevron/run/stage/stage_loss.hpp>

namespace differential {

namespace nn = torch::nn;

namespace {

using kind = flow::kind;

/// A block of one operation without parameters.
struct operation : block_module {
  std::function<void(tensors&)> call;
  explicit operation(std::function<void(tensors&)> f) : call(std::move(f)) {}
  void run(tensors& values) override { call(values); }
};
std::shared_ptr<block_module> does(std::function<void(tensors&)> f) { return std::make_shared<operation>(std::move(f)); }

/// A block around one module of torch::nn.
template <class Held>
struct around : block_module {
  Held inner;
  std::function<at::Tensor(Held&, at::Tensor const&)> call;
  around(Held m, std::function<at::Tensor(Held&, at::Tensor const&)> f) : inner(m), call(std::move(f)) {
    register_module("m", inner);
  }
  void run(tensors& values) override { values[0] = call(inner, values[0]); }
};
template <class Held>
std::shared_ptr<block_module> wrap(Held m) {
  return std::make_shared<around<Held>>(m, [](Held& inner, at::Tensor const& x) { return inner(x); });
}
template <class Held, class Call>
std::shared_ptr<block_module> wrap(Held m, Call call) {
  return std::make_shared<around<Held>>(m, std::move(call));
}

/// Causal attention over all tokens so far; its carries are keys and values.
struct attention : block_module {
  nn::Linear in{nullptr};
  explicit attention(int width) { in = register_module("m", nn::Linear(width, 3 * width)); }
  void run(tensors& v) override {
    tensors const parts = in(v[0]).chunk(3, -1);
    for (std::size_t k = 0; k < 2; ++k) carried[k] = carried[k].defined() ? at::cat({carried[k], parts[k + 1]}, 1) : parts[k + 1];
    std::int64_t const own = v[0].size(1), all = carried[0].size(1);
    at::Tensor const hidden = at::ones({own, all}, at::kBool).tril(all - own).logical_not();
    at::Tensor const shares = parts[0].matmul(carried[0].transpose(1, 2)).masked_fill(hidden, -1e9).softmax(-1);
    v[0] = v[0] + shares.matmul(carried[1].to(shares.scalar_type()));
  }
};

/// A state and how many slices have been seen: the carries of a recurrence over slices.
struct memory : block_module {
  nn::Linear in{nullptr}, out{nullptr};
  explicit memory(int width) {
    in = register_module("in", nn::Linear(width, width));
    out = register_module("out", nn::Linear(width, width));
  }
  void run(tensors& v) override {
    at::Tensor const mean = v[0].dim() > 2 ? v[0].mean(1) : v[0];
    at::Tensor const given = carried[0].defined() ? out(carried[0]) * carried[1].to(mean.scalar_type()) : out(mean);
    carried[0] = (in(mean) + given).tanh();
    carried[1] = carried[1].defined() ? carried[1] + 1 : at::ones({}, at::kLong);
    v[0] = v[0] + (v[0].dim() > 2 ? given.unsqueeze(1) : given);
  }
};

/// Two results of one node, of which the second may stay without use.
struct two_results : torch::autograd::Function<two_results> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, at::Tensor const& x,
                                                at::Tensor const& weight) {
    context->save_for_backward({x, weight});
    return {x * weight, x + weight};
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list g) {
    auto const saved = context->get_saved_variables();
    at::Tensor gx = g[0] * saved[1], gw = g[0] * saved[0];
    if (g[1].defined()) {
      gx = gx + g[1];
      gw = gw + g[1];
    }
    while (gw.dim() > saved[1].dim()) gw = gw.sum(0);
    return {gx, gw};
  }
};
struct own_function : block_module {
  at::Tensor weight;
  bool both;
  own_function(int width, bool uses_both) : both(uses_both) { weight = register_parameter("weight", at::randn({width})); }
  void run(tensors& v) override {
    auto results = two_results::apply(v[0], weight);
    v[0] = both ? results[0] + results[1] * 0.5 : results[0];
  }
};

/// A custom function whose backward has an effect of its own, a count in a buffer, and computes all gradients at once.
struct counted_product : torch::autograd::Function<counted_product> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor const& x, at::Tensor const& weight,
                            at::Tensor const& count) {
    context->save_for_backward({x, weight});
    context->saved_data["count"] = count;
    return x * weight;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list g) {
    context->saved_data["count"].toTensor().add_(1);
    auto const saved = context->get_saved_variables();
    at::Tensor gw = g[0] * saved[0];
    while (gw.dim() > saved[1].dim()) gw = gw.sum(0);
    return {g[0] * saved[1], gw, at::Tensor()};
  }
};
struct effect : block_module {
  at::Tensor weight, count;
  bool around;  // LibTorch's own functions use the weight before and after it, too
  effect(int width, bool used_around) : around(used_around) {
    weight = register_parameter("weight", at::randn({width}));
    count = register_buffer("count", at::zeros({}, at::kLong));
  }
  void run(tensors& v) override {
    at::Tensor const before = around ? (v[0] * weight).tanh() * weight : v[0];
    at::Tensor const here = counted_product::apply(before, weight, count);
    v[0] = around ? (here.tanh() * weight).tanh() * weight : here;
  }
};

/// Noise on gradients.
at::Tensor noisy(at::Tensor const& g) { return g + at::randn_like(g) * 0.01; }
struct noise : torch::autograd::Function<noise> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor const& x) { return x.view_as(x); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list g) {
    return {noisy(g[0])};
  }
};

/// Noise on the gradient of a weight by a function, and on those of a bias and of a result by hooks that count their calls.
struct hooked : block_module {
  nn::Linear inner{nullptr};
  at::Tensor calls;
  explicit hooked(int width) {
    inner = register_module("m", nn::Linear(width, width));
    calls = register_buffer("calls", at::zeros({}, at::kLong));
    listen(inner->bias);
  }
  void listen(at::Tensor const& to) {
    to.register_hook([count = calls](at::Tensor const& g) {
      count.add_(1);
      return noisy(g);
    });
  }
  void run(tensors& v) override {
    at::Tensor const y = at::linear(v[0], noise::apply(inner->weight), inner->bias);
    if (y.requires_grad()) listen(y);
    v[0] = y.tanh();
  }
};

/// Buffers of its own: a number, a flag and a running mean that its output depends on.
struct own_buffers : block_module {
  at::Tensor calls, seen, mean;
  bool felt;  // in training, too
  own_buffers(int width, bool by_training) : felt(by_training) {
    calls = register_buffer("calls", at::zeros({}, at::kLong));
    seen = register_buffer("seen", at::zeros({}, at::kBool));
    mean = register_buffer("mean", at::zeros({width}));
  }
  void run(tensors& v) override {
    if (is_training()) {
      at::NoGradGuard const off;
      calls.add_(1);
      seen.fill_(true);
      at::Tensor const now = v[0].detach().to(mean.scalar_type()).reshape({-1, v[0].size(-1)}).mean(0);
      mean.mul_(0.5).add_(now, 0.5);
    }
    v[0] = felt || !is_training() ? v[0] - mean.clone() * (seen.item<bool>() ? 0.5 : 1.0) : v[0] * 0.5;
  }
};

/// Penalizes the gradient of its own output: a double backward within the stage.
struct penalty : block_module {
  nn::Linear inner{nullptr};
  explicit penalty(int width) { inner = register_module("m", nn::Linear(width, width)); }
  void run(tensors& v) override {
    at::AutoGradMode const on(true);
    at::Tensor const x = v[0].requires_grad() ? v[0] : v[0].detach().requires_grad_(true);
    at::Tensor y = inner(x).tanh();
    at::Tensor const g = torch::autograd::grad({y.sum()}, {x}, {}, true, true)[0];
    v[0] = y + g.square() * 0.1;
  }
};

/// A loss of its stage.
struct own_loss : block_module {
  at::Tensor weight;
  char const* name;
  explicit own_loss(bool own) : name(own ? "own" : "aux") { weight = register_parameter("weight", at::rand({}) + 0.5); }
  void run(tensors& v) override {
    if (weight.requires_grad()) chevron::add_loss(name, (v[0] * weight).square().mean());
  }
};

/// A parameter of complex numbers.
struct complex_scale : block_module {
  at::Tensor weight;
  explicit complex_scale(int width) {
    weight = register_parameter("weight", at::complex(at::randn({width}), at::randn({width})));
  }
  void run(tensors& v) override {
    at::Tensor const z = at::complex(v[0], v[0] * 0.5) * weight;
    v[0] = at::real(z) + at::imag(z);
  }
};

struct unused_parameters : block_module {
  nn::Linear used{nullptr}, idle{nullptr};
  explicit unused_parameters(int width) {
    used = register_module("used", nn::Linear(width, width));
    idle = register_module("idle", nn::Linear(width, 3));
  }
  void run(tensors& v) override { v[0] = used(v[0]); }
};

/// A mixture of one expert a member of the group: row i goes to expert i mod members. `count` counts the rows that its expert was
/// given, in a buffer of the expert.
struct mixture : block_module {
  expert_ranks const* group;
  at::Tensor weight, given;
  mixture(int width, bool counts, expert_ranks const* of) : group(of) {
    std::int64_t const members = of == nullptr ? 1 : of->members, own = of == nullptr ? 0 : of->member;
    at::Tensor const all = at::randn({members, width, width}) * 0.5;
    weight = register_parameter("weight", all.narrow(0, own, 1).clone());
    if (counts) given = register_buffer("given", at::zeros({1}, at::kLong));
  }
  void run(tensors& v) override {
    at::Tensor const rows = v[0].reshape({-1, v[0].size(-1)});
    std::int64_t const members = group == nullptr ? 1 : group->members, n = rows.size(0);
    std::vector<std::int64_t> sent;
    tensors order;
    for (std::int64_t e = 0; e < members; ++e) {
      order.push_back(at::arange(e, std::max(e, n), members));
      sent.push_back(order.back().numel());
    }
    at::Tensor const by_expert = at::cat(order);
    at::Tensor came = rows.index_select(0, by_expert);
    std::vector<std::int64_t> counts{n}, back{n};
    if (group != nullptr) {
      counts = group->counts(sent);
      back.resize(counts.size());
      for (std::size_t a = 0; a < sent.size(); ++a) {
        for (std::size_t b = 0; b < sent.size(); ++b) back[b * sent.size() + a] = counts[a * sent.size() + b];
      }
      came = group->rows(came, counts);
    }
    if (given.defined() && is_training()) {
      at::NoGradGuard const off;
      given.add_(came.size(0));
    }
    at::Tensor made = came.matmul(weight[0]).tanh();
    if (group != nullptr) made = group->rows(made, back);
    v[0] = v[0] + made.index_select(0, by_expert.argsort()).view(v[0].sizes());
  }
};

/// Counts the positive elements that forwards in training see.
struct counted : block_module {
  at::Tensor seen;
  counted() { seen = register_buffer("seen", at::zeros({2}, at::kLong)); }
  void run(tensors& v) override {
    if (!is_training()) return;
    at::NoGradGuard const off;
    seen.select(0, 0).add_(v[0].gt(0).sum());
    seen.select(0, 1).add_(v[0].size(0));
  }
};

/// Two layers that shards divide: columns of the first, rows of the second, whose results they add up. With `fused` the first has
/// a gate and a value in one weight.
struct cut_layers : block_module {
  shard_ranks const* group;
  bool fused, copies;
  at::Tensor columns, rows, bias;
  cut_layers(int width, int inner, block const& b, shard_ranks const* of)
      : group(of), fused(b.has("fused")), copies(!b.has("nocopy")) {
    int const members = of == nullptr ? 1 : of->members, member = of == nullptr ? 0 : of->member;
    std::int64_t const begin = inner * member / members, size = inner * (member + 1) / members - begin;
    tensors parts;
    for (int k = 0; k < (fused ? 2 : 1); ++k) parts.push_back((at::randn({inner, width}) * 0.5).narrow(0, begin, size));
    columns = register_parameter("columns", at::cat(parts));
    rows = register_parameter("rows", (at::randn({width, inner}) * 0.5).narrow(1, begin, size).contiguous());
    bias = register_parameter("bias", at::randn({width}));
  }
  void run(tensors& v) override {
    at::Tensor const x = group != nullptr && copies ? group->copy(v[0]) : v[0];
    at::Tensor inside = x.matmul(columns.t());
    if (fused) {
      tensors const halves = inside.chunk(2, -1);
      inside = at::gelu(halves[0]) * halves[1];
    } else {
      inside = at::gelu(inside);
    }
    at::Tensor const part = inside.matmul(rows.t());
    v[0] = v[0] + (group != nullptr ? group->sum(part) : part) + bias;
  }
};

struct repeat : block_module {  // from one vector to a sequence, without copying it
  int times;
  bool copied;
  at::Tensor scale;
  repeat(int t, int width, bool copy) : times(t), copied(copy) {
    static_cast<void>(width);
    if (copied) scale = register_parameter("scale", at::randn({t, 1}));
  }
  void run(tensors& v) override {
    at::Tensor const row = v[0].unsqueeze(1);
    v[0] = copied ? row * scale : row.expand({row.size(0), times, row.size(2)});
  }
};

/// Any tensor as something that can be added to `x`: a number for each sample, or for all of them.
at::Tensor summand(at::Tensor const& side, at::Tensor const& x) {
  at::Tensor s = side.is_complex() ? at::real(side) + at::imag(side) : side;
  s = s.to(x.scalar_type());
  if (s.numel() == 0) return s.sum();
  if (s.dim() == 0 || s.size(0) != x.size(0)) return s.mean();
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(x.dim()), 1);
  sizes[0] = x.size(0);
  return s.reshape({s.size(0), -1}).mean(1).view(sizes);
}

std::shared_ptr<block_module> make_side(block const& b) {
  std::string const name = b.name;
  if (name == "push") return does([](tensors& v) { v.push_back(v[0]); });
  if (name == "pushc") return does([](tensors& v) { v.push_back(v[0].clone()); });
  if (name == "pushv") return does([](tensors& v) { v.push_back(v[0].select(-1, 0)); });
  if (name == "pushn") return does([](tensors& v) { v.push_back(v[0].narrow(-1, 1, v[0].size(-1) - 1)); });
  if (name == "int") return does([](tensors& v) { v.push_back((v[0].detach() * 10).to(at::kLong)); });
  if (name == "bool") return does([](tensors& v) { v.push_back(v[0].detach() > 0); });
  if (name == "max") {
    return does([](tensors& v) {
      auto const [most, where] = v[0].max(-1);
      v.push_back(where);
      v.push_back(most);
    });
  }
  if (name == "undef") return does([](tensors& v) { v.emplace_back(); });
  if (name == "empty") return does([](tensors& v) { v.push_back(v[0].narrow(0, 0, 0)); });
  if (name == "expd") return does([](tensors& v) { v.push_back(v[0].mean().expand({v[0].size(0), 3})); });
  if (name == "cx") return does([](tensors& v) { v.push_back(at::complex(v[0], v[0] * 0.5)); });
  if (name == "dbl") return does([](tensors& v) { v.push_back(v[0].to(at::kDouble)); });
  if (name == "det") return does([](tensors& v) { v.push_back(v[0].detach() * 2); });
  if (name == "split") {
    return does([](tensors& v) {
      auto const halves = v[0].chunk(2, -1);
      v.push_back(halves.back());
      v[0] = halves[0];
    });
  }
  if (name == "pop") {
    return does([](tensors& v) {
      if (v.size() < 2) throw meaningless("pop: nothing goes along");
      at::Tensor const side = v.back();
      v.pop_back();
      if (side.defined()) v[0] = v[0] + summand(side, v[0]);
    });
  }
  if (name == "del") {
    return does([](tensors& v) {
      if (v.size() < 2) throw meaningless("del: nothing goes along");
      v.pop_back();
    });
  }
  return nullptr;
}

std::shared_ptr<block_module> make_layout(block const& b) {
  std::string const name = b.name;
  if (name == "tr") return does([](tensors& v) { v[0] = v[0].transpose(1, 2); });
  if (name == "last") return does([](tensors& v) { v[0] = v[0].select(1, v[0].size(1) - 1); });
  if (name == "mean") {
    return does([](tensors& v) {
      at::Tensor const& x = v[0];
      v[0] = x.dim() == 4 ? x.mean(at::IntArrayRef({2, 3})) : x.mean(2);
    });
  }
  if (name == "avg") return does([](tensors& v) { v[0] = v[0].mean(1); });
  if (name == "flat") return does([](tensors& v) { v[0] = v[0].flatten(2).transpose(1, 2); });
  if (name == "cl") return does([](tensors& v) { v[0] = v[0].contiguous(at::MemoryFormat::ChannelsLast); });
  if (name == "cont") return does([](tensors& v) { v[0] = v[0].contiguous(); });
  if (name == "cols") return does([](tensors& v) { v[0] = v[0].transpose(0, 1).contiguous().transpose(0, 1); });
  if (name == "gaps") return does([](tensors& v) { v[0] = at::stack({v[0], v[0] * 2}, -1).select(-1, 0); });
  if (name == "viewt")
    return does([](tensors& v) { v[0] = v[0].transpose(1, 2).reshape({v[0].size(0), -1, v[0].size(1)}).transpose(1, 2); });
  return nullptr;
}

std::shared_ptr<block_module> make_function(block const& b) {
  std::string const name = b.name;
  if (name == "tanh") return does([](tensors& v) { v[0] = v[0].tanh(); });
  if (name == "gelu") return does([](tensors& v) { v[0] = at::gelu(v[0]); });
  if (name == "sig") return does([](tensors& v) { v[0] = v[0].sigmoid(); });
  if (name == "relu") return does([](tensors& v) { v[0] = v[0].relu(); });
  if (name == "relu_") return does([](tensors& v) { v[0].relu_(); });
  if (name == "add_") return does([](tensors& v) { v[0].add_(0.25); });
  if (name == "mul_") return does([](tensors& v) { v[0].mul_(0.75); });
  if (name == "part_") return does([](tensors& v) { v[0].select(-1, 0).mul_(0.5); });
  if (name == "dbl2") return does([](tensors& v) { v[0] = v[0].to(at::kDouble).sin().to(v[0].scalar_type()); });
  if (name == "soft") return does([](tensors& v) { v[0] = v[0].softmax(-1); });
  if (name == "sort") return does([](tensors& v) { v[0] = std::get<0>(v[0].sort(-1)); });
  if (name == "noise") return does([](tensors& v) { v[0] = noise::apply(v[0]); });
  if (name == "half") return does([](tensors& v) { v[0] = v[0].chunk(2, -1)[0]; });
  return nullptr;
}

}  // namespace

std::shared_ptr<block_module> make_block(block const& b, flow before, rank_groups groups) {
  std::string const& name = b.name;
  int const width = before.width;
  int const to = b.number(0, width);
  bool const flat = before.what == kind::vector;
  if (auto made = make_side(b)) return made;
  if (auto made = make_layout(b)) return made;
  if (auto made = make_function(b)) return made;
  if (name == "lin") return wrap(nn::Linear(width, to));
  if (name == "lin3") {
    return wrap(nn::Linear(width, width), [](nn::Linear& l, at::Tensor const& x) { return l(l(l(x).tanh()).tanh()); });
  }
  if (name == "res") return wrap(nn::Linear(width, width), [](nn::Linear& l, at::Tensor const& x) { return x + l(x).tanh(); });
  if (name == "lstm" || name == "gru") {
    bool const both = b.has("bi");
    int const hidden = both ? to / 2 : to;
    if (name == "lstm") {
      return wrap(nn::LSTM(nn::LSTMOptions(width, hidden).num_layers(b.number(1, 1)).batch_first(true).bidirectional(both)),
                  [](nn::LSTM& l, at::Tensor const& x) { return std::get<0>(l(x)); });
    }
    return wrap(nn::GRU(nn::GRUOptions(width, hidden).num_layers(b.number(1, 1)).batch_first(true).bidirectional(both)),
                [](nn::GRU& l, at::Tensor const& x) { return std::get<0>(l(x)); });
  }
  if (name == "mha") {
    return wrap(nn::MultiheadAttention(nn::MultiheadAttentionOptions(width, to)),
                [](nn::MultiheadAttention& l, at::Tensor const& x) {
                  at::Tensor const t = x.transpose(0, 1);
                  return std::get<0>(l(t, t, t)).transpose(0, 1);
                });
  }
  if (name == "enc") {
    return wrap(nn::TransformerEncoderLayer(
                    nn::TransformerEncoderLayerOptions(width, to).dim_feedforward(width * 2).dropout(b.number(1, 0) / 100.0)),
                [](nn::TransformerEncoderLayer& l, at::Tensor const& x) { return l(x.transpose(0, 1)).transpose(0, 1); });
  }
  if (name == "conv1") return wrap(nn::Conv1d(nn::Conv1dOptions(width, to, b.number(1, 3)).padding(b.number(1, 3) / 2)));
  if (name == "conv2") {
    nn::Conv2d inner(nn::Conv2dOptions(width, to, b.number(1, 3)).padding(b.number(1, 3) / 2));
    if (b.has("cl")) inner->weight.set_data(inner->weight.contiguous(at::MemoryFormat::ChannelsLast));
    return wrap(inner);
  }
  if (name == "ln") return wrap(nn::LayerNorm(nn::LayerNormOptions({width})));
  if (name == "gn") return wrap(nn::GroupNorm(nn::GroupNormOptions(2, width)));
  if (name == "bn" && before.what != kind::image) return wrap(nn::BatchNorm1d(width));
  if (name == "bn") return wrap(nn::BatchNorm2d(width));
  if (name == "in" && before.what == kind::channels)
    return wrap(nn::InstanceNorm1d(nn::InstanceNorm1dOptions(width).affine(true).track_running_stats(b.has("track"))));
  if (name == "in")
    return wrap(nn::InstanceNorm2d(nn::InstanceNorm2dOptions(width).affine(true).track_running_stats(b.has("track"))));
  if (name == "drop") return wrap(nn::Dropout(b.number(0, 30) / 100.0));
  if (name == "emb") return wrap(nn::Embedding(nn::EmbeddingOptions(b.number(1, 10), to).sparse(b.has("sparse"))));
  if (name == "bag") {
    nn::EmbeddingBagOptions options(b.number(1, 10), to);
    options.sparse(b.has("sparse"));
    return wrap(nn::EmbeddingBag(options), [](nn::EmbeddingBag& l, at::Tensor const& x) { return l(x); });
  }
  if (name == "rep") return std::make_shared<repeat>(b.number(0, 3), width, b.has("scaled"));
  if (name == "img") {
    int const side = b.number(1, 4);
    return wrap(nn::Linear(width, to * side * side), [to, side](nn::Linear& l, at::Tensor const& x) {
      return l(x).view({x.size(0), to, side, side});
    });
  }
  if (name == "fn2") return std::make_shared<own_function>(width, b.has("both"));
  if (name == "eff") return std::make_shared<effect>(width, b.has("turn"));
  if (name == "aux") return std::make_shared<own_loss>(b.has("own"));
  if (name == "hook") return std::make_shared<hooked>(width);
  if (name == "buf") return std::make_shared<own_buffers>(width, b.has("felt"));
  if (name == "pen") return std::make_shared<penalty>(width);
  if (name == "cplx") return std::make_shared<complex_scale>(width);
  if (name == "att") return std::make_shared<attention>(width);
  if (name == "mem") return std::make_shared<memory>(width);
  if (name == "moe") return std::make_shared<mixture>(width, b.has("count"), groups.experts);
  if (name == "tally") return std::make_shared<counted>();
  if (name == "tp") return std::make_shared<cut_layers>(width, b.number(0, 8), b, groups.shards);
  if (name == "idle") return std::make_shared<unused_parameters>(width);
  static_cast<void>(flat);
  throw meaningless("there is no block `" + name + "`");
}

}  // namespace differential
