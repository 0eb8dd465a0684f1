// Batches that were accumulated and never stepped are told when the trainer ends.
#include <stdexcept>
#include <string>
#include <vector>

#include <c10/util/Exception.h>

#include <chevron/run.hpp>

#include "support/small_model.hpp"

#include <doctest/doctest.h>

using namespace small_model;

namespace {

/// Stores LibTorch's warnings of this thread.
class kept_warnings : public c10::WarningHandler {
 public:
  /// \param refuses whether each warning ends in an exception
  explicit kept_warnings(bool refuses) : before_(c10::WarningUtils::get_warning_handler()), refuses_(refuses) {
    c10::WarningUtils::set_warning_handler(this);
  }
  ~kept_warnings() override { c10::WarningUtils::set_warning_handler(before_); }
  void process(c10::Warning const& one) override {
    all.push_back(one.msg());
    if (refuses_) throw std::runtime_error("no warnings here");
  }
  std::vector<std::string> all;

 private:
  c10::WarningHandler* before_;
  bool refuses_;
};

struct course {
  int batches = 0;  // accumulated, after one whole step
  bool steps = false, throws = false, refuses = false;
};

/// The warnings of all ranks, in the order of ranks.
std::vector<std::vector<std::string>> warnings_of(course const& how) {
  std::vector<std::vector<std::string>> all(2);
  try {
    chevron::run_threads({.pipeline_ranks = 2}, [&](chevron::transport& comm) {
      kept_warnings kept(how.refuses);
      struct at_the_end {
        std::vector<std::string>& to;
        kept_warnings& from;
        ~at_the_end() { to = from.all; }
      } const copies{all[static_cast<std::size_t>(comm.topology().global_rank)], kept};
      chevron::trainer train(setup(plan_of("1F1B", 2, 2), comm, build_stage));
      auto const data = make_batch(4, 1);
      train.step(data.input, data.target);
      for (int i = 0; i < how.batches; ++i) train.accumulate(data.input, data.target, 4 * (how.batches + 1));
      if (how.steps) train.step(data.input, data.target, 4 * (how.batches + 1));
      if (how.throws) throw std::runtime_error("the end of the data");
    });
  } catch (std::exception const&) {
    CHECK(how.throws);
  }
  return all;
}

}  // namespace

TEST_CASE("a trainer that ends with accumulated batches says so, on rank 0 alone") {
  auto const two = warnings_of({.batches = 2});
  REQUIRE(two[0].size() == 1);
  CHECK(two[0][0].find("the trainer ends with 2 accumulated batches that step 1 never took: no parameter learns from them. Remedy:") == 0);
  CHECK(two[1].empty());
  auto const one = warnings_of({.batches = 1});
  REQUIRE(one[0].size() == 1);
  CHECK(one[0][0].find("1 accumulated batch that step 1") != std::string::npos);
  CHECK(warnings_of({.batches = 1, .refuses = true})[0].size() == 1);
}

TEST_CASE("a trainer whose batches were all stepped, or that an exception ends, says nothing of batches") {
  for (course const& how : {course{}, course{.batches = 2, .steps = true}, course{.batches = 2, .throws = true}}) {
    for (auto const& of_rank : warnings_of(how)) CHECK(of_rank.empty());
  }
}
