#include "judge.hpp"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <exception>
#include <filesystem>

#include "limits.hpp"
#include "outcome.hpp"
#include "pipelined.hpp"
#include "plain.hpp"

namespace differential {

char const* name_of(verdict v) {
  switch (v) {
    case verdict::equal:
      return "equal";
    case verdict::as_cut:
      return "equal as cut";
    case verdict::refused:
      return "refused";
    case verdict::senseless:
      return "senseless";
    case verdict::differs:
      return "DIFFERS";
    case verdict::fails:
      return "FAILS";
    case verdict::hangs:
      return "HANGS";
    case verdict::dies:
      return "DIES";
  }
  return "";
}
bool is_finding(verdict v) { return v >= verdict::differs; }

judgement judge(program const& p, std::string const& folder, std::function<void(char const*)> const& begun) {
  // Ranks that are processes must be forked before anything has been computed here.
  bool const forked = p.get("line") == "fork";
  pipelined_run by_chevron;
  if (forked) {
    begun("Chevron");
    std::filesystem::create_directories(folder);
    by_chevron = run_forked(p, folder);
    std::filesystem::remove_all(folder);
  }
  // As many threads as a rank has: with more, matrix products are cut otherwise and round otherwise.
  at::set_num_threads(1);
  begun("plain");
  outcome expected;
  try {
    expected = run_plain(p, graph::whole);
  } catch (c10::Error const& e) {
    return {verdict::senseless, e.what_without_backtrace()};
  } catch (std::exception const& e) {
    return {verdict::senseless, e.what()};
  }
  begun("Chevron");
  if (!forked) {
    try {
      by_chevron = run_pipelined(p);
    } catch (std::exception const& e) {
      by_chevron.thrown = e.what();
    }
  }
  std::string const refusal = must_refuse(p);
  if (!by_chevron.thrown.empty()) {
    bool const right =
        (!refusal.empty() && by_chevron.thrown.find(refusal) != std::string::npos) || may_refuse(p, by_chevron.thrown);
    return {right ? verdict::refused : verdict::fails, by_chevron.thrown};
  }
  if (!refusal.empty()) return {verdict::fails, "must be refused with the word `" + refusal + "`, and was not"};
  // Shards and slices add summands in another order.
  std::string const difference =
      p.rounds() ? first_difference(expected, by_chevron.what, 1e-9) : first_difference(expected, by_chevron.what);
  if (difference.empty()) return {verdict::equal, ""};
  try {
    if (rounds_as_cut(p) && first_difference(run_plain(p, graph::cut), by_chevron.what).empty())
      return {verdict::as_cut, difference};
  } catch (std::exception const&) {
    // It cannot be cut so: then that is no excuse.
  }
  return {verdict::differs, difference};
}

}  // namespace differential
