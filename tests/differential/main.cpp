// timeout: 600
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include <CLI/CLI.hpp>

#include "children.hpp"
#include "generate.hpp"
#include "program.hpp"
#include "shrink.hpp"

using namespace differential;

namespace {

using clock_type = std::chrono::steady_clock;

double seconds_since(clock_type::time_point begin) { return std::chrono::duration<double>(clock_type::now() - begin).count(); }

/// How often something was in a program, by verdict.
struct tally {
  std::map<std::string, std::map<std::string, std::map<verdict, long>>> rows;  // by sort, by name
  std::map<verdict, long> all;

  void add(program const& p, verdict v) {
    ++all[v];
    std::map<std::string, std::map<std::string, bool>> in;
    in["schedule"][p.schedule()] = true;
    in["transport"][p.get("line", "threads")] = true;
    for (auto const& [key, value] : p.options) {
      bool const plain =
          key == "seed" || key == "plan" || key == "line" || key == "n" || key == "steps" || key == "clip" || key == "in";
      if (!plain) in["option"][key + "=" + value] = true;
      if (key == "clip") in["option"][key] = true;
      if (key == "in") in["option"]["in=" + value.substr(0, 3)] = true;
    }
    for (stage_text const& s : p.stages) {
      in["stage"][text_of(s.form)] = true;
      for (block const& b : s.blocks) {
        in["block"][b.name] = true;
        for (auto const& flag : b.flags) in["block"]["+" + flag] = true;
      }
    }
    for (auto const& [sort, names] : in) {
      for (auto const& [name, there] : names) rows[sort][name][v] += there ? 1 : 0;
    }
  }

  long of(verdict v) const {
    auto const found = all.find(v);
    return found == all.end() ? 0 : found->second;
  }
  long run() const {
    long sum = 0;
    for (auto const& [v, count] : all) sum += count;
    return sum;
  }
  long findings() const { return of(verdict::differs) + of(verdict::fails) + of(verdict::hangs) + of(verdict::dies); }

  void print() const {
    std::printf("\n%-11s %-28s %8s %8s %8s %8s %9s %8s\n", "", "", "run", "equal", "as cut", "refused", "senseless", "findings");
    auto const line = [](std::string const& sort, std::string const& name, std::map<verdict, long> const& of) {
      auto const count = [&](std::initializer_list<verdict> which) {
        long sum = 0;
        for (verdict v : which) sum += of.contains(v) ? of.at(v) : 0;
        return sum;
      };
      std::printf("%-11s %-28s %8ld %8ld %8ld %8ld %9ld %8ld\n", sort.c_str(), name.c_str(),
                  count({verdict::equal, verdict::as_cut, verdict::refused, verdict::senseless, verdict::differs, verdict::fails,
                         verdict::hangs, verdict::dies}),
                  count({verdict::equal}), count({verdict::as_cut}), count({verdict::refused}), count({verdict::senseless}),
                  count({verdict::differs, verdict::fails, verdict::hangs, verdict::dies}));
    };
    for (auto const& [sort, names] : rows) {
      for (auto const& [name, of] : names) line(sort, name, of);
    }
    line("all", "", all);
  }
};

void print_finding(found const& f, program const& first, std::string const& self) {
  std::printf("\n%s: %s\n  first      %s\n  smallest   %s\n  (%d tries) again: %s --program '%s'\n\n", name_of(f.said.what),
              f.said.words.c_str(), text_of(first).c_str(), text_of(f.smallest).c_str(), f.tries, self.c_str(),
              text_of(f.smallest).c_str());
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Random LibTorch programs, pipelined and in a plain loop, compared byte by byte");
  double minutes = 0;
  int jobs = 1, count = 0, most = 10;
  std::uint64_t seed = 0;
  std::string text, skip, only;
  double shrink_seconds = 60;
  bool one = false, print_only = false, all_lines = false;
  app.add_option("--minutes", minutes, "run until this time is over");
  app.add_option("--count", count, "run this many programs");
  app.add_option("--jobs", jobs, "processes at once");
  auto* const given_seed = app.add_option("--seed", seed, "the first program's seed; without it: one of the day, printed");
  app.add_option("--program", text, "run this program only");
  app.add_option("--skip", skip, "leave out programs whose text has a match of this regular expression");
  app.add_option("--only", only, "take only programs whose text has a match of this regular expression");
  app.add_flag("--one", one, "run the seed's program only");
  app.add_flag("--print", print_only, "print programs, do not run them");
  app.add_flag("--all", all_lines, "a line for each program");
  app.add_option("--shrink", shrink_seconds, "seconds to make a finding smaller; 0: not at all");
  app.add_option("--findings", most, "stop after so many findings");
  CLI11_PARSE(app, argc, argv);
  // LibTorch's recorder of collective operations is one for the process, and groups of several threads crash in it.
  ::setenv("TORCH_FR_BUFFER_SIZE", "0", 1);
  ::setvbuf(stdout, nullptr, _IOLBF, 0);

  if (!*given_seed) seed = std::random_device{}();
  if (!text.empty() || one) {
    program const p = text.empty() ? generate(seed) : program_of(text);
    std::printf("%s\n", text_of(p).c_str());
    if (print_only) return 0;
    judgement const j = judge_apart(p);
    std::printf("%s%s%s\n", name_of(j.what), j.words.empty() ? "" : ": ", j.words.c_str());
    if (!is_finding(j.what)) return 0;
    if (shrink_seconds > 0 && text.empty()) print_finding(shrink(p, j, shrink_seconds), p, argv[0]);
    return 1;
  }
  if (print_only) {
    for (int i = 0; i < count; ++i) std::printf("%s\n", text_of(generate(seed + static_cast<std::uint64_t>(i))).c_str());
    return 0;
  }
  if (minutes <= 0 && count <= 0) minutes = 1;
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));

  std::regex const without(skip), with(only);
  tally counts;
  auto const begin = clock_type::now();
  double said = 0;
  std::uint64_t next = seed;
  std::vector<program> back;  // to be run again after a process died
  std::vector<std::unique_ptr<child>> running;
  std::vector<std::pair<program, judgement>> findings;
  constexpr int at_once = 40;
  bool const by_count = count > 0;
  auto const time_left = [&] {
    return by_count ? next < seed + static_cast<std::uint64_t>(count) : seconds_since(begin) < minutes * 60;
  };
  while (static_cast<int>(findings.size()) < most) {
    while (static_cast<int>(running.size()) < jobs && (!back.empty() || time_left())) {
      std::vector<program> work;
      if (by_count || time_left()) work.swap(back);
      while (work.empty() || (work.size() < at_once && time_left() && work.back().get("line") != "fork")) {
        if (!time_left() && work.empty()) break;
        program p = generate(next++);
        if (!skip.empty() && std::regex_search(text_of(p), without)) continue;
        if (!only.empty() && !std::regex_search(text_of(p), with)) continue;
        // Ranks that are processes come first in a process, since nothing may have been computed there.
        if (p.get("line") == "fork") {
          running.push_back(std::make_unique<child>(std::vector<program>{p}));
          break;
        }
        work.push_back(std::move(p));
        if (by_count && next >= seed + static_cast<std::uint64_t>(count)) break;
      }
      if (work.empty()) {
        if (!time_left()) back.clear();
        continue;
      }
      running.push_back(std::make_unique<child>(std::move(work)));
    }
    if (running.empty()) break;
    std::vector<pollfd> news;
    for (auto const& each : running) news.push_back({each->handle(), POLLIN, 0});
    ::poll(news.data(), news.size(), 200);
    bool const over = !by_count && seconds_since(begin) > minutes * 60 + 5;
    for (auto& each : running) {
      for (auto& [p, j] : each->poll()) {
        counts.add(p, j.what);
        if (all_lines) std::printf("%s %s %s\n", p.get("seed").c_str(), name_of(j.what), j.words.c_str());
        if (!is_finding(j.what)) continue;
        std::printf("seed %s after %.0f s: %s %s\n", p.get("seed").c_str(), seconds_since(begin), name_of(j.what),
                    j.words.c_str());
        findings.emplace_back(p, j);
      }
      if (each->done()) {
        auto left = each->left();
        back.insert(back.end(), left.begin(), left.end());
      }
    }
    std::erase_if(running, [](auto const& each) { return each->done(); });
    if (over) running.clear();
    if (seconds_since(begin) - said >= 60) {
      said = seconds_since(begin);
      std::printf("%.0f min: %ld programs, %ld equal, %ld as cut, %ld refused, %ld senseless, %ld findings (threads", said / 60,
                  counts.run(), counts.of(verdict::equal), counts.of(verdict::as_cut), counts.of(verdict::refused),
                  counts.of(verdict::senseless), counts.findings());
      for (auto const& [name, of] : counts.rows["transport"]) {
        long sum = 0;
        for (auto const& [v, n] : of) sum += n;
        std::printf("; %s %ld", name.c_str(), sum);
      }
      std::printf(")\n");
    }
  }
  running.clear();
  for (auto const& [p, j] : findings) {
    if (shrink_seconds > 0) print_finding(shrink(p, j, shrink_seconds), p, argv[0]);
  }
  counts.print();
  return counts.findings() > 0 ? 1 : 0;
}
