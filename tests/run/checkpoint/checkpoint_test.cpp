#include "support/checkpoint_refusal.hpp"
#include "support/file_content.hpp"
#include "support/own_optimizer.hpp"
#include "support/scratch_folder.hpp"
#include "support/small_model.hpp"

#include <chevron/checkpoint/checkpoint.hpp>
#include <chevron/checkpoint/save_weights.hpp>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/rmsprop.h>

#include <sys/resource.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include <doctest/doctest.h>

using namespace small_model;
namespace fs = std::filesystem;

namespace {

/// The content of each file of a folder, by name.
std::map<std::string, std::string> contents_of(fs::path const& folder) {
  std::map<std::string, std::string> out;
  for (auto const& entry : fs::directory_iterator(folder)) {
    if (entry.is_regular_file()) out[entry.path().filename().string()] = content_of(entry.path());
  }
  return out;
}

/// Four layers with names of their own, cut into as many stages as asked for; the weights do not depend on the cut.
struct layers_impl : torch::nn::Module {
  layers_impl(int first, int last, int wide) {
    for (int i = first; i < last; ++i) {
      at::manual_seed(300 + i);
      maps.push_back(register_module("layer_" + std::to_string(i), torch::nn::Linear(width, wide)));
      norms.push_back(register_module("norm_" + std::to_string(i), torch::nn::LayerNorm(torch::nn::LayerNormOptions({wide}))));
      means.push_back(register_buffer("mean_" + std::to_string(i), at::zeros({width})));
      drops.push_back(register_module("drop_" + std::to_string(i), torch::nn::Dropout(0.1)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (std::size_t i = 0; i < maps.size(); ++i) {
      means[i].mul_(0.9).add_(x.detach().mean(0), 0.1);
      x = x + drops[i]->forward(norms[i]->forward(maps[i]->forward(x))).tanh();
    }
    return x;
  }
  std::vector<torch::nn::Linear> maps;
  std::vector<torch::nn::LayerNorm> norms;
  std::vector<at::Tensor> means;
  std::vector<torch::nn::Dropout> drops;
};

chevron::stage_builder layers_in(int stages, int count = 4, int wide = width) {
  return [=](int s) {
    int const each = count / stages;
    return chevron::stage(std::make_shared<layers_impl>(s * each, (s + 1) * each, wide));
  };
}

struct job {
  char const* schedule = "1F1B";
  int ranks = 2;
  int micro_batches = 4;
  bool post_validation = false;
  int replicas = 1;
};

/// Trains steps [first, last): loaded from `from` first if given, saved to `to` afterwards if given. Returns the losses, and
/// in the end every tensor by name.
struct outcome {
  std::vector<double> losses;
  std::map<std::string, at::Tensor> tensors;
  chevron::checkpoint_note note;
};

outcome train(job const& wanted, int steps, fs::path const& from, fs::path const& to, chevron::optimizer_factory const& make,
              std::function<chevron::stage_builder(int stages)> const& build =
                  [](int stages) { return layers_in(stages); }) {
  auto const plan = plan_of(wanted.schedule, wanted.ranks, wanted.micro_batches);
  outcome out;
  std::mutex guard;
  chevron::run_threads({.pipeline_ranks = wanted.ranks, .replicas = wanted.replicas}, [&](transport& comm) {
    chevron::trainer_options options;
    options.clip_grad_norm = 0.5;
    options.seed = 5;
    options.post_validation = wanted.post_validation;
    options.stable_steps = 0;
    chevron::trainer trainer(small_model::setup(plan, comm, build(plan.stages), options, make));
    chevron::checkpoint_note note;
    if (!from.empty()) note = chevron::load_checkpoint(trainer, from);
    long const first = trainer.next_step();
    for (long step = first; step < first + steps; ++step) {
      auto const data = make_batch(3 * wanted.micro_batches, static_cast<int>(10 * step) + comm.topology().replica());
      trainer.step({data.input}, {data.target});
      auto const report = trainer.synchronize();
      if (comm.topology().global_rank == 0) out.losses.push_back(report.loss);
    }
    if (!to.empty()) chevron::save_checkpoint(trainer, to, {{"seen", std::to_string(trainer.next_step() * 7)}});
    std::lock_guard const hold(guard);
    if (comm.topology().global_rank == 0) out.note = note;
    if (comm.topology().replica() != 0) return;
    for (auto const& s : trainer.stages()) {
      if (!s) continue;
      for (auto const& p : chevron::detail::kept_of(s)) out.tensors[p.name] = p.value.detach().clone();
    }
  });
  return out;
}

void check_same(outcome const& a, outcome const& b) {
  REQUIRE(!a.tensors.empty());
  REQUIRE(a.tensors.size() == b.tensors.size());
  for (auto const& [name, value] : a.tensors) {
    CAPTURE(name);
    REQUIRE(b.tensors.count(name) == 1);
    CHECK(at::equal(value, b.tensors.at(name)));
  }
}

std::vector<std::pair<char const*, chevron::optimizer_factory>> const optimizers = {
    {"SGD", chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9))},
    {"Adam", chevron::optimizer<torch::optim::Adam>(torch::optim::AdamOptions(1e-2).amsgrad(true))},
    {"AdamW", chevron::optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2))},
    {"RMSprop", chevron::optimizer<torch::optim::RMSprop>(torch::optim::RMSpropOptions(1e-3).momentum(0.5).centered(true))},
    {"Adagrad", chevron::optimizer<torch::optim::Adagrad>(torch::optim::AdagradOptions(1e-2))},
    {"fused AdamW", chevron::optimizer<chevron::fused_adamw>(torch::optim::AdamWOptions(1e-2))},
    {"fused SGD", chevron::optimizer<chevron::fused_sgd>(torch::optim::SGDOptions(0.1).momentum(0.9))}};

using checkpoint_refusal::check_says;
using checkpoint_refusal::failure_of;

}  // namespace

TEST_CASE("a resumed run is the uninterrupted one to the last bit: weights, buffers, losses, dropout, any optimizer") {
  at::set_num_threads(1);
  for (auto const& [kind, make] : optimizers) {
    CAPTURE(kind);
    for (job const wanted : {job{}, job{"ZBVZeroBubble", 2, 5}, job{"ZB-H2", 2, 4, true}, job{"1F1B", 2, 3, false, 2}}) {
      CAPTURE(wanted.schedule);
      scratch_folder at;
      auto const whole = train(wanted, 6, "", "", make);
      train(wanted, 3, "", at.path, make);
      auto const resumed = train(wanted, 3, at.path, "", make);
      CHECK(resumed.note.next_step == 3);
      CHECK(resumed.note.metadata.at("seen") == "21");
      CHECK(std::vector<double>(whole.losses.begin() + 3, whole.losses.end()) == resumed.losses);
      check_same(whole, resumed);
    }
  }
}

TEST_CASE("another layout, schedule and number of replicas goes on from the same weights and the same optimizer") {
  auto const& make = optimizers[2].second;
  scratch_folder at;
  train({"1F1B", 4, 4}, 3, "", at.path, make);
  for (job const wanted : {job{"GPipe", 1, 4}, job{"1F1B", 2, 4}, job{"ZBVZeroBubble", 2, 4}, job{"Interleaved1F1B", 2, 4},
                           job{"1F1B", 2, 2, false, 2}}) {
    CAPTURE(wanted.schedule);
    CAPTURE(wanted.ranks);
    scratch_folder again;
    auto const loaded = train(wanted, 0, at.path, again.path, make);
    auto const back = train({"1F1B", 4, 4}, 0, again.path, "", make);
    check_same(loaded, back);
    // The optimizer's state was saved and loaded as well: all files of the same layout are equal byte for byte.
    scratch_folder third;
    train({"1F1B", 4, 4}, 0, again.path, third.path, make);
    for (int s = 0; s < 4; ++s) {
      for (char const* sort : {"model", "optimizer"}) {
        auto const name = fs::path("step-00000003") / (std::string(sort) + "-" + std::to_string(s) + ".safetensors");
        std::string const one = content_of(at.path / name), two = content_of(third.path / name);
        CHECK(one.size() > 100);
        CHECK(one == two);
      }
    }
  }
}

TEST_CASE("the last whole checkpoint counts: a folder without its manifest is none") {
  auto const& make = optimizers[0].second;
  scratch_folder at;
  train({}, 2, "", at.path, make);
  train({}, 2, at.path, at.path, make);
  CHECK(chevron::last_checkpoint(at.path)->filename() == "step-00000004");
  fs::remove(at.path / "step-00000004" / "manifest.json");
  CHECK(chevron::last_checkpoint(at.path)->filename() == "step-00000002");
  CHECK(train({}, 0, at.path, "", make).note.next_step == 2);
  CHECK(train({}, 0, at.path / "step-00000002", "", make).note.next_step == 2);
}

TEST_CASE("to resume is to begin where there is no checkpoint, and to go on where there is one, for all ranks or for none") {
  auto const& make = optimizers[2].second;
  scratch_folder at, empty;
  train({}, 2, "", at.path, make);
  // \returns the next step after resuming, of rank 0
  auto const resumed = [&](std::vector<fs::path> const& of_rank) {
    long next = -1;
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      chevron::trainer trainer(small_model::setup(plan_of("1F1B", 2, 4), comm, layers_in(2), {}, make));
      int const me = comm.topology().global_rank;
      auto const note = chevron::resume(trainer, of_rank[static_cast<std::size_t>(me)]);
      CHECK((note ? note->next_step : 0) == trainer.next_step());
      if (me == 0) next = trainer.next_step();
    });
    return next;
  };
  CHECK(resumed({at.path, at.path}) == 2);
  CHECK(resumed({at.path / "step-00000002", at.path / "step-00000002"}) == 2);
  CHECK(resumed({empty.path, empty.path}) == 0);
  CHECK(resumed({"/nowhere/at/all", "/nowhere/at/all"}) == 0);
  check_says(failure_of([&] { resumed({at.path, empty.path}); }),
             {"ranks see different last checkpoints, step-00000002 and none", "must be one shared folder"});
}

TEST_CASE("ranks that save into different folders are refused, and what was saved before of the same step stays") {
  for (bool const weights : {false, true}) {
    scratch_folder first, second;
    fs::path const here = weights ? first.path : first.path / "step-00000000";
    fs::path const there = weights ? second.path : second.path / "step-00000000";
    std::atomic<int> refused{0};
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      chevron::trainer trainer(small_model::setup(plan_of("1F1B", 2, 4), comm, layers_in(2), {}, optimizers[2].second));
      int const me = comm.topology().global_rank;
      auto const save = [&](fs::path const& folder) {
        weights ? chevron::save_weights(trainer, folder) : (void)chevron::save_checkpoint(trainer, folder);
      };
      save(first.path);
      auto const before = contents_of(here);
      try {
        save(me == 0 ? first.path : second.path);
      } catch (chevron::checkpoint_error const& e) {
        ++refused;
        std::string const name = weights ? "model-00002-of-00002.safetensors" : "model-1.safetensors";
        check_says(e.what(), {(here.string() + ": has no file " + name + ", which rank 1 has written into").c_str(),
                              there.c_str(), "nothing was saved. Remedy: one folder that all ranks share"});
      }
      comm.all_gather_text("");
      CHECK(contents_of(here) == before);
      CHECK(fs::is_empty(there));
      comm.all_gather_text("");
      save(first.path);  // training may go on
    });
    CHECK(refused == 2);
  }
}

TEST_CASE("complex parameters are saved with their optimizer's state, and a resumed run is the uninterrupted one") {
  scratch_folder at, other;
  auto const run = [&](fs::path const& folder, at::ScalarType type, long first, long last) {
    std::string weights;
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      struct rotation : torch::nn::Module {
        explicit rotation(at::ScalarType of) : turn(register_parameter("turn", at::randn({width}, of))) {}
        at::Tensor forward(at::Tensor x) { return at::real(x * turn).to(at::kFloat); }
        at::Tensor turn;
      };
      auto const build = [type](int s) {
        at::manual_seed(s);
        return chevron::stage(std::make_shared<rotation>(type));
      };
      chevron::trainer trainer(small_model::setup(plan_of("1F1B", 2, 4), comm, build, {}, optimizers[2].second));
      if (first > 0) CHECK(chevron::resume(trainer, folder)->next_step == first);
      for (long step = first; step < last; ++step) trainer.step(at::ones({8, width}) * (step + 1), at::zeros({8, width}));
      chevron::save_checkpoint(trainer, folder);
    });
    for (char const* const file : {"model-0", "model-1", "optimizer-0", "optimizer-1"})
      weights += content_of(chevron::last_checkpoint(folder).value() / (std::string(file) + ".safetensors"));
    return weights;
  };
  std::string const whole = run(at.path, at::kComplexFloat, 0, 4);
  fs::rename(at.path / "step-00000004", at.path / "whole");
  CHECK(run(at.path, at::kComplexFloat, 0, 2) != whole);
  CHECK(run(at.path, at::kComplexFloat, 2, 4) == whole);
  check_says(failure_of([&] { run(other.path, at::kComplexDouble, 0, 0); }),
             {"turn is of a dtype that safetensors does not have, ComplexDouble. Remedy: ", "view_as_complex"});
}

TEST_CASE("what cannot be loaded is said with file, name and remedy, on every rank, before anything is changed") {
  auto const& make = optimizers[2].second;
  scratch_folder at, empty;
  train({}, 1, "", at.path, make);
  fs::path const saved = at.path / "step-00000001";
  check_says(failure_of([&] { train({}, 1, empty.path, "", make); }), {"holds no whole checkpoint", "manifest.json"});
  check_says(failure_of([&] { train({}, 1, "/nowhere/at/all", "", make); }), {"/nowhere/at/all", "holds no whole checkpoint"});
  check_says(failure_of([&] { train({}, 1, at.path, "", optimizers[0].second); }), {"AdamW", "SGD", "the same optimizer"});
  check_says(failure_of([&] { train({}, 1, at.path, "", make, [](int stages) { return layers_in(stages, 8); }); }),
             {"which the checkpoint does not hold", "layer_4"});
  check_says(failure_of([&] { train({}, 1, at.path, "", make, [](int stages) { return layers_in(stages, 2); }); }),
             {"has 20 tensors, and this model 10"});

  // Names that repeat from stage to stage, with an inner width that may differ.
  auto const sequential = [](int hidden) {
    return [hidden](int) -> chevron::stage_builder {
      return [hidden](int s) {
        at::manual_seed(s);
        return chevron::stage(torch::nn::Sequential(torch::nn::Linear(width, hidden), torch::nn::Linear(hidden, width)));
      };
    };
  };
  scratch_folder other;
  train({}, 1, "", other.path, make, sequential(4));
  CHECK(train({}, 1, other.path, "", make, sequential(4)).note.next_step == 1);
  CHECK(train({"GPipe"}, 1, other.path, "", make, sequential(4)).note.next_step == 1);
  check_says(failure_of([&] { train({}, 1, other.path, "", make, sequential(5)); }), {"0.weight", "[4, 6]", "[5, 6]"});
  check_says(failure_of([&] {
               train({"1F1B", 1}, 1, other.path, "", make, sequential(4));
             }),
             {"2 of the checkpoint's 2 stages have", "names that differ between stages"});

  fs::resize_file(saved / "model-1.safetensors", fs::file_size(saved / "model-1.safetensors") - 40);
  check_says(failure_of([&] { train({}, 1, at.path, "", make); }), {"model-1.safetensors", "cut short"});
  fs::remove(saved / "model-1.safetensors");
  check_says(failure_of([&] { train({}, 1, at.path, "", make); }), {"model-1.safetensors", "cannot be opened"});
  std::ofstream(saved / "manifest.json") << "{}";
  check_says(failure_of([&] { train({}, 1, at.path, "", make); }), {"manifest.json", "is no manifest"});
  check_says(failure_of([&] { train({}, 1, "", "/proc/nothing/here", make); }), {"/proc/nothing/here", "cannot be made"});
}

namespace {

using body = std::function<void(chevron::trainer&)>;

/// Calls `what` with a trainer on each rank.
void on_ranks(job const& wanted, chevron::optimizer_factory const& make, chevron::stage_builder const& build, body const& what,
              chevron::trainer_options const& options = {}) {
  auto const plan = plan_of(wanted.schedule, wanted.ranks, wanted.micro_batches);
  chevron::run_threads({.pipeline_ranks = wanted.ranks, .replicas = wanted.replicas}, [&](transport& comm) {
    chevron::trainer trainer(small_model::setup(plan, comm, build, options, make));
    what(trainer);
  });
}

void steps_of(chevron::trainer& trainer, int count) {
  for (int i = 0; i < count; ++i) {
    auto const data = make_batch(12, 10 * static_cast<int>(trainer.next_step()));
    trainer.step({data.input}, {data.target});
  }
}

tensors values_of(chevron::trainer& trainer) {
  tensors out;
  for (auto const& s : trainer.stages()) {
    for (auto const& p : s.parameters()) out.push_back(p.value.detach().clone());
    for (auto const& b : s.buffers()) out.push_back(b.value.detach().clone());
  }
  return out;
}

bool same(tensors const& a, tensors const& b) {
  return a.size() == b.size() &&
         std::equal(a.begin(), a.end(), b.begin(), [](auto const& x, auto const& y) { return at::equal(x, y); });
}

/// Loading fails with these words on every rank, and leaves everything as it was.
void check_refused(fs::path const& from, std::initializer_list<char const*> words, job const& wanted = {}) {
  std::atomic<int> refused = 0, unchanged = 0;
  std::string said;
  std::mutex guard;
  on_ranks(wanted, optimizers[2].second, layers_in(2), [&](chevron::trainer& trainer) {
    auto const before = values_of(trainer);
    try {
      chevron::load_checkpoint(trainer, from);
    } catch (chevron::checkpoint_error const& e) {
      ++refused;
      std::lock_guard const hold(guard);
      said = e.what();
    }
    unchanged += same(before, values_of(trainer)) && trainer.next_step() == 0 && trainer.optimizer()->state().empty() ? 1 : 0;
    steps_of(trainer, 1);
  });
  CHECK(refused == 2);
  CHECK(unchanged == 2);
  check_says(said, words);
}

std::vector<std::string> names_in(fs::path const& folder) {
  std::vector<std::string> names;
  for (auto const& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

TEST_CASE("a file that was damaged, exchanged or lost is told on every rank, before anything is changed") {
  auto const& make = optimizers[2].second;
  scratch_folder one, other;
  train({}, 2, "", one.path, make);
  train({"1F1B", 2, 3}, 2, "", other.path, make);
  fs::path const saved = one.path / "step-00000002", foreign = other.path / "step-00000002";
  for (char const* name : {"model-1.safetensors", "optimizer-0.safetensors"}) {
    CAPTURE(name);
    std::string const whole = content_of(saved / name);
    std::string damaged = whole;
    damaged[damaged.size() - 5] = static_cast<char>(damaged[damaged.size() - 5] ^ 1);
    std::ofstream(saved / name, std::ios::binary) << damaged;
    check_refused(one.path, {name, "was damaged", "Remedy"});
    fs::copy_file(foreign / name, saved / name, fs::copy_options::overwrite_existing);
    check_refused(one.path, {name, "damaged or exchanged"});
    std::ofstream(saved / name, std::ios::binary) << whole.substr(0, whole.size() - 8);
    check_refused(one.path, {name, "cut short"});
    fs::remove(saved / name);
    check_refused(one.path, {name, "cannot be opened"});
    std::ofstream(saved / name, std::ios::binary) << whole;
  }
  // Exchanged for one another: by name, since their names are not this model's.
  fs::rename(saved / "model-0.safetensors", saved / "kept");
  fs::rename(saved / "model-1.safetensors", saved / "model-0.safetensors");
  fs::rename(saved / "kept", saved / "model-1.safetensors");
  check_refused(one.path, {"model-", ".safetensors", "damaged or exchanged"});
  fs::rename(saved / "model-0.safetensors", saved / "kept");
  fs::rename(saved / "model-1.safetensors", saved / "model-0.safetensors");
  fs::rename(saved / "kept", saved / "model-1.safetensors");
  fs::copy_file(saved / "optimizer-0.safetensors", saved / "kept");
  fs::copy_file(saved / "model-0.safetensors", saved / "optimizer-0.safetensors", fs::copy_options::overwrite_existing);
  check_refused(one.path, {"optimizer-0.safetensors", "damaged or exchanged"});
  fs::copy_file(saved / "optimizer-0.safetensors", saved / "model-0.safetensors", fs::copy_options::overwrite_existing);
  fs::copy_file(saved / "kept", saved / "optimizer-0.safetensors", fs::copy_options::overwrite_existing);
  fs::remove(saved / "kept");
  std::string const manifest = content_of(saved / "manifest.json");
  auto const with = [&](std::string const& from, std::string const& to) {
    std::string changed = manifest;
    REQUIRE(changed.find(from) != std::string::npos);
    changed.replace(changed.find(from), from.size(), to);
    std::ofstream(saved / "manifest.json") << changed;
    check_refused(one.path, {"manifest.json", "was damaged, or changed by hand"});
  };
  with("\"next_step\": 2", "\"next_step\": -2");
  with("\"optimizer\": \"AdamW\"", "\"optimizer\": 7");
  with("\"seen\": \"14\"", "\"seen\": [14]");
  with("\"format\": " + std::to_string(chevron::detail::manifest_format), "\"format\": 1");
  with("\"next_step\": 2", "\"next_step\": 1");
  std::ofstream(saved / "manifest.json") << manifest.substr(0, manifest.size() / 2);
  check_refused(one.path, {"manifest.json", "was damaged, or changed by hand"});
  std::ofstream(saved / "manifest.json") << manifest;
  CHECK(train({}, 0, one.path, "", make).note.next_step == 2);
}

TEST_CASE("dtypes that are not the model's are refused before anything is changed") {
  scratch_folder at;
  auto const in_double = [](int s) {
    auto made = std::make_shared<layers_impl>(2 * s, 2 * s + 2, width);
    if (s == 1) made->norms[1]->to(at::kDouble);
    return chevron::stage(made);
  };
  on_ranks({}, optimizers[2].second, in_double, [&](chevron::trainer& trainer) { chevron::save_checkpoint(trainer, at.path); });
  check_refused(at.path, {"model-1.safetensors", "norm_3.", "Double [6]", "Float [6]"});
}

TEST_CASE("a checkpoint of the same step is replaced whole, or stays if the new one cannot be written") {
  scratch_folder at;
  auto const& make = optimizers[2].second;
  auto const fine = train({"1F1B", 4, 4}, 3, "", at.path, make);
  fs::path const saved = at.path / "step-00000003";
  auto const names = names_in(saved);
  CHECK(names.size() == 9);

  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
  rlimit low = before;
  low.rlim_cur = 512;
  std::string said;
  std::atomic<int> went_on = 0;
  on_ranks({"GPipe", 2, 4}, make, layers_in(2), [&](chevron::trainer& trainer) {
    chevron::load_checkpoint(trainer, at.path);
    auto const all_gather = [&] { trainer.comm().all_gather_text(""); };  // the limit is the whole process's
    all_gather();
    if (trainer.comm().topology().global_rank == 0) ::setrlimit(RLIMIT_FSIZE, &low);
    all_gather();
    try {
      chevron::save_checkpoint(trainer, at.path);
    } catch (chevron::checkpoint_error const& e) {
      if (trainer.comm().topology().global_rank == 0) said = e.what();
      ++went_on;
    }
    all_gather();
    if (trainer.comm().topology().global_rank == 0) ::setrlimit(RLIMIT_FSIZE, &before);
    all_gather();
    steps_of(trainer, 1);
  });
  CHECK(went_on == 2);
  check_says(said, {"model-0.safetensors", "cannot be written", "File too large", "Remedy"});
  CHECK(names_in(saved) == names);
  check_same(fine, train({"1F1B", 4, 4}, 0, at.path, "", make));

  auto const other = train({"GPipe", 2, 4}, 0, at.path, at.path, make);
  CHECK(names_in(saved).size() == 5);
  check_same(other, train({"GPipe", 2, 4}, 0, at.path, "", make));
}

TEST_CASE("groups with learning rates of their own go on with them, in any layout") {
  auto const make = [](double of_matrices, double of_vectors) -> chevron::optimizer_factory {
    return [=](std::vector<at::Tensor> parameters) {
      std::vector<at::Tensor> matrices, vectors;
      for (auto& p : parameters) (p.dim() > 1 ? matrices : vectors).push_back(p);
      std::vector<torch::optim::OptimizerParamGroup> groups;
      groups.emplace_back(matrices,
                          std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(of_matrices).momentum(0.9)));
      groups.emplace_back(vectors, std::make_unique<torch::optim::SGDOptions>(of_vectors));
      return std::make_unique<torch::optim::SGD>(groups, torch::optim::SGDOptions(1));
    };
  };
  scratch_folder at, again;
  auto const whole = train({}, 6, "", "", make(0.1, 0.01));
  train({}, 3, "", at.path, make(0.1, 0.01));
  train({"1F1B", 4, 4}, 0, at.path, again.path, make(7, 8));
  for (auto const& from : {at.path, again.path}) {
    auto const resumed = train({}, 3, from, "", make(0.5, 0.5));  // what was saved counts
    CHECK(std::vector<double>(whole.losses.begin() + 3, whole.losses.end()) == resumed.losses);
    check_same(whole, resumed);
  }
  check_says(failure_of([&] { train({}, 1, at.path, "", optimizers[0].second); }),
             {"learning rates", "0.1", "0.01", "the groups that were saved"});
}

TEST_CASE("tied weights go on in layouts that have them once or twice, under one name or two") {
  // Four layers; the first and the last share a weight.
  auto const build = [](bool one_name, bool tied = true) {
    return [=](int stages) -> chevron::stage_builder {
      return [=](int s) {
        int const each = 4 / stages;
        std::vector<chevron::parameter> parameters;
        tensors weights;
        for (int i = s * each; i < (s + 1) * each; ++i) {
          if (i == 3 && stages == 1) {
            weights.push_back(weights[0]);
            continue;
          }
          at::manual_seed(500 + i % 3 + (tied ? 0 : i));
          weights.push_back(at::randn({width, width}).mul(0.3).requires_grad_());
          parameters.push_back({i == 0 || (one_name && i == 3) ? "table" : "weight_" + std::to_string(i), weights.back()});
        }
        chevron::stage made(
            [weights](at::Tensor x) {
              for (auto const& w : weights) x = x + at::matmul(x, w).tanh();
              return x;
            },
            parameters);
        if (tied && stages > 1 && s == 0) made.tie("table", "shared");
        if (tied && stages > 1 && s == stages - 1) made.tie(one_name ? "table" : "weight_3", "shared");
        return made;
      };
    };
  };
  auto const& make = optimizers[2].second;
  for (bool const one_name : {true, false}) {
    CAPTURE(one_name);
    auto const whole = train({"1F1B", 4, 4}, 6, "", "", make, build(one_name));
    scratch_folder at;
    train({"1F1B", 4, 4}, 3, "", at.path, make, build(one_name));
    for (job const between : {job{"GPipe", 1, 4}, job{"1F1B", 2, 4}, job{"ZBVZeroBubble", 2, 4}, job{"Interleaved1F1B", 2, 4}}) {
      CAPTURE(between.schedule);
      scratch_folder again;
      auto const there = train(between, 0, at.path, again.path, make, build(one_name));
      CHECK(there.tensors.size() == (between.ranks == 1 || one_name ? 3u : 4u));
      auto const back = train({"1F1B", 4, 4}, 3, again.path, "", make, build(one_name));
      CHECK(std::vector<double>(whole.losses.begin() + 3, whole.losses.end()) == back.losses);
      check_same(whole, back);
    }
  }
  scratch_folder apart;
  train({"1F1B", 4, 4}, 1, "", apart.path, make, build(false, false));
  check_says(failure_of([&] {
               train({"1F1B", 4, 4}, 1, apart.path, "", make, build(false));
             }),
             {"stage 0's table and stage 3's weight_3 are one parameter of this model", "Remedy"});
}

TEST_CASE("a checkpoint without a factor of the loss leaves the first one to a job that scales") {
  scratch_folder at;
  auto const& make = optimizers[0].second;
  on_ranks({}, make, layers_in(2), [&](chevron::trainer& trainer) { chevron::save_checkpoint(trainer, at.path); });
  on_ranks({}, make, layers_in(2),
           [&](chevron::trainer& trainer) {
             chevron::load_checkpoint(trainer, at.path);
             if (trainer.scaling().factor() != 512) throw std::runtime_error("another factor");
           },
           {.scaling = chevron::loss_scaling{.initial = 512}});
}

TEST_CASE("gradients that wait for their step are in no checkpoint: it is refused between accumulate and step") {
  auto const data = make_batch(8, 1);
  for (bool const loads : {false, true}) {
    scratch_folder at;
    auto const run = [&] {
      on_ranks({}, optimizers[0].second, layers_in(2), [&](chevron::trainer& trainer) {
        chevron::save_checkpoint(trainer, at.path);
        trainer.accumulate({data.input}, {data.target}, 16);
        if (loads) {
          chevron::load_checkpoint(trainer, at.path);
        } else {
          chevron::save_checkpoint(trainer, at.path);
        }
      });
    };
    CHECK_THROWS_WITH_AS(run(), doctest::Contains("between accumulate() and its step()"), chevron::usage_error);
  }
}

TEST_CASE("an optimizer of one's own, or derived from a known one, is neither saved nor loaded, and training goes on") {
  auto const own = [](std::vector<at::Tensor> parameters) {
    return std::make_unique<own_optimizer>(std::move(parameters), torch::optim::SGDOptions(0.1));
  };
  scratch_folder at;
  std::atomic<int> refused = 0;
  on_ranks({}, optimizers[0].second, layers_in(2),
           [&](chevron::trainer& trainer) { chevron::save_checkpoint(trainer, at.path); });
  on_ranks({}, own, layers_in(2), [&](chevron::trainer& trainer) {
    for (bool const loads : {true, false}) {
      steps_of(trainer, 1);
      try {
        if (loads) {
          chevron::load_checkpoint(trainer, at.path);
        } else {
          chevron::save_checkpoint(trainer, at.path);
        }
      } catch (chevron::checkpoint_error const& e) {
        refused += std::string(e.what()).find("neither be saved nor loaded") != std::string::npos ? 1 : 0;
      }
    }
  });
  CHECK(refused == 4);
}

TEST_CASE("a header that does not describe its bytes is refused") {
  scratch_folder at;
  auto const file = at.path / "x.safetensors";
  auto const write = [&](std::string const& header, std::size_t data) {
    std::ofstream out(file, std::ios::binary);
    for (int i = 0; i < 8; ++i) out.put(static_cast<char>(header.size() >> (8 * i)));
    out << header << std::string(data, 0);
  };
  auto const open = [&] { chevron::safetensors_file opened(file); };
  write(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"by":"hand"}})", 8);
  chevron::safetensors_file good(file);
  CHECK(good.names() == std::vector<std::string>{"a"});
  CHECK(at::equal(good.read("a"), at::zeros({2})));
  for (char const* bad :
       {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,12]}})", R"({"a":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}})",
        R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})",
        R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}})", R"({"a":7})", R"([1])", "{",
        R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", R"({"a":{"dtype":"F32","shape":[2]}})",
        R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})"}) {
    CAPTURE(bad);
    write(bad, 8);
    CHECK(failure_of(open).find("x.safetensors") != std::string::npos);
  }
  write(std::string(1 << 20, '['), 8);
  check_says(failure_of(open), {"x.safetensors", "within each other"});
  write(std::string((16 << 20) + 1, ' '), 8);
  check_says(failure_of(open), {"x.safetensors", "a header of 16777217 bytes"});
  write('"' + std::string(1 << 20, 'x'), 8);
  auto const said = failure_of(open);
  check_says(said, {"x.safetensors", "no JSON of this kind"});
  CHECK(said.size() < 1000);
  std::ofstream(file) << "short";
  check_says(failure_of(open), {"no safetensors file"});
}
