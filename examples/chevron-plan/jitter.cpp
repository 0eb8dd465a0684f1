// computes: draws of times
#include "jitter.hpp"

#include <algorithm>
#include <cmath>

#include <chevron/base/format.hpp>

#include "table.hpp"

namespace plan_program {
namespace {

using chevron::search::difference;
using chevron::search::sampled_figures;

/// How many times as long something takes.
double factor_number(std::string const& value, std::string const& flag) {
  auto const factor = number_in(value);
  if (!factor || !(*factor >= 0.01 && *factor <= 100))
    throw usage(flag + " '" + value + "' is no factor: give a number from 0.01 to 100, such as 1.3");
  return *factor;
}

/// Numbers of one table, with as many decimals as tell a spread to a hundredth.
struct digits {
  int decimals;
  bool unicode;

  digits(double spread, bool with_unicode)
      : decimals(spread > 0 ? std::clamp(2 - static_cast<int>(std::floor(std::log10(spread))), 0, 6) : 0),
        unicode(with_unicode) {}
  std::string operator()(double value) const { return chevron::show::fixed(value, decimals); }
  /// `+1.2 ± 0.3`
  std::string operator()(chevron::search::sampled_difference const& by) const {
    return (by.by < 0 ? "-" : "+") + (*this)(std::abs(by.by)) + (unicode ? " ± " : " +- ") + (*this)(by.error);
  }
};

std::string bold_first_line(std::string const& lines, chevron::show::text_style const& style) {
  std::size_t const end = lines.find('\n');
  return style.colour ? "\x1b[1m" + lines.substr(0, end) + "\x1b[0m" + lines.substr(end) : lines;
}

}  // namespace

chevron::search::jitter jitter_of(request const& asked) {
  chevron::search::jitter out;
  jitter_request const& typed = asked.jitter;
  if (!typed.spread.empty()) {
    bool const hundredths = typed.spread.back() == '%';
    auto const number = number_in(typed.spread.substr(0, typed.spread.size() - (hundredths ? 1 : 0)));
    double const share = number ? *number / (hundredths ? 100 : 1) : -1;
    if (!(share >= 0 && share <= 1)) {
      throw usage("--jitter '" + typed.spread + "' is not usable: give a standard deviation from 0% to 100%, such as 5% or 0.05");
    }
    out.spread = share;
  }
  if (!typed.replicas.empty()) out.replicas = whole_number(typed.replicas, "--replicas", 1, 4096);
  if (!typed.slow_replica.empty()) {
    out.slow_replica = factor_number(typed.slow_replica, "--slow-replica");
    if (out.replicas < 2)
      throw usage("--slow-replica " + typed.slow_replica + " with one replica slows everything: add --replicas 2");
  }
  if (!typed.draws.empty()) out.draws = whole_number(typed.draws, "--draws", 10, 100'000);
  for (auto const& [value, flag] : {std::pair{&typed.replicas, "--replicas"}, std::pair{&typed.draws, "--draws"}}) {
    if (!value->empty() && !varies(out)) {
      throw usage(std::string(flag) + " " + *value + " changes nothing where times are as planned: add --jitter 5%");
    }
  }
  out.seed = effort_of(asked).seed;
  return out;
}

bool varies(chevron::search::jitter const& how) { return how.spread > 0 || how.slow_replica != 1; }

std::vector<double> slow_ranks(request const& asked, int ranks) {
  std::vector<double> out(static_cast<std::size_t>(ranks), 1);
  for (std::string const& one : asked.jitter.slow_ranks) {
    std::size_t const sign = one.find('=');
    if (sign == std::string::npos)
      throw usage("--slow-rank '" + one + "' names no factor: write 3=1.3 for rank 3, 1.3 times as long");
    int const rank = whole_number(one.substr(0, sign), "--slow-rank " + one + ": rank", 0, ranks - 1);
    out[static_cast<std::size_t>(rank)] *= factor_number(one.substr(sign + 1), "--slow-rank " + one + ": factor");
  }
  return out;
}

std::string jitter_words(request const& asked, chevron::search::jitter const& how) {
  std::string out;
  for (std::string const& one : asked.jitter.slow_ranks) {
    std::size_t const sign = one.find('=');
    out += (out.empty() ? "Rank " : ", rank ") + one.substr(0, sign) + " takes " + one.substr(sign + 1) + " times as long";
  }
  if (!out.empty()) out += ". ";
  if (how.spread > 0) out += "Each computation varies by " + percent(how.spread) + " (log-normal). ";
  if (how.slow_replica != 1) out += "One replica takes " + asked.jitter.slow_replica + " times as long. ";
  if (varies(how)) {
    out += std::to_string(how.draws) + " draws";
    if (how.replicas > 1) out += "; the slowest of " + std::to_string(how.replicas) + " replicas counts";
    out += ". ";
  }
  if (!out.empty()) out.back() = '\n';
  return out;
}

std::string drawn_table(std::vector<drawn_row> const& all, chevron::show::text_style const& style) {
  std::vector<table_row> rows{{"schedule", "chunks", "planned", "median", "p90", "spread", "above the first", "peak"}};
  std::string equals;
  std::size_t least = 0;
  digits const text(sampled_figures(all.front().lengths).spread, style.unicode);
  for (std::size_t i = 0; i < all.size(); ++i) {
    drawn_row const& row = all[i];
    sampled_figures const f(row.lengths);
    auto const above = difference(row.lengths, all.front().lengths);
    rows.push_back({row.name, std::to_string(row.chunks), number(row.planned), text(f.median), text(f.p90), text(f.spread),
                    i == 0 ? "-" : text(above), number(row.peak)});
    if (i == 0 || above.clear()) continue;
    equals += (equals.empty() ? "" : ", ") + row.name;
    if (row.peak < all[least].peak) least = i;
  }
  std::string lines = bold_first_line(table_text(rows, {align::left, align::right}), style);
  lines +=
      "\nplanned: makespan without jitter   p90: nine draws of ten take less   spread: from p10 to p90\n"
      "above the first: difference of p90 over the same draws, with its standard error\n"
      "peak: activations on the fullest rank, in microbatches of a rank's whole share\n";
  if (equals.empty()) return lines;
  lines +=
      "\nThese draws cannot tell " + all.front().name + " from " + equals + ": a difference below two standard errors is none.";
  if (least > 0) lines += " Of them " + all[least].name + " keeps least.";
  return lines + "\n";
}

std::string robust_words(std::vector<std::pair<std::string, chevron::search::robust_found const*>> const& all,
                         chevron::show::text_style const& style) {
  chevron::search::robust_found const& best = *all.front().second;
  digits const text(sampled_figures(best.best_drawn).spread, style.unicode);
  std::vector<table_row> rows{{"placement", "planned", "median", "p90", "spread", "catalogue's best", "", "above it"}};
  for (auto const& [placement, found] : all) {
    sampled_figures const f(found->best_drawn);
    bool const any = !found->published_drawn.empty();
    rows.push_back({placement, number(found->length), text(f.median), text(f.p90), text(f.spread),
                    any ? text(sampled_figures(found->published_drawn).p90) : "none fits",
                    any ? found->published.name.characters : "",
                    !any          ? "-"
                    : found->kept ? "the same"
                                  : text(difference(found->best_drawn, found->published_drawn))});
  }
  std::string out = bold_first_line(table_text(rows, {align::left, align::right, align::right, align::right, align::right,
                                                      align::right, align::left, align::right}),
                                    style) +
                    "\nplanned: without jitter   p90: nine draws of ten take less   spread: from p10 to p90\n"
                    "above it: difference of p90 over the same draws, with its standard error\n\n";
  std::string const which = all.size() > 1 ? "The first" : "The schedule";
  out += which;
  if (best.kept)
    out += std::string(" is ") + best.published.name.characters + ": nothing else is below it by two standard errors.";
  else
    out += std::string(" was made from ") + best.start.characters + (best.drawn ? ", over other draws than these." : ".");
  // What a search that knows of no jitter would have given, and whether that gain is there under jitter.
  bool const any = !best.published_drawn.empty();
  double const gain = best.planned.published_length - best.planned.length;
  auto const really = any ? difference(best.planned_drawn, best.published_drawn) : chevron::search::sampled_difference{};
  if (any && gain > 1e-9 * best.planned.length) {
    out += "\nSearched without jitter, " + number(best.planned.length) + " is " + number(gain) + " shorter than " +
           best.planned.published.name.characters + ". With it, its p90 beside " + best.published.name.characters +
           "'s: " + text(really) + (really.below() ? ", so a gain stays." : ", so the gain is lost.");
  }
  return out + "\n";
}

std::string robust_json(chevron::search::robust_found const& found) {
  using chevron::show::exact;
  using chevron::show::json_string;
  sampled_figures const f(found.best_drawn);
  bool const any = !found.published_drawn.empty();
  auto const above = difference(found.best_drawn, any ? found.published_drawn : found.best_drawn);
  return ", \"planned\": " + exact(found.length) + ", \"median\": " + exact(f.median) + ", \"p90\": " + exact(f.p90) +
         ", \"spread\": " + exact(f.spread) +
         ", \"p90_published\": " + (any ? exact(sampled_figures(found.published_drawn).p90) : "null") +
         ", \"published_under_jitter\": " + (any ? json_string(found.published.name.characters) : "null") +
         ", \"p90_above_published\": " + (any ? exact(above.by) : "null") +
         ", \"p90_above_published_error\": " + (any ? exact(above.error) : "null") +
         ", \"p90_of_planned\": " + exact(sampled_figures(found.planned_drawn).p90);
}

}  // namespace plan_program
