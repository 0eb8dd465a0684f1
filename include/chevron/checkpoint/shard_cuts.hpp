#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <c10/core/ScalarType.h>

#include <chevron/checkpoint/file_tensor.hpp>
#include <chevron/checkpoint/safetensors.hpp>
#include <chevron/run/comm/shard_group.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/fingerprint.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/stage.hpp>

/// \file
/// Joins the pieces of tensors that are cut over shards: files contain whole tensors, which shards write together.

namespace chevron::detail {

inline std::string plain_shape(at::IntArrayRef shape) {
  std::string out = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) out += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return out + "]";
}

/// The parameters and buffers of a stage that go into its model file.
/// \param trained_only true: without frozen parameters
inline std::vector<parameter> kept_of(stage const& s, bool trained_only = false) {
  std::vector<parameter> all;
  for (auto const* list : {&s.parameters(), &s.buffers()}) {
    for (parameter const& p : *list) {
      bool const frozen = list == &s.parameters() && !p.value.requires_grad();
      if (p.value.defined() && !(trained_only && frozen)) all.push_back(p);
    }
  }
  return all;
}

/// A hash of a text, the same on all ranks.
inline std::int64_t mark_of_text(std::string const& text) {
  byte_fingerprint sum;
  sum.add(text.data(), text.size());
  return static_cast<std::int64_t>(sum.value());
}

/// A file to be written, with its tensors and the entries of its header.
struct file_to_write {
  std::filesystem::path file;
  std::vector<file_tensor> tensors;
  std::map<std::string, std::string> metadata = {};
};

/// The pieces of one tensor along the dimension in which it is cut. The whole tensor is a row of blocks; a block is a row of
/// parts, one of each rank of the group, in the order of ranks. A rank's piece is a row of its parts, in the order of blocks.
struct tensor_cut {
  std::int64_t along = 0;
  rank_group over = rank_group::shards;          ///< the ranks that hold the pieces
  std::vector<std::vector<std::int64_t>> parts;  ///< sizes of parts, by rank of the group and block

  /// The size of a rank's piece.
  std::int64_t size(std::size_t piece) const {
    return std::accumulate(parts[piece].begin(), parts[piece].end(), std::int64_t{0});
  }
  /// The size of the whole tensor.
  std::int64_t size() const {
    std::int64_t sum = 0;
    for (std::size_t piece = 0; piece < parts.size(); ++piece) sum += size(piece);
    return sum;
  }
  /// The sizes of the whole tensor's blocks.
  std::vector<std::int64_t> blocks() const {
    std::vector<std::int64_t> out(parts[0].size());
    for (auto const& piece : parts) std::transform(piece.begin(), piece.end(), out.begin(), out.begin(), std::plus());
    return out;
  }
  /// The places of a rank's parts in the whole tensor.
  std::vector<tensor_part::range> ranges(std::size_t piece) const {
    std::vector<tensor_part::range> out;
    std::int64_t begin = 0;
    for (std::size_t block = 0; block < parts[piece].size(); ++block) {
      for (std::size_t other = 0; other < parts.size(); begin += parts[other++][block]) {
        if (other == piece) out.push_back({begin, parts[piece][block]});
      }
    }
    return out;
  }
  /// Joins the pieces. \param in_row all pieces, in the order of ranks
  at::Tensor joined(at::Tensor const& in_row) const {
    if (parts[0].size() == 1) return in_row;
    std::vector<std::vector<at::Tensor>> of_block(parts[0].size());
    std::int64_t begin = 0;
    for (auto const& piece : parts) {
      for (std::size_t block = 0; block < piece.size(); begin += piece[block++])
        of_block[block].push_back(in_row.narrow(along, begin, piece[block]));
    }
    std::vector<at::Tensor> in_order;
    for (auto const& block : of_block) in_order.insert(in_order.end(), block.begin(), block.end());
    return at::cat(in_order, along);
  }
};

/// Knows how tensors are cut of which this rank has only a piece. Empty if all tensors of this rank are whole, as with one
/// shard.
class shard_cuts {
 public:
  /// Gathers the sizes of pieces. Collective over the shards and over `rank_group::experts`; the preflight has checked that
  /// tensors of these ranks have the same names and numbers of blocks.
  /// \throws checkpoint_error, on all these ranks, if dtypes differ, or sizes in a dimension that is not cut
  shard_cuts(transport& comm, std::vector<stage> const& stages) : comm_(&comm) {
    topology const& where = comm.topology();
    for (rank_group const among : {rank_group::shards, rank_group::experts}) {
      if (where.has(among)) add_cuts(shard_group(comm, among), among, where, stages);
    }
  }

  /// The cut of a parameter or buffer; null: the tensor is whole on this rank.
  tensor_cut const* of(at::Tensor const& t) const {
    auto const found = cuts_.find(t.unsafeGetTensorImpl());
    return found == cuts_.end() ? nullptr : &found->second;
  }
  /// This shard's part of a parameter or buffer; empty: the whole tensor.
  std::optional<tensor_part> part(at::Tensor const& t) const {
    tensor_cut const* const cut = of(t);
    if (cut == nullptr) return {};
    auto const me = static_cast<std::size_t>(comm_->topology().number_in(cut->over));
    return tensor_part{cut->along, cut->ranges(me)};
  }
  /// The shape of a whole parameter or buffer.
  std::vector<std::int64_t> shape(at::Tensor const& t) const {
    auto out = t.sizes().vec();
    if (tensor_cut const* const cut = of(t)) out[static_cast<std::size_t>(cut->along)] = cut->size();
    return out;
  }
  /// Dtype and shape for errors, and if the tensor is cut the sizes of its pieces.
  std::string words(at::Tensor const& t) const {
    std::string out = c10::toString(t.scalar_type()) + (" " + plain_shape(shape(t)));
    tensor_cut const* const cut = of(t);
    if (cut == nullptr) return out;
    std::string sizes;
    for (std::size_t s = 0; s < cut->parts.size(); ++s) sizes += (s > 0 ? " + " : "") + std::to_string(cut->size(s));
    std::size_t const blocks = cut->parts[0].size();
    return out + ", the pieces of " + std::to_string(cut->parts.size()) + " " + member_of(cut->over) + "s having " + sizes +
           " along dimension " + std::to_string(cut->along) + (blocks > 1 ? ", in " + std::to_string(blocks) + " blocks" : "");
  }

  /// Gathers a whole tensor. Collective over the ranks that have pieces. \param piece cut in the same way as `like` \param like
  /// a parameter or buffer
  at::Tensor whole(at::Tensor const& piece, at::Tensor const& like) const {
    tensor_cut const* const cut = of(like);
    if (cut == nullptr) return piece;
    std::vector<std::int64_t> ends;
    for (std::size_t s = 0; s < cut->parts.size(); ++s) ends.push_back((ends.empty() ? 0 : ends.back()) + cut->size(s));
    return cut->joined(shard_group(*comm_, cut->over).gathered(piece, cut->along, ends));
  }
  /// Returns a tensor for a file, whose pieces are gathered when the file is written. \param like a parameter or buffer that is
  /// cut in the same way as `piece`
  file_tensor to_file(std::string name, at::Tensor const& piece, at::Tensor const& like) const {
    file_tensor out(std::move(name), piece);
    if (of(like) == nullptr) return out;
    out.shape = shape(like);
    out.gathered = true;
    out.values = [this, piece, like] { return whole(piece, like); };
    return out;
  }

  /// Checks that all shards write the same tensors. Collective over the shards.
  /// \throws checkpoint_error, on all shards, if not
  void compare(std::vector<file_to_write> const& files) const {
    std::string mine;
    for (file_to_write const& one : files) {
      for (file_tensor const& t : one.tensors) mine += t.name + c10::toString(t.type) + plain_shape(t.shape) + "\n";
    }
    std::int64_t const number = mark_of_text(mine);
    for (std::int64_t const other : shard_group(*comm_).all_counts({number})) {
      if (other != number) refuse("shards have different tensors to save, as of parameters that one shard alone trains");
    }
  }

 private:
  /// Adds the cuts of the tensors of which a group's ranks have pieces. For the group of shards, also compares all tensors of
  /// the shards.
  void add_cuts(shard_group const& group, rank_group among, topology const& where, std::vector<stage> const& stages) {
    std::vector<std::pair<std::string, parameter>> all;
    // For each tensor: a mark that is equal on all ranks, then for a cut tensor the sizes of the parts in this rank's piece.
    std::vector<std::int64_t> mine;
    for (std::size_t s = 0; s < stages.size(); ++s) {
      for (parameter const& p : kept_of(stages[s])) {
        bool const is_cut = p.held == over_shards::cut, is_here = is_cut && where.plain(p.cut_over) == among;
        if (!is_here && among != rank_group::shards) continue;
        all.emplace_back("stage " + std::to_string(s) + "'s " + p.name, p);
        auto shape = p.value.sizes().vec();
        if (is_cut) shape[static_cast<std::size_t>(p.cut_along)] = -1 - p.cut_along;
        mine.push_back(mark_of_text(all.back().first + c10::toString(p.value.scalar_type()) + plain_shape(shape)));
        if (is_here) mine.insert(mine.end(), p.cut_blocks.begin(), p.cut_blocks.end());
      }
    }
    if (all.empty()) return;
    std::string const member = member_of(among);
    auto const known = group.all_counts(mine);
    std::size_t mark = 0;  // index of the tensor's mark among a rank's numbers
    for (auto const& [name, p] : all) {
      bool const is_here = p.held == over_shards::cut && where.plain(p.cut_over) == among;
      std::size_t const blocks = is_here ? p.cut_blocks.size() : 0;
      tensor_cut cut{p.cut_along, among, {}};
      for (std::size_t at = mark; at < known.size(); at += mine.size()) {
        if (known[at] != known[mark])
          refuse(name + " differs in name, dtype or shape between " + member + " " + std::to_string(at / mine.size()) + " and " +
                 member + " 0");
        auto const first = known.begin() + static_cast<std::ptrdiff_t>(at) + 1;
        cut.parts.emplace_back(first, first + static_cast<std::ptrdiff_t>(blocks));
      }
      if (is_here) cuts_[p.value.unsafeGetTensorImpl()] = std::move(cut);
      mark += 1 + blocks;
    }
  }
  [[noreturn]] static void refuse(std::string const& what) {
    throw checkpoint_error(what +
                           ", so a file cannot store whole tensors. Remedy: the same names, dtypes and shapes on all shards, but "
                           "for the dimension along which stage.cut says that a tensor is cut");
  }

  transport* comm_;
  std::map<void const*, tensor_cut> cuts_;
};

/// Writes files, and creates their folders. Collective over the shards, which must give the same tensors: one shard writes, all
/// other shards send their pieces. A writing shard that fails still takes part in all gathers, since all other shards wait
/// there.
/// \param cuts null if one rank writes alone
/// \param writes whether this rank writes
/// \throws checkpoint_error, on all shards, if their tensors differ; and if a file cannot be written
inline std::vector<unnamed_file> write_files(shard_cuts const* cuts, std::vector<file_to_write> files, bool writes) {
  if (cuts != nullptr) cuts->compare(files);
  std::vector<std::function<at::Tensor()>> gathers;
  std::size_t done = 0;
  for (file_to_write& one : files) {
    for (file_tensor& t : one.tensors) {
      if (!t.gathered) continue;
      gathers.push_back(t.values);
      t.values = [&done, gather = t.values] {
        at::Tensor out = gather();
        ++done;
        return out;
      };
    }
  }
  std::vector<unnamed_file> out;
  std::exception_ptr failure;
  try {
    for (std::size_t i = 0; writes && i < files.size(); ++i) {
      std::error_code failed;
      auto const folder = files[i].file.parent_path();
      std::filesystem::create_directories(folder, failed);
      if (failed) refuse_file(folder, "cannot be made: " + failed.message() + ". Remedy: a folder that may be written to");
      out.push_back(unnamed_safetensors(files[i].file, files[i].tensors, files[i].metadata));
    }
  } catch (...) {
    failure = std::current_exception();
  }
  while (done < gathers.size()) gathers[done++]();
  if (failure) std::rethrow_exception(failure);
  return out;
}

}  // namespace chevron::detail
