// The time that a waiting message adds to a computation on a GPU: a matrix product beside a receive that was posted early, by the
// blocks that the receive's kernel may take (nccl_options.channels.edge). 0 is the product alone. Rank 1 sends once the products
// are done, and uses no GPU before.
//
//   bench-gpu_waiting [--json FILE]
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <chevron/jobs/run_main.hpp>
#include <chevron/plan/profile.hpp>
#include <chevron/run.hpp>
#include <chevron/transports/gpu/cuda_streams.hpp>

#include "gpu_job.hpp"

namespace {

struct options {
  int size = 4096;        // of the matrices
  int products = 20;      // in one round
  int rounds = 7;         // the first is not counted
  int kilobytes = 16384;  // of the message
  std::vector<int> blocks{0, 1, 2, 4, 8};
  std::string json;
};

/// A way from rank 1 to rank 0 whose kernels take at most so many blocks.
class way {
 public:
  way(bench::gpu_rank const& mine, int blocks, std::int64_t bytes)
      : rank_(mine.job.rank),
        streams_(mine.device, {.edge = blocks}),
        on_(streams_.make_stream()),
        arrived_(streams_.make_event()),
        values_{at::full({bytes}, 0, at::TensorOptions(at::kByte).device(mine.device))} {
    std::string const key = "id of " + std::to_string(blocks);
    if (rank_ == 1) mine.job.store->set(key, streams_.make_id());
    auto const id = mine.job.store->get(key);
    channel_ =
        streams_.connect("edge", {id.begin(), id.end()}, chevron::channel_use::edge, rank_ == 1 ? 0 : 1, 2, 1 - rank_, never);
    check();
  }
  void fill(int value) {
    values_.front().fill_(value);
    streams_.record(arrived_);
    streams_.wait(on_, arrived_);
  }
  void start() {
    rank_ == 1 ? streams_.send(channel_, on_, values_) : streams_.receive(channel_, on_, values_);
    streams_.record(arrived_, on_);
    check();
  }
  bool has_arrived() { return streams_.passed(arrived_); }
  void wait() {
    static_cast<void>(streams_.wait_on_host(arrived_, [this] { return static_cast<bool>(streams_.fault()); }));
    check();
  }
  bool holds(int value) const { return values_.front().eq(value).all().item<bool>(); }

 private:
  static bool never() { return false; }
  void check() {
    if (auto const why = streams_.fault()) throw std::runtime_error(why.what + ": " + why.text);
  }

  int rank_;
  chevron::cuda_streams streams_;
  chevron::cuda_streams::stream on_;
  chevron::cuda_streams::event arrived_;
  std::vector<at::Tensor> values_;
  chevron::cuda_streams::channel channel_;
};

struct result {
  std::vector<double> ms;  // of a product
  bool waited = true;      // each receive waited until its products were done
  bool right = true;       // and then had the sent values
};

std::string turn(int blocks, int round) { return "send " + std::to_string(blocks) + ", " + std::to_string(round); }

void receive_beside_products(options const& wanted, bench::gpu_rank const& mine, std::map<int, std::unique_ptr<way>>& ways) {
  c10::cuda::CUDAStream const computing = c10::cuda::getStreamFromPool(false, mine.device.index());
  c10::cuda::CUDAStreamGuard const here(computing);
  at::Tensor const a = at::randn({wanted.size, wanted.size}, at::TensorOptions(at::kBFloat16).device(mine.device));
  at::Tensor out = at::mm(a, a);
  std::map<int, result> results;
  for (int round = 0; round < wanted.rounds; ++round) {
    for (int const blocks : wanted.blocks) {  // in turns, so that the GPU's clocks are those of all
      way* const from = blocks == 0 ? nullptr : ways.at(blocks).get();
      result& of = results[blocks];
      if (from != nullptr) {
        from->fill(0);
        from->start();
        std::this_thread::sleep_for(std::chrono::milliseconds(5));  // its kernel runs by now, and waits
      }
      double const began = bench::ms_when_done(mine.device);
      for (int i = 0; i < wanted.products; ++i) at::mm_out(out, a, a);
      double const took = (bench::ms_when_done(mine.device) - began) / wanted.products;
      if (round > 0) of.ms.push_back(took);
      if (from == nullptr) continue;
      of.waited = of.waited && !from->has_arrived();
      mine.job.store->set(turn(blocks, round), std::string("now"));
      from->wait();
      of.right = of.right && from->holds(1 + round);
    }
  }
  nlohmann::json told = nlohmann::json::array();
  double const alone = results.contains(0) ? chevron::median(results[0].ms) : 0;
  std::printf("a product of %d x %d in bfloat16, beside a receive that waits\n%8s %12s %10s %8s\n", wanted.size, wanted.size,
              "blocks", "product ms", "of alone", "waited");
  bool good = true;
  for (auto const& [blocks, of] : results) {
    double const ms = chevron::median(of.ms);
    std::printf("%8d %12.4f %10.3f %8s\n", blocks, ms, alone > 0 ? ms / alone : 0.0,
                blocks == 0 ? "-"
                : of.waited ? "yes"
                            : "no");
    told.push_back(
        {{"blocks", blocks}, {"product_ms", ms}, {"waited", of.waited}, {"right", of.right}, {"rounds", of.ms.size()}});
    good = good && of.waited && of.right;
  }
  bench::write_json(wanted.json, told);
  if (!good) throw std::runtime_error("a receive did not wait for its message, or had another: the figures say nothing");
}

void send_when_told(options const& wanted, bench::gpu_rank const& mine, std::map<int, std::unique_ptr<way>>& ways) {
  for (int round = 0; round < wanted.rounds; ++round) {
    for (int const blocks : wanted.blocks) {
      if (blocks == 0) continue;
      way& to = *ways.at(blocks);
      to.fill(1 + round);
      static_cast<void>(bench::ms_when_done(mine.device));
      mine.job.store->wait({turn(blocks, round)});
      to.start();
      to.wait();
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  return chevron::run_main(argc, argv, [](int count, char** values) {
    CLI::App app{"time that a waiting message adds to a matrix product, on a GPU", "bench-gpu_waiting"};
    options wanted;
    app.add_option("--size", wanted.size, "of the matrices")->check(CLI::Range(1, 100000))->capture_default_str();
    app.add_option("--products", wanted.products, "in a round")->check(CLI::Range(1, 100000))->capture_default_str();
    app.add_option("--rounds", wanted.rounds, "the first is not counted")->check(CLI::Range(2, 10000))->capture_default_str();
    app.add_option("--kilobytes", wanted.kilobytes, "of the message")->check(CLI::Range(1, 1000000))->capture_default_str();
    app.add_option("--blocks", wanted.blocks, "that a receive may take; 0: there is none")->delimiter(',')->capture_default_str();
    app.add_option("--json", wanted.json, "write the figures to this file, too");
    int code = 0;
    if (!bench::parsed(app, count, values, code)) return code;
    bench::gpu_rank const mine = bench::fork_gpu_ranks(2);
    at::NoGradGuard const off;
    std::map<int, std::unique_ptr<way>> ways;
    for (int const blocks : wanted.blocks) {
      if (blocks == 0) continue;
      ways[blocks] = std::make_unique<way>(mine, blocks, std::int64_t{wanted.kilobytes} << 10);
      ways[blocks]->start();  // connects
      ways[blocks]->wait();
    }
    mine.job.rank == 0 ? receive_beside_products(wanted, mine, ways) : send_when_told(wanted, mine, ways);
    return 0;
  });
}
