#pragma once

#include <boost/hana/concat.hpp>
#include <boost/hana/tuple.hpp>

#include <chevron/describe/expression.hpp>
#include <chevron/plan/action.hpp>

/// \file
/// Tokens: the letters a schedule is written in. Each takes the next microbatch of its stream; a token whose stream is spent
/// is skipped.

namespace chevron {

namespace hana = boost::hana;

inline constexpr int any_chunk = -1;

/// One letter. Without a chunk it draws its (chunk, microbatch) from the schedule's order; `F(1)` names the chunk, counted
/// on its rank from the input side, and draws only the microbatch.
template <kind What>
struct token {
  int chunk = any_chunk;
  constexpr token operator()(int which_chunk) const { return {which_chunk}; }
};

template <class Item>
inline constexpr bool is_token = false;
template <kind What>
inline constexpr bool is_token<token<What>> = true;

/// Two letters as one action in time: `overlap(F(0), B(1))`. Where the stream of one half is spent, the other half stands alone.
template <kind ForwardHalf, kind BackwardHalf>
struct fused {
  static_assert(ForwardHalf == kind::forward && (BackwardHalf == kind::backward || BackwardHalf == kind::backward_input),
                "a fused pair is a forward and a backward, in this order: overlap(F, B) or overlap(F, I)");
  token<ForwardHalf> forward_half;
  token<BackwardHalf> backward_half;
};
template <kind ForwardHalf, kind BackwardHalf>
inline constexpr bool is_token<fused<ForwardHalf, BackwardHalf>> = true;

/// Runs a forward and a backward as one (DeepSeek's DualPipe; PyTorch's OVERLAP_F_B), so that each can hide the other's
/// communication. See `cost_view::of_pair` for what a pair costs.
template <kind ForwardHalf, kind BackwardHalf>
constexpr fused<ForwardHalf, BackwardHalf> overlap(token<ForwardHalf> forward_half, token<BackwardHalf> backward_half) {
  return {forward_half, backward_half};
}

/// Tokens one after another: `F + I`.
template <class... Tokens>
struct sequence {
  hana::tuple<Tokens...> tokens;
};

/// A sequence so many times, counted by a rank expression: `(F + I) * rank`.
template <class Count, class... Tokens>
struct repeated {
  hana::tuple<Tokens...> tokens;
  Count count;
};

template <class Item>
inline constexpr bool is_item = is_token<Item>;
template <class... Tokens>
inline constexpr bool is_item<sequence<Tokens...>> = true;
template <class Count, class... Tokens>
inline constexpr bool is_item<repeated<Count, Tokens...>> = true;

/// What a phase is made of: a token, a sequence, or a repeated one.
template <class Item>
concept phase_item = is_item<std::remove_cvref_t<Item>>;

template <kind What>
constexpr hana::tuple<token<What>> tokens_of(token<What> t) {
  return {t};
}
template <kind ForwardHalf, kind BackwardHalf>
constexpr hana::tuple<fused<ForwardHalf, BackwardHalf>> tokens_of(fused<ForwardHalf, BackwardHalf> pair) {
  return {pair};
}
template <class... Tokens>
constexpr hana::tuple<Tokens...> tokens_of(sequence<Tokens...> s) {
  return s.tokens;
}
template <class... Tokens>
constexpr sequence<Tokens...> sequence_of(hana::tuple<Tokens...> tokens) {
  return {tokens};
}

template <class Left, class Right>
requires(phase_item<Left>&& phase_item<Right>) constexpr auto operator+(Left left, Right right) {
  return sequence_of(hana::concat(tokens_of(left), tokens_of(right)));
}
template <kind What, expression::operand Count>
constexpr repeated<expression::node_of<Count>, token<What>> operator*(token<What> t, Count count) {
  return {hana::tuple<token<What>>{t}, expression::as_node(count)};
}
template <kind ForwardHalf, kind BackwardHalf, expression::operand Count>
constexpr repeated<expression::node_of<Count>, fused<ForwardHalf, BackwardHalf>> operator*(fused<ForwardHalf, BackwardHalf> pair,
                                                                                           Count count) {
  return {hana::tuple<fused<ForwardHalf, BackwardHalf>>{pair}, expression::as_node(count)};
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
}  // namespace letters

/// The same, spelled out.
namespace words {
using namespace terms;
inline constexpr token<kind::forward> forward{};
inline constexpr token<kind::backward> backward{};
inline constexpr token<kind::backward_input> backward_input{};
inline constexpr token<kind::backward_weight> backward_weight{};
}  // namespace words

}  // namespace chevron
