// Parts of a step: fields of a record, and the order in which parts write and judge.
#include <string>
#include <vector>

#include <chevron/run.hpp>
#include <chevron/run/train/collective_numbers.hpp>
#include <chevron/run/train/record.hpp>
#include <chevron/run/train/step_parts.hpp>

#include <doctest/doctest.h>

namespace {

using chevron::detail::record;

/// Writes a rank's number to some fields, and judges by their sum over all ranks.
class summed_part final : public chevron::detail::step_part {
 public:
  summed_part(record& to, chevron::transport& comm, std::string name, std::size_t count)
      : comm_(&comm), name_(std::move(name)), numbers_(to.add(count)) {}
  void write(record& mine) override {
    for (double& number : mine.numbers(numbers_)) number = comm_->topology().global_rank + 1.0;
  }
  void judge(chevron::detail::records_of_ranks const& all, chevron::detail::decision& found, chevron::step_report& report,
             chevron::error_context const&) override {
    for (int r = 0; r < comm_->topology().world(); ++r) {
      for (double const number : all.numbers(r, numbers_)) report.loss += number;
    }
    found.loss_culprit += name_;
  }

 private:
  chevron::transport* comm_;
  std::string name_;
  record::field numbers_;
};

}  // namespace

TEST_CASE("fields of a record are apart, and every rank finds those of all ranks") {
  chevron::run_threads({.pipeline_ranks = 3}, [](chevron::transport& comm) {
    record mine;
    auto const one = mine.add(), three = mine.add(3), none = mine.add(0), last = mine.add();
    double const rank = comm.topology().global_rank;
    mine[one] = rank;
    mine.write(three, std::vector{10 + rank, 20 + rank});
    mine[last] = -rank;
    chevron::detail::records_of_ranks all;
    for (bool const split : {false, true}) {
      if (split) {
        all.start(comm, mine);
        mine.clear();  // of which the gather has a copy
        all.finish(comm);
      } else {
        all.gather(comm, mine);
      }
      for (int r = 0; r < 3; ++r) {
        CHECK(all.at(r, one) == r);
        CHECK(all.numbers(r, three)[0] == 10 + r);
        CHECK(all.numbers(r, three)[1] == 20 + r);
        CHECK(all.numbers(r, three)[2] == 0);
        CHECK(all.numbers(r, none).empty());
        CHECK(all.at(r, last) == -r);
      }
    }
    CHECK(mine[one] == 0);
  });
}

TEST_CASE("parts write, gather once, and judge in the order in which they were made") {
  chevron::run_threads({.pipeline_ranks = 2}, [](chevron::transport& comm) {
    chevron::detail::step_parts parts;
    parts.make<summed_part>(comm, "a", 1u);
    parts.make<summed_part>(comm, "b", 2u);
    chevron::detail::scalar_reader numbers;
    parts.begin(false);
    parts.complete(numbers);
    parts.write();
    parts.gather(comm);
    chevron::step_report report{.loss = 0};
    std::vector<std::string> seen;
    auto const found = parts.judge(report, {}, [&](chevron::detail::decision& so_far) { seen.push_back(so_far.loss_culprit); });
    CHECK(report.loss == 9);  // three fields, each 1 on rank 0 and 2 on rank 1
    CHECK(found.loss_culprit == "ab");
    CHECK(seen == std::vector<std::string>{"a", "ab"});
  });
}

TEST_CASE("each claim of collectives has numbers of its own") {
  chevron::detail::collective_numbers collectives;
  CHECK(collectives.claim(3) == 0);
  CHECK(collectives.claim() == 3);
  CHECK(collectives.claim(0) == 4);
  CHECK(collectives.claim() == 4);
}
