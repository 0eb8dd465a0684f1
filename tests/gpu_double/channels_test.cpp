// timeout: 60
// Channels of copies by themselves: messages, sums, shares, gathers, and how they end.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <future>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <chevron/run/core/host_copy.hpp>
#include <chevron/transports/gpu/copy_streams.hpp>

#include <doctest/doctest.h>

#include "gpu_double/within.hpp"

namespace {

using namespace std::chrono_literals;
using steady = std::chrono::steady_clock;

/// So that messages have several pieces, sums have some, and flags go round beyond 2³².
constexpr chevron::copy_limits small_pieces{.edge_piece = 16, .edge_pieces = 3, .sum_piece = 32, .first = 0xffffffe0};

at::Device gpu(int index) { return {at::kCUDA, static_cast<c10::DeviceIndex>(index)}; }
constexpr auto never = [] { return false; };

/// One rank's end of a channel, with its stream.
struct end_of_channel {
  chevron::copy_streams streams;
  chevron::copy_streams::stream on = streams.make_stream();
  chevron::copy_streams::event done = streams.make_event();
  chevron::copy_streams::channel way;
  explicit end_of_channel(int of_gpu, chevron::copy_limits const& limits = small_pieces) : streams(gpu(of_gpu), limits) {}

  /// Makes the stream `on` wait for this thread's computations.
  void begin() {
    streams.record(done);
    streams.wait(on, done);
  }
  void end() { streams.record(done, on); }
  bool ends_within(std::chrono::milliseconds longest) {
    auto const until = steady::now() + longest;
    return streams.wait_on_host(done, [&] { return steady::now() > until; });
  }
};

/// Connected ends of a channel between ranks that are threads: `connect` waits for all of them.
std::vector<std::unique_ptr<end_of_channel>> joined(chevron::channel_use use, std::vector<int> const& gpus,
                                                    chevron::copy_limits const& limits = small_pieces) {
  std::vector<std::unique_ptr<end_of_channel>> out;
  for (int const of_gpu : gpus) out.push_back(std::make_unique<end_of_channel>(of_gpu, limits));
  std::string const id = chevron::copy_streams::make_id();
  std::vector<std::thread> threads;
  int const size = static_cast<int>(gpus.size());
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      end_of_channel& mine = *out[static_cast<std::size_t>(r)];
      mine.way = mine.streams.connect("a channel", id, use, r, size, -1, never);
    });
  }
  for (auto& each : threads) each.join();
  return out;
}

/// Offsets of shares: equal ones, all but the last empty, and uneven ones.
std::vector<std::vector<std::int64_t>> cuts_of(std::int64_t numbers, int size) {
  std::vector<std::int64_t> equal, last(static_cast<std::size_t>(size), 0), uneven;
  for (int r = 0; r <= size; ++r) equal.push_back(numbers * r / size);
  last.push_back(numbers);
  for (int r = 0; r <= size; ++r) uneven.push_back(numbers * r * r / (size * size));
  return {equal, last, uneven};
}

/// Rows of bytes of so many sizes, of a rank: the same wherever they are made.
std::vector<at::Tensor> rows(std::vector<std::int64_t> const& sizes, int seed) {
  auto const generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(seed));
  std::vector<at::Tensor> out;
  for (std::int64_t const size : sizes) out.push_back(at::randint(0, 256, {size}, generator, at::kByte));
  return out;
}
std::vector<at::Tensor> on(at::Device where, std::vector<at::Tensor> values) {
  for (at::Tensor& each : values) each = each.to(where);
  return values;
}
/// That of rank r on GPU r.
std::vector<at::Tensor> each_on_its_gpu(std::vector<at::Tensor> values) {
  for (std::size_t r = 0; r < values.size(); ++r) values[r] = values[r].to(gpu(static_cast<int>(r)));
  return values;
}

}  // namespace

TEST_CASE("messages come in order and whole, of whatever sizes") {
  std::vector<std::vector<std::int64_t>> const messages = {{1},         {16},   {17, 3},          {5, 5, 5, 5, 5}, {48},
                                                           {49, 1, 15}, {1000}, {16, 16, 16, 16}, {31, 500, 2}};
  auto const ends = joined(chevron::channel_use::edge, {0, 1});
  within(20s, "messages", [&] {
    c10::cuda::CUDAGuard const here(gpu(1));
    auto const sending = std::async(std::launch::async, [&] {
      for (int i = 0; i < 36; ++i) {
        auto const values = on(gpu(0), rows(messages[static_cast<std::size_t>(i) % messages.size()], i));
        ends[0]->begin();
        ends[0]->streams.send(ends[0]->way, ends[0]->on, values);
        ends[0]->end();
        ends[0]->ends_within(20s);
      }
    });
    for (int i = 0; i < 36; ++i) {
      auto const wanted = rows(messages[static_cast<std::size_t>(i) % messages.size()], i);
      std::vector<at::Tensor> into;
      for (auto const& each : wanted) into.push_back(at::zeros_like(each, at::TensorOptions().device(gpu(1))));
      ends[1]->begin();
      ends[1]->streams.receive(ends[1]->way, ends[1]->on, into);
      ends[1]->end();
      CHECK(ends[1]->ends_within(20s));
      CAPTURE(i);
      for (std::size_t t = 0; t < wanted.size(); ++t) CHECK(at::equal(into[t].cpu(), wanted[t]));
    }
    sending.wait();
  });
}

TEST_CASE("a sender goes on until the receiver's room is full, and the host of neither waits") {
  auto const ends = joined(chevron::channel_use::edge, {0, 1});
  std::vector<at::Tensor> const three = on(gpu(0), rows({48}, 1)), four = on(gpu(0), rows({16}, 2));
  within(20s, "a sender", [&] {
    ends[0]->begin();
    ends[0]->streams.send(ends[0]->way, ends[0]->on, three);
    ends[0]->end();
    CHECK(ends[0]->ends_within(10s));
    ends[0]->streams.send(ends[0]->way, ends[0]->on, four);
    ends[0]->end();
    CHECK_FALSE(ends[0]->ends_within(300ms));
    std::vector<at::Tensor> const into = {at::zeros({48}, at::TensorOptions(at::kByte).device(gpu(1)))};
    ends[1]->begin();
    ends[1]->streams.receive(ends[1]->way, ends[1]->on, into);
    CHECK(ends[0]->ends_within(10s));
  });
}

TEST_CASE("sums are added in the order of ranks, gathers are of all, whatever their sizes") {
  for (int const size : {2, 3, 4}) {
    CAPTURE(size);
    std::vector<int> gpus(static_cast<std::size_t>(size));
    std::iota(gpus.begin(), gpus.end(), 0);
    auto const ends = joined(chevron::channel_use::sum, gpus);
    auto const gathers = joined(chevron::channel_use::gather, gpus);
    for (auto const type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      for (std::int64_t const count : {1, 7, 8, 100}) {
        CAPTURE(count);
        std::vector<at::Tensor> values;
        auto const generator = at::make_generator<at::CPUGeneratorImpl>(7);
        for (int r = 0; r < size; ++r) values.push_back((at::randn({count}, generator) * 1000).to(type));
        at::Tensor wanted = values[0].clone();
        for (std::size_t r = 1; r < values.size(); ++r) wanted.add_(values[r]);
        values = each_on_its_gpu(values);
        within(20s, "a sum", [&] {
          std::vector<std::thread> threads;
          for (std::size_t r = 0; r < values.size(); ++r) {
            threads.emplace_back([&, r] {
              ends[r]->begin();
              ends[r]->streams.sum(ends[r]->way, ends[r]->on, values[r]);
              ends[r]->end();
              ends[r]->ends_within(20s);
            });
          }
          for (auto& each : threads) each.join();
        });
        for (auto const& each : values) CHECK(at::equal(each.cpu(), wanted));
      }
    }
    for (auto const& cut : cuts_of(100, size)) {
      auto const generator = at::make_generator<at::CPUGeneratorImpl>(9);
      std::vector<at::Tensor> brought;
      for (int r = 0; r < size; ++r) brought.push_back(at::randn({100}, generator, at::kDouble).div(0.37).to(at::kFloat));
      at::Tensor wanted = brought[0].clone();
      for (std::size_t r = 1; r < brought.size(); ++r) wanted.add_(brought[r]);
      auto const values = each_on_its_gpu(brought);
      // Sums of shares, a sum between them, and from the shares those of all, one right after the other.
      auto const between = each_on_its_gpu(brought);
      within(20s, "collectives of shares", [&] {
        std::vector<std::thread> threads;
        for (std::size_t r = 0; r < values.size(); ++r) {
          threads.emplace_back([&, r] {
            ends[r]->begin();
            ends[r]->streams.reduce_scatter(ends[r]->way, ends[r]->on, values[r], cut);
            ends[r]->streams.sum(ends[r]->way, ends[r]->on, between[r]);
            ends[r]->streams.share_gather(ends[r]->way, ends[r]->on, values[r], cut);
            ends[r]->end();
            ends[r]->ends_within(20s);
          });
        }
        for (auto& each : threads) each.join();
      });
      for (auto const& each : values) CHECK(at::equal(each.cpu(), wanted));
      for (auto const& each : between) CHECK(at::equal(each.cpu(), wanted));
    }
    for (std::int64_t const count : {0, 1, 100, 40000}) {
      CAPTURE(count);
      std::vector<at::Tensor> all(static_cast<std::size_t>(size));
      within(20s, "a gather", [&] {
        std::vector<at::Tensor> own;
        for (int r = 0; r < size; ++r) {
          end_of_channel& mine = *gathers[static_cast<std::size_t>(r)];
          own.push_back(mine.streams.bytes(count));
          own.back().copy_(rows({count}, r)[0]);
          all[static_cast<std::size_t>(r)] = mine.streams.bytes(count * size);
          mine.streams.all_gather(mine.way, mine.on, own.back(), all[static_cast<std::size_t>(r)]);
          mine.end();
        }
        for (auto const& each : gathers) CHECK(each->ends_within(20s));
      });
      std::vector<at::Tensor> wanted;
      for (int r = 0; r < size; ++r) wanted.push_back(rows({count}, r)[0]);
      for (auto const& each : all) CHECK(at::equal(each, at::cat(wanted)));
    }
  }
}

TEST_CASE("the host reads a value behind a wait, and other threads of the process reach the GPU meanwhile") {
  at::Tensor const word = chevron::copy_streams(gpu(0)).bytes(sizeof(std::uint32_t)).zero_();
  void* const flag = word.mutable_data_ptr();
  at::Tensor const wanted = rows({16}, 1)[0], there = wanted.to(gpu(0));
  auto const& driver = chevron::detail::stream_memory::of_driver();
  within(20s, "a value that the host reads", [&] {
    std::thread reader([&] {
      c10::cuda::CUDAStreamGuard const lane(c10::cuda::getStreamFromPool(false, 0));
      REQUIRE(driver.wait(c10::cuda::getCurrentCUDAStream(0), flag, 1) == CUDA_SUCCESS);
      CHECK(at::equal(chevron::detail::host_copy(there), wanted));
    });
    std::this_thread::sleep_for(300ms);
    c10::cuda::CUDAStreamGuard const other(c10::cuda::getStreamFromPool(false, 0));
    REQUIRE(driver.write(c10::cuda::getCurrentCUDAStream(0), flag, 1) == CUDA_SUCCESS);
    reader.join();
  });
}

TEST_CASE("a rank that ends its streams ends its own waits alone, and nobody takes for sent what it never sent") {
  auto const ends = joined(chevron::channel_use::edge, {0, 1});
  std::vector<at::Tensor> const sent = on(gpu(0), rows({16}, 1));
  std::vector<at::Tensor> const into = {at::zeros({16}, at::TensorOptions(at::kByte).device(gpu(1)))};
  // More is asked of either than the other one brings.
  ends[0]->begin();
  ends[1]->begin();
  for (int i = 0; i < 70; ++i) ends[0]->streams.send(ends[0]->way, ends[0]->on, sent);
  ends[0]->end();
  SUBCASE("the receiver") {
    for (int i = 0; i < 80; ++i) ends[1]->streams.receive(ends[1]->way, ends[1]->on, into);
    ends[1]->end();
    within(20s, "abort", [&] { ends[1]->streams.abort(); });
    CHECK_FALSE(ends[0]->ends_within(100ms));
    within(20s, "abort", [&] { ends[0]->streams.abort(); });
  }
  SUBCASE("the sender") {
    // Two more than it can send at once, and after it has ended none of them counts.
    for (int i = 0; i < 50; ++i) ends[1]->streams.receive(ends[1]->way, ends[1]->on, into);
    ends[1]->end();
    CHECK(ends[1]->ends_within(10s));
    for (int i = 0; i < 30; ++i) ends[1]->streams.receive(ends[1]->way, ends[1]->on, into);
    ends[1]->end();
    CHECK_FALSE(ends[1]->ends_within(500ms));
    within(20s, "abort", [&] { ends[0]->streams.abort(); });
    CHECK_FALSE(ends[1]->ends_within(300ms));
    CHECK(cudaStreamQuery(ends[1]->on.get()) == cudaErrorNotReady);  // a receive whose message is never sent
    static_cast<void>(cudaGetLastError());
    within(20s, "abort", [&] { ends[1]->streams.abort(); });
  }
  // Nothing more is asked of ended streams.
  ends[0]->streams.send(ends[0]->way, ends[0]->on, sent);
  CHECK(cudaStreamQuery(ends[0]->on.get()) == cudaSuccess);
}

TEST_CASE("ends of sums and gathers: whichever rank waits, and for whichever flag, abort ends it") {
  for (chevron::channel_use const use : {chevron::channel_use::sum, chevron::channel_use::gather}) {
    for (int const late : {0, 2}) {
      CAPTURE(late);
      auto const ends = joined(use, {0, 1, 2});
      std::vector<std::thread> threads;
      std::vector<at::Tensor> values, all;
      for (int r = 0; r < 3; ++r) {
        end_of_channel& mine = *ends[static_cast<std::size_t>(r)];
        values.push_back(use == chevron::channel_use::sum ? at::ones({20}, at::TensorOptions().device(gpu(r)))
                                                          : mine.streams.bytes(10));
        all.push_back(mine.streams.bytes(30));
      }
      for (int r = 0; r < 3; ++r) {
        if (r == late) continue;
        threads.emplace_back([&, r] {
          auto const i = static_cast<std::size_t>(r);
          end_of_channel& mine = *ends[i];
          use == chevron::channel_use::sum ? mine.streams.sum(mine.way, mine.on, values[i])
                                           : mine.streams.all_gather(mine.way, mine.on, values[i], all[i]);
          mine.end();
        });
      }
      std::this_thread::sleep_for(50ms);
      for (auto const& each : ends) within(20s, "abort", [&] { each->streams.abort(); });
      for (auto& each : threads) each.join();
    }
  }
}

TEST_CASE("what copies cannot do is refused, with the value, the place and the remedy") {
  auto const refused = [](std::function<void()> const& work) {
    try {
      work();
    } catch (chevron::usage_error const& error) {
      return std::string(error.what());
    }
    return std::string("nothing was thrown");
  };
  SUBCASE("streams beyond the queues of a GPU") {
    chevron::copy_streams one(gpu(3)), other(gpu(3));
    other.make_stream();
    std::string const words = refused([&] {
      for (int i = 0; i < 31; ++i) one.make_stream();
    });
    CHECK(words.find("the rank needs 33 streams on GPU 3, which has 32 queues") != std::string::npos);
    CHECK(words.find("Remedy: a schedule with fewer neighbours") != std::string::npos);
  }
  SUBCASE("pieces that are none") {
    std::string const words = refused([] { chevron::copy_streams(gpu(0), {.sum_piece = 24}); });
    CHECK(words.find("pieces of 24 bytes, 4 of them on an edge. Remedy: multiples of 16 bytes") != std::string::npos);
    CHECK(refused([] { chevron::copy_streams(gpu(0), {.edge_pieces = 0}); }).find("0 of them") != std::string::npos);
  }
  SUBCASE("ranks on two machines") {
    std::string const words = refused([] {
      chevron::copy_streams streams(gpu(0));
      streams.connect("a channel", "another-machine 1 3 chevron-1", chevron::channel_use::edge, 1, 2, 0, never);
    });
    CHECK(words.find("rank 1 of 2 of a channel cannot open the memory of its rank 0 (another-machine 1 3 chevron-1)") !=
          std::string::npos);
  }
  SUBCASE("rank threads on one GPU") {
    std::string const id = chevron::copy_streams::make_id();
    chevron::copy_streams one(gpu(1), small_pieces), other(gpu(1), small_pieces);
    std::string words;
    std::thread joining(
        [&] { words = refused([&] { one.connect("a channel", id, chevron::channel_use::edge, 0, 2, 1, never); }); });
    refused([&] { other.connect("a channel", id, chevron::channel_use::edge, 1, 2, 0, never); });
    joining.join();
    CHECK(words.find("ranks 0 and 1 of a channel of copies are threads of one process on GPU 1, whose streams may wait for "
                     "each other for ever. Remedy: a process for each rank") != std::string::npos);
  }
  SUBCASE("other limits") {
    std::string const id = chevron::copy_streams::make_id();
    chevron::copy_streams one(gpu(0), small_pieces), other(gpu(1));
    std::string words;
    std::thread joining(
        [&] { words = refused([&] { one.connect("a channel", id, chevron::channel_use::edge, 0, 2, 1, never); }); });
    refused([&] { other.connect("a channel", id, chevron::channel_use::edge, 1, 2, 0, never); });
    joining.join();
    CHECK(words.find("rank 0 of a channel has 3 pieces of 16 bytes, from 4294967264, rank 1 has 4 pieces of 4194304 bytes") !=
          std::string::npos);
  }
}
