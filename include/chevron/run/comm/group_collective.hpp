#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/topology.hpp>

/// \file
/// Kinds of collectives over a group of ranks (the replicas or the shards of a stage), and the cut of a tensor into shares.

namespace chevron {

/// The kind of a collective over a group.
enum class group_collective {
  all_reduce,      ///< each member of the group receives the sums of all elements
  reduce_scatter,  ///< each member receives the sums of its own share
  share_gather     ///< each member receives every member's share unchanged
};

/// The training state that is cut over the replicas of a stage, so that each replica stores only a share (ZeRO, Rajbhandari et
/// al., arXiv 1910.02054).
enum class sharding {
  nothing,    ///< each replica stores and updates everything
  optimizer,  ///< optimizer state: each replica updates its share of the parameters, then gathers the other shares
  gradients   ///< also gradients: each replica stores only its share of the sums, until the stage's next backward
};

/// The operations that a channel carries.
enum class channel_use {
  edge,   ///< messages from one pipeline rank to another pipeline rank
  sum,    ///< sums, reduce-scatters and gathers of shares over a group: the replicas of a rank's stages, or its shards
  gather  ///< gathers of a few numbers from every rank
};

namespace detail {

/// The value of option `--shard` for a sharding, a literal.
inline char const* words_of(sharding what) {
  return what == sharding::nothing ? "nothing" : what == sharding::optimizer ? "optimizer" : "gradients";
}
/// The name of a collective in errors and waits, a literal.
inline char const* words_of(group_collective what, rank_group among = rank_group::replicas) {
  constexpr char const* words[][3] = {
      {"sum of gradients", "reduce-scatter of gradients", "gather of shares"},
      {"sum over shards", "reduce-scatter over shards", "gather over shards"},
      {"sum over experts", "reduce-scatter over experts", "gather over experts"},
      {"sum of experts' gradients", "reduce-scatter of experts' gradients", "gather of experts' shares"},
  };
  return words[static_cast<std::size_t>(among)][static_cast<std::size_t>(what)];
}

/// The noun for a member of a group in errors.
inline std::string member_of(rank_group among) {
  constexpr char const* names[] = {"replica", "shard", "expert rank", "expert copy"};
  return names[static_cast<std::size_t>(among)];
}

/// Checks the arguments of a collective over a group.
/// \param members size of the group
/// \throws usage_error if `values` is not contiguous, or if the cut does not divide the values among the members
inline void check_collective(rank_group among, group_collective what, int bucket, at::Tensor const& values,
                             std::span<std::int64_t const> cut, int members) {
  std::string const of_bucket = std::string("the ") + words_of(what, among) + " of bucket " + std::to_string(bucket);
  if (!values.is_contiguous()) throw usage_error(of_bucket + " needs a contiguous tensor. Remedy: .contiguous()");
  if (what == group_collective::all_reduce) return;
  bool const divides = cut.size() == static_cast<std::size_t>(members) + 1 && std::is_sorted(cut.begin(), cut.end()) &&
                       cut.front() == 0 && cut.back() == values.numel();
  if (divides) return;
  std::string offsets;
  for (std::int64_t const each : cut) offsets += (offsets.empty() ? "" : ", ") + std::to_string(each);
  throw usage_error(of_bucket + " has the cut [" + offsets + "], which does not divide " + std::to_string(values.numel()) +
                    " elements among " + std::to_string(members) + " " + member_of(among) + "s. Remedy: " +
                    std::to_string(members + 1) + " offsets, ascending, from 0 to " + std::to_string(values.numel()));
}

/// The reason text of an error: in one bucket, two members of a group start different collectives, or the same collective with
/// different tensors or cuts.
/// \param mine, theirs numbers of the two members \param what, other collectives of `mine` and of `theirs`
inline std::string unlike_collectives(rank_group among, int bucket, int mine, group_collective what, int theirs,
                                      group_collective other) {
  std::string const of_bucket = "bucket " + std::to_string(bucket), member = member_of(among);
  if (what != other) {
    return member + " " + std::to_string(mine) + " starts the " + words_of(what, among) + " in " + of_bucket + " where " +
           member + " " + std::to_string(theirs) + " starts the " + words_of(other, among) +
           ". Remedy: the same collectives in the same order on all " + member + "s";
  }
  std::string const both = member + "s " + std::to_string(mine) + " and " + std::to_string(theirs);
  if (what == group_collective::all_reduce)
    return both + " sum " + (among == rank_group::replicas ? "gradients" : "tensors") + " of different shapes or dtypes in " +
           of_bucket;
  return both + " start the " + words_of(what, among) + " with different shapes, dtypes or cuts in " + of_bucket;
}

/// A contiguous tensor's memory as a one-dimensional tensor of bytes.
inline at::Tensor bytes_of(at::Tensor const& values) { return values.detach().view({-1}).view(at::kByte); }

/// Cuts the concatenated elements of parameters (a row) into shares of nearly equal size. Replica r's share is the elements
/// [cut[r], cut[r + 1]) of the row. A share begins between two parameters, or between two blocks of one parameter, at the
/// position nearest to an equal cut.
/// \param sizes number of elements, by parameter
/// \param blocks number of elements of a block, by parameter: no block is cut
/// \returns replicas + 1 offsets, ascending, from 0 to the end of the row
inline std::vector<std::int64_t> cut_into_shares(std::span<std::int64_t const> sizes, std::span<std::int64_t const> blocks,
                                                 int replicas) {
  std::int64_t total = 0;
  for (std::int64_t const size : sizes) total += size;
  std::vector<std::int64_t> cut{0};
  std::int64_t begin = 0;  // first element of parameter i in the row
  std::size_t i = 0;
  for (int r = 1; r < replicas; ++r) {
    std::int64_t const wanted = total / replicas * r + total % replicas * r / replicas;
    while (i < sizes.size() && begin + sizes[i] <= wanted) begin += sizes[i++];
    if (i == sizes.size()) {
      cut.push_back(total);
      continue;
    }
    std::int64_t const before = (wanted - begin) / blocks[i] * blocks[i];
    std::int64_t const behind = before + blocks[i] < sizes[i] ? before + blocks[i] : sizes[i];
    std::int64_t const next = wanted - begin - before <= behind - (wanted - begin) ? before : behind;
    cut.push_back(begin + next > cut.back() ? begin + next : cut.back());
  }
  cut.push_back(total);
  return cut;
}

/// Limits a cut's offsets to a part of the row; the results count from the part's begin.
/// \param begin first element of the part \param elements size of the part
inline std::vector<std::int64_t> part_of_cut(std::vector<std::int64_t> cut, std::int64_t begin, std::int64_t elements) {
  for (std::int64_t& at : cut) at = std::clamp<std::int64_t>(at - begin, 0, elements);
  return cut;
}

}  // namespace detail
}  // namespace chevron
