#include "run/trained.hpp"

#include <chevron/run/checkpoint.hpp>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/rmsprop.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <doctest/doctest.h>

using namespace trained;
namespace fs = std::filesystem;

namespace {

struct folder {
  fs::path path;
  folder() {
    std::string name = (fs::temp_directory_path() / "chevron-checkpoint-XXXXXX").string();
    path = ::mkdtemp(name.data());
  }
  ~folder() { fs::remove_all(path); }
};

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
              std::function<chevron::stage_builder(int stages)> const& build = [](int stages) { return layers_in(stages); }) {
  auto const plan = plan_of(wanted.schedule, wanted.ranks, wanted.micro_batches);
  outcome out;
  std::mutex guard;
  chevron::run_threads({.pipeline_ranks = wanted.ranks, .replicas = wanted.replicas}, [&](transport& line) {
    chevron::trainer_options options;
    options.clip_grad_norm = 0.5;
    options.seed = 5;
    options.post_validation = wanted.post_validation;
    options.calm_steps = 0;
    chevron::trainer trainer(chevron::lower(plan), line, build(plan.stages), mean_square, make, options);
    chevron::checkpoint_note note;
    if (!from.empty()) note = chevron::load_checkpoint(trainer, from);
    long const first = trainer.next_step();
    for (long step = first; step < first + steps; ++step) {
      auto const data = make_batch(3 * wanted.micro_batches, static_cast<int>(10 * step) + line.where().replica());
      trainer.step({data.input}, {data.target});
      auto const report = trainer.settle();
      if (line.where().global_rank == 0) out.losses.push_back(report.loss);
    }
    if (!to.empty()) chevron::save_checkpoint(trainer, to, {{"seen", std::to_string(trainer.next_step() * 7)}});
    std::lock_guard const hold(guard);
    if (line.where().global_rank == 0) out.note = note;
    if (line.where().replica() != 0) return;
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
    {"Adagrad", chevron::optimizer<torch::optim::Adagrad>(torch::optim::AdagradOptions(1e-2))}};

std::string failure_of(std::function<void()> const& what) {
  try {
    what();
  } catch (chevron::error const& e) {
    CHECK(e.code() == static_cast<int>(chevron::exit_code::checkpoint));
    return e.what();
  }
  return "nothing was thrown";
}

void check_says(std::string const& text, std::initializer_list<char const*> words) {
  CAPTURE(text);
  for (char const* word : words) {
    CAPTURE(word);
    CHECK(text.find(word) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("a resumed run is the uninterrupted one to the last bit: weights, buffers, losses, dropout, any optimizer") {
  at::set_num_threads(1);
  for (auto const& [kind, make] : optimizers) {
    CAPTURE(kind);
    for (job const wanted : {job{}, job{"ZBVZeroBubble", 2, 5}, job{"ZB-H2", 2, 4, true}, job{"1F1B", 2, 3, false, 2}}) {
      CAPTURE(wanted.schedule);
      folder at;
      auto const whole = train(wanted, 6, "", "", make);
      train(wanted, 3, "", at.path, make);
      auto const resumed = train(wanted, 3, at.path, "", make);
      CHECK(resumed.note.next_step == 3);
      CHECK(resumed.note.words.at("seen") == "21");
      CHECK(std::vector<double>(whole.losses.begin() + 3, whole.losses.end()) == resumed.losses);
      check_same(whole, resumed);
    }
  }
}

TEST_CASE("another layout, schedule and number of replicas goes on from the same weights and the same optimizer") {
  auto const& make = optimizers[2].second;
  folder at;
  train({"1F1B", 4, 4}, 3, "", at.path, make);
  for (job const wanted : {job{"GPipe", 1, 4}, job{"1F1B", 2, 4}, job{"ZBVZeroBubble", 2, 4}, job{"Interleaved1F1B", 2, 4}, job{"1F1B", 2, 2, false, 2}}) {
    CAPTURE(wanted.schedule);
    CAPTURE(wanted.ranks);
    folder again;
    auto const loaded = train(wanted, 0, at.path, again.path, make);
    auto const back = train({"1F1B", 4, 4}, 0, again.path, "", make);
    check_same(loaded, back);
    // What the optimizer keeps came through as well: all files of the same layout are equal byte for byte.
    folder third;
    train({"1F1B", 4, 4}, 0, again.path, third.path, make);
    for (int s = 0; s < 4; ++s) {
      for (char const* sort : {"model", "optimizer"}) {
        auto const name = fs::path("step-00000003") / (std::string(sort) + "-" + std::to_string(s) + ".safetensors");
        std::ifstream a(at.path / name, std::ios::binary), b(third.path / name, std::ios::binary);
        std::string const one((std::istreambuf_iterator<char>(a)), {}), two((std::istreambuf_iterator<char>(b)), {});
        CHECK(one.size() > 100);
        CHECK(one == two);
      }
    }
  }
}

TEST_CASE("the last whole checkpoint counts: a folder without its manifest is none") {
  auto const& make = optimizers[0].second;
  folder at;
  train({}, 2, "", at.path, make);
  train({}, 2, at.path, at.path, make);
  CHECK(chevron::last_checkpoint(at.path)->filename() == "step-00000004");
  fs::remove(at.path / "step-00000004" / "manifest.json");
  CHECK(chevron::last_checkpoint(at.path)->filename() == "step-00000002");
  CHECK(train({}, 0, at.path, "", make).note.next_step == 2);
  CHECK(train({}, 0, at.path / "step-00000002", "", make).note.next_step == 2);
}

TEST_CASE("what cannot be loaded is said with file, name and remedy, on every rank, before anything is changed") {
  auto const& make = optimizers[2].second;
  folder at, empty;
  train({}, 1, "", at.path, make);
  fs::path const saved = at.path / "step-00000001";
  check_says(failure_of([&] { train({}, 1, empty.path, "", make); }), {"holds no whole checkpoint", "manifest.json"});
  check_says(failure_of([&] { train({}, 1, "/nowhere/at/all", "", make); }), {"/nowhere/at/all", "holds no whole checkpoint"});
  check_says(failure_of([&] { train({}, 1, at.path, "", optimizers[0].second); }), {"AdamW", "SGD", "the same optimizer"});
  check_says(failure_of([&] { train({}, 1, at.path, "", make, [](int stages) { return layers_in(stages, 8); }); }),
             {"which the checkpoint does not hold", "layer_4"});
  check_says(failure_of([&] { train({}, 1, at.path, "", make, [](int stages) { return layers_in(stages, 2); }); }),
             {"holds 20 tensors, this model has 10"});

  // Names that repeat from stage to stage, with an inner width that may differ.
  auto const sequential = [](int hidden) {
    return [hidden](int) -> chevron::stage_builder {
      return [hidden](int s) {
        at::manual_seed(s);
        return chevron::stage(torch::nn::Sequential(torch::nn::Linear(width, hidden), torch::nn::Linear(hidden, width)));
      };
    };
  };
  folder other;
  train({}, 1, "", other.path, make, sequential(4));
  CHECK(train({}, 1, other.path, "", make, sequential(4)).note.next_step == 1);
  CHECK(train({"GPipe"}, 1, other.path, "", make, sequential(4)).note.next_step == 1);
  check_says(failure_of([&] { train({}, 1, other.path, "", make, sequential(5)); }), {"0.weight", "[4, 6]", "[5, 6]"});
  check_says(failure_of([&] { train({"1F1B", 1}, 1, other.path, "", make, sequential(4)); }),
             {"2 of the checkpoint's 2 stages hold", "names of their own"});

  fs::resize_file(saved / "model-1.safetensors", fs::file_size(saved / "model-1.safetensors") - 40);
  check_says(failure_of([&] { train({}, 1, at.path, "", make); }), {"model-1.safetensors", "cut short"});
  fs::remove(saved / "model-1.safetensors");
  check_says(failure_of([&] { train({}, 1, at.path, "", make); }), {"model-1.safetensors", "cannot be opened"});
  std::ofstream(saved / "manifest.json") << "{}";
  check_says(failure_of([&] { train({}, 1, at.path, "", make); }), {"manifest.json", "is no manifest"});
  check_says(failure_of([&] { train({}, 1, "", "/proc/nothing/here", make); }), {"/proc/nothing/here", "cannot be made"});
}

TEST_CASE("a header that does not describe its bytes is refused") {
  folder at;
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
  for (char const* bad : {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,12]}})", R"({"a":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}})",
                          R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})",
                          R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}})", R"({"a":7})", R"([1])", "{",
                          R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", R"({"a":{"dtype":"F32","shape":[2]}})"}) {
    CAPTURE(bad);
    write(bad, 8);
    CHECK(failure_of(open).find("x.safetensors") != std::string::npos);
  }
  std::ofstream(file) << "short";
  check_says(failure_of(open), {"no safetensors file"});
}
