#pragma once

#include <bit>

#include <boost/hana/for_each.hpp>
#include <boost/hana/size.hpp>

#include <chevron/describe/schedule.hpp>
#include <chevron/plan/buffer.hpp>
#include <chevron/plan/finding.hpp>

/// \file
/// Turns a description's phases, which are types, into plain values for one rank, which `unroll` then plays.

namespace chevron {

namespace detail {

/// A token with its count, as a plain value.
struct bound_token {
  kind what{};
  int chunk = any_chunk;
  int times = 1;
  int stream = 0;            // number of the stream from which the token takes actions
  int cell = 0;              // for streams of one chunk: index of the chunk's first cell, chunk × microbatches
  int stage = -1;            // the stage of all its actions, if the stream is one chunk's; -1: given by the order
  bool pairs = false;        // the first half of a fused pair with the next token
  bool by_forwards = false;  // takes chunks and microbatches in the order of the forwards; otherwise of the backwards
  int ends = 0;              // on the last token of a repeated sequence within its phase: the sequence's number of tokens
  int rounds = 1;            // number of times that the sequence is repeated in one round of the phase
};
/// The `count` of a phase without a count: the phase repeats while its streams have actions left. A special value, since -1 and
/// other negative counts, which a schedule may compute by mistake, must be a finding.
inline constexpr int while_work_is_left = -2147483647 - 1;

/// A phase for one rank: tokens [first, first + tokens), repeated `count` times.
struct bound_phase {
  int first = 0;
  int tokens = 0;
  int count = while_work_is_left;
  bool has_forward = false;
  int deciding = 1;      // number of the first tokens, whose streams determine whether work is left
  bool regular = false;  // each token takes one action, from a stream of its own: whole rounds can be played at once
};

template <class Item>
inline constexpr int tokens_in = 1;
template <kind ForwardHalf, kind BackwardHalf>
inline constexpr int tokens_in<fused<ForwardHalf, BackwardHalf>> = 2;
template <class... Tokens>
inline constexpr int tokens_in<sequence<Tokens...>> = (0 + ... + tokens_in<Tokens>);
template <class Count, class... Tokens>
inline constexpr int tokens_in<repeated<Count, Tokens...>> = (0 + ... + tokens_in<Tokens>);

template <class Phases>
struct score_size;
template <phase_kind Last, class... Phases>
struct score_size<phases<Last, Phases...>> {
  template <class Phase>
  struct of;
  template <phase_kind Role, class... Items>
  struct of<phase<Role, Items...>> {
    static constexpr int value = (0 + ... + tokens_in<Items>);
  };
  static constexpr int phases_count = sizeof...(Phases);
  static constexpr int tokens_count = (0 + ... + of<Phases>::value);
};

/// A description's phases and tokens for one rank, as values.
template <class Phases>
struct score {
  static constexpr int phases_count = score_size<Phases>::phases_count;
  bound_phase phase[array_size(phases_count)]{};
  bound_token token[score_size<Phases>::tokens_count]{};
  bool mixes_backwards = false;  // both B and W appear: a W skips each chunk and microbatch whose B has run
  bool queues_weights = false;   // W without a chunk beside I with a chunk: each W takes the oldest I that has no W yet
};

template <kind What>
constexpr void play(token<What> item, rank_parameters const&, bound_token* out, int& used, int& count, bool) {
  out[used].what = What;
  out[used++].chunk = item.chunk;
  count = while_work_is_left;
}
template <kind ForwardHalf, kind BackwardHalf>
constexpr void play(fused<ForwardHalf, BackwardHalf> item, rank_parameters const& s, bound_token* out, int& used, int& count,
                    bool) {
  out[used].pairs = true;
  play(item.forward_half, s, out, used, count, false);
  play(item.backward_half, s, out, used, count, false);
}
template <class... Tokens>
constexpr void play(sequence<Tokens...> const& item, rank_parameters const& s, bound_token* out, int& used, int& count, bool) {
  hana::for_each(item.tokens, [&](auto t) { play(t, s, out, used, count, false); });
  count = while_work_is_left;
}
template <class Count, class... Tokens>
constexpr void play(repeated<Count, Tokens...> const& item, rank_parameters const& s, bound_token* out, int& used, int& count,
                    bool alone) {
  static_assert(sizeof...(Tokens) > 0);
  int const times = item.count(s);
  int const before = used;
  hana::for_each(item.tokens, [&](auto t) { play(t, s, out, used, count, false); });
  count = times;
  if (!alone) {
    // A single token takes `times` actions; a sequence is played `times` times.
    bool const sequence = used - before > 1;
    for (int i = before; i < used; ++i) out[i].times = sequence && times > 0 ? 1 : times;
    if (sequence) {
      out[used - 1].ends = used - before;
      out[used - 1].rounds = times;
    }
  }
}

template <class Phases>
constexpr score<Phases> score_of(Phases const& how, rank_parameters const& s) {
  score<Phases> result;
  int used = 0;
  int at = 0;
  hana::for_each(how.list, [&](auto const& one) {
    constexpr bool alone = decltype(hana::size(one.items))::value == 1;
    bound_phase& p = result.phase[at++];
    p.first = used;
    hana::for_each(one.items, [&](auto const& item) {
      int count = while_work_is_left;
      play(item, s, result.token, used, count, alone);
      p.count = alone ? count : while_work_is_left;
    });
    p.tokens = used - p.first;
  });
  return result;
}

/// The kinds of a description's tokens outside of fused pairs, as bits.
template <class Item>
inline constexpr unsigned kinds_held = 0;
template <kind What>
inline constexpr unsigned kinds_held<token<What>> = kind_bit(What);
template <class... Tokens>
inline constexpr unsigned kinds_held<sequence<Tokens...>> = (0 | ... | kinds_held<Tokens>);
template <class Count, class... Tokens>
inline constexpr unsigned kinds_held<repeated<Count, Tokens...>> = (0 | ... | kinds_held<Tokens>);
template <phase_kind Role, class... Items>
inline constexpr unsigned kinds_held<phase<Role, Items...>> = (0 | ... | kinds_held<Items>);
template <phase_kind Last, class... Phases>
inline constexpr unsigned kinds_held<phases<Last, Phases...>> = (0 | ... | kinds_held<Phases>);

/// An upper bound of the number of a description's actions for one stage and microbatch: F and B, or F, I and W; and one more
/// for R and for each of the user's own kinds.
template <class Phases>
inline constexpr int kinds_in = 2 + std::popcount(kinds_held<Phases> >> static_cast<int>(kind::backward_weight));

template <class Phases>
inline constexpr bool holds_own_kinds = kinds_held<Phases> >= kind_bit(kind::own_x);

/// Writes the rows (`own_kind`) of a description's own letters into `own`, the list in `plan_facts`.
template <kind What>
constexpr void note_own_kinds(token<What> item, own_kind* own) {
  if constexpr (is_own(What)) own[own_number(What)] = item.stands;
}
template <kind ForwardHalf, kind BackwardHalf>
constexpr void note_own_kinds(fused<ForwardHalf, BackwardHalf>, own_kind*) {}
template <class Items>
requires requires(Items const& of) { of.tokens; }
constexpr void note_own_kinds(Items const& of, own_kind* own) {
  hana::for_each(of.tokens, [&](auto const& item) { note_own_kinds(item, own); });
}
template <class Phases>
constexpr void note_own_kinds_of(Phases const& how, own_kind* own) {
  hana::for_each(how.list,
                 [&](auto const& one) { hana::for_each(one.items, [&](auto const& item) { note_own_kinds(item, own); }); });
}

/// The number of families of kinds (`family_of`), counted from family 0, for which a description needs streams. The description
/// uses no later family.
template <class Phases>
inline constexpr int families_in = holds_own_kinds<Phases>                           ? action_families
                                   : kinds_held<Phases> >= kind_bit(kind::recompute) ? 4
                                                                                     : 3;

/// Sets each token's stream and stage on a rank. \returns a finding if a token names a chunk that the rank does not have, if a
/// count is negative, or if tokens of one kind occur with and without a chunk
template <class Score>
constexpr finding ready(Score& score, int rank, int held, int played, int const* stages, bool const* in_sequence,
                        own_kind const* own) {
  auto const fault_here = [&](char const* words, int number) {
    return finding{.broken = law::description, .rank = rank, .number = number, .words = words};
  };
  bool with_chunk[action_families] = {};
  bool plain[action_families] = {};
  bool whole = false;
  for (int p = 0; p < Score::phases_count; ++p) {
    auto& phase = score.phase[p];
    for (int t = phase.first; t < phase.first + phase.tokens; ++t) {
      auto& token = score.token[t];
      int const family = family_of(token.what);
      if (token.chunk >= held || (token.chunk < 0 && token.chunk != any_chunk))
        return fault_here("a token names a chunk this rank does not have, chunk ", token.chunk);
      if (token.times < 0 || (phase.count < 0 && phase.count != while_work_is_left))
        return fault_here("a phase has a negative count, see max_of; it is ", token.times < 0 ? token.times : phase.count);
      (token.chunk < 0 ? plain : with_chunk)[family] = true;
      if (plain[family] && with_chunk[family])
        return fault_here("tokens with and without a chunk are mixed for one kind, at token ", t);
      whole = whole || token.what == kind::backward;
      score.mixes_backwards = score.mixes_backwards || token.what == kind::backward_weight;
      phase.has_forward = phase.has_forward || token.what == kind::forward;
      token.stream = family * (held + 1) + (token.chunk < 0 ? held : token.chunk);
      if (token.chunk >= 0) {
        token.stage = stages[token.chunk];
        token.cell = token.chunk * played;
      }
      token.by_forwards = token.what == kind::forward || (is_own(token.what) && own[own_number(token.what)].draws_forwards());
      if (token.chunk < 0 && in_sequence[token.by_forwards ? 0 : 1]) token.stage = stages[0];
    }
    phase.deciding = phase.has_forward ? phase.tokens : 1;
    phase.regular = true;
    for (int t = phase.first; t < phase.first + phase.tokens; ++t) {
      phase.regular = phase.regular && score.token[t].times == 1 && score.token[t].ends == 0;
      for (int u = phase.first; u < t; ++u) phase.regular = phase.regular && score.token[u].stream != score.token[t].stream;
    }
  }
  score.queues_weights = plain[2] && with_chunk[1];
  score.mixes_backwards = score.mixes_backwards && whole && !score.queues_weights;
  for (auto& token : score.token) {
    if (score.queues_weights && token.what == kind::backward_weight) token.stage = -1;
  }
  return {};
}

}  // namespace detail
}  // namespace chevron
