#include "samples.hpp"

#include <algorithm>
#include <system_error>
#include <utility>

#include <ATen/core/Tensor.h>

#include <chevron/base/format.hpp>

#include "common/console.hpp"

namespace chevron::finetune {
namespace {

std::variant<train::token_windows, train::packed_windows> cut(window_kind kind, std::vector<std::string> const& names,
                                                              std::int64_t context, std::int64_t vocabulary) {
  std::vector<std::filesystem::path> const files(names.begin(), names.end());
  if (kind == window_kind::packed) return train::packed_windows(files, context, vocabulary);
  return train::token_windows(files, context, vocabulary);
}

std::int64_t count_of(std::size_t number) { return static_cast<std::int64_t>(number); }

}  // namespace

samples::samples(window_kind kind, std::vector<std::string> const& files, std::int64_t context, std::int64_t vocabulary)
    : windows_(cut(kind, files, context, vocabulary)) {}

std::size_t samples::size() const {
  return std::visit([](auto const& all) { return all.size(); }, windows_);
}
std::size_t samples::tokens() const {
  return std::visit([](auto const& all) { return all.tokens(); }, windows_);
}
std::int64_t samples::context() const {
  return std::visit([](auto const& all) { return all.context(); }, windows_);
}
bool samples::packed() const { return std::holds_alternative<train::packed_windows>(windows_); }
bool samples::counts_labels() const { return packed() || std::get<train::token_windows>(windows_).masked(); }
std::string samples::settings() const {
  return std::visit([](auto const& all) { return all.settings(); }, windows_);
}
void samples::check_vocabulary() const {
  std::visit([](auto const& all) { all.check_vocabulary(); }, windows_);
}

std::string samples::words() const {
  std::string out = train::grouped(count_of(tokens())) + " tokens in " + train::some(count_of(size()), "window") + " of " +
                    std::to_string(context());
  if (!packed()) return out;
  auto const& all = std::get<train::packed_windows>(windows_);
  out +=
      ", packed with " + train::some(count_of(all.documents()), "document") + ", " + show::percent(1 - all.filled()) + " padding";
  if (all.cut() > 0) out += "; " + train::some(count_of(all.cut()), "document") + " cut to a window's length";
  if (all.left_out() > 0) out += "; " + train::some(count_of(all.left_out()), "document") + " without a label left out";
  return out;
}

double samples::labels(std::size_t first, std::size_t count) const {
  std::size_t sum = 0;
  for (std::size_t w = first; w < first + count; ++w) sum += std::visit([&](auto const& all) { return all.labels(w); }, windows_);
  return static_cast<double>(sum);
}

chevron::batch samples::batch(std::span<std::size_t const> windows) const {
  if (auto const* const packed = std::get_if<train::packed_windows>(&windows_)) {
    auto const [tokens, following, positions] = packed->batch(windows);
    return {{tokens}, {following}, {{.name = positions_name, .value = positions}}};
  }
  auto const [tokens, following] = std::get<train::token_windows>(windows_).batch(windows);
  return {{tokens}, {following}};
}

double labels_of(chevron::batch const& of) { return of.targets[0].ne(train::ignored_label).sum().item<double>(); }

window_kind kind_of_windows(std::string const& word, std::vector<std::string> const& files) {
  if (!word.empty()) return word == "packed" ? window_kind::packed : window_kind::stream;
  bool const masked = std::any_of(files.begin(), files.end(), [](std::string const& file) {
    std::error_code ignored;
    std::filesystem::path const mask = std::filesystem::path(file).replace_extension(".mask");
    return mask != file && std::filesystem::exists(mask, ignored);
  });
  return masked ? window_kind::packed : window_kind::stream;
}

}  // namespace chevron::finetune
