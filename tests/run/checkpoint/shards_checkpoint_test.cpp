// timeout: 300
#include <sys/resource.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/arange.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <chevron/checkpoint.hpp>

#include <doctest/doctest.h>

#include "support/checkpoint_refusal.hpp"
#include "support/file_content.hpp"
#include "support/gloo_ranks.hpp"
#include "support/own_optimizer.hpp"
#include "support/scratch_folder.hpp"
#include "support/shard_model.hpp"

using namespace shard_model;
namespace fs = std::filesystem;

namespace {

// With an eps above rounding errors: Adam's step of a gradient near zero would make them large.
auto const adamw = chevron::optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2).eps(1e-3));
auto const momentum = chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9));

/// A job: loads from `from` if given, takes `what.steps` steps, and saves to `to` if given.
outcome go_on(transport& comm, setting const& what, fs::path const& from, fs::path const& to) {
  outcome out;
  chevron::trainer train = make_trainer(comm, what, out.reports);
  if (!from.empty()) chevron::load_checkpoint(train, from);
  train_steps(train, what, what.steps);
  train.synchronize();
  if (!to.empty()) chevron::save_checkpoint(train, to);
  out.values = values_of(train);
  return out;
}

/// On threads. \returns whole parameters; copies of shards and replicas were found equal
std::vector<named_value> run(setting what, int shards, int steps, fs::path const& from = "", fs::path const& to = "") {
  what.shards = shards;
  what.steps = steps;
  std::vector<outcome> all(static_cast<std::size_t>(what.ranks * what.replicas * shards));
  chevron::run_threads({.pipeline_ranks = what.ranks, .replicas = what.replicas, .shards = shards}, [&](transport& comm) {
    all[static_cast<std::size_t>(comm.topology().global_rank)] = go_on(comm, what, from, to);
  });
  return whole_values(all, what);
}

double largest_difference(std::vector<named_value> const& a, std::vector<named_value> const& b) {
  REQUIRE(a.size() == b.size());
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    REQUIRE(a[i].name == b[i].name);
    REQUIRE(a[i].value.sizes() == b[i].value.sizes());
    largest = std::max(largest, (a[i].value - b[i].value).abs().max().item<double>());
  }
  return largest;
}

/// The files of tensors of a folder's last checkpoint.
std::map<std::string, std::string> files_in(fs::path const& folder) {
  std::map<std::string, std::string> out;
  for (auto const& entry : fs::directory_iterator(*chevron::last_checkpoint(folder))) {
    if (entry.path().extension() == ".safetensors") out[entry.path().filename().string()] = content_of(entry.path());
  }
  return out;
}

setting sharded(setting what) {
  what.options.shard = chevron::sharding::optimizer;
  return what;
}

using checkpoint_refusal::check_says;
using checkpoint_refusal::failure_of;

}  // namespace

TEST_CASE("training goes on from T shards with T', optimizer sharded over replicas or not, where one shard would have gone") {
  setting adam{.replicas = 1, .dropout = 0.2, .make = adamw};
  setting sgd{.sequence_parallel = true, .tied = true, .make = momentum};
  setting replicas{.replicas = 2, .micro_batches = 2, .dropout = 0.2, .make = adamw};
  for (setting const& what : {adam, sgd, sharded(replicas)}) {
    CAPTURE(what.sequence_parallel);
    CAPTURE(what.replicas);
    auto const alone = run(what, 1, 4);
    for (int shards = 1; shards <= 4; ++shards) {
      CAPTURE(shards);
      scratch_folder at;
      run(what, shards, 2, "", at.path);
      for (int others = 1; others <= 4; ++others) {
        CAPTURE(others);
        auto const resumed = run(what, others, 2, at.path);
        CHECK(largest_difference(alone, resumed) <= 1e-9);
        if (others == shards) CHECK(largest_difference(run(what, shards, 4), resumed) == 0);
      }
    }
  }
}

TEST_CASE("2 shards, then 1, 4 and 2 again; pieces that differ in size; random numbers of each shard") {
  setting const what{.dropout = 0.2, .make = momentum};
  auto const alone = run(what, 1, 8);
  scratch_folder at;
  run(what, 2, 2, "", at.path);
  run(what, 1, 2, at.path, at.path);
  run(what, 4, 2, at.path, at.path);
  CHECK(largest_difference(alone, run(what, 2, 2, at.path)) <= 1e-9);
  CHECK(largest_difference(alone, run(what, 5, 2, at.path)) <= 1e-9);  // 24 rows: 4, 5, 5, 5 and 5

  setting const own{.sharded_dropout = 0.2, .make = momentum};
  scratch_folder there;
  run(own, 2, 2, "", there.path);
  CHECK(largest_difference(run(own, 2, 4), run(own, 2, 2, there.path)) == 0);
}

TEST_CASE("a checkpoint has the same bytes whatever the shards and replicas that loaded and saved it") {
  for (auto const& make : {adamw, momentum}) {
    setting const what{.make = make};
    scratch_folder at;
    run(what, 2, 2, "", at.path);
    auto const files = files_in(at.path);
    REQUIRE(files.size() == 4);
    // Cut or whole, the file has the tensors of a model without shards.
    chevron::safetensors_file const model(*chevron::last_checkpoint(at.path) / "model-0.safetensors");
    CHECK(model.shape("column_weight") == std::vector<std::int64_t>{inner, wide});
    CHECK(model.shape("row_weight") == std::vector<std::int64_t>{wide, inner});
    CHECK(model.shape("norm_weight") == std::vector<std::int64_t>{wide});
    for (int replicas = 1; replicas <= 2; ++replicas) {
      for (int shards = 1; shards <= 4; ++shards) {
        for (bool const shares : {false, true}) {
          CAPTURE(replicas);
          CAPTURE(shards);
          CAPTURE(shares);
          setting other = shares ? sharded(what) : what;
          other.replicas = replicas;
          scratch_folder again;
          run(other, shards, 0, at.path, again.path);
          CHECK(files_in(again.path) == files);
        }
      }
    }
  }
}

TEST_CASE("over Gloo: the files that threads write, and training goes on from them") {
  setting const what{.steps = 2, .make = adamw};
  scratch_folder threads;
  run(what, 2, 2, "", threads.path);
  for (bool const near : {true, false}) {
    scratch_folder gloo;
    std::vector<outcome> resumed(4);
    auto const shared = [near](int) { return near; };
    chevron::topology const grid{.pipeline_ranks = 2, .shards = 2};
    gloo_ranks::check_all_well(
        gloo_ranks::on_ranks(grid, shared, [&](chevron::gloo_transport& comm) { go_on(comm, what, "", gloo.path); }));
    CHECK(files_in(gloo.path) == files_in(threads.path));
    gloo_ranks::check_all_well(gloo_ranks::on_ranks(grid, shared, [&](chevron::gloo_transport& comm) {
      resumed[static_cast<std::size_t>(comm.topology().global_rank)] = go_on(comm, what, gloo.path, "");
    }));
    CHECK(largest_difference(run(what, 2, 4), whole_values(resumed, what)) == 0);
  }
}

namespace {

/// A stage of one rank with all tensors that a checkpoint may have to join: pieces of any size along any dimension, frozen
/// ones, buffers, integers.
struct pieces {
  std::vector<std::int64_t> sizes{10};  // by shard
  double value = 0;                     // of all elements, unless `numbered`
  bool numbered = true;
  bool one_dtype = true;
  chevron::optimizer_factory make = chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9));

  at::Tensor tensor(std::vector<std::int64_t> shape, std::int64_t along, int shard, at::ScalarType type = at::kFloat) const {
    shape[static_cast<std::size_t>(along)] = 0;
    for (std::int64_t const each : sizes) shape[static_cast<std::size_t>(along)] += each;
    std::int64_t count = 1, begin = 0;
    for (std::int64_t const each : shape) count *= each;
    for (int t = 0; t < shard; ++t) begin += sizes[static_cast<std::size_t>(t)];
    at::Tensor const whole = (numbered ? at::arange(count) % 97 : at::full({count}, value)).to(type).view(shape);
    return whole.narrow(along, begin, sizes[static_cast<std::size_t>(shard)]).clone();
  }

  chevron::stage stage(int shard) const {
    struct holder : torch::nn::Module {
      at::Tensor scale, middle, last, frozen, mean, counts;
      at::Tensor forward(at::Tensor x) { return x * scale; }
    };
    auto const made = std::make_shared<holder>();
    made->scale = made->register_parameter("scale", at::full({}, numbered ? 1.5 : 0));
    made->middle =
        made->register_parameter("middle", tensor({2, 0, 3}, 1, shard, one_dtype || shard == 0 ? at::kHalf : at::kFloat));
    made->last = made->register_parameter("last", tensor({4, 0}, 1, shard));
    made->frozen = made->register_parameter("frozen", tensor({0, 2}, 0, shard), false);
    made->mean = made->register_buffer("mean", at::ones({3}));
    made->counts = made->register_buffer("counts", tensor({3, 0}, 1, shard, at::kLong));
    chevron::stage out(made);
    return out.cut("middle", 1).cut("last", -1).cut("frozen", 0).cut("counts", 1);
  }

  static chevron::proved_program program() {
    return chevron::lower(chevron::prove(chevron::catalogue::make_plan("GPipe", {.ranks = 1, .micro_batches = 1})));
  }
  void on_threads(std::function<void(chevron::trainer&, pieces const&)> const& what) const {
    int const shards = static_cast<int>(sizes.size());
    chevron::run_threads({.pipeline_ranks = 1, .shards = shards}, [&](transport& comm) {
      chevron::trainer train({.program = program(),
                              .transport = comm,
                              .stages = [&](int) { return stage(comm.topology().shard()); },
                              .loss = [](at::Tensor y, at::Tensor target) { return at::mse_loss(y, target); },
                              .optimizer = make});
      what(train, *this);
    });
  }
  /// Whether a trainer or an evaluator has the tensors of `stage`.
  template <class Holder>
  static bool holds(Holder& train, pieces const& of) {
    chevron::stage const wanted = of.stage(train.comm().topology().shard());
    bool same = true;
    auto const compare = [&](auto const& a, auto const& b) {
      for (std::size_t i = 0; i < a.size(); ++i) same = same && a[i].value.equal(b[i].value);
    };
    compare(train.stages()[0].parameters(), wanted.parameters());
    compare(train.stages()[0].buffers(), wanted.buffers());
    return same;
  }
};

pieces of(std::vector<std::int64_t> sizes) { return {.sizes = std::move(sizes)}; }
pieces zeros(pieces what) {
  what.numbered = false;
  return what;
}

}  // namespace

TEST_CASE("pieces of any size along any dimension, buffers and frozen parameters, checkpoints and weights") {
  std::vector<std::vector<std::int64_t>> const divisions{{10}, {1, 9}, {4, 5, 1}, {7, 3}};
  std::string bytes, exported;
  for (auto const& from : divisions) {
    scratch_folder at, weights;
    of(from).on_threads([&](chevron::trainer& train, pieces const&) {
      chevron::save_checkpoint(train, at.path);
      chevron::save_weights(train, weights.path, {{"", "model"}});
    });
    std::string const model = files_in(at.path)["model-0.safetensors"], there = content_of(weights.path / "model.safetensors");
    if (bytes.empty()) bytes = model, exported = there;
    CHECK(model == bytes);
    CHECK(there == exported);
    chevron::export_weights(at.path, weights.path, {{"", "model"}});
    CHECK(content_of(weights.path / "model.safetensors") == exported);
    for (auto const& to : divisions) {
      std::atomic<int> well = 0;
      zeros(of(to)).on_threads([&](chevron::trainer& train, pieces const&) {
        CHECK(!pieces::holds(train, of(to)));
        chevron::load_checkpoint(train, at.path);
        well += pieces::holds(train, of(to)) ? 1 : 0;
      });
      zeros(of(to)).on_threads([&](chevron::trainer& train, pieces const&) {
        chevron::load_weights(train, weights.path, {{"", "model"}});
        well += pieces::holds(train, of(to)) ? 1 : 0;
      });
      zeros(of(to)).on_threads([&](chevron::trainer& train, pieces const& empty) {
        chevron::evaluator model(
            chevron::evaluator_setup{.program = pieces::program(), .transport = train.comm(), .stages = [&](int) {
                                       return empty.stage(train.comm().topology().shard());
                                     }});
        chevron::load_weights(model, weights.path, {{"", "model"}});
        well += pieces::holds(model, of(to)) && !pieces::holds(train, of(to)) ? 1 : 0;
      });
      CHECK(well == static_cast<int>(3 * to.size()));
    }
  }
  // Without the frozen ones: the manifest's fingerprint is that of the whole.
  scratch_folder at;
  of({4, 6}).on_threads(
      [&](chevron::trainer& train, pieces const&) { chevron::save_checkpoint(train, at.path, {}, {.trained_only = true}); });
  for (auto const& to : divisions) {
    of(to).on_threads([&](chevron::trainer& train, pieces const& what) {
      chevron::load_checkpoint(train, at.path);
      CHECK(pieces::holds(train, what));
    });
    check_says(
        failure_of([&] {
          zeros(of(to)).on_threads([&](chevron::trainer& train, pieces const&) { chevron::load_checkpoint(train, at.path); });
        }),
        {"other values than stage 0's frozen here"});
  }
}

TEST_CASE("a part of a tensor of a file, whatever its address, dtype and dimension") {
  scratch_folder at;
  at::Tensor const odd = at::arange(3).to(at::kChar), values = at::arange(4 * 6 * 5).to(at::kDouble).view({4, 6, 5});
  chevron::write_safetensors(at.path / "model.safetensors", {{"odd", odd}, {"values", values}});
  chevron::safetensors_file const file(at.path / "model.safetensors");
  chevron::detail::weight_folder folder(at.path);
  for (std::int64_t along = 0; along < 3; ++along) {
    for (std::int64_t begin = 0; begin < values.size(along); ++begin) {
      for (std::int64_t size = 0; begin + size <= values.size(along); ++size) {
        chevron::detail::tensor_part const part{along, {{begin, size}}};
        at::Tensor const wanted = values.narrow(along, begin, size);
        CHECK(file.read("values", part).equal(wanted));
        at::Tensor const plain = at::zeros(wanted.sizes(), at::kFloat),
                         turned = at::zeros_like(wanted).transpose(0, 2).contiguous();
        folder.copy("values", plain, part);
        folder.copy("values", turned.transpose(0, 2), part);
        CHECK(plain.equal(wanted.to(at::kFloat)));
        CHECK(turned.transpose(0, 2).equal(wanted));
      }
    }
  }
  // Several ranges, some of them empty, as the blocks of a fused weight have.
  for (std::int64_t along = 0; along < 3; ++along) {
    chevron::detail::tensor_part const part{along, {{0, 1}, {1, 0}, {2, 2}}};
    at::Tensor const wanted = at::cat({values.narrow(along, 0, 1), values.narrow(along, 2, 2)}, along);
    CHECK(file.read("values", part).equal(wanted));
    at::Tensor const plain = at::zeros(wanted.sizes(), at::kFloat), turned = at::zeros_like(wanted).transpose(0, 2).contiguous();
    folder.copy("values", plain, part);
    folder.copy("values", turned.transpose(0, 2), part);
    CHECK(plain.equal(wanted.to(at::kFloat)));
    CHECK(turned.transpose(0, 2).equal(wanted));
  }
}

TEST_CASE("what shards cannot save or load whole is refused on all ranks, with names and sizes") {
  scratch_folder at, weights, other;
  of({4, 6}).on_threads([&](chevron::trainer& train, pieces const&) {
    chevron::save_checkpoint(train, at.path);
    chevron::save_weights(train, weights.path);
  });
  auto const loading = [&](pieces const& what) {
    return failure_of(
        [&] { what.on_threads([&](chevron::trainer& train, pieces const&) { chevron::load_checkpoint(train, at.path); }); });
  };
  auto const saving = [&](
                          pieces const& what, std::function<void(chevron::trainer&)> const& before = [](auto&) {}) {
    return failure_of([&] {
      what.on_threads([&](chevron::trainer& train, pieces const&) {
        before(train);
        chevron::save_checkpoint(train, other.path);
      });
    });
  };
  check_says(loading(of({4, 5})),
             {"middle is Half [2, 10, 3]", "Half [2, 9, 3]", "2 shards having 4 + 5 along dimension 1", "Remedy"});
  check_says(
      failure_of([&] {
        of({4, 4, 4}).on_threads([&](chevron::trainer& train, pieces const&) { chevron::load_weights(train, weights.path); });
      }),
      {"last is Float [4, 10]", "Float [4, 12]", "3 shards having 4 + 4 + 4 along dimension 1"});
  pieces unlike = of({4, 6});
  unlike.one_dtype = false;
  check_says(saving(unlike), {"stage 0's middle differs in name, dtype or shape between shard 1 and shard 0", "Remedy"});
  check_says(saving(of({4, 6}),
                    [](chevron::trainer& train) { train.stages()[0].buffers()[0].value.fill_(train.comm().topology().shard()); }),
             {"stage 0's mean differs between shard 1 and shard 0", "stage.cut", "Remedy"});
  pieces own = of({4, 6});
  own.make = chevron::element_wise(chevron::optimizer<own_optimizer>(0.1));
  check_says(saving(own), {"the state of an optimizer of this class is unknown", "Remedy"});
  check_says(
      saving(of({4, 6}),
             [](chevron::trainer& train) {
               at::Tensor const p = train.stages()[0].parameters()[2].value;
               auto state = std::make_unique<torch::optim::SGDParamState>();
               state->momentum_buffer(at::zeros({2}));
               train.optimizer()->state()[p.unsafeGetTensorImpl()] = std::move(state);
             }),
      {"keeps a momentum_buffer of [2] for last, whose piece on a shard is [4, ", "Remedy: states of the parameter's shape"});
  // A state on one shard alone.
  check_says(saving(of({4, 6}),
                    [](chevron::trainer& train) {
                      if (train.comm().topology().shard() == 0) return;
                      at::Tensor const p = train.stages()[0].parameters()[2].value;
                      auto state = std::make_unique<torch::optim::SGDParamState>();
                      state->momentum_buffer(at::zeros_like(p));
                      train.optimizer()->state()[p.unsafeGetTensorImpl()] = std::move(state);
                    }),
             {"shards have different tensors to save", "Remedy"});
}

TEST_CASE("a disk that is full on the shard that writes is an error of all shards, and training goes on") {
  scratch_folder at;
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
  rlimit low = before;
  low.rlim_cur = 512;
  std::atomic<int> refused = 0;
  std::string said;
  setting const what{.make = adamw};
  chevron::run_threads({.pipeline_ranks = 2, .shards = 2}, [&](transport& comm) {
    std::vector<chevron::step_report> reports;
    chevron::trainer train = make_trainer(comm, what, reports);
    train_steps(train, what, 1);
    auto const limit = [&](rlimit const& to) {  // the whole process's
      comm.all_gather_text("");
      if (comm.topology().global_rank == 0) ::setrlimit(RLIMIT_FSIZE, &to);
      comm.all_gather_text("");
    };
    limit(low);
    try {
      chevron::save_checkpoint(train, at.path);
    } catch (chevron::checkpoint_error const& e) {
      ++refused;
      if (comm.topology().global_rank == 3) said = e.what();
    }
    limit(before);
    train_steps(train, what, 1);
    chevron::save_checkpoint(train, at.path);
  });
  CHECK(refused == 4);
  check_says(said, {"model-0.safetensors", "cannot be written", "File too large"});
  CHECK(chevron::last_checkpoint(at.path)->filename() == "step-00000002");
}
