#include "waits.hpp"

#include <algorithm>

#include <chevron/lower/messages.hpp>
#include <chevron/plan/step_graph.hpp>

namespace plan_program {
namespace {

using chevron::action;
using chevron::kind;
using chevron::show::progress;

bool is_posting(kind k) { return chevron::is_send(k) || chevron::is_receive(k); }

rank_story story_of(flight_log const& of, plan_index const* plan) {
  rank_story out;
  // Of a pair both halves are under way: the first is where the rank is.
  for (ring_action const& one : of.actions) {
    if (!one.end && !out.at) out.at = one;
  }
  out.began = out.at && out.at->start > out.at->reached;
  bool const goes_on = of.waiting && out.at && is_posting(out.at->op.kind);  // starting a message waits for nobody
  bool const waits = of.waiting && !goes_on;
  std::int64_t since = of.written, until = of.written;
  if (!of.actions.empty()) since = out.at ? out.at->reached : *of.actions.back().end;
  if (waits) {
    out.state = rank_state::waiting;
    until = of.waiting->until;
    out.waits_for = of.waiting->peer;
    if (of.waiting->what) out.needs = needed_for(*of.waiting->what, plan);
  } else if (goes_on) {
    out.state = rank_state::going_on;
  } else if (of.told.rank == of.rank && of.told.code != 4) {
    out.state = rank_state::failed;
  } else {
    out.state = out.at ? rank_state::busy : rank_state::between;
  }
  if (!of.actions.empty()) out.seconds = static_cast<double>(std::max<std::int64_t>(0, until - since)) * 1e-9;
  return out;
}

std::uint32_t key_of(action a) { return static_cast<std::uint32_t>(a.kind) << 27 | a.stage << 16 | a.micro_batch; }

}  // namespace

std::optional<action> needed_for(action waiting, plan_index const* plan) {
  auto const make = [&](kind what, int stage) {
    return chevron::make_action(what, stage, static_cast<int>(waiting.micro_batch));
  };
  int const stage = static_cast<int>(waiting.stage);
  // The other side's backward is B or I, as its plan has it.
  auto const backward_of = [&](int of) {
    action const split = make(kind::backward_input, of);
    bool const is_split = plan != nullptr && plan->position_of(split) >= 0;
    return is_split ? split : make(kind::backward, of);
  };
  switch (waiting.kind) {
    case kind::receive_forward:
      return stage > 0 ? std::optional(make(kind::forward, stage - 1)) : std::nullopt;
    case kind::receive_backward:
      return backward_of(stage + 1);
    case kind::send_forward:
    case kind::wait_send_forward:  // it is taken where it is needed
      return make(kind::forward, stage + 1);
    case kind::send_backward:
    case kind::wait_send_backward:
      return stage > 0 ? std::optional(backward_of(stage - 1)) : std::nullopt;
    default:
      return std::nullopt;
  }
}

plan_index::plan_index(chevron::plan const& plan) : plan_(plan) {
  for (int r = 0; r < plan.size.ranks; ++r) {
    int const begin = plan.begin.data[r];
    for (int i = begin; i < plan.begin.data[r + 1]; ++i) positions_.emplace(key_of(plan.actions.data[i]), i - begin);
  }
}

int plan_index::position_of(action what, int on) const {
  auto const found = positions_.find(key_of(what));
  if (found == positions_.end()) return -1;
  return on < 0 || plan_.rank_of.data[what.stage] == on ? found->second : -1;
}

story follow_waits(flight_logs const& all, plan_index const* plan) {
  story out;
  int const world = static_cast<int>(all.by_rank.size());
  auto const log_of = [&](int r) -> std::optional<flight_log> const& { return all.by_rank[static_cast<std::size_t>(r)]; };
  for (int r = 0; r < world; ++r) out.ranks.push_back(log_of(r) ? story_of(*log_of(r), plan) : rank_story{});
  auto const at = [&](int r) -> rank_story& { return out.ranks[static_cast<std::size_t>(r)]; };

  // Who waits for all waits for one that has not come: first of all for one that is gone, then for one that is elsewhere.
  for (int r = 0; r < world; ++r) {
    if (at(r).state != rank_state::waiting || at(r).waits_for >= 0) continue;
    ring_wait const& mine = *log_of(r)->waiting;
    bool const of_replicas =
        mine.action == "sum of gradients" || mine.action == "reduce-scatter of gradients" || mine.action == "gather of shares";
    bool const of_shards = mine.action.ends_with(" over shards");
    int best = -1, rank_of_best = 99;
    for (int other = 0; other < world; ++other) {
      flight_log const& grid = all.any();
      bool const same_stages = grid.pipeline_rank_of(other) == grid.pipeline_rank_of(r);
      bool const is_copy = same_stages && grid.shard_of(other) == grid.shard_of(r);
      bool const is_shard =
          same_stages && grid.first_of_pipeline(other) - grid.shard_of(other) == grid.first_of_pipeline(r) - grid.shard_of(r);
      if (other == r || (of_replicas && !is_copy) || (of_shards && !is_shard)) continue;
      rank_state const state = at(other).state;
      bool const same = state == rank_state::waiting && log_of(other)->waiting->action == mine.action &&
                        log_of(other)->waiting->step == mine.step;
      int const order = state == rank_state::absent    ? 0
                        : state == rank_state::failed  ? 1
                        : state != rank_state::waiting ? 2
                        : same                         ? 99
                                                       : 3;
      if (order < rank_of_best) best = other, rank_of_best = order;
    }
    at(r).waits_for = best;
  }

  // Each chain to its end.
  std::vector<int> ends(static_cast<std::size_t>(world), 0), end_of(static_cast<std::size_t>(world), -1);
  for (int r = 0; r < world; ++r) {
    if (at(r).state != rank_state::waiting) continue;
    std::vector<int> way{r};
    int here = r;
    while (at(here).state == rank_state::waiting && at(here).waits_for >= 0) {
      here = at(here).waits_for;
      auto const seen = std::find(way.begin(), way.end(), here);
      if (seen != way.end()) {
        if (out.circle.empty()) out.circle.assign(seen, way.end());
        here = -1;
        break;
      }
      way.push_back(here);
    }
    end_of[static_cast<std::size_t>(r)] = here;
    // Who waits for all, and misses nobody, is led nowhere.
    if (here >= 0 && here != r) ++ends[static_cast<std::size_t>(here)];
  }
  int const told = all.any().told.rank;
  for (int r = 0; r < world; ++r) {
    if (ends[static_cast<std::size_t>(r)] == 0) continue;
    if (out.root < 0 || ends[static_cast<std::size_t>(r)] > ends[static_cast<std::size_t>(out.root)]) out.root = r;
  }
  // The rank that is blamed counts, unless it waited itself: a failure that is told at once finds the others on their way, and
  // what they were about to wait for.
  bool const was_late = told >= 0 && (at(told).state == rank_state::waiting || at(told).state == rank_state::going_on);
  if (told >= 0 && !was_late) out.root = told;
  if (out.root < 0 && out.circle.empty()) {
    // Nobody waited. A rank that failed, or is gone, is what there is to be told.
    auto const is = [&](rank_state s) {
      auto const found = std::find_if(out.ranks.begin(), out.ranks.end(), [&](rank_story const& one) { return one.state == s; });
      return found == out.ranks.end() ? -1 : static_cast<int>(found - out.ranks.begin());
    };
    out.root = told >= 0 ? told : is(rank_state::failed) >= 0 ? is(rank_state::failed) : is(rank_state::absent);
  }
  for (int r = 0; r < world; ++r) {
    bool const is_known = at(r).state == rank_state::going_on;
    if (r != out.root && ends[static_cast<std::size_t>(r)] > 0 && !is_known) out.others.push_back(r);
  }
  for (int r = 0; r < world; ++r) {
    if (r != out.root && end_of[static_cast<std::size_t>(r)] >= 0 && end_of[static_cast<std::size_t>(r)] == out.root)
      out.led.push_back(r);
  }
  if (out.root < 0) {
    if (!out.circle.empty()) out.step = log_of(out.circle.front())->waiting->step;
    return out;
  }

  // What of it was waited for: where it was itself, or else the first thing that somebody lacked.
  rank_story const& root = at(out.root);
  if (root.at) {
    out.awaited = root.at->op;
    out.step = root.at->step;
    return out;
  }
  std::optional<std::pair<long, int>> first;
  for (int r = 0; r < world; ++r) {
    rank_story const& one = at(r);
    if (one.state != rank_state::waiting || one.waits_for != out.root) continue;
    long const step = log_of(r)->waiting->step;
    if (!one.needs) {
      if (!out.awaited && out.meeting.empty()) out.meeting = log_of(r)->waiting->action, out.step = step;
      continue;
    }
    std::pair<long, int> const place{step, plan == nullptr ? -1 : plan->position_of(*one.needs)};
    if (first && *first <= place) continue;
    first = place;
    out.awaited = one.needs;
    out.step = step;
    out.meeting.clear();
  }
  if (out.step < 0 && log_of(out.root) && !log_of(out.root)->actions.empty()) out.step = log_of(out.root)->actions.back().step;
  if (out.step < 0) out.step = all.any().told.step;
  return out;
}

std::vector<std::vector<progress>> how_far(flight_logs const& all, story const& what, plan_index const& index, int first_rank,
                                           long step) {
  chevron::plan const& plan = index.plan();
  auto const rank_of = [&](int p) { return static_cast<std::size_t>(first_rank + p * all.any().shards); };
  auto const story_of = [&](int p) -> rank_story const& { return what.ranks[rank_of(p)]; };
  std::vector<std::vector<progress>> out;
  auto const row_of = [&](int p) { return plan.begin.data[p + 1] - plan.begin.data[p]; };
  for (int p = 0; p < plan.size.ranks; ++p) {
    auto& row = out.emplace_back(static_cast<std::size_t>(row_of(p)), progress::not_begun);
    auto const& mine = all.by_rank[rank_of(p)];
    if (!mine || mine->actions.empty()) continue;
    if (mine->actions.back().step > step) std::fill(row.begin(), row.end(), progress::done);
    bool first = true;
    for (ring_action const& one : mine->actions) {
      int const at = one.step == step && is_compute(one.op.kind) ? index.position_of(one.op, p) : -1;
      if (at < 0) continue;
      // What came before has no place in the file any more.
      if (first && mine->left_out > 0) std::fill(row.begin(), row.begin() + at, progress::done);
      first = false;
      bool const waits = !one.end && story_of(p).state == rank_state::waiting && one.start <= one.reached;
      row[static_cast<std::size_t>(at)] = one.end ? progress::done : waits ? progress::waiting : progress::under_way;
    }
  }
  // A rank that left nothing has done what others got from it, and all before that.
  for (int p = 0; p < plan.size.ranks; ++p) {
    if (story_of(p).state != rank_state::absent) continue;
    auto& row = out[static_cast<std::size_t>(p)];
    int last = -1;
    for (int q = 0; q < plan.size.ranks; ++q) {
      for (int i = 0; i < row_of(q); ++i) {
        progress const so_far = out[static_cast<std::size_t>(q)][static_cast<std::size_t>(i)];
        action const a = plan.actions.data[plan.begin.data[q] + i];
        if (q == p || (so_far != progress::done && so_far != progress::under_way) || a.kind == chevron::kind::backward_weight)
          continue;
        if (chevron::step_graph(plan.view()).from(a) < 0) continue;
        last = std::max(last, index.position_of(*needed_for(chevron::detail::receive_for(a), &index), p));
      }
    }
    std::fill(row.begin(), row.begin() + last + 1, progress::done);
  }
  return out;
}

}  // namespace plan_program
