#include "support/checkpoint_refusal.hpp"
#include "support/file_content.hpp"
#include "support/scratch_folder.hpp"
#include "support/small_model.hpp"

#include <chevron/checkpoint.hpp>

#include <torch/nn/modules/embedding.h>

#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

using namespace small_model;
namespace fs = std::filesystem;
namespace nn = torch::nn;

namespace {

std::string number_of(std::uint64_t n) {
  std::string out;
  for (int i = 0; i < 8; ++i) out += static_cast<char>(n >> (8 * i));
  return out;
}

/// A safetensors file put together by hand: header, and bytes.
void write_raw(fs::path const& file, std::string const& header, std::string const& bytes) {
  write_content(file, number_of(header.size()) + header + bytes);
}

std::string float_bytes(std::vector<float> const& all) {
  return {reinterpret_cast<char const*>(all.data()), all.size() * sizeof(float)};
}

/// Two linear maps, 2 -> 3 -> 2.
nn::Sequential two_maps() {
  at::manual_seed(3);
  return nn::Sequential(nn::Linear(2, 3), nn::Linear(3, 2));
}

std::map<std::string, at::Tensor> values_of(nn::Sequential const& module) {
  std::map<std::string, at::Tensor> out;
  for (auto const& item : module->named_parameters()) out[item.key()] = item.value().detach().clone();
  return out;
}

using checkpoint_refusal::check_says;
using checkpoint_refusal::failure_of;

/// An embedding that is also the head: one parameter of two names in one stage, tied over two.
struct table_impl : nn::Module {
  explicit table_impl(bool head) : head_(head) {
    at::manual_seed(9);
    table = register_parameter(head ? "head" : "table", at::randn({width, width}));
    at::manual_seed(head ? 11 : 10);
    map = register_module(head ? "last" : "first", nn::Linear(width, width));
  }
  at::Tensor forward(at::Tensor x) { return head_ ? at::matmul(map(x), table.t()) : map(at::matmul(x, table)); }
  at::Tensor table;
  nn::Linear map{nullptr};
  bool head_;
};

chevron::stage table_stage(int s) {
  return chevron::stage(std::make_shared<table_impl>(s == 1)).tie(s == 1 ? "head" : "table", "shared");
}

chevron::weight_names const as_saved{
    {"table", "model.embed.weight"}, {"head", "lm_head.weight"}, {"first", "model.first"}, {"last", "model.last"}};

/// Calls `each` on two ranks, under 1F1B; returns all parameters, by stage and name.
std::map<std::string, at::Tensor> on_two_ranks(chevron::stage_builder const& build,
                                               std::function<void(chevron::trainer&)> const& each, int replicas = 1) {
  auto const program = chevron::lower(chevron::prove(plan_of("1F1B", 2, 4)));
  std::map<std::string, at::Tensor> out;
  std::mutex guard;
  chevron::run_threads({.pipeline_ranks = 2, .replicas = replicas}, [&](transport& comm) {
    chevron::trainer trainer(small_model::setup(program, comm, build, {}, chevron::optimizer<torch::optim::AdamW>(1e-2)));
    each(trainer);
    std::lock_guard const hold(guard);
    for (std::size_t s = 0; s < 2; ++s) {
      for (auto const& p : trainer.stages()[s].parameters()) out[std::to_string(s) + "." + p.name] = p.value.detach().clone();
    }
  });
  return out;
}

void step(chevron::trainer& trainer) {
  auto const data = make_batch(8, static_cast<int>(trainer.next_step()));
  trainer.step({data.input}, {data.target});
}

}  // namespace

TEST_CASE("shards that others wrote are loaded by a name map, and numbers converted") {
  scratch_folder const here;
  // bfloat16: 1, 2, -1, 0.5, 0.25, 4; b's numbers stand where no double may.
  write_raw(here.path / "model-00001-of-00002.safetensors",
            R"({"__metadata__":{"format":"pt"},"net.a.weight":{"dtype":"BF16","shape":[3,2],"data_offsets":[0,12]},)"
            R"("net.a.bias":{"dtype":"F32","shape":[3],"data_offsets":[12,24]}} )",
            std::string("\x80\x3f\x00\x40\x80\xbf\x00\x3f\x80\x3e\x80\x40", 12) + float_bytes({7, 8, 9}));
  write_raw(
      here.path / "model-00002-of-00002.safetensors",
      R"({"net.b.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"net.b.bias":{"dtype":"F64","shape":[2],"data_offsets":[24,40]}})",
      float_bytes({1, 2, 3, 4, 5, 6}) + std::string("\0\0\0\0\0\0\xf0\x3f\0\0\0\0\0\0\0\xc0", 16));
  write_content(here.path / "model.safetensors.index.json",
        R"({"metadata":{"total_size":64},"weight_map":{"net.a.weight":"model-00001-of-00002.safetensors",
            "net.a.bias":"model-00001-of-00002.safetensors","net.b.weight":"model-00002-of-00002.safetensors",
            "net.b.bias":"model-00002-of-00002.safetensors"}})");
  auto const check = [&](chevron::weight_names const& names) {
    nn::Sequential module = two_maps();
    chevron::load_weights(module, here.path, names);
    auto const now = values_of(module);
    CHECK(at::equal(now.at("0.weight"), at::tensor({1., 2., -1., .5, .25, 4.}, at::kFloat).view({3, 2})));
    CHECK(at::equal(now.at("0.bias"), at::tensor({7., 8., 9.}, at::kFloat)));
    CHECK(at::equal(now.at("1.weight"), at::tensor({1., 2., 3., 4., 5., 6.}, at::kFloat).view({2, 3})));
    CHECK(at::equal(now.at("1.bias"), at::tensor({1., -2.}, at::kFloat)));
  };
  check({{"0", "net.a"}, {"1", "net.b"}});
  check({{"", "net"}, {"0", "net.a"}, {"1", "net.b"}, {"1.weight", "net.b.weight"}});
  check([](std::string const& name) { return std::string("net.") + (name[0] == '0' ? "a" : "b") + name.substr(1); });
}

TEST_CASE("tensors larger than a piece are whole, and those of other strides too") {
  scratch_folder const here;
  at::Tensor const numbers = at::arange(2048 * 1500, at::kDouble).view({1500, 2048});  // 24 MB
  chevron::write_safetensors(here.path / "model.safetensors", {{"weight", numbers}});
  nn::Linear map(nn::LinearOptions(2048, 1500).bias(false));
  chevron::load_weights(map, here.path);
  CHECK(at::equal(map->weight.detach(), numbers.to(at::kFloat)));
  map->weight.set_data(at::zeros({2048, 1500}).t());
  chevron::load_weights(map, here.path);
  CHECK(at::equal(map->weight.detach(), numbers.to(at::kFloat)));
}

TEST_CASE("all that does not fit is told in one error, and nothing is changed") {
  scratch_folder const here;
  chevron::write_safetensors(here.path / "model.safetensors", {{"0.weight", at::zeros({2, 3})},
                                                               {"0.bias", at::zeros({3}, at::kLong)},
                                                               {"1.bias", at::zeros({2})},
                                                               {"inv_freq", at::zeros({4})},
                                                               {"other.weight", at::zeros({1})}});
  nn::Sequential module = two_maps();
  auto const before = values_of(module);
  auto const load = [&](chevron::load_weights_options const& options) {
    return failure_of([&] { chevron::load_weights(module, here.path, {}, options); });
  };
  check_says(load({}), {here.path.c_str(), "1 tensor is missing: 1.weight;",
                        "2 tensors do not fit the model: 0.bias is Long [3], the model's is Float [3], "
                        "0.weight is Float [2, 3], the model's is Float [3, 2];",
                        "2 tensors are not the model's: inv_freq, other.weight.", "Remedy"});
  auto const allowed = load({.may_stay = {"inv_*"}});
  CHECK(allowed.find("inv_freq") == std::string::npos);
  check_says(allowed, {"1 tensor is not the model's: other.weight"});
  for (auto const& [name, value] : values_of(module)) CHECK(at::equal(value, before.at(name)));
}

TEST_CASE("of hundreds of tensors that do not fit, their number and some of them are told") {
  scratch_folder const here;
  chevron::named_tensors others;
  for (int i = 0; i < 40; ++i) others.emplace_back("layers." + std::to_string(100 + i) + ".weight", at::zeros({1}));
  chevron::write_safetensors(here.path / "model.safetensors", others);
  nn::Sequential module = two_maps();
  std::string const said = failure_of([&] { chevron::load_weights(module, here.path); });
  check_says(said, {"4 tensors are missing: 0.bias, 0.weight, 1.bias, 1.weight; 40 tensors are not the model's, such as "
                    "layers.100.weight, layers.101.weight, layers.102.weight, layers.103.weight. Remedy: "});
}

TEST_CASE("one tensor under two names is loaded from a folder that holds either or both") {
  at::manual_seed(3);
  auto const made = [] {
    auto out = std::make_shared<nn::Module>();
    at::Tensor const table = out->register_parameter("embed", at::zeros({4, 3}));
    out->register_parameter("head", table);
    return out;
  };
  at::Tensor const table = at::randn({4, 3});
  for (chevron::named_tensors const& all :
       {chevron::named_tensors{{"embed", table}}, {{"head", table}}, {{"embed", table}, {"head", table.clone()}}}) {
    scratch_folder const here;
    chevron::write_safetensors(here.path / "model.safetensors", all);
    auto const module = made();
    chevron::load_weights(module, here.path);
    CHECK(at::equal(module->named_parameters()["head"], table));
    chevron::save_weights(module, here.path);
    CHECK(chevron::safetensors_file(here.path / "model.safetensors").names().size() == 1);
    CHECK(chevron::safetensors_file(here.path / "model.safetensors").holds("embed"));
  }
  scratch_folder const here;
  chevron::write_safetensors(here.path / "model.safetensors", {{"embed", table}, {"head", table + 1}});
  check_says(failure_of([&] { chevron::load_weights(made(), here.path); }),
             {"head differs from embed, and both are one parameter of the model"});
}

TEST_CASE("a saved model is loaded again, whole and in shards, and takes the place of what was there") {
  scratch_folder const here;
  nn::Sequential const from = two_maps();
  chevron::save_weights(from, here.path, {{"", "net"}}, {.shard_bytes = 35});
  CHECK(fs::exists(here.path / "model-00001-of-00003.safetensors"));
  CHECK(fs::exists(here.path / "model.safetensors.index.json"));
  auto const check = [&](double tolerance) {
    nn::Sequential to = two_maps();
    for (at::Tensor& p : to->parameters()) p.detach().zero_();
    chevron::load_weights(to, here.path, {{"", "net"}});
    auto const saved = values_of(from);
    for (auto const& [name, value] : values_of(to)) CHECK(at::allclose(value, saved.at(name), 0, tolerance));
  };
  check(0);
  write_content(here.path / "config.json", "{}");
  chevron::save_weights(from, here.path, {{"", "net"}}, {.dtype = at::kBFloat16});
  bool const half_as_wide = chevron::safetensors_file(here.path / "model.safetensors").dtype("net.0.weight") == at::kBFloat16;
  CHECK(half_as_wide);
  check(1e-2);
  std::size_t files = 0;
  for (auto const& each : fs::directory_iterator(here.path)) files += each.is_regular_file() ? 1 : 0;
  CHECK(files == 2);  // and config.json

  check_says(failure_of([&] { chevron::save_weights(from, here.path, [](std::string const&) { return "same"; }); }),
             {"two tensors of the model would be called same", "Remedy"});
  CHECK(chevron::safetensors_file(here.path / "model.safetensors").holds("net.0.weight"));
  CHECK_THROWS_AS(chevron::save_weights(from, here.path, {}, {.dtype = at::kLong}), chevron::usage_error);
}

TEST_CASE("a folder that a wrapper of the model has saved is named with the wrapper, and with words that save the model itself") {
  for (auto const& [word, remedy] :
       {std::pair("_orig_mod.", "as torch.compile saves them. Remedy: save the model itself, model._orig_mod"),
        {"module.", "DistributedDataParallel saves them. Remedy: save the model itself, model.module."},
        {"base_model.model.", "as peft saves them. Remedy: save the model itself, model.merge_and_unload()"}}) {
    scratch_folder const here;
    chevron::named_tensors all;
    for (auto const& [name, value] : values_of(two_maps())) all.emplace_back(word + name, value);
    chevron::write_safetensors(here.path / "model.safetensors", all);
    std::string const names = "Names have `" + std::string(word) + "`";
    check_says(failure_of([&] { chevron::load_weights(two_maps(), here.path); }), {names.c_str(), remedy});
  }
  // torch.compile of a part puts its word in the middle; a name that only begins alike is no wrapper's.
  scratch_folder const here;
  chevron::named_tensors all;
  for (auto const& [name, value] : values_of(two_maps()))
    all.emplace_back(name.substr(0, 2) + "_orig_mod." + name.substr(2), value);
  chevron::write_safetensors(here.path / "model.safetensors", all);
  check_says(failure_of([&] { chevron::load_weights(two_maps(), here.path); }), {"Names have `_orig_mod.`"});
  chevron::write_safetensors(here.path / "model.safetensors", {{"module.other", at::zeros({1})}});
  check_says(failure_of([&] { chevron::load_weights(two_maps(), here.path); }), {"Remedy: the model that was saved"});
  scratch_folder const adapter;
  write_content(adapter.path / "adapter_config.json", "{}");
  check_says(failure_of([&] { chevron::load_weights(two_maps(), adapter.path); }),
             {"holds an adapter of peft", "merge_and_unload"});
}

TEST_CASE("each rank of a trainer loads what its stages hold, and ties may stand once or twice in the folder") {
  scratch_folder const once, twice, differing;
  at::manual_seed(1);
  at::Tensor const table = at::randn({width, width});
  chevron::named_tensors all = {{"model.embed.weight", table}};
  for (char const* layer : {"first", "last"}) {
    all.emplace_back(std::string("model.") + layer + ".weight", at::randn({width, width}));
    all.emplace_back(std::string("model.") + layer + ".bias", at::randn({width}));
  }
  chevron::write_safetensors(once.path / "model.safetensors", all);
  all.emplace_back("lm_head.weight", table);
  chevron::write_safetensors(twice.path / "model.safetensors", all);
  all.back().second = table + 1;
  chevron::write_safetensors(differing.path / "model.safetensors", all);

  for (auto const* from : {&once, &twice}) {
    auto const now = on_two_ranks(
        table_stage, [&](chevron::trainer& t) { chevron::load_weights(t, from->path, as_saved); }, 2);
    CHECK(at::equal(now.at("0.table"), table));
    CHECK(at::equal(now.at("1.head"), table));
    CHECK(at::equal(now.at("0.first.bias"), all[2].second));
    CHECK(at::equal(now.at("1.last.weight"), all[3].second));
  }
  // A model without a trainer, beside one that keeps its own values.
  on_two_ranks(table_stage, [&](chevron::trainer& t) {
    chevron::evaluator reference(
        {.program = chevron::lower(chevron::prove(plan_of("1F1B", 2, 2))), .transport = t.comm(), .stages = table_stage});
    chevron::load_weights(reference, twice.path, as_saved);
    auto const s = static_cast<std::size_t>(t.comm().topology().global_rank);
    CHECK(at::equal(reference.stages()[s].parameters()[0].value, table));
    CHECK(!at::equal(t.stages()[s].parameters()[0].value, table));
    check_says(failure_of([&] { chevron::load_weights(reference, differing.path, as_saved); }),
               {"both are one parameter of the model"});
  });
  on_two_ranks(table_stage, [&](chevron::trainer& t) {
    auto const before = t.comm().topology().global_rank == 0 ? t.stages()[0].parameters()[0].value.clone() : at::Tensor();
    check_says(failure_of([&] { chevron::load_weights(t, differing.path, as_saved); }),
               {"model.embed.weight", "both are one parameter of the model"});
    check_says(failure_of([&] { chevron::load_weights(t, once.path); }),
               {"6 tensors are missing: ", "first.bias, first.weight, head, last.bias",
                "5 tensors are not the model's: model.embed.weight"});
    if (before.defined()) CHECK(at::equal(before, t.stages()[0].parameters()[0].value));
    step(t);  // the trainer is still of use
  });
}

TEST_CASE("a trainer's weights and those of its checkpoint are saved alike, ties once") {
  scratch_folder const here;
  auto const now = on_two_ranks(
      table_stage,
      [&](chevron::trainer& t) {
        step(t);
        chevron::save_weights(t, here.path / "saved", as_saved);
        chevron::save_checkpoint(t, here.path / "checkpoints");
      },
      2);
  chevron::export_weights(here.path / "checkpoints", here.path / "exported", as_saved);
  for (char const* name : {"saved", "exported"}) {
    chevron::detail::weight_folder from(here.path / name);
    CHECK(from.names() == std::vector<std::string>{"model.embed.weight", "model.first.bias", "model.first.weight",
                                                   "model.last.bias", "model.last.weight"});
    for (auto const& [ours, theirs] : {std::pair{"0.table", "model.embed.weight"},
                                       {"1.head", "model.embed.weight"},
                                       {"0.first.weight", "model.first.weight"},
                                       {"1.last.bias", "model.last.bias"}}) {
      at::Tensor read = at::empty_like(now.at(ours));
      from.copy(theirs, read);
      CHECK(at::equal(read, now.at(ours)));
    }
  }
  CHECK(fs::exists(here.path / "saved" / "model-00002-of-00002.safetensors"));  // each rank wrote its own
  CHECK(fs::exists(here.path / "exported" / "model.safetensors"));

  fs::path const model = here.path / "checkpoints" / "step-00000001" / "model-1.safetensors";
  std::fstream(model, std::ios::in | std::ios::out | std::ios::binary).seekp(-1, std::ios::end).put('?');
  check_says(failure_of([&] { chevron::export_weights(here.path / "checkpoints", here.path / "other"); }),
             {"model-1.safetensors", "was damaged or exchanged"});
  check_says(failure_of([&] { chevron::export_weights(here.path / "saved", here.path / "other"); }),
             {"holds no whole checkpoint"});
}

TEST_CASE("names that repeat from stage to stage are told apart by the stage's number") {
  scratch_folder const here;
  chevron::weight_names const by_stage(
      [](std::size_t s, std::string const& name) { return "layers." + std::to_string(s) + "." + name; });
  auto const saved = on_two_ranks(build_stage, [&](chevron::trainer& t) { chevron::save_weights(t, here.path, by_stage); });
  auto const now = on_two_ranks(build_stage, [&](chevron::trainer& t) {
    step(t);
    chevron::load_weights(t, here.path, by_stage);
    check_says(failure_of([&] { chevron::save_weights(t, here.path / "other"); }),
               {"two tensors of the model would be called 1.bias"});
  });
  for (auto const& [name, value] : now) CHECK(at::equal(value, saved.at(name)));
}

TEST_CASE("folders that are damaged, or made to deceive, are refused") {
  auto const refused = [](std::string const& header, std::string const& bytes, std::vector<char const*> const& words) {
    scratch_folder const here;
    write_raw(here.path / "model.safetensors", header, bytes);
    nn::Sequential module = two_maps();
    check_says(failure_of([&] { chevron::load_weights(module, here.path); }), words);
  };
  refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
          std::string(12, 'x'), {"model.safetensors", "two tensors share the bytes from 4"});
  refused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", std::string(8, 'x'), {"no tensor has the bytes from 0"});
  refused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", std::string(8, 'x'), {"no tensor has the bytes from 4"});
  refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", std::string(5, 'x'), {"cut short"});
  refused(R"({"a":{"dtype":"F32","shape":[0,9223372036854775808],"data_offsets":[0,0]}})", "", {"no tensor can have"});
  refused(R"({"a":{"dtype":"F8_E8M0","shape":[4],"data_offsets":[0,4]}})", "xxxx", {"dtype that is not known here, F8_E8M0"});
  refused(R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", "xxxx", {"not made of whole numbers"});
  refused(R"({"a":[[[[[[]]]]]]})", "", {"within each other"});
  refused("{", "", {"no JSON of this kind"});

  auto const refused_index = [](std::string const& index, std::vector<char const*> const& words) {
    scratch_folder const here;
    write_content(here.path / "model.safetensors.index.json", index);
    write_raw(here.path / "part.safetensors", R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "xxxx");
    nn::Sequential module = two_maps();
    check_says(failure_of([&] { chevron::load_weights(module, here.path); }), words);
  };
  refused_index(R"({"weight_map":{"0.weight":"../../etc/passwd"}})", {"in which of the folder's files 0.weight is"});
  refused_index(R"({"weight_map":{"0.weight":7}})", {"in which of the folder's files"});
  refused_index(R"({"weight_map":[]})", {"has no weight_map"});
  refused_index(R"({"weight_map":)", {"index.json", "no JSON of this kind"});
  refused_index(R"({"weight_map":{"0.weight":"part.safetensors"}})",
                {"part.safetensors", "holds no tensor called 0.weight, though"});
  refused_index(R"({"weight_map":{"0.weight":"none.safetensors"}})", {"none.safetensors", "cannot be mapped: No such file", "Remedy: the whole folder"});

  scratch_folder const here;
  nn::Sequential module = two_maps();
  check_says(failure_of([&] { chevron::load_weights(module, here.path); }), {"holds neither model.safetensors nor", "Remedy"});
  write_content(here.path / "model.safetensors", number_of(std::uint64_t{1} << 62) + "{}");
  check_says(failure_of([&] { chevron::load_weights(module, here.path); }), {"header of 4611686018427387904 bytes"});
  fs::remove(here.path / "model.safetensors");
  fs::create_directory(here.path / "model.safetensors");
  check_says(failure_of([&] { chevron::load_weights(module, here.path); }), {"model.safetensors", "cannot be mapped"});
  fs::remove(here.path / "model.safetensors");
  REQUIRE(::mkfifo((here.path / "model.safetensors").c_str(), 0600) == 0);  // nobody will ever write to it
  check_says(failure_of([&] { chevron::load_weights(module, here.path); }), {"model.safetensors", "cannot be mapped"});
}

TEST_CASE("whatever bytes a folder's headers are changed to, it is loaded or refused") {
  scratch_folder const here;
  nn::Sequential const from = two_maps();
  chevron::save_weights(from, here.path, {}, {.shard_bytes = 35});
  std::mt19937 random(1);
  int refused = 0, loaded = 0;
  for (char const* name : {"model.safetensors.index.json", "model-00002-of-00003.safetensors"}) {
    std::string const whole = content_of(here.path / name);
    for (int i = 0; i < 400; ++i) {
      std::string changed = whole;
      for (auto k = random() % 3; k < 3; ++k) changed[random() % changed.size()] = "0189{}[]\",:x\0\xff"[random() % 15];
      if (random() % 4 == 0) changed.resize(random() % changed.size());
      write_content(here.path / name, changed);
      nn::Sequential module = two_maps();
      try {
        chevron::load_weights(module, here.path);
        ++loaded;
      } catch (chevron::checkpoint_error const&) {
        ++refused;
      }
    }
    write_content(here.path / name, whole);
  }
  CHECK(refused + loaded == 800);
  CHECK(refused > 300);
  CHECK(loaded > 3);  // values may change unseen: the format has no fingerprint
}
