#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/run/core/fingerprint.hpp>
#include <chevron/run/core/host_copy.hpp>

/// \file
/// Finds parameters of different stages with equal initial values: perhaps one parameter whose `stage.tie` is missing.

namespace chevron::detail {

/// Returns the fingerprint of a few thousand evenly spaced elements of a parameter; an empty text for fewer than two elements,
/// for equal elements (a norm's weights), and for sparse and meta tensors.
inline std::string begins_with(at::Tensor const& t) {
  constexpr std::int64_t enough = 4096;
  if (t.numel() < 2 || t.layout() != at::kStrided || t.is_meta()) return "";
  std::int64_t const stride = std::max<std::int64_t>(t.numel() / enough, 1);
  at::Tensor const some = host_copy(t.detach().reshape({-1}).slice(0, 0, t.numel(), stride).contiguous());
  auto const* const bytes = static_cast<char const*>(some.const_data_ptr());
  auto const one = static_cast<std::size_t>(some.element_size());
  if (std::memcmp(bytes, bytes + one, some.nbytes() - one) == 0) return "";
  byte_fingerprint sum;
  sum.add(bytes, some.nbytes());
  return sum.text();
}

/// The initial values of the parameters of a pipeline's stages.
class equal_values {
 public:
  /// Adds a parameter.
  /// \param values text of dtype, shape and `begins_with` (which must not be empty) \param tied_as as in `parameter`
  void add(std::size_t stage, std::string name, std::string const& values, std::string tied_as) {
    known_[values].push_back({stage, count_++, std::move(name), std::move(tied_as)});
  }

  /// Returns a warning that names the first two parameters of different stages with equal values and counts further pairs;
  /// empty if there is no pair.
  std::string warning() const {
    std::map<std::array<std::size_t, 4>, std::pair<owner, owner>> found;
    for (auto [values, owners] : known_) {
      std::stable_sort(owners.begin(), owners.end(), [](owner const& a, owner const& b) { return a.stage < b.stage; });
      for (auto b = owners.begin(); b != owners.end(); ++b) {
        auto const a = std::find_if(owners.begin(), b, [&](owner const& one) { return may_be_one(one, *b); });
        if (a != b) found.emplace(std::array{a->stage, b->stage, a->order, b->order}, std::pair(*a, *b));
      }
    }
    if (found.empty()) return "";
    auto const& [a, b] = found.begin()->second;
    return in_words(a) + " and " + in_words(b) + " begin with the same values" +
           (found.size() > 1 ? " (and " + std::to_string(found.size() - 1) + " more like these)" : "") +
           ": if they are one parameter, say so on both, by stage.tie(\"" + a.name +
           "\", \"a group of their own\"); else they are trained apart, and another seed for each stage would begin better";
  }

 private:
  struct owner {
    std::size_t stage, order;
    std::string name, tied_as;
  };
  static bool may_be_one(owner const& a, owner const& b) {
    return a.stage != b.stage && (a.tied_as.empty() || b.tied_as.empty());
  }
  static std::string in_words(owner const& o) { return "stage " + std::to_string(o.stage) + "'s `" + o.name + "`"; }

  std::size_t count_ = 0;
  std::map<std::string, std::vector<owner>> known_;  // key: `values` of `add`
};

}  // namespace chevron::detail
