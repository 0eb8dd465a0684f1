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
/// The collectives among the replicas of a pipeline rank and among its shards, and the cut of one tensor into shares.

namespace chevron {

enum class group_collective {
  all_reduce,      ///< each member of the group gets the sums of all elements
  reduce_scatter,  ///< each gets the sums of its own share
  share_gather     ///< each gets every member's share as it is
};

/// State that is cut over the replicas of a stage: each replica holds its share (ZeRO, Rajbhandari et al., arXiv 1910.02054).
enum class sharding {
  nothing,    ///< each replica holds and steps everything
  optimizer,  ///< the optimizer's state: a replica steps its share of the parameters, and gets the rest from the others
  gradients   ///< that, and gradients: between the sum over the replicas and the stage's next backward a replica has its share
};

namespace detail {

/// In the words of `--shard`, a literal.
inline char const* words_of(sharding what) {
  return what == sharding::nothing ? "nothing" : what == sharding::optimizer ? "optimizer" : "gradients";
}
/// A collective in the words of a wait, a literal.
inline char const* words_of(group_collective what, rank_group among = rank_group::replicas) {
  constexpr char const* words[][3] = {
      {"sum of gradients", "reduce-scatter of gradients", "gather of shares"},
      {"sum over shards", "reduce-scatter over shards", "gather over shards"},
      {"sum over experts", "reduce-scatter over experts", "gather over experts"},
      {"sum of experts' gradients", "reduce-scatter of experts' gradients", "gather of experts' shares"},
  };
  return words[static_cast<std::size_t>(among)][static_cast<std::size_t>(what)];
}

/// A member of a group, without its number.
inline std::string member_of(rank_group among) {
  constexpr char const* names[] = {"replica", "shard", "expert rank", "expert copy"};
  return names[static_cast<std::size_t>(among)];
}

/// \param members how many the group has
/// \throws usage_error where `values` is not contiguous, or where a collective of shares has a cut that does not divide it among
/// the members
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

/// The reason why two members of a group are refused that start different collectives, or with different tensors or cuts, in
/// one bucket.
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

/// The memory of a contiguous tensor.
inline at::Tensor bytes_of(at::Tensor const& values) { return values.detach().view({-1}).view(at::kByte); }

/// Cuts a row of parameters into shares of nearly equal size. Replica r's share are the elements [cut[r], cut[r + 1]) of the row.
/// \param sizes elements of each parameter \param blocks of each, the elements that stay together from its beginning: a share
/// begins between two parameters or between two blocks of one, at the place next to an equal cut
/// \returns replicas + 1 offsets, ascending, from 0 to the end of the row
inline std::vector<std::int64_t> cut_into_shares(std::span<std::int64_t const> sizes, std::span<std::int64_t const> blocks,
                                                 int replicas) {
  std::int64_t total = 0;
  for (std::int64_t const size : sizes) total += size;
  std::vector<std::int64_t> cut{0};
  std::int64_t begin = 0;  // of the parameter in the row
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

/// A cut as a part of the row sees it, which begins at `begin` and has `elements`.
inline std::vector<std::int64_t> part_of_cut(std::vector<std::int64_t> cut, std::int64_t begin, std::int64_t elements) {
  for (std::int64_t& at : cut) at = std::clamp<std::int64_t>(at - begin, 0, elements);
  return cut;
}

}  // namespace detail
}  // namespace chevron
