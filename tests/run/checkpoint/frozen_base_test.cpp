// Checkpoints of models of which a part is frozen: which parameters were trained is compared, and the frozen ones may stay out.
#include "support/gloo_ranks.hpp"
#include "support/scratch_folder.hpp"
#include "support/small_model.hpp"

#include <chevron/checkpoint.hpp>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <doctest/doctest.h>

using namespace small_model;
namespace fs = std::filesystem;

namespace {

/// A map that is frozen, and a narrow one beside it that is trained; a norm that may be frozen too. The table of the first layer
/// has a second name, as a head that shares it would give it.
struct adapted_impl : torch::nn::Module {
  adapted_impl(int first, int last, std::set<std::string> const& trained, double moved, bool tied = false) {
    for (int i = first; i < last; ++i) {
      std::string const at = std::to_string(i);
      at::manual_seed(700 + i);
      base.push_back(register_module("base_" + at, torch::nn::Linear(width, width)));
      norm.push_back(register_module("norm_" + at, torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}))));
      down.push_back(register_parameter("down_" + at, at::randn({width, 2}) * 0.1));
      if (tied && (i == 0 || i == 3)) at::manual_seed(750);
      up.push_back(register_parameter("up_" + at, at::randn({2, width}) * 0.1));
      means.push_back(register_buffer("mean_" + at, at::zeros({width})));
      if (i == 0) register_module("again", base[0]);
    }
    for (auto& p : named_parameters()) {
      std::string const sort = p.key().substr(0, p.key().find('_'));
      p.value().requires_grad_(trained.count(sort) != 0);
      if (p.key() == "base_1.weight") p.value().detach().add_(moved);
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (std::size_t i = 0; i < base.size(); ++i) {
      means[i].mul_(0.9).add_(x.detach().mean(0), 0.1);
      x = norm[i]->forward(base[i]->forward(x) + at::matmul(at::matmul(x, down[i]), up[i])).tanh();
    }
    return x;
  }
  std::vector<torch::nn::Linear> base;
  std::vector<torch::nn::LayerNorm> norm;
  std::vector<at::Tensor> down, up, means;
};

struct job {
  char const* schedule = "1F1B";
  int ranks = 2;
  int replicas = 1;
  std::set<std::string> trained = {"down", "up"};
  double moved = 0;   // added to a frozen tensor before the trainer is made
  bool tied = false;  // the first and the last layer's `up`
};

using body = std::function<void(chevron::trainer&)>;
/// Ranks as threads or as processes of this one.
using launcher = std::function<void(chevron::topology const&, std::function<void(transport&)> const&)>;

launcher const threads = [](chevron::topology const& of, std::function<void(transport&)> const& rank) {
  chevron::run_threads({.pipeline_ranks = of.pipeline_ranks, .replicas = of.replicas}, rank);
};

void on_ranks(job const& wanted, body const& what, launcher const& launch = threads) {
  auto const plan = plan_of(wanted.schedule, wanted.ranks, 4);
  int const each = 4 / plan.stages;
  auto const build = [&](int s) {
    chevron::stage made = std::make_shared<adapted_impl>(s * each, (s + 1) * each, wanted.trained, wanted.moved, wanted.tied);
    if (wanted.tied && s == 0) made.tie("up_0", "up");
    if (wanted.tied && s == plan.stages - 1) made.tie("up_3", "up");
    return made;
  };
  launch({.pipeline_ranks = wanted.ranks, .replicas = wanted.replicas}, [&](transport& comm) {
    chevron::trainer trainer(small_model::setup(plan, comm, build, {}, chevron::optimizer<torch::optim::AdamW>(1e-2)));
    what(trainer);
  });
}

void steps_to(chevron::trainer& trainer, long last) {
  while (trainer.next_step() < last) {
    auto const data = make_batch(12, static_cast<int>(trainer.next_step()) * 10);
    trainer.step(data.input, data.target);
  }
}

/// Adds this rank's tensors by name, if it is of replica 0.
void add_values(std::map<std::string, at::Tensor>& to, chevron::trainer& trainer) {
  for (auto const& s : trainer.stages()) {
    if (!s || trainer.comm().topology().replica() != 0) continue;
    for (auto const& p : chevron::detail::kept_of(s)) to[p.name] = p.value.detach().clone();
  }
}

/// All tensors of the model by name, from all ranks of replica 0.
std::map<std::string, at::Tensor> values_after(job const& wanted, body const& what) {
  std::map<std::string, at::Tensor> out;
  std::mutex guard;
  on_ranks(wanted, [&](chevron::trainer& trainer) {
    what(trainer);
    std::lock_guard const hold(guard);
    add_values(out, trainer);
  });
  return out;
}

void check_same(std::map<std::string, at::Tensor> const& a, std::map<std::string, at::Tensor> const& b) {
  REQUIRE(a.size() == b.size());
  REQUIRE(a.size() > 20);
  for (auto const& [name, value] : a) {
    CAPTURE(name);
    CHECK(at::equal(value, b.at(name)));
  }
}

/// The error of loading on all ranks, which train on afterwards.
std::string said_by_loading(job const& wanted, fs::path const& from, chevron::load_options const& options = {}) {
  std::vector<std::string> said;
  std::mutex guard;
  on_ranks(wanted, [&](chevron::trainer& trainer) {
    std::string mine;
    try {
      chevron::load_checkpoint(trainer, from, {}, options);
    } catch (chevron::checkpoint_error const& e) {
      mine = e.what();
      if (trainer.next_step() != 0 || (trainer.optimizer() != nullptr && !trainer.optimizer()->state().empty()))
        mine += " CHANGED";
    }
    steps_to(trainer, trainer.next_step() + 1);
    std::lock_guard const hold(guard);
    said.push_back(mine);
  });
  for (std::string const& one : said) CHECK(one == said[0]);
  return said.at(0);
}

std::uintmax_t bytes_of_models(fs::path const& folder) {
  std::uintmax_t sum = 0;
  for (auto const& file : fs::directory_iterator(folder)) {
    if (file.path().filename().string().starts_with("model-")) sum += file.file_size();
  }
  return sum;
}

bool contains(std::string const& text, std::string const& words) { return text.find(words) != std::string::npos; }

}  // namespace

TEST_CASE("a run that saves the trained part alone goes on as the uninterrupted one, in any layout, schedule and replicas") {
  for (bool const tied : {false, true}) {
    CAPTURE(tied);
    job first;
    first.tied = tied;
    auto const whole = values_after(first, [](chevron::trainer& t) { steps_to(t, 6); });
    scratch_folder at, full;
    on_ranks(first, [&](chevron::trainer& t) {
      steps_to(t, 3);
      chevron::save_checkpoint(t, full.path);
      chevron::save_checkpoint(t, at.path, {}, {.trained_only = true});
    });
    CHECK(2 * bytes_of_models(at.path / "step-00000003") < bytes_of_models(full.path / "step-00000003"));
    for (std::string const name : {"base_1.weight", "again.weight", "norm_3.bias"}) {
      for (std::size_t s = 0; s < 2; ++s)
        CHECK(!chevron::safetensors_file(chevron::detail::stage_file(at.path / "step-00000003", "model", s)).holds(name));
    }
    std::vector<job> layouts = {first, {"ZBVZeroBubble"}, {"ZB-H1", 4}, {"1F1B", 2, 2}};
    if (!tied) layouts.push_back({"GPipe", 1});
    for (job wanted : layouts) {
      CAPTURE(wanted.schedule);
      wanted.tied = tied;
      scratch_folder again;
      // Loaded, saved so by this layout, and loaded by the first one.
      auto const loaded = values_after(wanted, [&](chevron::trainer& t) {
        CHECK(chevron::resume(t, at.path)->next_step == 3);
        chevron::save_checkpoint(t, again.path, {}, {.trained_only = true});
      });
      CHECK(loaded.size() == whole.size());
      auto const resumed = values_after(first, [&](chevron::trainer& t) {
        chevron::load_checkpoint(t, again.path);
        steps_to(t, 6);
      });
      check_same(whole, resumed);
    }
  }
}

TEST_CASE("over Gloo the trained part is saved, loaded, and compared with what is trained and frozen, as in threads") {
  auto const whole = values_after({}, [](chevron::trainer& t) { steps_to(t, 4); });
  scratch_folder at;
  launcher const gloo = [](chevron::topology const& of, std::function<void(transport&)> const& rank) {
    gloo_ranks::check_all_well(gloo_ranks::on_ranks(
        of.pipeline_ranks, of.replicas, [](int r) { return r != 1; }, rank));
  };
  auto const save = [&](chevron::trainer& t) {
    chevron::save_checkpoint(t, at.path, {}, {.trained_only = true});
    chevron::remove_old_checkpoints(t, at.path, 1);
  };
  on_ranks(
      {}, [&](chevron::trainer& t) { steps_to(t, 2), save(t); }, gloo);
  std::map<std::string, at::Tensor> resumed;
  std::mutex guard;
  auto const go_on = [&](chevron::trainer& t) {
    chevron::load_checkpoint(t, at.path);
    steps_to(t, 3);
    save(t);
    steps_to(t, 4);
    std::lock_guard const hold(guard);
    add_values(resumed, t);
  };
  on_ranks({}, go_on, gloo);
  check_same(whole, resumed);
  CHECK(!fs::exists(at.path / "step-00000002"));
  for (auto const& [wanted, words] :
       {std::pair{job{.moved = 0.5}, "other values than stage 0's base_1.weight"},
        std::pair{job{.trained = {"up"}}, "stage 1's down_3 were trained in the saved run, and not in this one"}}) {
    auto const load = [&, says = words](chevron::trainer& t) {
      CHECK_THROWS_WITH_AS(chevron::load_checkpoint(t, at.path), doctest::Contains(says), chevron::checkpoint_error);
      steps_to(t, 1);
    };
    on_ranks(wanted, load, gloo);
  }
}

TEST_CASE("another base than the one beside which a checkpoint was saved is refused by the names of its tensors") {
  scratch_folder at;
  on_ranks({}, [&](chevron::trainer& t) {
    steps_to(t, 2);
    chevron::save_checkpoint(t, at.path, {}, {.trained_only = true});
  });
  for (job const& wanted :
       {job{.moved = 0.5}, job{"ZB-H1", 4, 1, {"down", "up"}, 0.5}, job{.trained = {"base", "up"}, .moved = 0.5}}) {
    std::string const said = said_by_loading(wanted, at.path);
    CAPTURE(said);
    CHECK(contains(said, "step-00000002: was saved with trained_only, beside frozen parameters with other values than stage "));
    CHECK(contains(said, "'s base_1.weight here. Remedy: load into the stages the weights that the saving run began with"));
    CHECK(!contains(said, "CHANGED"));
  }
}

TEST_CASE("a frozen parameter that changes between two checkpoints without it is told when the second is saved") {
  scratch_folder at;
  int refused = 0;
  on_ranks({}, [&](chevron::trainer& t) {
    bool const first = t.comm().topology().global_rank == 0;
    chevron::save_checkpoint(t, at.path, {}, {.trained_only = true});
    steps_to(t, 1);
    for (std::size_t i = 0; first && i < t.stages()[0].parameters().size(); ++i) {
      auto const& p = t.stages()[0].parameters()[i];
      if (p.name == "base_0.weight") p.value.detach().add_(1);
    }
    std::string said;
    try {
      chevron::save_checkpoint(t, at.path, {}, {.trained_only = true});
    } catch (chevron::checkpoint_error const& e) {
      said = e.what();
    }
    CHECK(contains(said,
                   "needs no gradient, so save_options::trained_only leaves this tensor out, but its values have changed since "
                   "the checkpoint before"));
    chevron::save_checkpoint(t, at.path);
    if (first) ++refused;
  });
  CHECK(refused == 1);
}

TEST_CASE("other trained parameters than those of the run that saved are told, both ways, unless they are meant") {
  job const adapters, norms_too{.trained = {"down", "up", "norm"}};
  for (bool const trained_only : {false, true}) {
    scratch_folder few, more;
    for (auto const& [who, at] : {std::pair{adapters, few.path}, std::pair{norms_too, more.path}}) {
      on_ranks(who, [&, folder = at](chevron::trainer& t) {
        steps_to(t, 2);
        chevron::save_checkpoint(t, folder, {}, {.trained_only = trained_only});
      });
    }
    std::string const now = said_by_loading(norms_too, few.path);
    CAPTURE(now);
    CHECK(contains(
        now,
        "step-00000002: was saved by a run that trained other parameters: stage 0's norm_0.bias, stage 0's norm_0.weight, "
        "stage 0's norm_1.bias, stage 0's norm_1.weight and 4 more are trained in this run, and not in the saved one. Remedy: "
        "freeze the parameters that the saved run froze, or load_options::allow_other_trained to go on with another set"));
    std::string const then = said_by_loading(adapters, more.path);
    CHECK(contains(then, "stage 0's norm_1.weight and 4 more were trained in the saved run, and not in this one. Remedy"));
    // A layout in which a rank trains nothing at all.
    job const upper{"1F1B", 4, 1, {"norm"}};
    CHECK(contains(said_by_loading(upper, few.path), "stage 0's norm_0.bias"));
    CHECK(!contains(now + then, "CHANGED"));

    CHECK(said_by_loading(adapters, more.path, {.allow_other_trained = true}).empty());
    // Newly trained norms begin without a state, adapters go on with theirs.
    on_ranks(norms_too, [&](chevron::trainer& t) {
      chevron::load_checkpoint(t, few.path, {}, {.allow_other_trained = true});
      auto& state = t.optimizer()->state();
      for (auto const& s : t.stages()) {
        if (!s) continue;
        for (auto const& p : s.parameters()) {
          bool const adapter = p.name.starts_with("up") || p.name.starts_with("down");
          if ((state.count(p.value.unsafeGetTensorImpl()) != 0) != adapter) throw std::runtime_error(p.name);
        }
      }
      steps_to(t, 3);
    });
  }
}

TEST_CASE("a parameter that an optimizer's factory leaves out counts as not trained") {
  scratch_folder at;
  job const all{.trained = {"down", "up", "norm"}};
  on_ranks(all, [&](chevron::trainer& t) { chevron::save_checkpoint(t, at.path); });
  auto const plan = plan_of("1F1B", 2, 4);
  auto const build = [&](int s) { return chevron::stage(std::make_shared<adapted_impl>(2 * s, 2 * s + 2, all.trained, 0)); };
  auto const some = [](std::vector<chevron::named_parameter> const& every) {
    tensors matrices;
    for (auto const& p : every) {
      if (p.value.dim() > 1) matrices.push_back(p.value);
    }
    return std::make_unique<torch::optim::AdamW>(matrices, torch::optim::AdamWOptions(1e-2));
  };
  auto const run = [&] {
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      chevron::trainer t(small_model::setup(plan, comm, build, {}, some));
      chevron::load_checkpoint(t, at.path);
    });
  };
  CHECK_THROWS_WITH_AS(run(), doctest::Contains("stage 0's norm_0.bias, stage 0's norm_0.weight"), chevron::checkpoint_error);
}

TEST_CASE("a parameter of two names in a module keeps what the optimizer keeps for it") {
  scratch_folder at;
  job const bases{.trained = {"base", "up", "again.weight", "again.bias"}};
  auto const whole = values_after(bases, [](chevron::trainer& t) { steps_to(t, 4); });
  on_ranks(bases, [&](chevron::trainer& t) {
    steps_to(t, 2);
    chevron::save_checkpoint(t, at.path);
  });
  check_same(whole, values_after(bases, [&](chevron::trainer& t) {
               chevron::load_checkpoint(t, at.path);
               steps_to(t, 4);
             }));
}

TEST_CASE("a checkpoint of the format before, whose manifest knows of no base, is read") {
  scratch_folder at;
  auto const whole = values_after({}, [](chevron::trainer& t) { steps_to(t, 4); });
  on_ranks({}, [&](chevron::trainer& t) {
    steps_to(t, 2);
    chevron::save_checkpoint(t, at.path);
  });
  fs::path const file = at.path / "step-00000002" / "manifest.json";
  nlohmann::json manifest = nlohmann::json::parse(std::ifstream(file));
  manifest["format"] = 3;
  manifest.erase("base");
  manifest.erase("fingerprint");
  std::ofstream(file, std::ios::binary) << chevron::detail::with_fingerprint(manifest);
  check_same(whole, values_after({}, [&](chevron::trainer& t) {
               chevron::load_checkpoint(t, at.path);
               steps_to(t, 4);
             }));
}
