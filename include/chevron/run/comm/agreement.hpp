#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/text_parts.hpp>

/// \file
/// Compares the ranks: each rank adds rows of text, and every rank gets the rows of all ranks, so that all ranks find the same
/// difference and throw the same error.

namespace chevron {

/// A row of an agreement: fields of text, such as the name and the value of an option.
struct agreement_row {
  int rank = 0;                          ///< the global rank that added the row
  std::vector<std::string> fields = {};  ///< in the order of `agreement::add`
  /// A field of the row. \param field its index
  std::string const& operator[](std::size_t field) const { return fields[field]; }
};

/// One rank's rows for an agreement of all ranks.
class agreement {
 public:
  /// Adds a row. \param fields any texts
  void add(std::vector<std::string> const& fields) {
    detail::add_number(text_, fields.size());
    for (std::string const& one : fields) detail::add_text(text_, one);
  }
  /// Gathers the rows of all ranks. \param comm the job's transport \returns the rows by rank, each rank's in the order of `add`.
  /// Collective.
  std::vector<agreement_row> gather(transport& comm) const {
    std::vector<agreement_row> out;
    std::vector<std::string> const texts = comm.all_gather_text(text_);
    for (std::size_t rank = 0; rank < texts.size(); ++rank) {
      detail::text_reader from(texts[rank]);
      while (!from.at_end()) {
        agreement_row& row = out.emplace_back(agreement_row{.rank = static_cast<int>(rank)});
        for (std::size_t left = from.number(); left > 0; --left) row.fields.push_back(from.text());
      }
    }
    return out;
  }

 private:
  std::string text_;
};

/// One rank's values for a comparison before the first step, in which a difference would corrupt results or make ranks hang.
/// Ranks that add the same name must add the same value.
class named_values {
 public:
  /// Adds a value. \param name of the value \param value in words
  void add(std::string const& name, std::string const& value) { rows_.add({name, value}); }
  agreement const& rows() const { return rows_; }  ///< of a name and a value each

 private:
  agreement rows_;
};

/// Compares the values of all ranks. Collective; every rank throws the same error.
/// \param words returns cause and remedy of a difference of two rows, from arguments that are equal on all ranks; empty, or an
/// empty result: the general words
/// \returns the rows of all ranks, of a name and a value each
/// \throws preflight_error naming the first value that differs, the two ranks and their values
inline std::vector<agreement_row> check_consistency(
    transport& comm, named_values const& mine,
    std::function<std::string(agreement_row const& first, agreement_row const& other)> const& words = {}) {
  std::vector<agreement_row> all = mine.rows().gather(comm);
  std::unordered_map<std::string, agreement_row const*> known;
  for (agreement_row const& row : all) {
    agreement_row const& first = *known.try_emplace(row[0], &row).first->second;
    if (first.fields == row.fields) continue;
    error_context const here{comm.topology().global_rank, row.rank, -1, "preflight", {first.rank}};
    std::string const special = words ? words(first, row) : std::string();
    if (!special.empty()) throw preflight_error(special, here);
    auto const has = [](agreement_row const& of) {
      return "rank " + std::to_string(of.rank) + " has `" + of[0] + ": " + of[1] + "`";
    };
    throw preflight_error(has(row) + " where " + has(first) + ": start all ranks with the same program and options", here);
  }
  return all;
}

}  // namespace chevron
