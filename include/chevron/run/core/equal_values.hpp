#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/run/core/fingerprint.hpp>
#include <chevron/run/core/host_copy.hpp>

/// \file
/// Finds parameters of several stages with equal initial values: perhaps one parameter that was not tied by `stage.tie`.

namespace chevron::detail {

/// The fingerprint of a few thousand elements of a parameter, evenly spaced. Empty for fewer than two elements, for
/// equal ones (such as a norm's weights), and for sparse and meta tensors.
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
  /// \param values dtype, shape and `begins_with`, which must not be empty \param tied_as as of `parameter`
  void add(std::size_t stage, std::string name, std::string const& values, std::string tied_as) {
    known_[values].push_back({stage, count_++, std::move(name), std::move(tied_as)});
  }

  /// The warning: names the first two parameters of different stages with equal values, and counts further ones. Empty without
  /// such parameters.
  std::string warning() const {
    std::optional<std::pair<owner, owner>> first;
    int more = -1;
    for (auto [values, owners] : known_) {
      std::stable_sort(owners.begin(), owners.end(), [](owner const& a, owner const& b) { return a.stage < b.stage; });
      for (std::size_t b = 1; b < owners.size(); ++b) {
        auto const alike = std::find_if(owners.begin(), owners.begin() + static_cast<std::ptrdiff_t>(b),
                                        [&](owner const& a) { return may_be_one(a, owners[b]); });
        if (alike == owners.begin() + static_cast<std::ptrdiff_t>(b)) continue;
        ++more;
        std::pair const found(*alike, owners[b]);
        if (!first || comes_before(found, *first)) first = found;
      }
    }
    if (!first) return "";
    return in_words(first->first) + " and " + in_words(first->second) + " begin with the same values" +
           (more > 0 ? " (and " + std::to_string(more) + " more like these)" : "") +
           ": if they are one parameter, say so on both, by stage.tie(\"" + first->first.name +
           "\", \"a group of their own\"); else they are trained apart, and another seed for each stage would begin better";
  }

 private:
  struct owner {
    std::size_t stage, order;
    std::string name, tied_as;
  };
  static bool comes_before(std::pair<owner, owner> const& a, std::pair<owner, owner> const& b) {
    return std::tuple(a.first.stage, a.second.stage, a.first.order) < std::tuple(b.first.stage, b.second.stage, b.first.order);
  }
  static bool may_be_one(owner const& a, owner const& b) {
    return a.stage != b.stage && (a.tied_as.empty() || b.tied_as.empty());
  }
  static std::string in_words(owner const& o) { return "stage " + std::to_string(o.stage) + "'s `" + o.name + "`"; }

  std::size_t count_ = 0;
  std::map<std::string, std::vector<owner>> known_;  // by values
};

}  // namespace chevron::detail
