// The sampler of ranks: each rank's samples and their order, and the position of a resumed run.

#include <torch/data/dataloader.h>
#include <torch/data/datasets/base.h>
#include <torch/serialize.h>

#include <chevron/data/sampler.hpp>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>

namespace {

using chevron::distributed_sampler;
using chevron::topology;
using indices = std::vector<std::size_t>;

topology rank_of(int pipeline_ranks, int replicas, int global_rank) {
  return {.pipeline_ranks = pipeline_ranks, .replicas = replicas, .global_rank = global_rank};
}

/// The batches of one epoch.
std::vector<indices> pass(distributed_sampler& sampler, std::size_t batch_size) {
  std::vector<indices> out;
  sampler.reset();
  while (auto batch = sampler.next(batch_size)) out.push_back(*batch);
  return out;
}
indices joined(std::vector<indices> const& batches) {
  indices out;
  for (auto const& each : batches) out.insert(out.end(), each.begin(), each.end());
  return out;
}

/// A data set whose samples are their numbers.
struct numbers : torch::data::datasets::Dataset<numbers, std::size_t> {
  explicit numbers(std::size_t how_many) : count(how_many) {}
  std::size_t get(std::size_t i) override { return i; }
  std::optional<std::size_t> size() const override { return count; }
  std::size_t count;
};

std::string refusal(auto const& what) {
  try {
    what();
  } catch (chevron::usage_error const& e) {
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("ranks of a pipeline get the same samples, replicas others, together every one") {
  for (bool const shuffle : {true, false}) {
    std::vector<indices> by_replica(3);
    for (int r = 0; r < 6; ++r) {
      distributed_sampler sampler(36, rank_of(2, 3, r), {.batch_size = 4, .seed = 5, .shuffle = shuffle});
      CHECK(sampler.batches() == 3);
      indices const mine = joined(pass(sampler, 4));
      indices& of_replica = by_replica[static_cast<std::size_t>(r / 2)];
      if (r % 2 == 0) of_replica = mine;
      CHECK(mine == of_replica);
    }
    indices all = joined(by_replica);
    CHECK(all.size() == 36);
    if (!shuffle) CHECK(by_replica[1] == indices{1, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31, 34});
    if (shuffle) CHECK(!std::is_sorted(by_replica[0].begin(), by_replica[0].end()));
    CHECK(std::set<std::size_t>(all.begin(), all.end()).size() == 36);
  }
}

TEST_CASE("each epoch has another order, each seed, too; the same seed the same, on every machine") {
  distributed_sampler one(8, topology{}, {.batch_size = 8, .seed = 1}), again = one;
  auto const first = joined(pass(one, 8)), second = joined(pass(one, 8));
  CHECK(first != second);
  CHECK(joined(pass(again, 8)) == first);
  CHECK(joined(pass(again, 8)) == second);
  distributed_sampler other(8, topology{}, {.batch_size = 8, .seed = 2}),
      large(8, topology{}, {.batch_size = 8, .seed = 1ull << 32});
  CHECK(joined(pass(other, 8)) != first);
  CHECK(joined(pass(large, 8)) != first);
  // Written down: a checkpoint goes on with it wherever and with whatever library it is read.
  CHECK(first == indices{7, 6, 0, 5, 2, 3, 1, 4});
  CHECK(second == indices{4, 6, 1, 3, 0, 7, 2, 5});
}

TEST_CASE("all orders of a few samples come, about equally often") {
  std::vector<int> seen(6);
  distributed_sampler sampler(3, topology{}, {.batch_size = 3});
  for (int epoch = 0; epoch < 6000; ++epoch) {
    auto const order = pass(sampler, 3)[0];
    ++seen[order[0] * 2 + (order[1] > order[2] ? 1 : 0)];
  }
  for (int const times : seen) CHECK(std::abs(times - 1000) < 150);  // five standard deviations
}

TEST_CASE("what is left over at the end of an epoch is left out, or evened out") {
  for (int replicas : {1, 2, 3}) {
    std::vector<std::size_t> sizes;
    std::set<std::size_t> seen;
    for (int r = 0; r < replicas; ++r) {
      distributed_sampler whole(23, rank_of(1, replicas, r), {.batch_size = 4});
      auto const batches = pass(whole, 4);
      CHECK(batches.size() == whole.batches());
      CHECK(batches.size() == static_cast<std::size_t>(23 / replicas / 4));
      for (auto const& each : batches) CHECK(each.size() == 4);

      distributed_sampler ragged(23, rank_of(1, replicas, r), {.batch_size = 4, .drop_last = false});
      auto const all = pass(ragged, 4);
      CHECK(all.size() == ragged.batches());
      std::vector<std::size_t> mine;
      for (auto const& each : all) mine.push_back(each.size());
      if (r == 0) sizes = mine;
      CHECK(mine == sizes);
      for (std::size_t const i : joined(all)) seen.insert(i);
    }
    CHECK(seen.size() == 23);
  }
}

TEST_CASE("a batch of all replicas holds the same samples, however many they are") {
  std::vector<std::set<std::size_t>> wanted;
  for (int replicas : {1, 2, 4}) {
    std::size_t const batch_size = 8 / static_cast<std::size_t>(replicas);
    std::vector<std::set<std::size_t>> batches;
    for (int r = 0; r < replicas; ++r) {
      distributed_sampler sampler(50, rank_of(1, replicas, r), {.batch_size = batch_size, .seed = 3});
      auto const mine = pass(sampler, batch_size);
      batches.resize(mine.size());
      for (std::size_t k = 0; k < mine.size(); ++k) batches[k].insert(mine[k].begin(), mine[k].end());
    }
    if (wanted.empty()) wanted = batches;
    CHECK(batches == wanted);
  }
}

TEST_CASE("under a loader with workers it goes on at the batch that training has come to") {
  for (std::size_t const workers : {0u, 2u}) {
    auto const options = torch::data::DataLoaderOptions(4).workers(workers).max_jobs(2 * workers);
    auto const wanted = [&] {
      std::vector<indices> out;
      auto const loader =
          torch::data::make_data_loader(numbers(30), distributed_sampler(30, rank_of(2, 2, 3), {.batch_size = 4}), options);
      for (int epoch = 0; epoch < 4; ++epoch) {
        for (auto& batch : *loader) out.push_back(batch);
      }
      return out;
    }();
    CHECK(wanted.size() == 12);
    // A run that ends in the middle of an epoch, with batches fetched that it never used.
    for (std::size_t const used : {0u, 1u, 3u, 5u, 6u, 11u}) {
      std::vector<indices> got;
      distributed_sampler sampler(30, rank_of(2, 2, 3), {.batch_size = 4});
      {
        auto const loader = torch::data::make_data_loader(numbers(30), sampler, options);
        while (got.size() < used) {
          for (auto& batch : *loader) {
            got.push_back(batch);
            if (got.size() == used) break;
          }
        }
      }
      sampler.start_at(static_cast<long>(got.size()));
      CHECK(sampler.epoch() == used / 3);
      auto const loader = torch::data::make_data_loader(numbers(30), sampler, options);
      for (std::size_t epoch = sampler.epoch(); epoch < 4; ++epoch) {
        for (auto& batch : *loader) got.push_back(batch);
      }
      CHECK(got == wanted);
    }
  }
}

TEST_CASE("it is saved and loaded as other samplers are") {
  distributed_sampler sampler(30, rank_of(1, 2, 1), {.batch_size = 4, .seed = 9});
  pass(sampler, 4);
  sampler.reset();
  sampler.next(4);
  std::stringstream file;
  {
    torch::serialize::OutputArchive out;
    sampler.save(out);
    out.save_to(file);
  }
  torch::serialize::InputArchive in;
  in.load_from(file);
  distributed_sampler resumed(30, rank_of(1, 2, 1), {.batch_size = 4, .seed = 9});
  resumed.load(in);
  CHECK(resumed.epoch() == 1);
  resumed.reset();  // as a loader does
  CHECK(resumed.next(4) == sampler.next(4));
  distributed_sampler other(30, rank_of(1, 2, 1), {.batch_size = 4, .seed = 8});
  CHECK(refusal([&] { other.load(in); }) ==
        "a sampler was saved with 30 samples, 8 in a batch of all replicas, shuffled by seed 9, this one has 30 samples, 8 in a "
        "batch of "
        "all replicas, shuffled by seed 8: their batches differ");
}

TEST_CASE("a data set may grow from one epoch to the next") {
  distributed_sampler sampler(8, topology{}, {.batch_size = 4});
  CHECK(pass(sampler, 4).size() == 2);
  sampler.reset(12);
  indices all;
  while (auto batch = sampler.next(4)) all.insert(all.end(), batch->begin(), batch->end());
  CHECK(std::set<std::size_t>(all.begin(), all.end()).size() == 12);
  CHECK(sampler.epoch() == 1);
}

TEST_CASE("what cannot be sampled is said") {
  CHECK(refusal([] { distributed_sampler(8, topology{}, {.batch_size = 4}).start_at(-1); }) ==
        "a sampler cannot start at batch -1: they are counted from 0");
  auto const made = [](std::size_t size, chevron::sampler_options options) {
    return [=] { distributed_sampler(size, rank_of(1, 3, 0), options); };
  };
  CHECK(refusal(made(10, {})) == "a sampler needs sampler_options::batch_size, the number of samples in a batch of one replica");
  CHECK(refusal(made(10, {.batch_size = 4})) ==
        "a data set of 10 samples has no batch of 4 for each of 3 replicas: smaller batches, or drop_last = false");
  CHECK(refusal(made(10, {.batch_size = 4, .drop_last = false})) == "");
  CHECK(refusal(made(0, {.batch_size = 4, .drop_last = false})) != "");
  distributed_sampler sampler(30, topology{}, {.batch_size = 4});
  CHECK(refusal([&] { sampler.next(8); }) ==
        "the data loader asks for batches of 8 samples, but its sampler has batches of 4: give both the same batch_size, that of "
        "one replica");
}
