#include <algorithm>
#include <iostream>

#include <chevron/prove/check.hpp>
#include <chevron/show/format.hpp>
#include <chevron/show/picture.hpp>

#include "request.hpp"

namespace plan_program {
namespace {

using chevron::show::exact;
using chevron::show::json_string;
using chevron::show::number;
using chevron::show::percent;

/// One schedule of the table: its numbers, or why it has none.
struct entry {
  std::string name;
  int chunks = 0;
  chevron::show::figures numbers;
  int peak = 0;  ///< chunks, on the rank that has most
  std::string reason;
};

/// One cost for all: a list a stage would mean different things to schedules that cut the model differently.
double single_cost(std::string const& typed, std::string const& flag) {
  if (typed.find(',') != std::string::npos) {
    throw usage(flag + " '" + typed +
                "' is a list, but schedules cut the model into different numbers of stages: give one "
                "number, the cost of a rank's whole share");
  }
  return cost_number(typed, flag);
}

/// The numbers of one plan, or why it has none.
entry look_at(std::string const& name, chevron::plan plan, chevron::costs whole, int limit) {
  entry out;
  out.name = name;
  if (plan.problem) {
    out.reason = describe(plan.problem).str();
    return out;
  }
  out.chunks = plan.stages / plan.size.ranks;
  plan.in_flight_limit = 0;
  if (chevron::finding const broken = check(plan)) {
    out.reason = describe(broken).str();
    return out;
  }
  chevron::costs const each{whole.forward / out.chunks, whole.backward_input / out.chunks, whole.backward_weight / out.chunks,
                            whole.communication};
  out.numbers = chevron::show::figures_of(plan, each);
  out.peak = *std::max_element(out.numbers.peak_in_flight.begin(), out.numbers.peak_in_flight.end());
  if (limit > 0 && out.peak > limit * out.chunks) {
    out.reason = "peak " + number(static_cast<double>(out.peak) / out.chunks);
    if (out.chunks > 1) out.reason += " (" + std::to_string(out.peak) + " chunks of 1/" + std::to_string(out.chunks) + ")";
    out.reason += " is above the limit of " + std::to_string(limit);
  }
  return out;
}

/// A schedule of the catalogue.
entry look_at(std::string const& name, chevron::shape size, chevron::costs whole, int limit) {
  chevron::plan plan = plan_named(name, size);
  // A schedule whose number of chunks is fixed takes part with its own.
  if (plan.problem && size.chunks != 0) plan = plan_named(name, {size.ranks, size.micro_batches, 0});
  return look_at(name, std::move(plan), whole, limit);
}

/// A schedule from a file, which must cut the model evenly: the costs are of a rank's whole share.
entry look_at(request const& asked, foreign const& from, chevron::costs whole, int limit) {
  entry out;
  out.name = asked.schedule;
  chevron::plan const& plan = from.read.plan;
  if (from.broken) {
    out.reason = describe(from.broken, from.read, from.text);
  } else if (plan.stages != plan.size.ranks * plan.size.chunks) {
    out.reason = "its ranks have different numbers of stages; a rank's whole share then means different things";
  } else {
    return look_at(asked.schedule, plan, whole, limit);
  }
  return out;
}

/// Words as one field of CSV. A file's name may hold anything.
std::string field(std::string const& words) {
  std::string out = "\"";
  for (char c : words) out += c == '"' ? std::string(2, c) : std::string(1, c);
  return out + "\"";
}

using table = std::vector<std::vector<std::string>>;

/// Columns as wide as they need to be, the first to the left, the others to the right.
std::string aligned(table const& rows) {
  std::vector<int> width(rows.front().size());
  for (auto const& row : rows) {
    for (std::size_t c = 0; c < row.size(); ++c) width[c] = std::max(width[c], chevron::show::columns_of(row[c]));
  }
  std::string out;
  for (auto const& row : rows) {
    for (std::size_t c = 0; c < row.size(); ++c) {
      std::string const gap(static_cast<std::size_t>(width[c] - chevron::show::columns_of(row[c])), ' ');
      out += c == 0 ? row[c] + gap : "  " + gap + row[c];
    }
    out += "\n";
  }
  return out;
}

}  // namespace

int run_compare(request const& asked) {
  std::string const format = format_of(asked, {"text", "csv", "json"});
  foreign from;
  chevron::shape size;
  if (asked.schedule.empty()) {
    size = shape_of(asked);
  } else {
    if (!is_file(asked.schedule)) {
      throw usage("'" + asked.schedule +
                  "' is no CSV file: the catalogue's schedules are all compared anyway; name a file that ends in .csv");
    }
    from = read_file(asked);
    if (from.read.plan.problem) {
      std::cout << law_words(asked, from.broken) << "\n";
      return exit_broken_law;
    }
    size = {from.read.plan.size.ranks, from.read.plan.size.micro_batches, 0};
  }
  chevron::costs const whole{single_cost(asked.forward, "--forward"), single_cost(asked.backward_input, "--backward-input"),
                             single_cost(asked.backward_weight, "--backward-weight"),
                             cost_number(asked.communication, "--communication")};
  if (!(whole.forward + whole.backward_input + whole.backward_weight > 0)) {
    throw usage("--forward, --backward-input and --backward-weight are all 0: give at least one cost above 0");
  }
  int const limit = asked.memory_limit.empty() ? 0 : whole_number(asked.memory_limit, "--memory-limit", 1, 1000000);
  chevron::show::text_style const style = style_of(asked);

  std::vector<entry> fit, unfit;
  for (std::string const& name : schedule_names()) {
    entry one = look_at(name, size, whole, limit);
    (one.reason.empty() ? fit : unfit).push_back(std::move(one));
  }
  if (!asked.schedule.empty()) {
    entry one = look_at(asked, from, whole, limit);
    (one.reason.empty() ? fit : unfit).push_back(std::move(one));
  }
  std::stable_sort(fit.begin(), fit.end(), [](entry const& a, entry const& b) {
    if (std::abs(a.numbers.makespan - b.numbers.makespan) > 1e-9 * a.numbers.makespan)
      return a.numbers.makespan < b.numbers.makespan;
    return a.peak * b.chunks < b.peak * a.chunks;
  });

  auto const share = [](entry const& e) { return static_cast<double>(e.peak) / e.chunks; };
  std::string out;
  if (format == "json") {
    out = "[";
    for (auto const* list : {&fit, &unfit}) {
      for (entry const& e : *list) {
        out += std::string(out.size() > 1 ? "," : "") + "\n  {\"schedule\": " + json_string(e.name);
        if (e.reason.empty()) {
          out += ", \"chunks\": " + std::to_string(e.chunks) + ", \"makespan\": " + exact(e.numbers.makespan) +
                 ", \"bubble_makespan\": " + exact(e.numbers.bubble_makespan) + ", \"span\": " + exact(e.numbers.span) +
                 ", \"bubble_span\": " + exact(e.numbers.bubble_span) + ", \"peak_in_flight\": " + std::to_string(e.peak) +
                 ", \"peak_share\": " + exact(share(e)) + ", \"messages\": " + std::to_string(e.numbers.messages) + "}";
        } else {
          out += ", \"reason\": " + json_string(e.reason) + "}";
        }
      }
    }
    out += "\n]\n";
  } else if (format == "csv") {
    out = "schedule,chunks,makespan,bubble_makespan,span,bubble_span,peak_in_flight,peak_share,messages,reason\n";
    for (entry const& e : fit) {
      out += (is_file(e.name) ? field(e.name) : e.name) + "," + std::to_string(e.chunks) + "," + exact(e.numbers.makespan) + "," +
             exact(e.numbers.bubble_makespan) + "," + exact(e.numbers.span) + "," + exact(e.numbers.bubble_span) + "," +
             std::to_string(e.peak) + "," + exact(share(e)) + "," + std::to_string(e.numbers.messages) + ",\n";
    }
    for (entry const& e : unfit) out += (is_file(e.name) ? field(e.name) : e.name) + ",,,,,,,,," + field(e.reason) + "\n";
  } else {
    out = std::to_string(size.ranks) + (size.ranks == 1 ? " rank, " : " ranks, ") + std::to_string(size.micro_batches) +
          (size.micro_batches == 1 ? " microbatch" : " microbatches") + ". A rank's share of the model costs F=" + asked.forward +
          " I=" + asked.backward_input + " W=" + asked.backward_weight +
          (whole.communication > 0 ? ", a message " + asked.communication : "") + ".\n\n";
    if (!fit.empty()) {
      table rows{{"schedule", "chunks", "makespan", "slower", "bubble", "span", "bubble", "peak", "messages"}};
      double const best = fit.front().numbers.makespan;
      for (entry const& e : fit) {
        double const more = e.numbers.makespan / best - 1;
        rows.push_back({e.name, std::to_string(e.chunks), number(e.numbers.makespan), more > 1e-9 ? percent(more) : "-",
                        percent(e.numbers.bubble_makespan), number(e.numbers.span), percent(e.numbers.bubble_span),
                        number(share(e)), std::to_string(e.numbers.messages)});
      }
      std::string lines = aligned(rows);
      if (style.colour) lines = "\x1b[1m" + lines.substr(0, lines.find('\n')) + "\x1b[0m" + lines.substr(lines.find('\n'));
      out += lines +
             "\nmakespan: first start to last end over all ranks   span: the longest single rank\n"
             "peak: activations on the fullest rank, in microbatches of a rank's whole share\n";
    }
    if (!unfit.empty()) {
      out += std::string(fit.empty() ? "" : "\n") + "left out:\n";
      table rows;
      for (entry const& e : unfit) rows.push_back({"  " + e.name, e.reason});
      std::size_t widest = 0;
      for (auto const& row : rows) widest = std::max(widest, row[0].size());
      for (auto const& row : rows) out += row[0] + std::string(widest - row[0].size() + 3, ' ') + row[1] + "\n";
    }
  }
  write(asked, out);
  return exit_ok;
}

}  // namespace plan_program
