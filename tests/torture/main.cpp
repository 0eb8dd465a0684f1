// chevron-torture: makes ranks of small jobs fail at every action of a step, in every way, and looks what becomes of the job: whether it
// ends, with the right exit code, and whether it blames the right rank. Exit code 1 if anything went otherwise.
//
//     build/bin/chevron-torture --count 300               a sample, drawn by --seed
//     build/bin/chevron-torture --all --jobs 2            everything
//     build/bin/chevron-torture --only 'ZB-H1 gloo x1 | rank 2, step 2, before 1F0: kill'
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <random>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include <ATen/Parallel.h>

#include "job.hpp"
#include "scenario.hpp"

namespace {

using namespace torture;

struct tally {
  long tried = 0, missed = 0, hangs = 0, wrong_code = 0, wrong_rank = 0, wrong_action = 0;
  double longest = 0;
};

std::string line_of(std::string const& name, tally const& t) {
  char text[200];
  std::snprintf(text, sizeof text, "| %s | %ld | %ld | %ld | %ld | %ld | %ld | %.1f s |\n", name.c_str(), t.tried, t.missed, t.hangs, t.wrong_code, t.wrong_rank,
                t.wrong_action, t.longest);
  return text;
}

void add(tally& to, verdict const& v) {
  ++to.tried;
  to.missed += !v.struck;
  to.hangs += v.hangs;
  to.wrong_code += !v.right_code;
  to.wrong_rank += !v.right_rank;
  to.wrong_action += !v.right_action;
  to.longest = std::max(to.longest, v.seconds);
}

/// One of the processes that share the work: what it found, a line for each scenario, goes to `to`.
void work(std::vector<scenario> const& all, std::size_t first, std::size_t stride, int to) {
  for (std::size_t i = first; i < all.size(); i += stride) {
    verdict v = run_apart(all[i]);
    std::string line = std::to_string(i) + " " + std::to_string(v.struck) + " " + std::to_string(v.hangs) + " " + std::to_string(v.right_code) + " " +
                       std::to_string(v.right_rank) + " " + std::to_string(v.right_action) + " " + std::to_string(v.code) + " " +
                       std::to_string(v.seconds) + " ";
    std::replace(v.output.begin(), v.output.end(), '\n', '\r');
    line += v.well() ? "" : v.output.substr(0, 3000);
    line += "\n";
    if (::write(to, line.data(), line.size()) < 0) ::_exit(1);
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Makes ranks of small jobs fail, and looks what becomes of the job.");
  std::size_t count = 0, jobs = 1;
  std::uint64_t seed = 1;
  std::string only, report;
  bool everything = false;
  app.add_flag("--all", everything, "every scenario");
  app.add_option("--count", count, "so many, drawn at random");
  app.add_option("--seed", seed, "of the draw");
  app.add_option("--jobs", jobs, "at a time")->check(CLI::Range(1, 64));
  app.add_option("--only", only, "one scenario, as it is printed");
  app.add_option("--report", report, "a file for the table");
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);

  std::vector<scenario> all = only.empty() ? all_scenarios() : std::vector<scenario>{scenario_of(only)};
  std::size_t const there = all.size();
  if (only.empty() && !everything) {
    std::mt19937_64 draw(seed);
    std::shuffle(all.begin(), all.end(), draw);
    all.resize(std::min(all.size(), count == 0 ? std::size_t{100} : count));
  }

  std::vector<pid_t> workers;
  int ends[2];
  if (::pipe(ends) != 0) return 1;
  for (std::size_t w = 0; w < jobs; ++w) {
    pid_t const id = ::fork();
    if (id == 0) {
      ::close(ends[0]);
      work(all, w, jobs, ends[1]);
      ::_exit(0);
    }
    workers.push_back(id);
  }
  ::close(ends[1]);

  std::map<std::string, tally> by_kind;
  tally sum;
  FILE* const heard = ::fdopen(ends[0], "r");
  char* text = nullptr;
  std::size_t room = 0;
  while (::getline(&text, &room, heard) > 0) {
    std::size_t i = 0;
    verdict v;
    int struck = 0, hangs = 0, code = 0, rank = 0, action = 0, said = 0;
    if (std::sscanf(text, "%zu %d %d %d %d %d %d %lf %n", &i, &struck, &hangs, &code, &rank, &action, &v.code, &v.seconds, &said) < 8) continue;
    v.struck = struck != 0, v.hangs = hangs != 0, v.right_code = code != 0, v.right_rank = rank != 0, v.right_action = action != 0;
    scenario const& what = all[i];
    add(by_kind[what.backend + ", " + what.kind], v);
    add(sum, v);
    if (v.well() && only.empty()) continue;
    std::string output(text + said);
    std::replace(output.begin(), output.end(), '\r', '\n');
    std::printf("%s: %s\n  exit code %d after %.1f s%s%s%s%s%s\n%s\n", v.well() ? "well" : "FAILED", what.text().c_str(), v.code, v.seconds,
                v.struck ? "" : ", the fault never struck", v.hangs ? ", it hangs or leaves processes" : "", v.right_code ? "" : ", another was promised",
                v.right_rank ? "" : ", another rank or none is blamed", v.right_action ? "" : ", the action is not named", output.c_str());
    std::fflush(stdout);
  }
  for (pid_t const id : workers) ::waitpid(id, nullptr, 0);

  std::string table = "| fault | tried | never struck | hangs | wrong exit code | wrong rank | wrong action | longest |\n|---|---|---|---|---|---|---|---|\n";
  for (auto const& [name, t] : by_kind) table += line_of(name, t);
  table += line_of("all", sum);
  std::printf("%s%ld of %zu scenarios\n", table.c_str(), sum.tried, there);
  if (!report.empty()) {
    if (FILE* const to = std::fopen(report.c_str(), "w")) {
      std::fputs(table.c_str(), to);
      std::fclose(to);
    }
  }
  bool const complete = sum.tried == static_cast<long>(all.size());
  return complete && sum.missed + sum.hangs + sum.wrong_code + sum.wrong_rank + sum.wrong_action == 0 ? 0 : 1;
}
