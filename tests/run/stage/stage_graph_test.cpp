#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/functional/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

#include <chevron/run/core/libtorch.hpp>
#include <chevron/run/stage/graph/stage_graph.hpp>
#include <chevron/run/stage/stage.hpp>

#include <chrono>
#include <cstring>
#include <optional>

#include <doctest/doctest.h>

namespace {

using chevron::parameter;
using chevron::stage;
using chevron::tensors;
using chevron::detail::stage_graph;

/// Pre-norm attention and feed-forward, as a GPT has them.
struct transformer_block_impl : torch::nn::Module {
  int64_t heads;
  torch::nn::LayerNorm norm_1, norm_2;
  torch::nn::Linear qkv, out, up, down;
  transformer_block_impl(int64_t width, int64_t head_count)
      : heads(head_count),
        norm_1(torch::nn::LayerNormOptions({width})),
        norm_2(torch::nn::LayerNormOptions({width})),
        qkv(width, 3 * width),
        out(width, width),
        up(width, 4 * width),
        down(4 * width, width) {
    register_module("norm_1", norm_1);
    register_module("qkv", qkv);
    register_module("out", out);
    register_module("norm_2", norm_2);
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(at::Tensor x) {
    auto const b = x.size(0), t = x.size(1), c = x.size(2);
    auto parts = qkv(norm_1(x)).view({b, t, 3, heads, c / heads}).permute({2, 0, 3, 1, 4});
    auto mixed = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
    x = x + out(mixed.transpose(1, 2).reshape({b, t, c}));
    return x + down(at::gelu(up(norm_2(x))));
  }
};

/// Multiplies by a weight; its backward computes only the gradients that are needed, and counts them.
struct counted_product : torch::autograd::Function<counted_product> {
  static inline int input_gradients = 0;
  static inline int weight_gradients = 0;
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x, at::Tensor w) {
    context->save_for_backward({x, w});
    return x.matmul(w);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list arriving) {
    auto const saved = context->get_saved_variables();
    torch::autograd::variable_list leaving(2);
    if (context->needs_input_grad(0)) {
      leaving[0] = arriving[0].matmul(saved[1].t());
      ++input_gradients;
    }
    if (context->needs_input_grad(1)) {
      leaving[1] = saved[0].t().matmul(arriving[0]);
      ++weight_gradients;
    }
    return leaving;
  }
};

/// Multiplies by a weight and counts how often it is asked for gradients, of which it computes all, or none for the weight.
struct asked_product : torch::autograd::Function<asked_product> {
  static inline int calls = 0;
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x, at::Tensor w, bool trains = true) {
    context->save_for_backward({x, w});
    context->saved_data["trains"] = trains;
    return x.matmul(w);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list arriving) {
    ++calls;
    auto const saved = context->get_saved_variables();
    at::Tensor const of_weight = context->saved_data["trains"].toBool() ? saved[0].t().matmul(arriving[0]) : at::Tensor();
    return {arriving[0].matmul(saved[1].t()), of_weight, at::Tensor()};
  }
};

/// The same of two inputs and two results, the second of which may stay without use; changes its first input in place.
struct two_products : torch::autograd::Function<two_products> {
  static inline int calls = 0;
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, at::Tensor x, at::Tensor w) {
    context->save_for_backward({w, x.clone()});
    x.mul_(w);
    context->mark_dirty({x});
    return {x, w + 1};
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list arriving) {
    ++calls;
    auto const saved = context->get_saved_variables();
    return {arriving[0] * saved[0], (arriving[0] * saved[1]).sum(0) + arriving[1]};
  }
};

/// Multiplies by a row, in place, with one result: as a view can bear it.
struct scaled_in_place : torch::autograd::Function<scaled_in_place> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x, at::Tensor w) {
    context->save_for_backward({w, x.clone()});
    x.mul_(w);
    context->mark_dirty({x});
    return x;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list arriving) {
    auto const saved = context->get_saved_variables();
    return {arriving[0] * saved[0], (arriving[0] * saved[1]).sum(0)};
  }
};

/// Sees whether a node still is.
using weak_node = std::conditional_t<chevron::detail::shares_nodes, std::weak_ptr<torch::autograd::Node>,
                                     c10::weak_intrusive_ptr<torch::autograd::Node>>;

/// A node as a library beside LibTorch writes one: it adds up, of a tensor of samples and of a row.
struct sum_node final : torch::autograd::Node {
  static inline int calls = 0;
  torch::autograd::variable_list apply(torch::autograd::variable_list&& arriving) override {
    ++calls;
    return {arriving[0] * 3, arriving[0].sum(0)};
  }
  static at::Tensor of(at::Tensor const& x, at::Tensor const& w) {
    at::Tensor out;
    {
      at::NoGradGuard const off;
      out = x * 3 + w;
    }
    auto const node = chevron::detail::make_node<sum_node>();
    node->set_next_edges(torch::autograd::collect_next_edges(x, w));
    torch::autograd::create_gradient_edge(out, node);
    return out;
  }
};

bool same_bits(at::Tensor const& a, at::Tensor const& b) {
  if (a.defined() != b.defined()) return false;
  if (!a.defined()) return true;
  auto const x = a.contiguous(), y = b.contiguous();
  return x.sizes() == y.sizes() && x.scalar_type() == y.scalar_type() && at::equal(x, y);
}

struct gradients_of {
  std::vector<tensors> inputs;  // per microbatch
  tensors parameters;
};

void zero(stage& s) {
  for (auto& p : s.parameters()) {
    if (p.value.requires_grad()) p.value.mutable_grad() = at::zeros_like(p.value);
  }
}

tensors parameter_gradients(stage& s) {
  tensors all;
  for (auto& p : s.parameters()) all.push_back(p.value.grad().defined() ? p.value.grad().clone() : at::Tensor());
  return all;
}

tensors output_gradients(tensors const& outputs, int seed) {
  at::manual_seed(seed);
  tensors all;
  for (auto& o : outputs) {
    if (chevron::detail::carries_gradient(o)) all.push_back(at::randn_like(o.detach()));
  }
  return all;
}

/// The plain way: leaves, one call of the engine.
gradients_of by_plain_autograd(stage& s, std::vector<tensors> const& batches) {
  zero(s);
  gradients_of result;
  for (std::size_t m = 0; m < batches.size(); ++m) {
    tensors leaves, seen, outputs;
    for (auto& t : batches[m]) {
      auto leaf = t.detach().clone();
      if (chevron::detail::carries_gradient(leaf)) leaf.requires_grad_(true);
      leaves.push_back(leaf);
      seen.push_back(leaf.requires_grad() ? leaf.mul(1) : leaf);  // not a leaf, so that it may be changed in place
    }
    s.forward(seen, outputs);
    auto const grads = output_gradients(outputs, static_cast<int>(m));
    tensors roots, root_gradients;
    std::size_t next = 0;
    for (auto& o : outputs) {
      if (!chevron::detail::carries_gradient(o)) continue;
      if (o.requires_grad()) {
        roots.push_back(o);
        root_gradients.push_back(grads[next]);
      }
      ++next;
    }
    if (!roots.empty()) torch::autograd::backward(roots, root_gradients);
    tensors of_inputs;
    for (auto& leaf : leaves) {
      if (leaf.requires_grad()) of_inputs.push_back(leaf.grad().defined() ? leaf.grad() : at::zeros_like(leaf));
    }
    result.inputs.push_back(of_inputs);
  }
  result.parameters = parameter_gradients(s);
  return result;
}

gradients_of by_stage_graph(stage& s, std::vector<tensors> const& batches, bool split) {
  zero(s);
  gradients_of result;
  std::vector<stage_graph> graphs(batches.size());
  std::vector<tensors> grads(batches.size());
  for (std::size_t m = 0; m < batches.size(); ++m) {
    tensors seen, outputs, given;
    for (auto& t : batches[m]) given.push_back(t.clone());
    graphs[m].enter(given, true, seen);
    s.forward(seen, outputs);
    graphs[m].leave(outputs);
    grads[m] = output_gradients(outputs, static_cast<int>(m));
  }
  for (std::size_t m = 0; m < batches.size(); ++m) {
    tensors of_inputs;
    if (split) {
      graphs[m].backward_input(grads[m], of_inputs);
    } else {
      graphs[m].backward(grads[m], of_inputs);
    }
    result.inputs.push_back(of_inputs);
  }
  if (split) {
    for (auto& g : graphs) g.backward_weight();
  }
  result.parameters = parameter_gradients(s);
  return result;
}

void check_same(gradients_of const& a, gradients_of const& b) {
  REQUIRE(a.inputs.size() == b.inputs.size());
  for (std::size_t m = 0; m < a.inputs.size(); ++m) {
    REQUIRE(a.inputs[m].size() == b.inputs[m].size());
    for (std::size_t i = 0; i < a.inputs[m].size(); ++i) {
      INFO("microbatch " << m << ", input " << i);
      CHECK(same_bits(a.inputs[m][i], b.inputs[m][i]));
    }
  }
  REQUIRE(a.parameters.size() == b.parameters.size());
  for (std::size_t p = 0; p < a.parameters.size(); ++p) {
    INFO("parameter " << p);
    CHECK(same_bits(a.parameters[p], b.parameters[p]));
  }
}

/// Checks that B, and I + W, give autograd's results bit for bit, over three microbatches whose W's come after all I's.
void check_stage(stage s, std::function<tensors()> const& make_inputs) {
  std::vector<tensors> batches;
  for (int m = 0; m < 3; ++m) batches.push_back(make_inputs());
  auto const expected = by_plain_autograd(s, batches);
  check_same(by_stage_graph(s, batches, false), expected);
  check_same(by_stage_graph(s, batches, true), expected);
}

parameter leaf(char const* name, at::Tensor value) { return {name, value.set_requires_grad(true)}; }

}  // namespace

TEST_CASE("a chain of linear layers") {
  check_stage(torch::nn::Sequential(torch::nn::Linear(8, 16), torch::nn::Linear(16, 16), torch::nn::Linear(16, 4)), [] {
    return tensors{at::randn({5, 8})};
  });
}

TEST_CASE("a transformer block") {
  check_stage(std::make_shared<transformer_block_impl>(32, 4), [] { return tensors{at::randn({2, 8, 32})}; });
}

TEST_CASE("an embedding has no differentiable input: I is free, W is the whole backward") {
  stage s = torch::nn::Sequential(torch::nn::Embedding(20, 8), torch::nn::Linear(8, 8));
  check_stage(s, [] { return tensors{at::randint(20, {3, 7}, at::kLong)}; });

  zero(s);
  stage_graph graph;
  tensors seen, outputs, of_inputs;
  tensors const tokens{at::randint(20, {3, 7}, at::kLong)};
  graph.enter(tokens, true, seen);
  s.forward(seen, outputs);
  graph.leave(outputs);
  graph.backward_input(output_gradients(outputs, 1), of_inputs);
  CHECK(of_inputs.empty());
  CHECK(s.parameters()[0].value.grad().abs().sum().item<double>() == 0);
  graph.backward_weight();
  CHECK(s.parameters()[0].value.grad().abs().sum().item<double>() > 0);
}

TEST_CASE("an LSTM: nodes with several outputs, a tuple of results") {
  check_stage(torch::nn::LSTM(torch::nn::LSTMOptions(6, 5).num_layers(2)), [] { return tensors{at::randn({4, 3, 6})}; });
  check_stage(torch::nn::GRU(torch::nn::GRUOptions(6, 5)), [] { return tensors{at::randn({4, 3, 6}), at::randn({1, 3, 5})}; });
}

TEST_CASE("convolutions") {
  check_stage(torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3)),
                                    torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 2, 3))),
              [] {
                return tensors{at::randn({2, 3, 8, 8})};
              });
}

TEST_CASE("one weight used several times, also through a shared branch") {
  auto w = leaf("w", at::randn({6, 6}));
  check_stage(
      stage([w](at::Tensor x) { return x.matmul(w.value).tanh().matmul(w.value.t()).matmul(w.value).sin().matmul(w.value); },
            {w}),
      [] {
        return tensors{at::randn({3, 6})};
      });
  check_stage(stage(
                  [w](at::Tensor x) {
                    auto const shared = w.value.tanh();
                    return x.matmul(shared).relu().matmul(shared).matmul(shared) + shared.sum();
                  },
                  {w}),
              [] {
                return tensors{at::randn({3, 6})};
              });
}

TEST_CASE("several outputs") {
  auto w = leaf("w", at::randn({6, 6})), v = leaf("v", at::randn({6, 6}));
  SUBCASE("of one input") {
    check_stage(stage([w, v](at::Tensor x) { return std::make_tuple(x.matmul(w.value), x.sin().matmul(v.value)); }, {w, v}), [] {
      return tensors{at::randn({3, 6})};
    });
  }
  SUBCASE("h and k(h)") {
    check_stage(stage(
                    [w, v](at::Tensor x) {
                      auto const h = x.matmul(w.value);
                      return std::vector<at::Tensor>{h, h.matmul(v.value)};
                    },
                    {w, v}),
                [] {
                  return tensors{at::randn({3, 6})};
                });
  }
  SUBCASE("the same tensor twice") {
    check_stage(stage(
                    [w](at::Tensor x) {
                      auto const h = x.matmul(w.value);
                      return std::make_pair(h, h);
                    },
                    {w}),
                [] {
                  return tensors{at::randn({3, 6})};
                });
  }
  SUBCASE("parts of one tensor") {
    check_stage(stage([w](at::Tensor x) { return x.matmul(w.value).split(2, 1); }, {w}), [] {
      return tensors{at::randn({3, 6})};
    });
  }
  SUBCASE("one that leads to parameters only, one to nothing, one of integers") {
    check_stage(stage([w, v](at::Tensor x,
                             at::Tensor i) { return std::make_tuple(x.matmul(w.value), v.value.sin(), at::ones({2}), i + 1); },
                      {w, v}),
                [] {
                  return tensors{at::randn({3, 6}), at::arange(4)};
                });
  }
}

TEST_CASE("several inputs, some unused, some passed on untouched") {
  auto w = leaf("w", at::randn({6, 6}));
  auto const two = [] { return tensors{at::randn({3, 6}), at::randn({3, 6})}; };
  check_stage(stage([w](at::Tensor x, at::Tensor y) { return x.matmul(w.value) * y; }, {w}), two);
  check_stage(stage([w](at::Tensor x, at::Tensor) { return x.matmul(w.value); }, {w}), two);
  check_stage(stage([w](at::Tensor, at::Tensor) { return w.value * 2; }, {w}), two);
  check_stage(stage([w](at::Tensor x, at::Tensor y) { return std::make_tuple(x, y.matmul(w.value), y); }, {w}), two);
  check_stage(stage([](at::Tensor x) { return x; }), [] { return tensors{at::randn({3, 6})}; });
}

TEST_CASE("no parameters, frozen parameters, unused parameters") {
  check_stage(stage([](at::Tensor x) { return x.sin().cumsum(0); }), [] { return tensors{at::randn({3, 6})}; });
  torch::nn::Linear first(6, 6), second(6, 6);
  first->weight.requires_grad_(false);
  second->bias.requires_grad_(false);
  check_stage(torch::nn::Sequential(first, second), [] { return tensors{at::randn({3, 6})}; });
  first->bias.requires_grad_(false);
  check_stage(first, [] { return tensors{at::randn({3, 6})}; });
  auto w = leaf("w", at::randn({6, 6})), unused = leaf("unused", at::randn({2}));
  check_stage(stage([w](at::Tensor x) { return x.matmul(w.value); }, {w, unused}), [] { return tensors{at::randn({3, 6})}; });
}

TEST_CASE("a custom function computes each product once") {
  auto w = leaf("w", at::randn({6, 6})), v = leaf("v", at::randn({6, 6}));
  stage s([w, v](at::Tensor x) { return counted_product::apply(counted_product::apply(x, w.value).tanh(), v.value); }, {w, v});
  check_stage(s, [] { return tensors{at::randn({3, 6})}; });
  counted_product::input_gradients = counted_product::weight_gradients = 0;
  by_stage_graph(s, {tensors{at::randn({3, 6})}}, true);
  CHECK(counted_product::input_gradients == 2);
  CHECK(counted_product::weight_gradients == 2);
}

TEST_CASE("a custom function is asked once for all its gradients") {
  auto w = leaf("w", at::randn({6, 6})), v = leaf("v", at::randn({6, 6})), row = leaf("row", at::randn({6}));
  auto const given = [] { return tensors{at::randn({3, 6})}; };
  auto const calls_of = [&](stage s, int& calls) {
    check_stage(s, given);
    calls = 0;
    by_stage_graph(s, {given()}, true);
    return calls;
  };
  SUBCASE("its weight is used around it, too: gradients are added in the order of a full backward") {
    stage const s(
        [w](at::Tensor x) {
          at::Tensor const early = x.matmul(w.value).tanh().matmul(w.value);
          at::Tensor const middle = asked_product::apply(early, w.value, true).sigmoid().matmul(w.value);
          return asked_product::apply(middle.matmul(w.value), w.value, true).matmul(w.value).tanh().matmul(w.value);
        },
        {w});
    CHECK(calls_of(s, asked_product::calls) == 2);
  }
  SUBCASE("a weight is computed from a parameter, for it and for others") {
    stage const s(
        [w, v](at::Tensor x) {
          at::Tensor const shared = asked_product::apply(v.value, w.value, true).tanh();
          at::Tensor const y = asked_product::apply(x.matmul(shared), shared, true);
          return y.matmul(shared).matmul(shared) + shared.sum();
        },
        {w, v});
    CHECK(calls_of(s, asked_product::calls) == 2);
  }
  SUBCASE("it gives its weight no gradient") {
    stage const s([w, v](at::Tensor x) { return asked_product::apply(x, w.value, false).matmul(v.value); }, {w, v});
    CHECK(calls_of(s, asked_product::calls) == 1);
  }
  SUBCASE("it has several results, and changes its input in place") {
    stage const s(
        [v, row](at::Tensor x) {
          auto const both = two_products::apply(x.matmul(v.value), row.value);
          return both[0].matmul(v.value) + both[1];
        },
        {v, row});
    CHECK(calls_of(s, two_products::calls) == 1);
    stage const one([v, row](at::Tensor x) { return two_products::apply(x.matmul(v.value), row.value)[0].tanh(); }, {v, row});
    CHECK(calls_of(one, two_products::calls) == 1);
  }
  SUBCASE("it is a node of its own kind") {
    stage const s([v, row](at::Tensor x) { return sum_node::of(x.matmul(v.value), row.value).matmul(v.value); }, {v, row});
    CHECK(calls_of(s, sum_node::calls) == 1);
  }
}

TEST_CASE("W goes on with the gradients of a custom function, not with what it saved") {
  auto w = leaf("w", at::randn({6, 6}));
  std::optional<weak_node> product;
  stage s(
      [&](at::Tensor x) {
        at::Tensor const y = asked_product::apply(x, w.value, true);
        product.emplace(y.grad_fn());
        return y.sin();
      },
      {w});
  zero(s);
  stage_graph graph;
  tensors seen, outputs, of_inputs, kept;
  tensors const given{at::randn({3, 6})};
  graph.enter(given, true, seen);
  s.forward(seen, outputs);
  graph.leave(outputs);
  tensors const grads = output_gradients(outputs, 0);
  outputs.clear();
  seen.clear();
  graph.backward_input(grads, of_inputs);
  CHECK(product->expired());
  graph.each_kept_gradient([&](at::Tensor const& g) { kept.push_back(g); });
  REQUIRE(kept.size() == 1);
  CHECK(w.value.grad().abs().sum().item<double>() == 0);
  graph.backward_weight();
  CHECK(same_bits(w.value.grad(), kept[0]));
}

TEST_CASE("hooks of graph nodes run once and see all gradients") {
  struct twice final : torch::autograd::FunctionPostHook {
    int* calls;
    int* gradients;
    twice(int* c, int* g) : calls(c), gradients(g) {}
    torch::autograd::variable_list operator()(torch::autograd::variable_list const& leaving,
                                              torch::autograd::variable_list const&) override {
      ++*calls;
      torch::autograd::variable_list out;
      for (at::Tensor const& g : leaving) {
        *gradients += g.defined();
        out.push_back(g.defined() ? g * 2 : g);
      }
      return out;
    }
  };
  auto w = leaf("w", at::randn({6, 6}));
  int calls = 0, gradients = 0;
  stage s(
      [&, w](at::Tensor x) {
        at::Tensor const y = x.matmul(w.value);
        y.grad_fn()->add_post_hook(std::make_unique<twice>(&calls, &gradients));
        return y.matmul(w.value);
      },
      {w});
  check_stage(s, [] { return tensors{at::randn({3, 6})}; });
  CHECK(calls == 9);
  CHECK(gradients == 18);
}

TEST_CASE("inputs that are views, changes in place") {
  auto w = leaf("w", at::randn({6, 6})), b = leaf("b", at::randn({3, 2}));
  auto const views = [] { return tensors{at::randn({6, 8}).t().narrow(0, 1, 3).slice(1, 0, 6)}; };
  check_stage(stage([w](at::Tensor x) { return x.matmul(w.value); }, {w}), views);
  SUBCASE("of the input") {
    check_stage(stage([w](at::Tensor x) { return x.mul_(2).matmul(w.value).add_(1); }, {w}), views);
  }
  SUBCASE("of a view, by a parameter") {
    check_stage(stage(
                    [w, b](at::Tensor x) {
                      auto y = x.matmul(w.value);
                      y.narrow(1, 2, 2).mul_(b.value);
                      return y.matmul(w.value);
                    },
                    {w, b}),
                views);
  }
  SUBCASE("of a copied parameter, by the input") {
    check_stage(stage(
                    [w, b](at::Tensor x) {
                      auto y = w.value.clone();
                      y.narrow(0, 1, 3).mul_(x);
                      return x.matmul(y);
                    },
                    {w, b}),
                views);
  }
  SUBCASE("of a view, by a custom function that has a parameter") {
    auto row = leaf("row", at::randn({2}));
    check_stage(stage(
                    [w, row](at::Tensor x) {
                      auto y = x.matmul(w.value);
                      scaled_in_place::apply(y.narrow(1, 2, 2), row.value);
                      return y.matmul(w.value);
                    },
                    {w, row}),
                views);
  }
  SUBCASE("of a buffer, by input and parameter in turn") {
    check_stage(stage(
                    [w, b](at::Tensor x) {
                      auto y = at::zeros({3, 6});
                      y.narrow(1, 0, 2).copy_(b.value);
                      y.narrow(1, 2, 2).copy_(x.narrow(1, 0, 2));
                      y.narrow(1, 1, 2).mul_(b.value);
                      return y.matmul(w.value);
                    },
                    {w, b}),
                views);
  }
}

TEST_CASE("hooks on tensors run once and count") {
  auto w = leaf("w", at::randn({6, 6}));
  int calls = 0;
  stage s(
      [w, &calls](at::Tensor x) {
        auto h = x.matmul(w.value);
        h.register_hook([&calls](at::Tensor g) {
          ++calls;
          return g * 2;
        });
        return h.matmul(w.value);
      },
      {w});
  check_stage(s, [] { return tensors{at::randn({3, 6})}; });
  CHECK(calls == 9);
}

TEST_CASE("I frees what W does not need") {
  auto w = leaf("w", at::randn({6, 6}));
  std::vector<weak_node> nodes;  // of the product and of the sine, which is as attention: of no parameter
  stage s(
      [&](at::Tensor x) {
        auto h = x.matmul(w.value);
        nodes.emplace_back(h.grad_fn());
        auto y = h.sin();
        nodes.emplace_back(y.grad_fn());
        return y.cos();
      },
      {w});
  zero(s);
  stage_graph graph;
  tensors seen, outputs, of_inputs;
  tensors const given{at::randn({3, 6})};
  graph.enter(given, true, seen);
  s.forward(seen, outputs);
  graph.leave(outputs);
  tensors const grads = output_gradients(outputs, 0);
  outputs.clear();
  seen.clear();
  CHECK_FALSE(nodes[1].expired());
  graph.backward_input(grads, of_inputs);
  CHECK(nodes[1].expired());
  CHECK_FALSE(nodes[0].expired());
  graph.backward_weight();
  CHECK(nodes[0].expired());
}

TEST_CASE("a wrong number of gradients is an error that says so") {
  stage s([](at::Tensor x) { return std::make_tuple(x.sin(), x.cos()); });
  stage_graph graph;
  tensors seen, outputs, of_inputs;
  tensors const given{at::randn({3})};
  graph.enter(given, true, seen);
  s.forward(seen, outputs);
  graph.leave(outputs);
  CHECK_THROWS_WITH_AS(graph.backward(given, of_inputs), "a stage gave 2 floating-point outputs but got 1 gradients for them",
                       chevron::usage_error);
  CHECK_THROWS_AS(s.forward(given.size() == 1 ? (outputs = {given[0], given[0]}) : outputs, of_inputs), chevron::usage_error);
}

TEST_CASE("I and W together take about as long as B" * doctest::may_fail()) {
  stage s = std::make_shared<transformer_block_impl>(128, 4);
  zero(s);
  auto const clock = [] { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); };
  auto const once = [&](bool split) {
    stage_graph graph;
    tensors seen, outputs, of_inputs;
    tensors const given{at::randn({4, 64, 128})};
    graph.enter(given, true, seen);
    s.forward(seen, outputs);
    graph.leave(outputs);
    auto const grads = output_gradients(outputs, 0);
    double const start = clock();
    if (split) {
      graph.backward_input(grads, of_inputs);
      graph.backward_weight();
    } else {
      graph.backward(grads, of_inputs);
    }
    return clock() - start;
  };
  double whole = 1e9, split = 1e9;
  for (int i = 0; i < 20; ++i) {
    whole = std::min(whole, once(false));
    split = std::min(split, once(true));
  }
  MESSAGE("(I + W) / B on a transformer block: " << split / whole << " (B takes " << whole * 1e3 << " ms)");
  CHECK(split < 1.3 * whole);
}
