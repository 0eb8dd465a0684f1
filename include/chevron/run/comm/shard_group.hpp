#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/host_copy.hpp>
#include <chevron/run/core/tensors.hpp>

/// \file
/// The group of a stage's shards: collectives that a stage calls in its forward, with gradients by autograd.

namespace chevron {

/// One shard's piece of a dimension, in elements.
struct shard_piece {
  std::int64_t begin = 0, size = 0;
};
/// Divides a dimension among shards in nearly equal pieces, whose sizes differ by one at most: shard t's piece is [size × t / T,
/// size × (t + 1) / T).
/// \param size of the dimension \param shard from 0 \param shards T
constexpr shard_piece piece_of(std::int64_t size, int shard, int shards) {
  std::int64_t const begin = size * shard / shards, end = size * (shard + 1) / shards;
  return {begin, end - begin};
}

/// Transposes `counts`: returns the counts of the `all_to_all` that sends the rows back to their senders.
/// \param counts numbers of rows, members × members
inline std::vector<std::int64_t> transposed(std::vector<std::int64_t> const& counts) {
  std::size_t members = 0;
  while (members * members < counts.size()) ++members;
  std::vector<std::int64_t> back(counts.size());
  for (std::size_t from = 0; from < members; ++from) {
    for (std::size_t to = 0; to < members; ++to) back[to * members + from] = counts[from * members + to];
  }
  return back;
}

/// How shards use a gathered tensor, which determines how its gradient is computed.
enum class after_gather {
  whole,   ///< every shard computes the same from the tensor: gradients are equal, and each shard uses its own piece
  partial  ///< each shard computes a part of the result from the tensor: gradients are summed over the shards
};

namespace detail {

/// An autograd function of one tensor, given by two callables: for the value and for the gradient. Its node in the graph knows
/// whether the value is a sum over the group (`adds_up`).
struct with_gradient : torch::autograd::Function<with_gradient> {
  using function = std::function<at::Tensor(at::Tensor const&)>;
  struct kept final : torch::CustomClassHolder {
    explicit kept(function f) : of(std::move(f)) {}
    function of;
  };

  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor const& x, function const& value,
                            function const& gradient, bool sums) {
    context->saved_data["sums"] = sums;
    context->saved_data["gradient"] = at::IValue::make_capsule(c10::make_intrusive<kept>(gradient));
    return value(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list const& gradients) {
    auto const gradient = c10::static_intrusive_pointer_cast<kept>(context->saved_data["gradient"].toCapsule());
    return {gradient->of(gradients[0]), {}, {}, {}};
  }

  /// A node of a graph as that of a collective over a group; null for any other node.
  static torch::autograd::CppNode<with_gradient>* node_of(torch::autograd::Node* node) {
    return dynamic_cast<torch::autograd::CppNode<with_gradient>*>(node);
  }
  /// Whether a collective's value is a sum over the group, as of `all_reduce` and `reduce_scatter`.
  static bool adds_up(torch::autograd::CppNode<with_gradient>& node) { return node.ctx_.saved_data["sums"].toBool(); }
};

}  // namespace detail

/// The group of this stage's shards: T ranks that run the same instructions on cuts of the same parameters. The group's
/// collectives are differentiable, with the conventions of Megatron-LM (Shoeybi et al., arXiv 1909.08053, section 3). A tensor
/// is *whole* (equal on all shards, and its gradient too), *cut* along a dimension, or *partial* (the shards' sum is whole).
///
/// All shards must call the same collectives in the same order, forward and backward: if a stage has branches, all its shards
/// must take the same branch. A wait ends at the transport's deadline or at the failure of any rank, with an error that names
/// the collective. With one shard each collective returns its argument.
///
///     chevron::shard_group const group(comm);
///     at::Tensor h = at::linear(group.copy(x), columns);         // columns: this shard's rows of the weight
///     x = group.all_reduce(at::linear(at::gelu(h), rows));       // rows: this shard's columns
///
/// A group is a handle to the transport, which must outlive all autograd graphs of the group's collectives.
class shard_group {
 public:
  /// \param among the shards, or the expert ranks for collectives of a mixture of experts
  explicit shard_group(transport& comm, rank_group among = rank_group::shards) : comm_(&comm), among_(among) {}

  int shard() const { return comm_->topology().number_in(among_); }  ///< this rank's number in the group, from 0
  int shards() const { return comm_->topology().members(among_); }   ///< T, the size of the group
  /// This shard's piece of a dimension of `size` elements.
  shard_piece piece(std::int64_t size) const { return piece_of(size, shard(), shards()); }

  /// Returns the sum of a partial tensor over the shards, a whole tensor. Backward passes the gradient unchanged.
  at::Tensor all_reduce(at::Tensor const& x) const {
    return differentiable(
        x, [*this](auto& partial) { return summed(partial); },
        [*this](auto& gradient) {
          watch(detail::shard_watch::kind::reduced, gradient);
          return gradient;
        },
        true);
  }
  /// Returns a whole tensor unchanged, for computations that differ by shard. Backward sums the partial gradient over shards.
  at::Tensor copy(at::Tensor const& x) const {
    return differentiable(
        x,
        [*this](auto& whole) {
          watch(detail::shard_watch::kind::copied, whole);
          return whole.view_as(whole);
        },
        [*this](auto& gradient) {
          watch(detail::shard_watch::kind::copied_parts, gradient);
          return summed(gradient);
        });
  }
  /// Gathers the pieces of a tensor that is cut along `dim`; the result is whole.
  /// \param x this shard's piece
  /// \param next how shards use the result: all compute the same from it, or each computes a part
  /// \param size of the result along `dim`; 0: this shard's size times T
  /// \throws usage_error if the size of `x` along `dim` differs from this shard's piece of `size`
  at::Tensor all_gather(at::Tensor const& x, std::int64_t dim, after_gather next, std::int64_t size = 0) const {
    if (alone()) return x;
    std::int64_t const along = dimension(x, dim), whole = size == 0 ? x.size(along) * shards() : size;
    return differentiable(
        x, [=, *this](auto& piece) { return gathered(piece, along, whole); },
        [=, *this](auto& gradient) {
          if (next == after_gather::partial) {
            watch(detail::shard_watch::kind::gathered_parts, gradient);
            return summed_piece(gradient, along);
          }
          watch(detail::shard_watch::kind::gathered, gradient);
          return piece_in(gradient, along).contiguous();
        });
  }
  /// Returns this shard's piece, along `dim`, of the sum of a partial tensor. Backward gathers the gradient.
  at::Tensor reduce_scatter(at::Tensor const& x, std::int64_t dim) const { return to_piece(x, dim, true); }
  /// Returns this shard's piece, along `dim`, of a whole tensor. Backward gathers the gradient.
  at::Tensor scatter(at::Tensor const& x, std::int64_t dim) const { return to_piece(x, dim, false); }
  /// Sends rows (of dimension 0) to the shards, the first rows to shard 0, and returns the rows sent to this shard, ordered by
  /// sender. Backward sends the gradient's rows back.
  /// \param counts T × T numbers of rows, equal on all shards: counts[from × T + to]; `all_counts` gathers them
  /// \throws usage_error if `counts` has another size, or if this shard's counts do not sum to the number of rows of `x`
  at::Tensor all_to_all(at::Tensor const& x, std::vector<std::int64_t> const& counts) const {
    check_counts(x, counts);
    if (alone()) return x;
    return differentiable(
        x, [=, *this](auto& rows) { return exchanged(rows, counts); },
        [=, *this](auto& gradient) { return exchanged(gradient, transposed(counts)); });
  }
  /// Gathers numbers of all shards to the host. \param mine equally many on all shards \returns `mine` of each shard, in order
  std::vector<std::int64_t> all_counts(std::vector<std::int64_t> const& mine) const {
    if (alone()) return mine;
    at::Tensor const own = at::empty({static_cast<std::int64_t>(mine.size())}, at::kLong);
    std::copy(mine.begin(), mine.end(), own.mutable_data_ptr<std::int64_t>());
    at::Tensor const all = detail::host_copy(gathered(own.to(comm_->memory()), 0, own.numel() * shards()));
    return {all.const_data_ptr<std::int64_t>(), all.const_data_ptr<std::int64_t>() + all.numel()};
  }

  // Without autograd.

  /// Returns the sum of `x` over the shards, summed in shard order, in new memory.
  at::Tensor summed(at::Tensor const& x) const {
    at::NoGradGuard const off;
    at::Tensor out = x.detach().clone(at::MemoryFormat::Contiguous);
    comm_->over_group(among_, group_collective::all_reduce, out);
    return out;
  }
  /// Gathers the pieces of a tensor that is cut along `dim`. \param size of the result along `dim`
  at::Tensor gathered(at::Tensor const& x, std::int64_t dim, std::int64_t size) const {
    std::vector<std::int64_t> ends;
    for (int t = 1; t <= shards(); ++t) ends.push_back(piece_of(size, t, shards()).begin);
    if (x.size(dim) != piece(size).size) {
      throw usage_error("all_gather over shards to " + std::to_string(size) + " elements along dimension " + std::to_string(dim) +
                        ": shard " + std::to_string(shard()) + " has " + std::to_string(x.size(dim)) + ", where its piece has " +
                        std::to_string(piece(size).size) + ". Remedy: shard_group::piece gives the sizes");
    }
    return gathered(x, dim, ends);
  }
  /// Gathers the pieces of a tensor that is cut along `dim` into pieces of any sizes.
  /// \param ends by shard, the end of the shard's piece along `dim` of the result
  at::Tensor gathered(at::Tensor const& x, std::int64_t dim, std::vector<std::int64_t> const& ends) const {
    at::NoGradGuard const off;
    std::int64_t const row = row_of(x, dim);
    std::vector<std::int64_t> cut{0};
    for (std::int64_t const end : ends) cut.push_back(row * end);
    at::Tensor const all = gathered_row(x, cut);
    auto sizes = x.sizes().vec();
    std::int64_t& along = sizes[static_cast<std::size_t>(dim)];
    if (dim == 0) {
      along = ends.back();
      return all.view(sizes);
    }
    std::vector<at::Tensor> pieces;
    for (std::size_t t = 0; t < ends.size(); ++t) {
      along = ends[t] - (t == 0 ? 0 : ends[t - 1]);
      pieces.push_back(all.narrow(0, cut[t], cut[t + 1] - cut[t]).view(sizes));
    }
    return at::cat(pieces, dim);
  }
  /// \returns this shard's piece along `dim` of the sum of `x` over the shards
  at::Tensor summed_piece(at::Tensor const& x, std::int64_t dim) const {
    at::NoGradGuard const off;
    std::int64_t const size = x.size(dim);
    std::vector<at::Tensor> rows;
    std::vector<std::int64_t> cut{0};
    for (int t = 0; t < shards(); ++t) {
      shard_piece const one = piece_of(size, t, shards());
      rows.push_back(x.detach().narrow(dim, one.begin, one.size).reshape({-1}));
      cut.push_back(cut.back() + rows.back().numel());
    }
    at::Tensor const all = at::cat(rows);
    comm_->over_group(among_, group_collective::reduce_scatter, all, cut);
    auto sizes = x.sizes().vec();
    sizes[static_cast<std::size_t>(dim)] = piece(size).size;
    auto const me = static_cast<std::size_t>(shard());
    return all.narrow(0, cut[me], cut[me + 1] - cut[me]).clone().view(sizes);
  }
  /// Returns the rows for this shard, ordered by sender (`all_to_all`). Every shard gathers the rows of `x` of all shards, and
  /// copies its own.
  at::Tensor exchanged(at::Tensor const& x, std::vector<std::int64_t> const& counts) const {
    at::NoGradGuard const off;
    int const T = shards();
    auto const rows = [&](int from, int to) { return counts[static_cast<std::size_t>(from * T + to)]; };
    std::int64_t const row = row_of(x, 0);
    std::vector<std::int64_t> cut{0};
    for (int from = 0; from < T; ++from) {
      std::int64_t given = 0;
      for (int to = 0; to < T; ++to) given += rows(from, to);
      cut.push_back(cut.back() + given * row);
    }
    at::Tensor const all = gathered_row(x, cut);
    std::vector<at::Tensor> taken;
    std::int64_t count = 0;
    for (int from = 0; from < T; ++from) {
      std::int64_t begin = cut[static_cast<std::size_t>(from)];
      for (int to = 0; to < shard(); ++to) begin += rows(from, to) * row;
      taken.push_back(all.narrow(0, begin, rows(from, shard()) * row));
      count += rows(from, shard());
    }
    auto sizes = x.sizes().vec();
    sizes[0] = count;
    return at::cat(taken).view(sizes);
  }

 private:
  bool alone() const { return shards() == 1; }
  /// \param value computes the result from `x` \param gradient computes the gradient of `x` from the result's gradient
  /// \param sums whether the result is a sum over the group
  at::Tensor differentiable(at::Tensor const& x, detail::with_gradient::function const& value,
                            detail::with_gradient::function const& gradient, bool sums = false) const {
    return alone() ? x : detail::with_gradient::apply(x, value, gradient, sums);
  }
  /// Records a tensor for the comparison over the shards.
  void watch(detail::shard_watch::kind what, at::Tensor const& t) const {
    if (comm_->topology().plain(among_) == rank_group::shards) detail::shards_watched(*comm_).note(what, t);
  }
  /// Returns this shard's piece, along `dim`, of a whole tensor, or if `adds` of the sum of a partial tensor.
  at::Tensor to_piece(at::Tensor const& x, std::int64_t dim, bool adds) const {
    if (alone()) return x;
    std::int64_t const along = dimension(x, dim), size = x.size(along);
    return differentiable(
        x,
        [=, *this](auto& all) {
          if (!adds) watch(detail::shard_watch::kind::scattered, all);
          return adds ? summed_piece(all, along) : piece_in(all, along).clone(at::MemoryFormat::Contiguous);
        },
        [=, *this](auto& gradient) { return gathered(gradient, along, size); }, adds);
  }
  at::Tensor piece_in(at::Tensor const& whole, std::int64_t dim) const {
    shard_piece const mine = piece(whole.size(dim));
    return whole.narrow(dim, mine.begin, mine.size);
  }
  /// Gathers the elements of all shards into a one-dimensional tensor, in shard order.
  /// \param cut offsets in the result: shard t's elements are [cut[t], cut[t + 1])
  at::Tensor gathered_row(at::Tensor const& mine, std::vector<std::int64_t> const& cut) const {
    at::Tensor const all = at::empty({cut.back()}, mine.options());
    auto const me = static_cast<std::size_t>(shard());
    all.narrow(0, cut[me], cut[me + 1] - cut[me]).view(mine.sizes()).copy_(mine.detach());
    comm_->over_group(among_, group_collective::share_gather, all, cut);
    return all;
  }
  /// The number of elements of a tensor per index of one dimension.
  static std::int64_t row_of(at::Tensor const& x, std::int64_t dim) {
    std::int64_t row = 1;
    for (std::int64_t d = 0; d < x.dim(); ++d) row *= d == dim ? 1 : x.size(d);
    return row;
  }
  static std::int64_t dimension(at::Tensor const& x, std::int64_t dim) {
    std::int64_t const out = dim < 0 ? dim + x.dim() : dim;
    if (out >= 0 && out < x.dim()) return out;
    throw usage_error("a collective over shards goes along dimension " + std::to_string(dim) + " of a tensor with " +
                      std::to_string(x.dim()) + " dimensions");
  }
  void check_counts(at::Tensor const& x, std::vector<std::int64_t> const& counts) const {
    auto const T = static_cast<std::size_t>(shards());
    std::int64_t given = 0;
    for (std::size_t to = 0; counts.size() == T * T && to < T; ++to) given += counts[static_cast<std::size_t>(shard()) * T + to];
    if (counts.size() == T * T && given == x.size(0)) return;
    throw usage_error("all_to_all over " + std::to_string(T) + " shards needs " + std::to_string(T * T) +
                      " counts, of which those of shard " + std::to_string(shard()) + " add up to its " +
                      std::to_string(x.size(0)) + " rows; the call has " + std::to_string(counts.size()) + " that add up to " +
                      std::to_string(given) + ". Remedy: shard_group::all_counts");
  }

  transport* comm_;
  rank_group among_;
};

}  // namespace chevron
