#include <chevron/schedule.hpp>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

using namespace chevron;
using namespace chevron::letters;

namespace {

// 1F1B as a block: a backward takes two slots.
constexpr auto one_f_one_b_block = building_block(placement::linear, every(3), F.at(rank), B.at(3 * ranks - 2 - 2 * rank));

// Twice V-Half's hops: as much memory as ZB-V, and as short a step.
constexpr auto v_zb = building_block(placement::vee, every(6), F(0).at(4 * rank), F(1).at(6 * ranks - 4 - 2 * rank),
                                     I(1).at(6 * ranks - 3 + 4 * rank), I(0).at(12 * ranks - 7 - 2 * rank), W(1), W(0));

bool same(plan const& a, plan const& b) {
  if (a.size != b.size || a.view().total() != b.view().total()) return false;
  for (int r = 0; r <= a.size.ranks; ++r) {
    if (a.begin.data[r] != b.begin.data[r]) return false;
  }
  for (int i = 0; i < a.view().total(); ++i) {
    if (!(a.actions.data[i] == b.actions.data[i])) return false;
  }
  return true;
}

double bubble_in_slots(plan const& p) { return makespan(p, costs{}) - 3.0 * p.size.micro_batches * p.size.chunks; }

/// A slot per rank, looked up: a rank expression of one's own.
struct looked_up : expression::node {
  int const* table;
  constexpr explicit looked_up(int const* t) : table(t) {}
  constexpr int operator()(rank_parameters const& s) const { return table[s.rank]; }
};

/// One action of a random block on one rank. `weight` says where a W without a slot stands in the block's list.
struct piece {
  kind what;
  int stage;
  int slot;
  bool idle;
};

int length_of(kind what) { return what == kind::backward ? 2 : 1; }

/// A rank's actions once its block repeats, slot by slot, with W's in idle slots: independent of the library's code.
struct step {
  int slot;
  action what;
};
std::vector<step> unsqueezed(std::vector<piece> const& mine, int interval, int micro_batches) {
  std::vector<step> all;
  std::vector<int> given(mine.size(), 0), ready(mine.size(), 0);
  int last = 0;
  for (piece const& p : mine) last = std::max(last, p.slot + interval * micro_batches);
  for (int slot = 0; slot < last + 4 * micro_batches; ++slot) {
    bool busy = false;
    for (std::size_t k = 0; k < mine.size(); ++k) {
      piece const& p = mine[k];
      for (int m = 0; m < micro_batches && !p.idle; ++m) {
        int const starts = p.slot + m * interval;
        if (slot < starts || slot >= starts + length_of(p.what)) continue;
        DOCTEST_REQUIRE(!busy);
        busy = true;
        if (slot != starts) continue;
        all.push_back({slot, make_action(p.what, p.stage, m)});
        for (std::size_t w = 0; w < mine.size(); ++w)
          ready[w] += p.what == kind::backward_input && mine[w].idle && mine[w].stage == p.stage ? 1 : 0;
      }
    }
    for (std::size_t w = 0; w < mine.size() && !busy; ++w) {
      if (!mine[w].idle || ready[w] == 0) continue;
      --ready[w];
      busy = true;
      all.push_back({slot, make_action(kind::backward_weight, mine[w].stage, given[w]++)});
    }
  }
  return all;
}

/// A random block on a random placement of two chunks a rank: earliest free slots, with random delays.
struct random_block {
  int ranks, interval;
  bool whole[2];        // a chunk has B
  bool weight_idle[2];  // a chunk's W has no slot
  std::vector<int> rank_of, slots[4][2];
  std::vector<std::vector<piece>> by_rank;

  random_block(std::mt19937& random, bool vee) {
    auto const below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
    ranks = 1 + below(5);
    for (int c = 0; c < 2; ++c) {
      whole[c] = below(3) == 0;
      weight_idle[c] = below(3) != 0;
    }
    interval = 6 + below(4);
    int const stages = 2 * ranks;
    for (int s = 0; s < stages; ++s) rank_of.push_back(vee ? placement::vee.rank_of(s, {ranks, 1, 2}) : s % ranks);
    for (auto& kinds : slots) {
      for (auto& one : kinds) one.assign(static_cast<std::size_t>(ranks), 0);
    }
    // A whole backward needs two slots in a row: as a last resort the interval grows until all fit.
    while (!lay_out(below)) ++interval;
  }

  template <class Below>
  bool lay_out(Below const& below) {
    int const stages = 2 * ranks;
    by_rank.assign(static_cast<std::size_t>(ranks), {});
    std::vector<std::vector<bool>> taken(static_cast<std::size_t>(ranks),
                                         std::vector<bool>(static_cast<std::size_t>(interval), false));
    auto const chunk_of = [&](int s) { return s < ranks ? 0 : 1; };
    auto const put = [&](kind what, int s, int earliest) {
      auto const r = static_cast<std::size_t>(rank_of[static_cast<std::size_t>(s)]);
      int slot = earliest + (below(2) == 0 ? 0 : below(6));
      for (int tried = 0;; ++tried, ++slot) {
        if (tried == interval) return -1;
        bool free = true;
        for (int i = 0; i < length_of(what); ++i) free = free && !taken[r][static_cast<std::size_t>((slot + i) % interval)];
        if (free) break;
      }
      for (int i = 0; i < length_of(what); ++i) taken[r][static_cast<std::size_t>((slot + i) % interval)] = true;
      slots[static_cast<int>(what)][chunk_of(s)][r] = slot;
      by_rank[r].push_back({what, s, slot, false});
      return slot + length_of(what);
    };
    int end = below(3);
    for (int s = 0; s < stages; ++s) {
      end = put(kind::forward, s, end);
      if (end < 0) return false;
    }
    std::vector<int> gradient_end(static_cast<std::size_t>(stages));
    for (int s = stages - 1; s >= 0; --s) {
      end = put(whole[chunk_of(s)] ? kind::backward : kind::backward_input, s, end);
      if (end < 0) return false;
      gradient_end[static_cast<std::size_t>(s)] = end;
    }
    for (int s = stages - 1; s >= 0; --s) {
      if (whole[chunk_of(s)]) continue;
      auto const r = static_cast<std::size_t>(rank_of[static_cast<std::size_t>(s)]);
      if (weight_idle[chunk_of(s)])
        by_rank[r].push_back({kind::backward_weight, s, 0, true});
      else if (put(kind::backward_weight, s, gradient_end[static_cast<std::size_t>(s)]) < 0)
        return false;
    }
    return true;
  }

  int const* table(kind what, int chunk) const { return slots[static_cast<int>(what)][chunk].data(); }

  template <class Placement>
  plan worked_out(Placement where, int micro_batches) const {
    auto const forward = [&](int c) { return F(c).at(looked_up(table(kind::forward, c))); };
    auto const input = [&](int c) { return I(c).at(looked_up(table(kind::backward_input, c))); };
    auto const backward = [&](int c) { return B(c).at(looked_up(table(kind::backward, c))); };
    auto const weight = [&](int c) { return W(c).at(looked_up(table(kind::backward_weight, c))); };
    auto const made = [&](auto... gradients) {
      return expand(building_block(where, every(interval), forward(0), forward(1), gradients...), {ranks, micro_batches});
    };
    auto const with_first = [&](auto... second) {
      if (whole[0]) return made(second..., backward(0));
      return weight_idle[0] ? made(second..., input(0), W(0)) : made(second..., input(0), weight(0));
    };
    if (whole[1]) return with_first(backward(1));
    return weight_idle[1] ? with_first(input(1), W(1)) : with_first(input(1), weight(1));
  }
};

}  // namespace

TEST_SUITE("block") {
  TEST_CASE("1F1B as a block is 1F1B, action by action; with fewer microbatches than ranks as long and as large") {
    for (int p = 1; p <= 8; ++p) {
      for (int m = 1; m <= 24; ++m) {
        CAPTURE(p);
        CAPTURE(m);
        plan const block = expand(one_f_one_b_block, {p, m});
        plan const phases = expand(catalogue::one_f_one_b, {p, m});
        if (m >= p) DOCTEST_CHECK(same(block, phases));
        DOCTEST_CHECK(makespan(block, costs{}) == makespan(phases, costs{}));
        DOCTEST_CHECK(peak_in_flight(block) == peak_in_flight(phases));
      }
    }
  }

  TEST_CASE("twice V-Half's hops are as good as ZB-V") {
    for (int p = 2; p <= 10; ++p) {
      for (int m = 2 * p; m <= 2 * p + 9; ++m) {
        CAPTURE(p);
        CAPTURE(m);
        plan const made = expand(v_zb, {p, m});
        DOCTEST_CHECK(check(made).broken == law::none);
        DOCTEST_CHECK(peak_in_flight(made) == 2 * p);
        DOCTEST_CHECK(makespan(made, costs{}) == makespan(expand(catalogue::zb_v, {p, m}), costs{}));
      }
    }
  }

  TEST_CASE("V-Half and V-Min keep every law, their peak and their bubble up to 16 ranks and 40 microbatches") {
    for (int p = 1; p <= 16; ++p) {
      double const half = p == 1 ? 0 : p == 2 ? 1 : p % 2 == 0 ? 3 * p - 7 : 3 * p - 4;
      double const min = std::max(p - 1, 4 * p - (p % 3 == 0 ? 7 : p % 3 == 1 ? 5 : 9));
      for (int m = 1; m <= 40; ++m) {
        CAPTURE(p);
        CAPTURE(m);
        plan const v_half = expand(catalogue::v_half, {p, m});
        plan const v_min = expand(catalogue::v_min, {p, m});
        DOCTEST_CHECK(describe(check(v_half)).view() == "all laws hold");
        DOCTEST_CHECK(describe(check(v_min)).view() == "all laws hold");
        DOCTEST_CHECK(peak_in_flight(v_half) <= (p + 2) / 2 * 2);
        DOCTEST_CHECK(peak_in_flight(v_min) <= (p + 4) / 3 * 2);
        if (m < p) continue;
        DOCTEST_CHECK(bubble_in_slots(v_half) == half);
        DOCTEST_CHECK(bubble_in_slots(v_min) == min);
      }
    }
  }

  TEST_CASE("with more memory than a block needs the bubble shrinks") {
    auto const with = [](int extra) { return expand(catalogue::v_half.at_most_in_flight((ranks + 2) / 2 * 2 + extra), {8, 24}); };
    DOCTEST_CHECK(bubble_in_slots(with(0)) == 17);
    DOCTEST_CHECK(bubble_in_slots(with(2)) == 15);
    DOCTEST_CHECK(bubble_in_slots(with(4)) == 13);
    for (int extra : {0, 2, 4}) {
      DOCTEST_CHECK(check(with(extra)).broken == law::none);
      DOCTEST_CHECK(peak_in_flight(with(extra)) == 10 + extra);
    }
  }

  TEST_CASE("a declared limit below what a block needs is a broken law") {
    finding const f = check(expand(catalogue::v_half.at_most_in_flight(ranks), {4, 8}));
    DOCTEST_CHECK(f.broken == law::in_flight);
  }

  TEST_CASE("600 random blocks: lawful, no more in flight than the block needs, in the block's order once all microbatches run") {
    std::mt19937 random(15);
    int in_order = 0, kept = 0;
    for (int i = 0; i < 600; ++i) {
      bool const vee = i % 2 == 0;
      random_block const block(random, vee);
      int const m = 1 + static_cast<int>(random() % 30);
      plan const made = vee ? block.worked_out(placement::vee, m) : block.worked_out(placement::loop, m);
      CAPTURE(i);
      CAPTURE(block.ranks);
      CAPTURE(block.interval);
      CAPTURE(m);
      DOCTEST_REQUIRE(describe(check(made)).view() == "all laws hold");

      int peak = 0, cool_from = 1 << 30;
      for (auto const& mine : block.by_rank) {
        int now = 0;
        for (step const& s : unsqueezed(mine, block.interval, 20 + 2 * block.ranks)) {
          now += in_flight_change(s.what.kind, false);
          peak = std::max(peak, now);
        }
        for (piece const& p : mine) cool_from = std::min(cool_from, p.idle ? cool_from : p.slot + (m - 1) * block.interval);
      }
      DOCTEST_CHECK(peak_in_flight(made) <= peak);
      for (int r = 0; r < block.ranks; ++r) {
        auto const& mine = block.by_rank[static_cast<std::size_t>(r)];
        int first_gradient = cool_from;
        for (piece const& p : mine) {
          if (p.what != kind::forward && !p.idle) first_gradient = std::min(first_gradient, p.slot);
        }
        int position = 0;
        for (step const& s : unsqueezed(mine, block.interval, m)) {
          bool const between = s.slot >= first_gradient && s.slot < cool_from;
          if (between) {
            ++in_order;
            kept += made.view().at(r, position) == s.what ? 1 : 0;
          }
          ++position;
        }
      }
    }
    DOCTEST_CHECK(in_order > 10000);
    DOCTEST_CHECK(kept == in_order);
  }

  TEST_CASE("ranks with different numbers of stages") {
    // Three stages, two of them on rank 0: rank 1 has no second chunk.
    constexpr auto mine = building_block(placement::of({0, 1, 0}), every(6), F(0).at(rank), F(1).at(2), B(1).at(3),
                                         I(0).at(7 - 2 * rank), W(0).at(11 - 2 * rank));
    for (int m = 1; m <= 9; ++m) {
      plan const made = expand(mine, {2, m});
      DOCTEST_REQUIRE(describe(check(made)).view() == "all laws hold");
      DOCTEST_CHECK(made.view().length(0) == 5 * m);
      DOCTEST_CHECK(made.view().length(1) == 3 * m);
    }
  }

  TEST_CASE("what is wrong with a block is said in words") {
    auto const says = [](auto const& block, int ranks_here) { return describe(check(expand(block, {ranks_here, 4}))).str(); };
    constexpr auto v = placement::vee;
    DOCTEST_CHECK(says(building_block(placement::linear, every(3), F.at(ranks - rank), B.at(3 * ranks - 2 * rank)), 3) ==
                  "rank 1: 1F0 must have a later slot in the block: it does not wait for the end of 0F0");
    DOCTEST_CHECK(says(building_block(placement::linear, every(3), F.at(rank), B.at(2 * ranks - rank)), 3) ==
                  "rank 0: 0B0 must have a later slot in the block: it does not wait for the end of 1B0");
    DOCTEST_CHECK(says(building_block(placement::linear, every(3), F.at(rank), I.at(3 * ranks - 2 * rank), W.at(rank)), 3) ==
                  "rank 0: 0W0 must have a later slot in the block: it does not wait for the end of 0I0");
    DOCTEST_CHECK(says(building_block(placement::linear, every(4), F.at(rank), B.at(3 * ranks - 2 - 2 * rank)), 3) ==
                  "rank 0: 0B0 must move to another slot, or the blocks repeat at another interval: once repeated it meets 0F0");
    DOCTEST_CHECK(says(building_block(placement::linear, every(2), F.at(rank), B.at(3 * ranks - 2 - 2 * rank)), 3) ==
                  "rank 0: the work of a rank in one block needs an interval of at least 3, not 2");
    DOCTEST_CHECK(says(building_block(placement::linear, every(0), F.at(rank), B.at(3 * ranks - 2 - 2 * rank)), 3) ==
                  "rank 0: the work of a rank in one block needs an interval of at least 3");
    DOCTEST_CHECK(says(building_block(placement::linear, every(20000), F.at(rank), B.at(3 * ranks - 2 - 2 * rank)), 3) ==
                  "an interval must be at most 16384 slots, not 20000");
    DOCTEST_CHECK(says(building_block(placement::linear, every(3), F.at(rank - 1), B.at(3 * ranks - 2 * rank)), 3) ==
                  "rank 0: a slot of a block is negative, see max_of; it is -1");
    DOCTEST_CHECK(says(building_block(placement::linear, every(3), F.at(rank), B.at(300000 - 2 * rank)), 3) ==
                  "rank 0: a slot of a block must be at most 262144, not 300000");
    DOCTEST_CHECK(says(building_block(placement::linear, every(3), F.at(rank)), 3) ==
                  "rank 0: 0B0 is missing: the block must say in which slot, or give an I and a W");
    DOCTEST_CHECK(says(building_block(placement::linear, every(3)), 3) ==
                  "rank 0: 0F0 is missing: the block must say in which slot");
    DOCTEST_CHECK(says(building_block(placement::linear, every(3), B.at(rank)), 3) ==
                  "rank 0: 0F0 is missing: the block must say in which slot");
    DOCTEST_CHECK(says(building_block(placement::linear, every(3), F.at(rank), I.at(3 * ranks - 2 - 2 * rank)), 3) ==
                  "rank 0: 0W0 is missing: the block must say in which slot, or name W without one, to run in idle slots");
    DOCTEST_CHECK(says(building_block(placement::linear, every(3), F.at(rank), B.at(3 * ranks - 2 - 2 * rank), W), 3) ==
                  "rank 0: 0B0 would add these gradients twice: the block also has an I or a W of this stage");
    DOCTEST_CHECK(says(building_block(placement::linear, every(4), F.at(rank), F(0).at(1 + rank), B.at(9)), 3) ==
                  "rank 0: 0F0 stands in the block more than once");
    DOCTEST_CHECK(says(building_block(v, every(6), F.at(rank), I.at(9), W), 3) ==
                  "a token of a block names its chunk, as in F(0), where a rank has several; here a rank has 2");
    DOCTEST_CHECK(says(building_block(v, every(6), F(0).at(rank), F(2).at(9)), 3) ==
                  "a token names a chunk no rank has, chunk 2");
    DOCTEST_CHECK(says(building_block(placement::loop, every(3), F(0).at(rank), B(0).at(9)), 0) ==
                  "ranks must be at least 1, not 0");
  }
}
