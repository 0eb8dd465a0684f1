#pragma once

#include <stdexcept>
#include <type_traits>

#include <boost/hana/basic_tuple.hpp>
#include <boost/hana/unpack.hpp>

#include <chevron/describe/expression.hpp>
#include <chevron/plan/action.hpp>
#include <chevron/plan/raise.hpp>

/// \file
/// Tokens: the letters of a schedule. Each takes the next microbatch of its stream (forwards, backwards or weight gradients); a
/// token whose stream has no action left is skipped.

namespace chevron {

// Descriptions store their parts in basic_tuples: with hana::tuple, which can also compare and convert, users would compile the
// catalogue's descriptions for twice as long.
namespace hana = boost::hana;

/// The value of `chunk` in a token without a chunk; no schedule contains this number.
inline constexpr int any_chunk = -2147483647 - 1;

/// Called for an action with other numbers. Not constexpr, so that a compiler that evaluates such an action stops here and
/// prints this name.
[[noreturn]] inline void an_action_has_stage_0_to_1023_and_microbatch_0_to_65534() {
  detail::raise(std::out_of_range("an action has a stage from 0 to 1023 and a microbatch from 0 to 65534"));
}

template <kind What, class Slot>
struct placed;

/// Empty; takes the place of `own_kind` for kinds that Chevron defines.
struct known_kind {};

/// One letter of a schedule, for actions of kind `What`. A token without a chunk takes its chunk and microbatch from the
/// schedule's order. `F(1)` names the chunk, counted on its rank from the input side, and takes only the microbatch from the
/// order.
template <kind What>
struct token {
  int chunk = any_chunk;
  [[no_unique_address]] std::conditional_t<is_own(What), own_kind, known_kind> stands{};
  constexpr token operator()(int which_chunk) const { return {which_chunk, stands}; }
  template <class Other>
  requires(!std::integral<Other>) constexpr token operator()(Other const&) const {
    static_assert(std::integral<Other>,
                  "a chunk is an int, the same on every rank: F(1); a count is written with *, as in F * rank");
    return {};
  }
  /// The action itself, for a `table`: `F(2, 0)` is 2F0, stage 2's forward of microbatch 0.
  constexpr action operator()(int stage, int micro_batch) const {
    if (stage < 0 || stage >= max_stages || micro_batch < 0 || micro_batch >= max_micro_batches)
      an_action_has_stage_0_to_1023_and_microbatch_0_to_65534();
    return make_action(What, stage, micro_batch);
  }
  /// Returns the token with the slot in which its action starts, for a building block.
  template <expression::operand Slot>
  constexpr placed<What, expression::node_of<Slot>> at(Slot slot) const;
};

/// A token in a slot of a building block: `F(0).at(2 * rank)`.
template <kind What, class Slot>
struct placed {
  token<What> what;
  Slot slot;
};
template <kind What>
template <expression::operand Slot>
constexpr placed<What, expression::node_of<Slot>> token<What>::at(Slot slot) const {
  return {*this, expression::as_node(slot)};
}

template <class Item>
inline constexpr bool is_token = false;
template <kind What>
inline constexpr bool is_token<token<What>> = true;

/// Two letters as one action: `overlap(F(0), B(1))`. If the stream of one half has no action left, the other half runs alone.
template <kind ForwardHalf, kind BackwardHalf>
struct fused {
  static_assert(makes_output(ForwardHalf) && makes_input_gradient(BackwardHalf),
                "a fused pair is a forward and a backward, in this order: overlap(F, B) or overlap(F, I)");
  token<ForwardHalf> forward_half;
  token<BackwardHalf> backward_half;
};
template <kind ForwardHalf, kind BackwardHalf>
inline constexpr bool is_token<fused<ForwardHalf, BackwardHalf>> = true;

/// Runs a forward and a backward as one (DeepSeek's DualPipe; PyTorch's OVERLAP_F_B), so that each can hide the communication
/// of its partner. `cost_view::of_pair` is the cost of a pair.
template <kind ForwardHalf, kind BackwardHalf>
constexpr fused<ForwardHalf, BackwardHalf> overlap(token<ForwardHalf> forward_half, token<BackwardHalf> backward_half) {
  return {forward_half, backward_half};
}

/// Tokens one after another: `F + I`.
template <class... Tokens>
struct sequence {
  hana::basic_tuple<Tokens...> tokens;
};

/// A token or sequence that is repeated; the rank expression `count` says how often: `(F + I) * rank`.
template <class Count, class... Tokens>
struct repeated {
  hana::basic_tuple<Tokens...> tokens;
  Count count;
};

template <class Item>
inline constexpr bool is_item = is_token<Item>;
template <class... Tokens>
inline constexpr bool is_item<sequence<Tokens...>> = true;
template <class Count, class... Tokens>
inline constexpr bool is_item<repeated<Count, Tokens...>> = true;

/// An item of a phase: a token, a sequence, or a repeated token or sequence.
template <class Item>
concept phase_item = is_item<std::remove_cvref_t<Item>>;

/// A token, or a fused pair.
template <class Item>
concept one_token = is_token<Item>;

template <one_token Token>
constexpr hana::basic_tuple<Token> tokens_of(Token one) {
  return hana::basic_tuple<Token>{one};
}
template <class... Tokens>
constexpr hana::basic_tuple<Tokens...> tokens_of(sequence<Tokens...> s) {
  return s.tokens;
}
/// A type whose name the compiler prints for an error: a repeated item was added to other items.
template <class Count, class... Tokens>
struct adding_to_a_repeated_item {
  static_assert(sizeof...(Tokens) == 0,
                "a repeated item stands by itself: write warmup(F * 2, I) or warmup((F + F + I) * 3), not F * 2 + I");
};
template <class Count, class... Tokens>
constexpr hana::basic_tuple<Tokens...> tokens_of(repeated<Count, Tokens...> r) {
  (void)sizeof(adding_to_a_repeated_item<Count, Tokens...>);
  return r.tokens;
}
template <class... Left, class... Right>
constexpr sequence<Left..., Right...> sequence_of(hana::basic_tuple<Left...> const& left,
                                                  hana::basic_tuple<Right...> const& right) {
  return hana::unpack(left, [&](Left const&... before) {
    return hana::unpack(right, [&](Right const&... after) {
      return sequence<Left..., Right...>{hana::basic_tuple<Left..., Right...>{before..., after...}};
    });
  });
}

template <class Left, class Right>
requires(phase_item<Left>&& phase_item<Right>) constexpr auto operator+(Left left, Right right) {
  return sequence_of(tokens_of(left), tokens_of(right));
}
template <one_token Token, expression::operand Count>
constexpr repeated<expression::node_of<Count>, Token> operator*(Token one, Count count) {
  return {tokens_of(one), expression::as_node(count)};
}
template <class... Tokens, expression::operand Count>
constexpr repeated<expression::node_of<Count>, Tokens...> operator*(sequence<Tokens...> s, Count count) {
  return {s.tokens, expression::as_node(count)};
}

/// The letters, in a namespace of their own since C headers may define `I` as a macro: `using namespace chevron::letters;`.
namespace letters {
using namespace terms;
inline constexpr token<kind::forward> F{};
inline constexpr token<kind::backward> B{};
inline constexpr token<kind::backward_input> I{};
inline constexpr token<kind::backward_weight> W{};
inline constexpr token<kind::recompute> R{};
}  // namespace letters

/// The letters as words.
namespace words {
using namespace terms;
inline constexpr token<kind::forward> forward{};
inline constexpr token<kind::backward> backward{};
inline constexpr token<kind::backward_input> backward_input{};
inline constexpr token<kind::backward_weight> backward_weight{};
inline constexpr token<kind::recompute> recompute{};
}  // namespace words

}  // namespace chevron
