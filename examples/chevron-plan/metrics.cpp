// computes: files of many megabytes are parsed
#include "metrics.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iostream>
#include <limits>
#include <optional>
#include <utility>

#include <nlohmann/json.hpp>

#include "request.hpp"
#include "value_list.hpp"

namespace plan_program {
namespace {

constexpr char const* remedy = "name a file that chevron-train --metrics or chevron-finetune --metrics wrote";
constexpr double absent = std::numeric_limits<double>::quiet_NaN();
constexpr double not_finite = std::numeric_limits<double>::infinity();
/// A step has a figure for each loss and some twenty more: lines beyond these limits have other content.
constexpr std::size_t longest_line = std::size_t{1} << 20, most_figures = 1000;

/// Takes the numbers of a line's object. Texts, truth values and nested values are no figures.
class line_reader : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::vector<std::pair<std::string, double>> entries;
  std::optional<std::int64_t> step;
  bool step_is_other = false;

  void clear() {
    entries.clear();
    step.reset();
    step_is_other = false;
    depth_ = 0;
    object_ = false;
  }
  bool is_object() const { return object_; }

  bool null() override { return take(not_finite); }
  bool boolean(bool) override { return other(); }
  bool number_integer(number_integer_t value) override { return whole(value); }
  bool number_unsigned(number_unsigned_t value) override {
    if (value > static_cast<number_unsigned_t>(std::numeric_limits<std::int64_t>::max())) return take(static_cast<double>(value));
    return whole(static_cast<std::int64_t>(value));
  }
  bool number_float(number_float_t value, string_t const&) override { return take(value); }
  bool string(string_t&) override { return other(); }
  bool binary(binary_t&) override { return other(); }
  bool start_object(std::size_t) override {
    if (depth_ == 0) object_ = true;
    return ++depth_, other_at(2);
  }
  bool key(string_t& name) override {
    if (depth_ == 1) key_ = name;
    return true;
  }
  bool end_object() override { return --depth_, true; }
  bool start_array(std::size_t) override { return ++depth_, other_at(2); }
  bool end_array() override { return --depth_, true; }
  bool parse_error(std::size_t, std::string const&, nlohmann::detail::exception const&) override { return false; }

 private:
  bool other() { return other_at(1); }
  /// Notes a value of `step` that is no number, seen at this depth.
  bool other_at(int depth) {
    if (object_ && depth_ == depth && key_ == "step") step_is_other = true;
    return true;
  }
  bool whole(std::int64_t value) {
    if (object_ && depth_ == 1 && key_ == "step") {
      step = value;
      return true;
    }
    return take(static_cast<double>(value));
  }
  bool take(double value) {
    if (!object_ || depth_ != 1) return true;
    if (key_ == "step") return step_is_other = true;
    entries.emplace_back(key_, value);
    return true;
  }

  int depth_ = 0;
  bool object_ = false;
  std::string key_;
};

/// A stream of a file that can be read to its end. \throws usage for anything else
std::ifstream opened(std::string const& file) {
  struct stat status {};
  if (stat(file.c_str(), &status) != 0) throw usage(quoted(file) + " cannot be read (" + std::strerror(errno) + "): " + remedy);
  if (!S_ISREG(status.st_mode) && !S_ISFIFO(status.st_mode) && !S_ISSOCK(status.st_mode))
    throw usage(quoted(file) + " is not a file: " + remedy);
  errno = 0;
  std::ifstream in(file, std::ios::binary);
  if (!in)
    throw usage(quoted(file) + " cannot be read (" + std::strerror(errno != 0 ? errno : EIO) + "): check that you may read it");
  return in;
}

/// Appends the values of a line to a run.
class collector {
 public:
  explicit collector(metrics& run) : run_(run) {}

  void add(std::int64_t step, std::vector<std::pair<std::string, double>> const& entries, long line) {
    if (!run_.steps.empty() && step <= run_.steps.back()) go_back(step, line);
    std::size_t const at = run_.steps.size();
    run_.steps.push_back(static_cast<long>(step));
    for (auto& column : run_.values) column.push_back(absent);
    std::size_t next = 0;  // lines mostly have the same figures in the same order
    for (auto const& [name, value] : entries) {
      std::size_t const found = next < run_.figures.size() && run_.figures[next] == name ? next : run_.index_of(name);
      if (found == run_.figures.size()) {
        if (found == most_figures) continue;
        run_.figures.push_back(name);
        run_.values.emplace_back(at + 1, absent);
      }
      run_.values[found][at] = value;
      next = found + 1;
    }
  }

  void finish() {
    if (returns_ > 1)
      run_.notes.push_back("steps occur again in " + std::to_string(returns_) + " places, the last at line " +
                           std::to_string(last_line_) + ": the later lines count");
    else if (returns_ == 1)
      run_.notes.push_back(first_ == last_
                               ? "step " + std::to_string(first_) + " occurs again at line " + std::to_string(last_line_) +
                                     ": the later line counts"
                               : "the run goes back from step " + std::to_string(last_) + " to step " + std::to_string(first_) +
                                     " at line " + std::to_string(last_line_) + ": from this step on the later lines count");
  }

 private:
  void go_back(std::int64_t step, long line) {
    ++returns_;
    first_ = step;
    last_ = run_.steps.back();
    last_line_ = line;
    auto const kept = std::lower_bound(run_.steps.begin(), run_.steps.end(), step) - run_.steps.begin();
    run_.steps.resize(static_cast<std::size_t>(kept));
    for (auto& column : run_.values) column.resize(static_cast<std::size_t>(kept));
  }

  metrics& run_;
  long returns_ = 0, last_line_ = 0;
  std::int64_t first_ = 0, last_ = 0;
};

}  // namespace

std::size_t metrics::index_of(std::string_view figure) const {
  return static_cast<std::size_t>(std::find(figures.begin(), figures.end(), figure) - figures.begin());
}

metrics read_metrics(std::string const& file) {
  metrics run;
  run.file = file;
  std::ifstream of_file;
  if (file != "-") of_file = opened(file);
  std::istream& in = file == "-" ? std::cin : of_file;
  collector to(run);
  line_reader read;
  std::string line;
  for (long number = 1; std::getline(in, line); ++number) {
    bool const cut_off = in.eof();
    auto const refuse = [&](std::string const& why) {
      return usage(quoted(file) + ", line " + std::to_string(number) + ": " + why + ": " + remedy);
    };
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (line.empty()) continue;
    if (line.size() > longest_line) throw refuse("the line is longer than 1 MiB");
    read.clear();
    if (!nlohmann::json::sax_parse(line, &read)) {
      if (!cut_off || number == 1 || line.front() != '{') throw refuse("this is no JSON object");
      run.notes.push_back("the last line, " + std::to_string(number) + ", is cut off, and left out");
      break;
    }
    if (!read.is_object()) throw refuse("this is no JSON object");
    if (!read.step) throw refuse(read.step_is_other ? "'step' is not a whole number" : "the object has no 'step'");
    if (*read.step < 0) throw refuse("'step' is " + std::to_string(*read.step) + ", below 0");
    to.add(*read.step, read.entries, number);
  }
  if (in.bad()) throw usage(quoted(file) + " cannot be read to its end: check the disk, or copy the file first");
  to.finish();
  if (run.steps.empty()) throw usage(quoted(file) + " has no step yet: wait for the run's first step, or " + remedy);
  return run;
}

}  // namespace plan_program
