#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include <chevron/run/comm/transport.hpp>

/// \file
/// The numbers that ranks gather at the end of a step. Parts of the step (step_part.hpp) add fields in their constructors; the
/// table of parts and fields is in docs/inside/design.md.

namespace chevron::detail {

/// A rank's numbers of a step, in named fields. All ranks add the same fields in the same order before the first gather.
class record {
 public:
  /// A field: consecutive numbers of each rank's record.
  struct field {
    std::size_t first = 0;  ///< index of the field's first number
    std::size_t count = 0;  ///< number of the field's numbers
  };

  /// Adds a field. \param count number of its numbers, equal on all ranks
  field add(std::size_t count = 1) {
    field const out{numbers_.size(), count};
    numbers_.resize(numbers_.size() + count);
    return out;
  }
  /// Sets all numbers to 0, before a step's numbers are written.
  void clear() { std::fill(numbers_.begin(), numbers_.end(), 0.0); }

  /// The only number of a field, or its first.
  double& operator[](field const& of) { return numbers_[of.first]; }
  /// All numbers of a field.
  std::span<double> numbers(field const& of) { return std::span(numbers_).subspan(of.first, of.count); }
  std::span<double const> numbers(field const& of) const { return std::span(numbers_).subspan(of.first, of.count); }
  /// Writes the first numbers of a field. \param values at most as many as the field has
  void write(field const& of, std::span<double const> values) { std::copy(values.begin(), values.end(), numbers(of).begin()); }
  /// The numbers of all fields, in the order of fields.
  std::span<double const> all() const { return numbers_; }

 private:
  std::vector<double> numbers_;
};

/// The records of all ranks, which a step's one gather fills: equal on every rank.
class records_of_ranks {
 public:
  /// Gathers the ranks' records. Collective.
  void gather(transport& comm, record const& mine) {
    make_room(comm, mine);
    comm.all_gather(mine.all(), all_);
  }
  /// Starts a gather of a copy of `mine`, during which ranks may continue. Collective.
  void start(transport& comm, record const& mine) {
    make_room(comm, mine);
    comm.start_all_gather(mine.all());
  }
  /// Waits for the gather that `start` began. Collective.
  void finish(transport& comm) { comm.finish_all_gather(all_); }

  /// The only number of a rank's field, or its first. \param rank global rank
  double at(int rank, record::field const& of) const { return of_rank(rank)[of.first]; }
  /// All numbers of a rank's field. \param rank global rank
  std::span<double const> numbers(int rank, record::field const& of) const { return {of_rank(rank) + of.first, of.count}; }

 private:
  void make_room(transport const& comm, record const& mine) {
    width_ = mine.all().size();
    all_.resize(width_ * static_cast<std::size_t>(comm.topology().world()));
  }
  double const* of_rank(int rank) const { return all_.data() + width_ * static_cast<std::size_t>(rank); }

  std::size_t width_ = 0;
  std::vector<double> all_;
};

}  // namespace chevron::detail
