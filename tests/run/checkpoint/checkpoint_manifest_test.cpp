// A checkpoint's manifest: a change of any bit is noticed, and the content of an undamaged manifest is checked, too.
#include "support/scratch_folder.hpp"

#include <climits>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include <unistd.h>

#include <chevron/checkpoint/checkpoint_manifest.hpp>

#include <doctest/doctest.h>

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

using scratch = scratch_folder;

json some_manifest() {
  json out = {{"format", chevron::detail::manifest_format},
              {"chevron", "0.1.0"},
              {"job", "0123456789abcdef"},
              {"next_step", 9},
              {"stages", 2},
              {"layout", {{"schedule", "1F1B"}, {"ranks", 2}, {"replicas", 1}}},
              {"optimizer", "AdamW"},
              {"words", {{"seed", "7"}, {"data", "12 bytes"}}},
              {"same", {{"tied in and out", {{0, "table"}, {1, "head"}}}}},
              {"base", json::array({{1, "frozen", "Float [2] 0123456789abcdef"}})},
              {"cuts", json::array({{1, "fused", 0, {12, 12}}})},
              {"loss_scale", {{"factor", 512.0}, {"steps", 3}}}};
  for (char const* file : {"model-0", "model-1", "optimizer-0", "optimizer-1"})
    out["files"][std::string(file) + ".safetensors"] = "00112233445566aa";
  return out;
}

/// A checkpoint of step 9, of which only the manifest is there.
struct saved : scratch {
  fs::path folder = path / "step-00000009";
  saved() { fs::create_directory(folder); }
  void put(std::string const& text) const { std::ofstream(folder / "manifest.json", std::ios::binary) << text; }
  /// The error of reading the manifest; empty: none.
  std::string said() const {
    try {
      chevron::detail::read_manifest(folder);
    } catch (chevron::checkpoint_error const& e) {
      return e.what();
    }
    return {};
  }
  std::string said_of(std::string const& text) const {
    put(text);
    return said();
  }
};

bool contains(std::string const& text, std::string const& words) { return text.find(words) != std::string::npos; }

}  // namespace

TEST_CASE("what was written is read, and is JSON that others read") {
  saved const at;
  std::string const text = chevron::detail::with_fingerprint(some_manifest());
  at.put(text);
  auto const about = chevron::detail::read_manifest(at.folder);
  CHECK(about.job == "0123456789abcdef");
  CHECK(about.next_step == 9);
  CHECK(about.stages == 2);
  CHECK(about.optimizer == "AdamW");
  CHECK(about.metadata.at("data") == "12 bytes");
  CHECK(about.files.size() == 4);
  CHECK(about.same.at("tied in and out").size() == 2);
  CHECK(about.base.at({1, "frozen"}) == "Float [2] 0123456789abcdef");
  CHECK(about.cuts.at({1, "fused"}).along == 0);
  CHECK(about.cuts.at({1, "fused"}).blocks == std::vector<std::int64_t>{12, 12});
  CHECK(about.scale->factor == 512);
  CHECK(about.scale->steps == 3);
  CHECK(json::parse(text).at("fingerprint") == about.fingerprint);
}

TEST_CASE("one bit flipped anywhere is found, and the manifest is named") {
  saved const at;
  std::string const text = chevron::detail::with_fingerprint(some_manifest());
  int accepted = 0, other_words = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string flipped = text;
      flipped[i] = static_cast<char>(flipped[i] ^ (1 << bit));
      std::string const said = at.said_of(flipped);
      accepted += said.empty() ? 1 : 0;
      other_words += contains(said, "manifest.json: was damaged, or changed by hand") ? 0 : 1;
    }
  }
  CHECK(text.size() > 700);
  CHECK(accepted == 0);
  CHECK(other_words == 0);
}

TEST_CASE("cut short, made longer, or not a manifest at all") {
  saved const at;
  std::string const text = chevron::detail::with_fingerprint(some_manifest());
  int accepted = 0;
  for (std::size_t length = 0; length < text.size(); ++length) accepted += at.said_of(text.substr(0, length)).empty() ? 1 : 0;
  CHECK(accepted == 0);
  for (std::string const& more :
       {text + " ", text + "\n", " " + text, text + text, std::string("{}"), std::string("[1]"), std::string(1000, 0)}) {
    CAPTURE(more);
    CHECK(contains(at.said_of(more), "manifest.json"));
  }
  CHECK(contains(at.said_of(std::string(1 << 20, '[')), "manifest.json"));
  at.put(text);
  fs::resize_file(at.folder / "manifest.json", (16 << 20) + 1);
  CHECK(contains(at.said(), "it has 16777217 bytes"));
  fs::remove(at.folder / "manifest.json");
  CHECK(contains(at.said(), "cannot be read"));
  fs::create_directory(at.folder / "manifest.json");
  CHECK(contains(at.said(), "cannot be read"));
}

TEST_CASE("changed by hand: a number, a key, a key twice") {
  saved const at;
  std::string const text = chevron::detail::with_fingerprint(some_manifest());
  auto const with = [&](std::string const& from, std::string const& to) {
    std::string changed = text;
    REQUIRE(contains(changed, from));
    changed.replace(changed.find(from), from.size(), to);
    CAPTURE(to);
    CHECK(contains(at.said_of(changed), "was damaged, or changed by hand"));
  };
  for (char const* step : {"8", "0", "1", "9223372036854775808", "18446744073709551615", "-9", "9.5", "9, \"next_step\": 5"})
    with("\"next_step\": 9", std::string("\"next_step\": ") + step);
  with("\"seed\"", "\"sEed\"");
  with("\"factor\": 512.0", "\"factor\": 256.0");
}

TEST_CASE("a whole manifest may still say what cannot be") {
  saved const at;
  auto const says = [&](std::function<void(json&)> const& change, char const* words) {
    json one = some_manifest();
    change(one);
    std::string const said = at.said_of(chevron::detail::with_fingerprint(one));
    CAPTURE(words);
    CAPTURE(said);
    CHECK(contains(said, "manifest.json"));
    CHECK(contains(said, words));
  };
  for (std::uint64_t const step : {std::uint64_t{8}, std::uint64_t{0}, std::uint64_t{10}})
    says([&](json& m) { m["next_step"] = step; }, "lies in the folder step-00000009");
  for (json const& step : {json(std::uint64_t{1} << 63), json(UINT64_MAX), json(-9), json(9.0), json("9"), json(nullptr)})
    says([&](json& m) { m["next_step"] = step; }, "'next_step' is no number of a step");
  for (char const* key : {"job", "next_step", "stages", "optimizer", "files", "words", "same", "base", "format", "chevron"})
    says([&](json& m) { m.erase(key); }, "is no manifest that can be read");
  says([](json& m) { m["job"] = ""; }, "'job' is empty");
  says([](json& m) { m["words"]["seed"] = 7; }, "is no manifest");
  for (json const& stages : {json(1), json(3), json(0), json(UINT64_MAX), json((std::uint64_t{1} << 63) + 2)})
    says([&](json& m) { m["stages"] = stages; }, "two files for each stage");
  says([](json& m) { m["files"].erase("model-1.safetensors"), m["files"]["model-7.safetensors"] = "0"; },
       "two files for each stage");
  for (json const& base : {json(7), json::object()}) says([&](json& m) { m["base"] = base; }, "'base' is no list");
  for (json const& one : {json::array({-1, "w", "x"}), json::array({0, "w"}), json("w")})
    says([&](json& m) { m["base"] = json::array({one}); }, "'base' does not name stages and tensors");
  says([](json& m) { m["base"] = json::array({{2, "w", "x"}}); }, "'base' names a stage that does not exist");
  says([](json& m) { m["cuts"] = 7; }, "'cuts' is no list");
  for (json const& one :
       {json(7), json::array({1, "w", 0}), json::array({1, "w", -1, json::array({2})}), json::array({1, "w", 0, 2})})
    says([&](json& m) { m["cuts"] = json::array({one}); }, "'cuts' does not name stages, tensors and blocks");
  says([](json& m) { m["cuts"] = json::array({{2, "w", 0, {2}}}); }, "'cuts' names a stage that does not exist");
  says([](json& m) { m["cuts"] = json::array({{1, "w", 0, {-2}}}); }, "'cuts' has a size that is no number");
  says([](json& m) { m["same"]["x"] = {{2, "w"}}; }, "names a stage that does not exist");
  says([](json& m) { m["same"]["x"] = {{-1, "w"}}; }, "does not name stages and tensors");
  says([](json& m) { m["same"]["x"] = json::array({json::array({0})}); }, "does not name stages and tensors");
  for (json const& factor : {json(0), json(-2), json("1"), json(nullptr)})
    says([&](json& m) { m["loss_scale"]["factor"] = factor; }, "the factor of the loss is no number above 0");
  for (json const& steps : {json(-1), json(1e20), json(std::int64_t{INT_MAX} + 1)})
    says([&](json& m) { m["loss_scale"]["steps"] = steps; }, "the factor of the loss has no number of steps");
  says([](json& m) { m["layout"]["a"]["b"]["c"]["d"] = json::object(); }, "within each other");

  // A key twice in a manifest that ends with the right fingerprint.
  std::string text = chevron::detail::with_fingerprint(some_manifest());
  auto const end = text.rfind(chevron::detail::before_fingerprint);
  text = text.substr(0, end) + ", \"seed\": 1, \"seed\": 2";
  chevron::detail::byte_fingerprint sum;
  sum.add(text.data(), text.size());
  text += std::string(chevron::detail::before_fingerprint) + sum.text() + std::string(chevron::detail::after_fingerprint);
  CHECK(contains(at.said_of(text), "'seed' is there twice"));
}

TEST_CASE("a manifest of the format before, which knows of no base, is read") {
  saved const at;
  json before = some_manifest();
  before["format"] = 3;
  before.erase("base");
  at.put(chevron::detail::with_fingerprint(before));
  auto const about = chevron::detail::read_manifest(at.folder);
  CHECK(about.next_step == 9);
  CHECK(about.base.empty());
}

TEST_CASE("a manifest of another format says which version wrote it") {
  saved const at;
  json old = some_manifest();
  old["format"] = 2;
  old["chevron"] = "0.0.9";
  old.erase("job");
  std::string const said = at.said_of(old.dump(2) + "\n");
  CHECK(contains(said, "its format is 2, written by Chevron 0.0.9"));
  CHECK(contains(said, "reads formats 3 to " + std::to_string(chevron::detail::manifest_format)));
  CHECK(contains(said, "Remedy"));
  json newer = some_manifest();
  newer["format"] = 1000;
  newer["chevron"] = "9.9.9";
  CHECK(contains(at.said_of(chevron::detail::with_fingerprint(newer)), "its format is 1000, written by Chevron 9.9.9"));
  // The right format without a fingerprint is no earlier one's.
  CHECK(contains(at.said_of(some_manifest().dump(2) + "\n"), "was damaged, or changed by hand"));
}

TEST_CASE("a checkpoint keeps its name, or gets one that is no step's; what is damaged names the one before") {
  saved const at;
  at.put(chevron::detail::with_fingerprint(some_manifest()));
  CHECK(at.said().empty());
  fs::create_directory_symlink(at.folder, at.path / "latest");
  CHECK(chevron::detail::read_manifest(at.path / "latest").next_step == 9);
  CHECK(chevron::detail::read_manifest(at.folder / "").next_step == 9);
  fs::copy(at.folder, at.path / "best", fs::copy_options::recursive);
  CHECK(chevron::detail::read_manifest(at.path / "best").next_step == 9);
  fs::copy(at.folder, at.path / "step-00000005", fs::copy_options::recursive);
  CHECK_THROWS_WITH_AS(chevron::detail::read_manifest(at.path / "step-00000005"),
                       doctest::Contains("is of step 9, and lies in the folder step-00000005"), chevron::checkpoint_error);
  CHECK(contains(at.said_of("damaged"), "move step-00000009 away; the last checkpoint is then step-00000005"));
}
