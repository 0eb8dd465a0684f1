// The time of the end of a step on a GPU: the norm of all gradients, read by the host, their scaling, and a step of AdamW, with
// the trainer's own code (rank_gradients, fused_adamw), of a GPT's 150 parameters and of one large parameter.
//
//   bench-gpu_end [--json FILE]                            the median of some rounds
//   .venv/bin/python bench/run/gpu_end_beside_torch.py     in turns with PyTorch's clip_grad_norm_ and AdamW(fused=True)
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <chevron/jobs/run_main.hpp>
#include <chevron/plan/profile.hpp>
#include <chevron/run.hpp>
#include <chevron/run/core/scalar_reader.hpp>
#include <chevron/run/train/collective_numbers.hpp>
#include <chevron/run/train/rank_gradients.hpp>

#include "gpu_job.hpp"

namespace {

namespace nn = torch::nn;

struct options {
  int width = 768;
  int rounds = 20;
  bool serve = false;
  std::string json;
};

constexpr double rate = 1e-3, most = 1;  // the learning rate, and the norm to which gradients are scaled

/// Parameters in the sizes of GPT-2's, or one. Nothing is computed with them.
chevron::stage parameters_of(std::string const& set, std::int64_t width, at::Device device) {
  nn::Sequential out;
  auto const linear = [&](std::int64_t from, std::int64_t to, bool bias) {
    out->push_back(nn::Linear(nn::LinearOptions(from, to).bias(bias)));
  };
  auto const norm = [&] { out->push_back(nn::LayerNorm(nn::LayerNormOptions({width}))); };
  if (set == "large") {
    linear(8 * width, 10 * width, false);
  } else {
    for (int layer = 0; layer < 12; ++layer) {
      norm();
      linear(width, 3 * width, true);
      linear(width, width, true);
      norm();
      linear(width, 4 * width, true);
      linear(4 * width, width, true);
    }
    for (std::int64_t const rows : {65 * width, width}) linear(width, rows, false);  // of words, of places
    norm();
    linear(width, 65 * width, true);
  }
  out->to(device);
  return out;
}

struct figures {
  double norm_ms = 0, norm_host_us = 0;  ///< until it is all done, and until the host may go on
  double step_ms = 0, step_host_us = 0;
};

class end_of_step {
 public:
  end_of_step(std::string const& set, int width, chevron::transport& comm, at::Device device)
      : device_(device),
        stages_{parameters_of(set, width, device)},
        gradients_(stages_, comm, collectives_, std::size_t{25} << 20) {
    std::vector<at::Tensor> all;
    at::NoGradGuard const off;
    for (auto const& p : gradients_.parameters()) {
      all.push_back(p.value);
      elements_ += p.value.numel();
      at::Tensor(p.value.grad()).fill_(1);
    }
    count_ = all.size();
    first_ = all.front();
    optimizer_ = std::make_unique<chevron::fused_adamw>(all, torch::optim::AdamWOptions(rate).weight_decay(0));
  }

  figures round() {
    at::NoGradGuard const off;
    at::Tensor const before = moved_ < 0 ? first_.detach().clone() : at::Tensor();
    figures out;
    out.norm_ms = timed(out.norm_host_us, [&] {
      std::vector<double> squares(count_);
      chevron::detail::scalar_reader numbers;
      gradients_.squared_norms(squares, most, numbers);
      numbers.read();
      double sum = 0;
      for (double const each : squares) sum += each;
      norm_ = std::sqrt(sum);
      if (norm_at_first_ < 0) norm_at_first_ = norm_;
      gradients_.scale(most / norm_);
    });
    out.step_ms = timed(out.step_host_us, [&] { optimizer_->step(); });
    if (before.defined()) moved_ = (before - first_).max().item<double>();
    return out;
  }

  nlohmann::json told(figures const& f) const {
    return {{"parameters", count_},           {"elements", elements_}, {"norm_ms", f.norm_ms},
            {"norm_host_us", f.norm_host_us}, {"step_ms", f.step_ms},  {"step_host_us", f.step_host_us},
            {"first_norm", norm_at_first_},   {"norm", norm_},         {"moved", moved_}};
  }

 private:
  template <class Work>
  double timed(double& host_us, Work const& work) {
    double const began = bench::ms_when_done(device_);
    auto const asked = std::chrono::steady_clock::now();
    work();
    host_us = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - asked).count();
    return bench::ms_when_done(device_) - began;
  }

  at::Device device_;
  std::vector<chevron::stage> stages_;
  chevron::detail::collective_numbers collectives_;
  chevron::detail::rank_gradients gradients_;
  std::unique_ptr<chevron::fused_adamw> optimizer_;
  std::size_t count_ = 0;
  std::int64_t elements_ = 0;
  at::Tensor first_;
  double norm_at_first_ = -1, norm_ = -1, moved_ = -1;
};

void run(options const& wanted, chevron::transport& comm, at::Device device) {
  std::map<std::string, std::unique_ptr<end_of_step>> sets;
  for (char const* const name : {"gpt", "large"}) sets[name] = std::make_unique<end_of_step>(name, wanted.width, comm, device);
  if (wanted.serve) {
    // A line in, the name of a set; a line out, a round's figures.
    for (std::string name; std::getline(std::cin, name);) {
      if (!sets.contains(name)) throw chevron::usage_error("no set of parameters is called " + name + ". Remedy: gpt or large");
      end_of_step& of = *sets.at(name);
      std::cout << of.told(of.round()).dump() << std::endl;
    }
    return;
  }
  nlohmann::json out;
  std::printf("%-8s %10s %12s %10s %12s %10s %12s\n", "set", "tensors", "elements", "norm ms", "its host us", "AdamW ms",
              "its host us");
  for (auto const& [name, of] : sets) {
    std::vector<double> norm, norm_host, step, step_host;
    for (int i = -3; i < wanted.rounds; ++i) {
      figures const f = of->round();
      if (i < 0) continue;
      norm.push_back(f.norm_ms);
      norm_host.push_back(f.norm_host_us);
      step.push_back(f.step_ms);
      step_host.push_back(f.step_host_us);
    }
    figures const f{chevron::median(norm), chevron::median(norm_host), chevron::median(step), chevron::median(step_host)};
    out[name] = of->told(f);
    std::printf("%-8s %10zu %12lld %10.3f %12.0f %10.3f %12.0f\n", name.c_str(), out[name]["parameters"].get<std::size_t>(),
                out[name]["elements"].get<long long>(), f.norm_ms, f.norm_host_us, f.step_ms, f.step_host_us);
  }
  bench::write_json(wanted.json, out);
}

}  // namespace

int main(int argc, char** argv) {
  return chevron::run_main(argc, argv, [](int count, char** values) {
    CLI::App app{"time of the end of a step, on a GPU", "bench-gpu_end"};
    options wanted;
    app.add_option("--width", wanted.width, "of the model")->check(CLI::Range(1, 8192))->capture_default_str();
    app.add_option("--rounds", wanted.rounds)->check(CLI::Range(1, 10000))->capture_default_str();
    app.add_flag("--serve", wanted.serve, "a round for each line that comes in, gpt or large");
    app.add_option("--json", wanted.json, "write the figures to this file, too");
    int code = 0;
    if (!bench::parsed(app, count, values, code)) return code;
    bench::on_gpu_ranks("threads", 1, [&](chevron::transport& comm, at::Device device) { run(wanted, comm, device); });
    return 0;
  });
}
