// chevron-torture: makes jobs fail, and checks how they end. Exit code 1 if a result differs from the documents' promises.
//
//     build/bin/chevron-torture faults --count 300     a rank fails at an action of a step: a sample of all, drawn by --seed
//     build/bin/chevron-torture faults --all --jobs 3  all
//     build/bin/chevron-torture faults --only 'ZB-H1 gloo x1 | rank 2, step 2, before 1F0: kill'
//     build/bin/chevron-torture kills --count 400      jobs that are killed while they save, and gone on with
//     build/bin/chevron-torture damage --count 4000    checkpoints that are damaged, and loaded
//     build/bin/chevron-torture fuzz --seconds 60      texts that are read from outside, mutated
//     build/bin/chevron-torture soak --steps 20000     long runs
//
// Each prints a table; --report FILE writes it, too. ./dev torture runs all of them.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include <ATen/Parallel.h>

#include "faults.hpp"
#include "scenario.hpp"
#include "tortures.hpp"

namespace {

using namespace torture;

/// Of faults of one kind.
struct tally {
  long tried = 0, missed = 0, hangs = 0, wrong_code = 0, wrong_rank = 0, wrong_action = 0;
  double longest = 0;

  void add(verdict const& v) {
    ++tried;
    missed += !v.struck;
    hangs += v.hangs;
    wrong_code += !v.right_code;
    wrong_rank += !v.right_rank;
    wrong_action += !v.right_action;
    longest = std::max(longest, v.seconds);
  }
  std::string line(std::string const& name) const {
    char text[200];
    std::snprintf(text, sizeof text, "| %s | %ld | %ld | %ld | %ld | %ld | %ld | %.1f s |\n", name.c_str(), tried, missed, hangs, wrong_code,
                  wrong_rank, wrong_action, longest);
    return text;
  }
  bool well() const { return missed + hangs + wrong_code + wrong_rank + wrong_action == 0; }
};

std::string said_of(verdict const& v) {
  std::ostringstream out;
  out << v.struck << " " << v.hangs << " " << v.right_code << " " << v.right_rank << " " << v.right_action << " " << v.code << " " << v.seconds
      << " " << v.output;
  return out.str();
}
verdict verdict_of(std::string const& said) {
  verdict v;
  std::istringstream in(said);
  in >> v.struck >> v.hangs >> v.right_code >> v.right_rank >> v.right_action >> v.code >> v.seconds;
  in.get();
  v.output.assign(std::istreambuf_iterator<char>(in), {});
  return v;
}

struct told {
  std::string table;
  bool well = false;
};

told faults(std::vector<scenario> all, std::size_t count, std::uint64_t seed, std::size_t jobs, bool tells_all) {
  std::size_t const there = all.size();
  if (count < all.size()) {
    std::mt19937_64 draw(seed);
    std::shuffle(all.begin(), all.end(), draw);
    all.resize(count);
  }
  std::map<std::string, tally> by_kind;
  tally sum;
  share_out(
      all.size(), jobs, [&](std::size_t i) { return said_of(try_fault(all[i])); },
      [&](std::size_t i, std::string const& said) {
        verdict const v = verdict_of(said);
        scenario const& what = all[i];
        by_kind[what.backend + ", " + what.kind].add(v);
        sum.add(v);
        if (v.well() && !tells_all) return;
        std::printf("%s: %s\n  exit code %d after %.1f s%s%s%s%s%s\n%s\n", v.well() ? "well" : "FAILED", what.text().c_str(), v.code, v.seconds,
                    v.struck ? "" : ", the fault never struck", v.hangs ? ", it hangs or leaves processes" : "",
                    v.right_code ? "" : ", another was promised", v.right_rank ? "" : ", another rank or none is blamed",
                    v.right_action ? "" : ", the action is not named", v.output.c_str());
        std::fflush(stdout);
      });
  std::string table =
      "| fault | tried | never struck | hangs | wrong exit code | wrong rank | wrong action | longest |\n|---|---|---|---|---|---|---|---|\n";
  for (auto const& [name, t] : by_kind) table += t.line(name);
  table += sum.line("all, of " + std::to_string(there));
  return {table, sum.well() && sum.tried == static_cast<long>(all.size())};
}

told told_of(std::vector<result> const& all) {
  told out{"| what | tried | refused, nothing changed | as if nothing had happened | anything else | |\n|---|---|---|---|---|---|\n", true};
  for (result const& r : all) {
    char text[600];
    std::snprintf(text, sizeof text, "| %s | %ld | %ld | %ld | %ld | %s |\n", r.name.c_str(), r.tried, r.refused, r.harmless, r.wrong, r.note.c_str());
    out.table += text;
    out.well = out.well && r.wrong == 0 && r.tried > 0;
  }
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Makes jobs fail, and looks what becomes of them.");
  app.require_subcommand(1);
  std::size_t count = 100, jobs = 1;
  long steps = 20000;
  double seconds = 60;
  std::uint64_t seed = 1;
  std::string only, word, report;
  bool everything = false;
  app.add_option("--report", report, "a file for the table");
  auto* const of_faults = app.add_subcommand("faults", "a rank fails at an action of a step");
  of_faults->add_flag("--all", everything, "every scenario");
  of_faults->add_option("--only", only, "one scenario, as it is printed");
  of_faults->add_option("--with", word, "scenarios with this word: cut, gloo, kill");
  auto* const of_kills = app.add_subcommand("kills", "jobs are killed while they save");
  auto* const of_damage = app.add_subcommand("damage", "checkpoints are damaged");
  auto* const of_fuzz = app.add_subcommand("fuzz", "texts from outside are mutated");
  of_fuzz->add_option("--seconds", seconds, "for so long");
  auto* const of_soak = app.add_subcommand("soak", "long runs");
  of_soak->add_option("--steps", steps, "of each");
  for (auto* const each : {of_faults, of_kills, of_damage}) {
    each->add_option("--count", count, "so many, drawn at random");
    each->add_option("--seed", seed, "of the draw");
  }
  of_fuzz->add_option("--seed", seed, "of the draw");
  for (auto* const each : {of_faults, of_kills, of_fuzz}) each->add_option("--jobs", jobs, "at a time")->check(CLI::Range(1, 64));
  for (auto* const each : {of_faults, of_kills, of_damage, of_fuzz, of_soak}) each->fallthrough();
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);

  told out;
  if (*of_faults) {
    auto all = only.empty() ? all_scenarios() : std::vector<scenario>{scenario_of(only)};
    std::erase_if(all, [&](scenario const& one) { return (" " + one.text() + " ").find(" " + word) == std::string::npos; });
    out = faults(all, everything ? all.size() : count, seed, jobs, !only.empty());
  } else if (*of_kills) {
    out = told_of(killed_while_saving(count, seed, jobs));
  } else if (*of_damage) {
    out = told_of(damaged_checkpoints(count, seed));
  } else if (*of_fuzz) {
    out = told_of(fuzz(seconds, seed, jobs));
  } else {
    out = told_of(soaks(steps));
  }
  std::printf("%s", out.table.c_str());
  if (!report.empty()) {
    FILE* const to = std::fopen(report.c_str(), "w");
    if (to == nullptr) {
      std::fprintf(stderr, "--report %s cannot be written\n", report.c_str());
      return 2;
    }
    std::fputs(out.table.c_str(), to);
    std::fclose(to);
  }
  return out.well ? 0 : 1;
}
