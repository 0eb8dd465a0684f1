#include <chevron/run/core/flight_log.hpp>

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>

#include <nlohmann/json.hpp>

#include <doctest/doctest.h>

#include <chevron/catalogue/catalogue.hpp>

// A rank's flight log: the record of its last actions, and the file. tests/process/explain.sh tests logs of real jobs.

namespace {

using namespace chevron;
using nlohmann::json;

action const f0 = make_action(kind::forward, 1, 0), f1 = make_action(kind::forward, 1, 1), b0 = make_action(kind::backward, 1, 0);

/// A folder that CHEVRON_FLIGHT_LOGS names for as long as this lives.
struct rings_in {
  std::filesystem::path folder = std::filesystem::temp_directory_path() / ("chevron-flight-logs-" + std::to_string(::getpid()));
  explicit rings_in(std::string const& other = "") {
    ::setenv("CHEVRON_FLIGHT_LOGS", other.empty() ? folder.c_str() : other.c_str(), 1);
  }
  ~rings_in() {
    ::unsetenv("CHEVRON_FLIGHT_LOGS");
    std::error_code ignored;
    std::filesystem::remove_all(folder, ignored);
  }
  json read(int rank) const {
    std::ifstream in(folder / ("rank-" + std::to_string(rank) + ".json"));
    std::stringstream text;
    text << in.rdbuf();
    return json::parse(text.str(), nullptr, false);
  }
  long count() const {
    std::error_code none;
    auto const all = std::filesystem::directory_iterator(folder, none);
    return none ? 0 : std::distance(begin(all), end(all));
  }
};

/// A rank of 1F1B that has come to its second action in step 7.
std::shared_ptr<rank_trace> record() {
  auto out = std::make_shared<rank_trace>();
  out->reserve(8);
  out->begin_step(6);
  for (action const a : {f0, f1, b0}) out->ends(out->add(a));
  out->begin_step(7);
  out->ends(out->add(f0));
  out->starts(out->add(f1));
  return out;
}
plan const two = catalogue::make_plan("1F1B", {.ranks = 2, .micro_batches = 2});
topology const second{.pipeline_ranks = 2, .replicas = 1, .global_rank = 1};
failure const lost{.code = 3, .rank = 0, .step = 7, .action = "0F1", .reason = "rank 0 \"was\" lost\n\x1b"};

TEST_CASE("a record tells of two steps, and what is under way") {
  auto const all = record()->flight_log();
  REQUIRE(all.size() == 5);
  CHECK(all[0].step == 6);
  CHECK(all[2].event.op == b0);
  CHECK(all[3].step == 7);
  for (std::size_t i = 0; i < 5; ++i) CHECK(all[i].under_way == (i == 4));
  CHECK(all[4].event.start >= all[4].event.reached);
  for (std::size_t i = 1; i < 5; ++i) CHECK(all[i].event.reached >= all[i - 1].event.end);
}

TEST_CASE("a record without room grows, and two steps back is forgotten") {
  rank_trace one;
  for (long step = 0; step < 3; ++step) {
    one.begin_step(step);
    for (int i = 0; i < 40; ++i) one.ends(one.add(f0));
  }
  CHECK(one.entries().size() == 40);
  auto const all = one.flight_log();
  REQUIRE(all.size() == 80);
  CHECK(all.front().step == 1);
  CHECK(all.back().step == 2);
}

TEST_CASE("a file holds the plan, the actions, the failure and the wait") {
  rings_in const here;
  chevron::detail::flight_recorder const keeper(second, two, record());
  chevron::detail::last_failed_wait = {
      1, lost, {.peer = 0, .what = make_action(kind::receive_forward, 1, 1), .step = 7}, now_ns()};
  chevron::detail::write_flight_logs({.reason = "not this one"}, 1);
  chevron::detail::last_failed_wait = {};
  json const flight_log = here.read(1);
  REQUIRE(flight_log.is_object());
  CHECK(here.count() == 1);
  CHECK(flight_log["rank"] == 1);
  CHECK(flight_log["pipeline_ranks"] == 2);
  CHECK(flight_log["schedule"] == "1F1B");
  CHECK(flight_log["microbatches"] == 2);
  CHECK(flight_log["plan"] == json({"0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"}));
  CHECK(flight_log["failure"]["reason"] == lost.reason);
  CHECK(flight_log["failure"]["rank"] == 0);
  CHECK(flight_log["waiting"]["peer"] == 0);
  CHECK(flight_log["waiting"]["action"] == "1RECV_F1");
  REQUIRE(flight_log["actions"].size() == 5);
  CHECK(flight_log["actions"][0][1] == "1F0");
  CHECK(flight_log["actions"][3][4].is_number_integer());
  CHECK(flight_log["actions"][4][4].is_null());
  CHECK(flight_log["left_out"] == 0);
}

TEST_CASE("what an exception destroys is still there, what ends well is not") {
  rings_in const here;
  { chevron::detail::flight_recorder const keeper(second, two, record()); }
  chevron::detail::write_flight_logs(lost, -1);
  CHECK(here.count() == 0);
  try {
    chevron::detail::flight_recorder const keeper(second, two, record());
    throw std::runtime_error("x");
  } catch (std::runtime_error const&) {
    chevron::detail::write_flight_logs(lost, -1);
  }
  CHECK(here.read(1)["failure"]["rank"] == 0);
  CHECK(here.read(1)["waiting"].is_null());
  // The next one of this rank takes its place.
  chevron::detail::flight_recorder const keeper(second, two, record());
  CHECK(chevron::detail::flight_recorders::instance().all.size() == 1);
}

TEST_CASE("what was begun last counts, and what its own rank has written stays") {
  rings_in const here;
  plan const evaluates = catalogue::make_plan("ForwardOnly", {.ranks = 2, .micro_batches = 2});
  auto const before = record();
  auto const after = record();
  chevron::detail::flight_recorder const second_of_two(second, evaluates, after);
  chevron::detail::flight_recorder const first_of_two(second, two, before);
  chevron::detail::write_flight_logs(lost, 1);
  CHECK(here.read(1)["forward_only"] == true);
  chevron::detail::write_flight_logs({.code = 4, .reason = "later"}, -1);
  CHECK(here.read(1)["failure"]["code"] == 3);
}

TEST_CASE("a file stays small, whatever is to be told") {
  auto const long_step = std::make_shared<rank_trace>();
  long_step->reserve(20000);
  long_step->begin_step(1);
  for (int i = 0; i < 20000; ++i) long_step->ends(long_step->add(f0));
  chevron::detail::kept_actions const kept{
      second, "1F1B", {2, 65535, 1}, false, std::string(std::size_t{600} << 10, '0') + "\n", long_step};
  std::string const text = chevron::detail::flight_log_text(kept, {.reason = std::string(1 << 20, '\x01')}, nullptr);
  CHECK(text.size() < (std::size_t{1} << 20));
  CHECK(json::parse(text)["left_out"] == 20000 - 4096);
  // A plan that has no room is left out whole.
  plan const large = catalogue::make_plan("GPipe", {.ranks = 64, .micro_batches = 1024});
  CHECK(chevron::detail::csv_of(large).empty());
}

TEST_CASE("a pair is one cell of the plan") {
  plan const pairs = catalogue::make_plan("DualPipeV", {.ranks = 2, .micro_batches = 6});
  CHECK(chevron::detail::csv_of(pairs).find("OVERLAP_F_B") != std::string::npos);
}

TEST_CASE("where nothing can be written, nothing is said") {
  chevron::detail::flight_recorder const unkept(second, two, record());
  chevron::detail::write_flight_logs(lost, 1);  // CHEVRON_FLIGHT_LOGS is not set
  for (std::string const folder : {"/dev/null/x", "/proc", "/nowhere/at/all"}) {
    rings_in const here(folder);
    chevron::detail::flight_recorder const keeper(second, two, record());
    chevron::detail::write_flight_logs(lost, 1);
    CHECK(here.count() == 0);
  }
}

TEST_CASE("a rank that fails before it has anything to do says so, if it is one of several") {
  rings_in const here;
  chevron::detail::write_flight_logs(lost, 3, {.pipeline_ranks = 4, .replicas = 1, .global_rank = 3});
  CHECK(here.read(3)["plan"].empty());
  CHECK(here.read(3)["actions"].empty());
  chevron::detail::write_flight_logs(lost, 0, {});
  CHECK(here.count() == 1);
}

}  // namespace
