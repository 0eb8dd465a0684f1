// Long runs: memory that grows, descriptors and threads that stay, and bits that are others the second time.
#include "tortures.hpp"

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>

#include "jobs.hpp"

namespace torture {

namespace {

using namespace std::chrono_literals;

/// Bytes of anonymous memory, which is independent of other processes that map the same libraries.
double own_bytes() {
  std::ifstream in("/proc/self/smaps_rollup");
  for (std::string word; in >> word;) {
    double kib = 0;
    if (word == "Anonymous:" && in >> kib) return kib * 1024;
  }
  return 0;
}
long entries_of(char const* folder) {
  return std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator());
}

/// The slope of a line through points, by least squares.
class slope {
 public:
  void add(double x, double y) { n_ += 1, x_ += x, y_ += y, xx_ += x * x, xy_ += x * y; }
  double value() const { return (n_ * xy_ - x_ * y_) / (n_ * xx_ - x_ * x_); }

 private:
  double n_ = 0, x_ = 0, y_ = 0, xx_ = 0, xy_ = 0;
};

/// The step from which on memory is looked at.
long settled(long steps) { return steps >= 4000 ? steps / 5 : steps / 2; }

/// One rank's part of a soak.
/// \param looks whether this rank looks at its process: of threads, one
/// \returns words that are empty if all is well; `sum` takes up all losses, `growth` bytes a step
std::string soak(job_shape const& shape, chevron::transport& comm, long steps, bool looks, double& sum, double& growth) {
  chevron::trainer trainer(setup_of(shape, comm));
  slope memory;
  long files = 0, threads = 0;
  std::string wrong;
  for (long step = 0; step < steps; ++step) {
    auto const data = batch_of(shape, step % 16, comm.topology().replica());
    auto const report = trainer.step(data.input, data.target);
    // Many roundings: a single bit that differs anywhere shows at the end.
    if (report.settled) sum = std::fma(sum, 1.0000001, report.loss);
    if (!looks || step < settled(steps) || step % 50 != 0) continue;
    memory.add(static_cast<double>(step), own_bytes());
    long const files_now = entries_of("/proc/self/fd"), threads_now = entries_of("/proc/self/task");
    if (files == 0) files = files_now, threads = threads_now;
    if (files_now > files) wrong = std::to_string(files_now - files) + " more files are open";
    if (threads_now > threads) wrong = std::to_string(threads_now - threads) + " more threads are there";
  }
  trainer.synchronize();
  growth = looks ? memory.value() : 0;
  return wrong;
}

result soak_twice(std::string const& name, job_shape const& shape, long steps, bool gloo) {
  result out{.name = name, .note = ""};
  std::string first;
  double worst = 0;
  for (int again = 0; again < 2; ++again) {
    auto const run = run_apart([&] {
      auto const body = [&](chevron::transport& comm) {
        double sum = 0, growth = 0;
        bool const first_rank = comm.topology().global_rank == 0, looks = gloo || first_rank;
        std::string const wrong = soak(shape, comm, steps, looks, sum, growth);
        if (first_rank) std::printf("sum %a\n", sum);
        if (looks) std::printf("growth %.3f\n", growth);
        if (!wrong.empty()) std::printf("wrong: %s\n", wrong.c_str());
      };
      if (gloo) return over_gloo(shape, body);
      chevron::run_threads({.pipeline_ranks = shape.pipeline_ranks, .replicas = shape.replicas}, body);
      return 0;
    }, 1h);
    ++out.tried;
    std::string sum;
    bool well = run.code == 0 && !run.hangs;
    std::istringstream lines(run.output);
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with("sum ")) sum = line;
      if (line.starts_with("growth ")) worst = std::max(worst, std::stod(line.substr(7)));
      if (line.starts_with("wrong: ")) well = false;
    }
    if (again == 0) first = sum;
    well = well && !sum.empty() && sum == first;
    // The allocator still takes a piece now and then, some MiB in all, which a short run cannot tell from growth.
    double const most = steps >= 20000 ? 10 : 10 + (4 << 20) / static_cast<double>(steps - settled(steps));
    well = well && worst < most;
    well ? ++out.harmless : ++out.wrong;
    if (!well) std::printf("FAILED: %s: exit code %d, %s, grows by %.1f B a step\n%s\n", name.c_str(), run.code,
                           sum == first ? "the same bits" : "other bits than the first time", worst, run.output.c_str());
  }
  char note[200];
  std::snprintf(note, sizeof note, "%ld steps twice: the same bits; memory grows by %.1f B a step at most; descriptors and threads stay", steps, worst);
  if (out.wrong == 0) out.note = note;
  return out;
}

}  // namespace

std::vector<result> soaks(long steps) {
  return {soak_twice("soak, threads, 4 ranks", {.schedule = "ZBVZeroBubble", .pipeline_ranks = 4}, steps, false),
          soak_twice("soak, Gloo, 4 ranks", {.schedule = "1F1B", .pipeline_ranks = 4}, steps, true),
          soak_twice("soak, Gloo, 2 x 2, post-validation",
                     {.schedule = "ZB-H2", .pipeline_ranks = 2, .replicas = 2, .post_validation = true}, steps, true)};
}

}  // namespace torture
