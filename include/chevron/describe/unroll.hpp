#pragma once

#include <cstdint>

#include <chevron/describe/order.hpp>
#include <chevron/describe/score.hpp>
#include <chevron/plan/action.hpp>
#include <chevron/plan/shape.hpp>

/// \file
/// Plays one rank's phases: tokens take actions from the rank's streams.

namespace chevron::detail {

/// The streams of one rank, lists of actions from which tokens take the next. The number of a stream is family × (held + 1) +
/// chunk, with chunk = held for tokens without a chunk.
struct streams {
  int units;                    // number of units of the shape
  int played;                   // number of units that the phases are played for; actions of those beyond `units` are left out
  int held;                     // number of stages on this rank
  int slices;                   // number of slices per microbatch
  int* length_of;               // by stream: number of its actions
  int* next_of;                 // by stream: number of actions taken
  drawn const* forward_order;   // actions of the forwards' stream without a chunk
  drawn const* backward_order;  // actions of the backwards' streams without a chunk
  drawn* queue;                 // if each W without a chunk takes the oldest I that has no W: these I's
  std::uint8_t* whole;          // by chunk and microbatch: 1 if B has run, so that no W is needed
  int const* stages;            // by chunk: its stage
};

/// The number of further rounds of a regular phase in which each token takes an action that is not left out.
constexpr int whole_rounds(bound_phase const& phase, bound_token const* tokens, streams const& s) {
  int rounds = phase.count < 0 ? s.played * s.held : phase.count;
  for (int t = 0; t < phase.tokens; ++t) {
    int const next = s.next_of[tokens[t].stream];
    int left = s.length_of[tokens[t].stream] - next;
    if (tokens[t].stage >= 0 && s.units - next < left) left = s.units - next;
    if (tokens[t].stage < 0 && s.units != s.played) left = 0;
    if (tokens[t].stage >= 0 && !tokens[t].by_forwards && s.slices > 1) left = 0;
    rounds = left < rounds ? left : rounds;
  }
  return rounds > 0 ? rounds : 0;
}

/// Plays whole rounds of a regular phase, token by token. The compile time of a long schedule is spent in this inner loop.
template <class Actions>
constexpr void play_rounds(int rounds, bound_phase const& phase, bound_token const* tokens, streams const& s, Actions& out,
                           int filled) {
  int const stride = phase.tokens;
  for (int t = 0; t < stride; ++t) {
    bound_token const token = tokens[t];
    int& next = s.next_of[token.stream];
    int const first = next;
    next = first + rounds;
    int at = filled + t;
    if (token.stage >= 0) {
      action one = make_action(token.what, token.stage, first);
      if (token.pairs) one.fused = 1;
      for (int m = first; m < first + rounds; ++m) {
        one.micro_batch = static_cast<std::uint32_t>(m) & 0xffffu;
        out[at] = one;
        at += stride;
      }
      continue;
    }
    drawn const* const order = token.by_forwards ? s.forward_order : s.backward_order;
    for (int i = first; i < first + rounds; ++i) {
      action one = make_action(token.what, s.stages[order[i].chunk], order[i].micro_batch);
      if (token.pairs) one.fused = 1;
      out[at] = one;
      at += stride;
    }
  }
}

/// The unit of a chunk's `at`-th action of a kind: backwards run the slices of a microbatch in reverse order.
constexpr int place_in(bound_token const& token, int at, streams const& s) {
  return token.by_forwards ? at : mirrored(at, s.slices);
}

/// Plays a rank's phases and writes its actions to `out`, from index `filled` on. `out` is an array where the compiler knows its
/// size, since constant evaluation reads and writes arrays at half the cost of pointers.
/// \tparam Sliced whether microbatches have several slices
/// \returns the index after the last action
template <bool Sliced, class Score, class Actions>
constexpr int unroll(Score const& score, streams const& s, Actions& out, int filled) {
  bool const skips = score.mixes_backwards;
  bool const queues = score.queues_weights;
  int const queue_stream = 2 * (s.held + 1) + s.held;
  if (queues) s.length_of[queue_stream] = 0;
  if (skips) {
    for (int i = 0; i < s.held * s.played; ++i) s.whole[i] = 0;
  }

  for (int p = 0; p < score.phases_count; ++p) {
    bound_phase const phase = score.phase[p];
    bound_token const* const tokens = score.token + phase.first;
    int round = 0;
    if (phase.regular && !queues && !skips) {
      round = whole_rounds(phase, tokens, s);
      play_rounds(round, phase, tokens, s, out, filled);
      filled += round * phase.tokens;
    }
    for (; phase.count < 0 || round < phase.count; ++round) {
      if (phase.count < 0) {
        // Continues while one of the phase's forward streams has an action left or, without forwards, its first token's stream
        // has.
        bool work_left = false;
        for (int t = 0; t < phase.deciding && !work_left; ++t) {
          if (phase.has_forward && tokens[t].what != kind::forward) continue;
          work_left = tokens[t].times > 0 && s.next_of[tokens[t].stream] < s.length_of[tokens[t].stream];
        }
        if (!work_left) break;
      }
      bool took = false;
      int open_pair = -1;  // index of a fused pair's forward half whose backward half comes next
      int repeats = 0;     // number of finished repeats of the current token's sequence
      bool drew = false;   // whether this repeat took an action
      for (int t = 0; t < phase.tokens; ++t) {
        bound_token const token = tokens[t];
        bool const queued = queues && token.what == kind::backward_weight;
        drawn const* const order = queued ? s.queue : token.by_forwards ? s.forward_order : s.backward_order;
        for (int time = token.times; time > 0; --time) {
          int const length = s.length_of[token.stream];
          int at = s.next_of[token.stream];
          if (skips && token.what == kind::backward_weight) {
            while (at < length && s.whole[token.stage >= 0 ? token.cell + (Sliced ? place_in(token, at, s) : at)
                                                           : order[at].chunk * s.played + order[at].micro_batch] != 0)
              ++at;
          }
          if (at >= length) break;
          s.next_of[token.stream] = at + 1;
          took = drew = true;
          int const chunk = token.stage >= 0 ? token.cell / s.played : order[at].chunk;
          int const micro_batch = Sliced && token.stage >= 0 ? place_in(token, at, s)
                                  : token.stage >= 0         ? at
                                                             : order[at].micro_batch;
          if (skips && token.what == kind::backward) s.whole[chunk * s.played + micro_batch] = 1;
          if (queues && leaves_weight(token.what)) s.queue[s.length_of[queue_stream]++] = {chunk, micro_batch};
          if (micro_batch >= s.units) continue;
          if (open_pair >= 0 && open_pair == filled - 1) out[open_pair].fused = 1;
          open_pair = token.pairs ? filled : -1;
          out[filled++] = make_action(token.what, s.stages[chunk], micro_batch);
        }
        if (token.ends == 0) continue;
        bool const again = drew && ++repeats < token.rounds;
        drew = false;
        if (again)
          t -= token.ends;
        else
          repeats = 0;
      }
      if (!took) break;
    }
  }
  return filled;
}

}  // namespace chevron::detail
