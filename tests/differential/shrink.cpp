#include "shrink.hpp"

#include <chrono>
#include <functional>
#include <vector>

#include "children.hpp"
#include "plans.hpp"

namespace differential {

namespace {

/// Smaller programs, the boldest first.
std::vector<program> smaller(program const& p) {
  std::vector<program> out;
  auto const with = [&](auto change) {
    program made = p;
    change(made);
    if (text_of(made) != text_of(p)) out.push_back(std::move(made));
  };
  auto const stages = p.stages.size();
  // Ranks in threads, without delays, then the simplest schedules for as many stages.
  if (p.get("line") != "threads") with([](program& q) { q.options["line"] = "threads"; });
  if (p.get("line") == "fork" || p.get("line") == "far") with([](program& q) { q.options["line"] = "gloo"; });
  for (char const* key : {"masters", "shard", "shards", "rep",  "ahead",   "acc",    "pv",     "eval", "clip",   "cast",
                          "dtype",   "weigh", "side",   "odd",  "less",    "slices", "zg",     "lr",   "bucket", "all",
                          "vary",    "turn",  "cut",    "long", "overlap", "cl",     "groups", "slip", "late",
                          "exp",     "tp",    "tp2",  "resume", "act",    "faulty", "own",  "label", "rate2"}) {
    if (p.rounds() && std::string(key) == "dtype") continue;  // its tolerance is that of doubles
    if (p.has(key)) with([&](program& q) { q.options.erase(key); });
  }
  if (p.replicas() > 2) with([](program& q) { q.options["rep"] = "2"; });
  if (p.get("opt") != "sgd") with([](program& q) { q.options["opt"] = "sgd"; });
  if (p.steps() > 1) with([&](program& q) { q.options["steps"] = std::to_string(p.steps() - 1); });
  if (p.steps() > 2) with([](program& q) { q.options["steps"] = "1"; });
  // Fewer stages: two become one, or one goes, under a schedule for as many.
  for (char const* name : {"GPipe", "1F1B", "ZB-H1", "Seq1F1B", "SeqZB-H1"}) {
    auto const on = [&](program& q, std::size_t count, int micro_batches) {
      q.options["plan"] = std::string(name) + "," + std::to_string(count) + "," + std::to_string(micro_batches);
    };
    if (p.schedule() != name && p.schedule() != "GPipe" && p.schedule() != "1F1B")
      with([&](program& q) { on(q, stages, p.micro_batches()); });
    for (std::size_t s = 0; s + 1 < stages; ++s) {
      with([&](program& q) {
        on(q, stages - 1, p.micro_batches());
        auto& into = q.stages[s].blocks;
        into.insert(into.end(), q.stages[s + 1].blocks.begin(), q.stages[s + 1].blocks.end());
        q.stages.erase(q.stages.begin() + static_cast<std::ptrdiff_t>(s) + 1);
      });
    }
    for (std::size_t s = 0; s < stages && stages > 1; ++s) {
      with([&](program& q) {
        on(q, stages - 1, p.micro_batches());
        q.stages.erase(q.stages.begin() + static_cast<std::ptrdiff_t>(s));
      });
    }
  }
  auto const same_plan = [&](program& q, int micro_batches) {
    q.options["plan"] = p.schedule() + "," + std::to_string(p.ranks()) + "," + std::to_string(micro_batches);
  };
  for (int m : {1, 2, p.micro_batches() / 2, p.micro_batches() - 1}) {
    if (m >= 1 && m < p.micro_batches()) with([&](program& q) { same_plan(q, m); });
  }
  for (long n : {static_cast<long>(p.micro_batches()), 2L * p.micro_batches(), p.number("n", 1) - 1}) {
    if (n >= p.micro_batches() && n < p.number("n", 1)) with([&](program& q) { q.options["n"] = std::to_string(n); });
  }
  for (std::size_t s = 0; s < stages; ++s) {
    stage_text const& one = p.stages[s];
    for (std::size_t b = 0; b < one.blocks.size(); ++b) {
      if (one.blocks.size() > 1) {
        with([&](program& q) { q.stages[s].blocks.erase(q.stages[s].blocks.begin() + static_cast<std::ptrdiff_t>(b)); });
      }
      for (char const* simple : {"lin", "tanh"}) {
        if (one.blocks[b].name != "lin" && one.blocks[b].name != simple && one.blocks[b].name != "tanh")
          with([&](program& q) { q.stages[s].blocks[b] = {simple}; });
      }
      for (std::string const& flag : one.blocks[b].flags) with([&](program& q) { q.stages[s].blocks[b].flags.erase(flag); });
      for (std::size_t k = 0; k < one.blocks[b].numbers.size(); ++k) {
        for (int to : {1, 2, 4}) {
          if (to < one.blocks[b].numbers[k]) with([&](program& q) { q.stages[s].blocks[b].numbers[k] = to; });
        }
      }
    }
    for (std::string const& flag : one.form.flags) with([&](program& q) { q.stages[s].form.flags.erase(flag); });
    if (one.form.name != "mod") with([&](program& q) { q.stages[s].form.name = "mod"; });
  }
  return out;
}

}  // namespace

found shrink(program p, judgement said, double seconds) {
  auto const end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  found best{std::move(p), std::move(said), 0};
  for (bool better = true; better;) {
    better = false;
    for (program const& one : smaller(best.smallest)) {
      if (std::chrono::steady_clock::now() > end) return best;
      ++best.tries;
      try {
        auto const facts = facts_of(one.schedule(), one.ranks(), one.micro_batches(), one.slices());
        if (facts.stages != static_cast<int>(one.stages.size())) continue;
      } catch (meaningless const&) {
        continue;
      }
      judgement const j = judge_apart(one);
      if (j.what != best.said.what) continue;
      best.smallest = one;
      best.said = j;
      better = true;
      break;
    }
  }
  return best;
}

}  // namespace differential
