// timeout: 300
// Tensors that are not contiguous, between stages: a pipelined step equals the plain one whatever transport they crossed.
#include "support/gloo_ranks.hpp"
#include "support/thread_ranks.hpp"

#include <array>
#include <cmath>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>
#include <torch/optim/sgd.h>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/run.hpp>
#include <chevron/run/comm/message_signature.hpp>
#include <chevron/run/comm/tensor_strides.hpp>
#include <chevron/transports/gloo/gloo_transport.hpp>
#include <chevron/transports/streams/stream_transport.hpp>
#include "support/host_streams.hpp"

namespace {

using chevron::transport;
using namespace std::chrono_literals;

at::Tensor mean_square(at::Tensor output, at::Tensor target) { return at::mse_loss(output, target); }

/// A model of two stages, and a batch for it.
struct model {
  std::function<chevron::stage(int)> build;
  at::Tensor input, target;
};

/// A module whose input gradient is a transposed view.
struct rows_to_convolution : torch::nn::Module {
  rows_to_convolution() {
    convolution = register_module("convolution", torch::nn::Conv1d(torch::nn::Conv1dOptions(24, 16, 3)));
    head = register_module("head", torch::nn::Linear(16, 4));
  }
  at::Tensor forward(at::Tensor x) { return head(convolution(x.transpose(1, 2)).relu().mean(2)); }
  torch::nn::Conv1d convolution{nullptr};
  torch::nn::Linear head{nullptr};
};

/// Gives a transposed view, and the next stage takes a `view` of it transposed back: not to be had of other strides.
struct gives_transposed : torch::nn::Module {
  gives_transposed() { layer = register_module("layer", torch::nn::Linear(10, 24)); }
  at::Tensor forward(at::Tensor x) { return layer(x).transpose(1, 2); }
  torch::nn::Linear layer{nullptr};
};
struct views_transposed : torch::nn::Module {
  views_transposed() { layer = register_module("layer", torch::nn::Linear(24, 4)); }
  at::Tensor forward(at::Tensor x) { return layer(x.transpose(1, 2).view({-1, 24})).view({x.size(0), -1}); }
  torch::nn::Linear layer{nullptr};
};

/// Elements with gaps between them, and, if `Expands`, some without memory of their own: a row for seven.
template <bool Expands>
struct gives_halves : torch::nn::Module {
  gives_halves() { layer = register_module("layer", torch::nn::Linear(10, 48)); }
  std::vector<at::Tensor> forward(at::Tensor x) {
    auto const halves = layer(x).chunk(2, -1);
    return {halves[1], Expands ? halves[0].select(2, 0).unsqueeze(2).expand({x.size(0), 7, 24}) : halves[0]};
  }
  torch::nn::Linear layer{nullptr};
};
struct takes_halves : torch::nn::Module {
  takes_halves() { layer = register_module("layer", torch::nn::Linear(24, 4)); }
  at::Tensor forward(at::Tensor x, at::Tensor y) { return layer(x.tanh().mean(1) + y.tanh().select(1, 0)); }
  torch::nn::Linear layer{nullptr};
};
/// A module whose input gradient is expanded: one row of a gradient for all seven.
struct takes_halves_in_sum : takes_halves {
  at::Tensor forward(at::Tensor x, at::Tensor y) { return layer(x.sum(1) + y.sum(at::IntArrayRef{0, 1}) / 7); }
};

template <class First, class Second>
chevron::stage one_of(int number) {
  at::manual_seed(50 + number);
  if (number == 0) return std::make_shared<First>();
  return std::make_shared<Second>();
}

model rows() {
  struct first : torch::nn::Module {
    first() { layer = register_module("layer", torch::nn::Linear(10, 24)); }
    at::Tensor forward(at::Tensor x) { return layer(x); }
    torch::nn::Linear layer{nullptr};
  };
  return {one_of<first, rows_to_convolution>, at::randn({8, 7, 10}), at::randn({8, 4})};
}
model transposed() { return {one_of<gives_transposed, views_transposed>, at::randn({8, 7, 10}), at::randn({8, 28})}; }
model halves() { return {one_of<gives_halves<false>, takes_halves>, at::randn({8, 7, 10}), at::randn({8, 4})}; }
model expanded() { return {one_of<gives_halves<true>, takes_halves_in_sum>, at::randn({8, 7, 10}), at::randn({8, 4})}; }
model channels_last() {
  struct images : torch::nn::Module {
    explicit images(int in) {
      convolution = register_module("convolution", torch::nn::Conv2d(torch::nn::Conv2dOptions(in, 16, 3).padding(1)));
      norm = register_module("norm", torch::nn::BatchNorm2d(16));
    }
    at::Tensor forward(at::Tensor x) { return norm(convolution(x)).relu(); }
    torch::nn::Conv2d convolution{nullptr};
    torch::nn::BatchNorm2d norm{nullptr};
  };
  return {[](int number) -> chevron::stage {
            at::manual_seed(60 + number);
            auto made = std::make_shared<images>(number == 0 ? 3 : 16);
            for (auto& p : made->parameters()) {
              if (p.dim() == 4) p.set_data(p.contiguous(at::MemoryFormat::ChannelsLast));
            }
            return made;
          },
          at::randn({8, 3, 6, 6}).contiguous(at::MemoryFormat::ChannelsLast), at::randn({8, 16, 6, 6})};
}

/// Gradients after each of three steps, of both stages.
using seen = std::vector<at::Tensor>;

constexpr int steps = 3, micro_batches = 4;

seen plain(model const& m) {
  std::vector<chevron::stage> stages{m.build(0), m.build(1)};
  std::vector<at::Tensor> all;
  for (auto& s : stages) {
    for (auto& p : s.parameters()) all.push_back(p.value);
  }
  torch::optim::SGD sgd(all, torch::optim::SGDOptions(0.1));
  seen out;
  for (int step = 0; step < steps; ++step) {
    sgd.zero_grad();
    for (int k = 0; k < micro_batches; ++k) {
      chevron::tensors values{m.input.narrow(0, 2 * k, 2)}, next;
      for (auto& s : stages) {
        s.forward(values, next);
        values = std::move(next);
      }
      torch::autograd::backward({mean_square(values[0], m.target.narrow(0, 2 * k, 2))}, {at::full({}, 1.0 / micro_batches)});
    }
    for (auto& p : all) out.push_back(p.grad().clone());
    sgd.step();
  }
  return out;
}

/// The same by a trainer; called on each rank.
void train_on(transport& comm, model const& m, chevron::proved_program const& program, std::mutex& mutex,
              std::array<seen, 2>& out) {
  chevron::trainer train({.program = program,
                          .transport = comm,
                          .stages = m.build,
                          .loss = mean_square,
                          .optimizer = chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.1))});
  for (int step = 0; step < steps; ++step) {
    train.step({m.input}, {m.target});
    std::lock_guard const hold(mutex);
    for (std::size_t s = 0; s < 2; ++s) {
      for (auto& p : train.stages()[s] ? train.stages()[s].parameters() : std::vector<chevron::parameter>{})
        out[s].push_back(p.value.grad().clone());
    }
  }
}

/// Runs `body` on two ranks that join through a store.
void on_two_ranks(std::string const& how, std::function<void(transport&)> const& body) {
  gloo_ranks::check_all_well(
      thread_ranks::said(thread_ranks::run(2, 1, [&](chevron::topology const& where, auto const& store, auto const& watch) {
        std::unique_ptr<transport> comm;
        if (how == "streams") {
          comm = std::make_unique<chevron::stream_transport<chevron::host_streams>>(where, store, watch, 60s);
        } else {
          comm = std::make_unique<chevron::gloo_transport>(where, store, watch,
                                                           chevron::gloo_options{.shared_memory = how != "Gloo"});
        }
        comm->deadline(60s);
        body(*comm);
      })));
}

void check_same(seen const& expected, std::array<seen, 2> const& got, std::string const& what) {
  seen flat;
  std::size_t const first = got[0].size() / steps, second = got[1].size() / steps;
  for (std::size_t step = 0; step < steps; ++step) {
    flat.insert(flat.end(), got[0].begin() + static_cast<long>(step * first),
                got[0].begin() + static_cast<long>((step + 1) * first));
    flat.insert(flat.end(), got[1].begin() + static_cast<long>(step * second),
                got[1].begin() + static_cast<long>((step + 1) * second));
  }
  REQUIRE(flat.size() == expected.size());
  for (std::size_t i = 0; i < flat.size(); ++i) {
    CHECK_MESSAGE(at::equal(flat[i], expected[i]), what << ", gradient " << i);
    CHECK_MESSAGE(flat[i].strides() == expected[i].strides(), what << ", strides of gradient " << i);
  }
}

}  // namespace

TEST_CASE("activations and gradients keep their strides over every transport: steps are the plain ones, bit for bit") {
  at::set_num_threads(1);
  struct named {
    char const* name;
    model of;
  };
  at::manual_seed(1);
  for (auto const& [name, m] : {named{"rows", rows()}, named{"transposed", transposed()}, named{"halves", halves()},
                                named{"expanded", expanded()}, named{"channels_last", channels_last()}}) {
    seen const expected = plain(m);
    for (char const* schedule : {"1F1B", "ZB-H1"}) {
      auto const program =
          chevron::lower(chevron::prove(chevron::catalogue::make_plan(schedule, {.ranks = 2, .micro_batches = micro_batches})));
      std::mutex mutex;
      for (std::string const how : {"threads", "Gloo", "Gloo in shared memory", "streams"}) {
        // Over streams an expanded tensor arrives with memory for each element, and a sum over it is rounded differently.
        if (how == "streams" && std::string(name) == "expanded") continue;
        std::array<seen, 2> got;
        if (how == "threads") {
          chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) { train_on(comm, m, program, mutex, got); });
        } else {
          on_two_ranks(how, [&](transport& comm) { train_on(comm, m, program, mutex, got); });
        }
        check_same(expected, got, std::string(name) + ", " + schedule + ", " + how);
      }
    }
  }
}

TEST_CASE("what a message keeps of strides") {
  using namespace chevron::detail;
  auto const x = at::arange(120, at::kFloat).view({2, 3, 4, 5});
  struct example {
    char const* name;
    at::Tensor value;
    bool same_strides;
  };
  for (auto const& [name, value, same_strides] :
       {example{"contiguous", x, true}, example{"permuted", x.permute({2, 0, 3, 1}), true},
        example{"channels_last", x.contiguous(at::MemoryFormat::ChannelsLast), true},
        example{"one sample of channels_last", x.narrow(0, 0, 1).contiguous(at::MemoryFormat::ChannelsLast), true},
        example{"half of a row", x.narrow(3, 1, 2), true},
        example{"expanded", x.select(1, 0).unsqueeze(1).expand({2, 9, 4, 5}), true},
        example{"expanded half", x.narrow(3, 1, 2).select(1, 0).unsqueeze(1).expand({2, 9, 4, 2}), true},
        example{"one number, expanded", at::full({}, 3.0F).expand({4, 5}), true},
        example{"one step of a sequence", at::randn({8, 100, 6}).select(1, 99), true},
        example{"scalar", at::full({}, 3.0F), true}, example{"empty", at::empty({3, 0, 2}), true},
        example{"empty, permuted", at::empty({3, 0, 2}).permute({2, 0, 1}), true},
        example{"windows that overlap", at::arange(10, at::kFloat).unfold(0, 4, 2), false},
        example{"few elements far apart", at::empty({1 << 25}, at::kBool).as_strided({4}, {1 << 23}), false}}) {
    INFO(std::string(name));
    message_shapes const shapes = shapes_of({value});
    message_strides strides;
    strides_of({value}, true, strides);
    REQUIRE(strides.size() == strides_in(shapes));
    std::vector<at::Tensor> came;
    make_room(came, shapes, at::kCPU);
    if (value.numel() > 0) as_row(came[0]).copy_(as_row(packed(value)));
    replace_by_strides(came, strides, laid_out);
    CHECK(at::equal(came[0], value));
    CHECK((came[0].strides() == value.strides()) == same_strides);
    CHECK(fits({value}, shapes));
    if (value.numel() > 4) CHECK(!fits({value.contiguous().flatten()}, shapes));
  }
}

TEST_CASE("strides may be others each time: a microbatch that counts nothing gives zeros, which lie otherwise") {
  at::set_num_threads(1);
  at::manual_seed(2);
  model const m = rows();
  auto const program =
      chevron::lower(chevron::prove(chevron::catalogue::make_plan("1F1B", {.ranks = 2, .micro_batches = micro_batches})));
  auto const run = [&](transport& comm, std::vector<double>& said) {
    int calls = 0;
    chevron::trainer train({.program = program,
                            .transport = comm,
                            .stages = m.build,
                            .loss = mean_square,
                            .optimizer = chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.1)),
                            .options = {.loss_weight = [&](chevron::batch const&) { return calls++ % 3 == 0 ? 0.0 : 2.0; }}});
    for (int step = 0; step < 2 * steps; ++step) {
      auto const report = train.step({m.input}, {m.target});
      if (comm.topology().global_rank == 0) said.insert(said.end(), {report.loss, report.grad_norm});
    }
  };
  std::vector<double> by_threads;
  chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) { run(comm, by_threads); });
  for (std::string const how : {"Gloo", "Gloo in shared memory", "streams"}) {
    std::vector<double> said;
    on_two_ranks(how, [&](transport& comm) { run(comm, said); });
    INFO(how);
    REQUIRE(said.size() == by_threads.size());
    // Streams keep the strides of the first message: a gradient that was zeros then arrives contiguous later, too.
    for (std::size_t i = 0; i < said.size(); ++i) {
      bool const same = how == "streams" ? std::abs(said[i] - by_threads[i]) < 1e-5 : said[i] == by_threads[i];
      CHECK_MESSAGE(same, said[i] << " and " << by_threads[i]);
    }
  }
}
