#include <iostream>
#include <optional>
#include <string>
#include <utility>

#include <chevron/csv/csv.hpp>
#include <chevron/csv/csv_gathers.hpp>
#include <chevron/lower/check_program.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/tools/show/picture.hpp>
#include <chevron/tools/show/program_text.hpp>

#include "channel_verdict.hpp"
#include "gathers.hpp"
#include "promela.hpp"
#include "request.hpp"

namespace plan_program {
namespace {

std::string title_of(request const& asked, chevron::plan const& plan) {
  chevron::show::picture sizes;
  sizes.size = plan.size;
  sizes.rows = plan.size.ranks;
  std::string const name = *plan.name != 0 ? std::string(plan.name) : asked.schedule;
  return name + ", " + size_words(sizes, style_of(asked).unicode ? "\xc3\x97" : "x");
}

int report(request const& asked, chevron::finding const& broken) {
  std::cout << law_words(asked, broken) << "\n";
  return exit_broken_law;
}

/// The gathers of a file, judged with the limit of `--resident`; throws `usage` where the limit has nothing to judge.
chevron::csv_gathers gathers_of(request const& asked, foreign const* from) {
  if (from != nullptr && from->read.gathers) return judge_gathers(from->read, from->text, resident_asked(asked));
  if (!asked.resident.empty())
    throw usage("--resident " + asked.resident + " is for a file with UNSHARD and RESHARD, and " + asked.schedule +
                " has none: give the file that lower --format csv-comms --resident " + asked.resident + " writes");
  return {};
}

/// The line of `check` about gathers; empty for a file without.
std::string gather_words(chevron::csv_gathers const& judged) {
  if (judged.gathers == 0) return {};
  return "  resident      at most " + std::to_string(judged.resident) + " stages of a rank gathered at once, by " +
         std::to_string(judged.gathers) + " UNSHARD; " +
         (judged.late == 0 ? "each has a computation before its use, but that of a rank's first computation"
                           : std::to_string(judged.late) + " of them with no computation between the gather and its use") +
         "\n";
}

}  // namespace

int run_check(request const& asked) {
  std::optional<foreign> from;
  if (is_file(asked.schedule)) {
    from = read_file(asked);
    if (from->broken) return report(asked, from->broken);
  }
  chevron::plan const plan = plan_of(asked);
  if (chevron::finding const broken = check(plan)) return report(asked, broken);
  chevron::proved_program const program = lower(prove(plan));
  if (chevron::finding const broken = check(program)) return report(asked, broken);
  chevron::csv_gathers const gathers = gathers_of(asked, from ? &*from : nullptr);
  if (gathers.broken) return report(asked, gathers.broken);
  channel_verdict const verdict = verdict_on_channels(asked, from ? &*from : nullptr, program);
  if (!verdict.broken.empty()) {
    std::cout << verdict.broken << "\n";
    return exit_broken_law;
  }
  std::string const limit = plan.in_flight_limit > 0 ? "never above the declared limit of " + std::to_string(plan.in_flight_limit)
                                                     : "no limit declared";
  std::pair<chevron::law, std::string> const laws[] = {
      {chevron::law::placement, "every stage lives on one rank, every rank has a stage"},
      {chevron::law::ids_in_range, "every action names a stage of its own rank and a microbatch that exists"},
      {chevron::law::no_duplicate, "no action twice; B, or I and W, never both"},
      {chevron::law::complete, "every stage has all its work for every microbatch"},
      {chevron::law::order, std::string("F before B or I, I before W") +
                                (plan.size.slices > 1 ? "; slices in their order, backwards in reverse" : "")},
      {chevron::law::fused_pair, "a pair is an F and then the B or I of another chunk"},
      {chevron::law::deadlock, "no rank waits for what is queued behind its own next action; for messages see Channels"},
      {chevron::law::in_flight, limit + "; at most " + std::to_string(peak_in_flight(plan)) + " chunks on a rank"},
      {chevron::law::matched, std::to_string(messages(plan)) + " messages, each sent and received once"},
      {chevron::law::slots, "no tensor's place is used again while it is needed"}};
  std::string out = "ok: " + title_of(asked, plan) + "\n";
  for (auto const& [law, meaning] : laws) {
    std::string const name = name_of(law);
    out += "  " + name + std::string(14 - name.size(), ' ') + meaning + "\n";
  }
  out += gather_words(gathers);
  out += verdict.words;
  for (int k = 0; k < chevron::own_kinds; ++k) {
    if (!plan.own[k].declared) continue;
    out += std::string("  ") + static_cast<char>('X' + k) + " is an own action" +
           (plan.own[k].after == 0 && plan.own[k].before == 0 ? ": it may stand anywhere, once for a stage and microbatch\n"
                                                              : ", in the place that the schedule declares\n");
  }
  if (from && from->read.dialect != chevron::csv_dialect::compute_only) {
    out +=
        "  The file's own messages keep 'matched' and 'deadlock' too; as CSV says nothing of slots, 'slots' holds of what lower "
        "makes of it.\n";
  }
  write(asked, out);
  return exit_ok;
}

int run_lower(request const& asked) {
  std::string const format = format_of(asked, lower_formats);
  if (format != "promela") refuse_channels(asked);
  if (!asked.resident.empty() && format != "csv-comms" && format != "csv-comms-2.15")
    throw usage("--resident " + asked.resident +
                " is for --format csv-comms or csv-comms-2.15, which have UNSHARD and RESHARD: "
                "add one of them, or leave --resident out");
  if (is_file(asked.schedule)) {
    if (chevron::finding const broken = read_file(asked).broken) return report(asked, broken);
  }
  chevron::plan const plan = plan_of(asked);
  if (chevron::finding const broken = check(plan)) return report(asked, broken);
  chevron::proved_program const program = lower(prove(plan));
  if (format == "csv") {
    write(asked, chevron::show::csv(plan));
    return exit_ok;
  }
  if (format == "promela") {
    channel_sizes const sizes = channel_sizes_of(asked, plan.stages);
    chevron::channel_model const model = model_asked(asked).value_or(chevron::channel_model::edge);
    chevron::channel_rules const rules{model, asked.channels.hosts_wait};
    write(asked, chevron::show::promela(program, rules, sizes.messages.view(), sizes.buffered_below));
    return exit_ok;
  }
  if (format != "text") {
    write(asked, csv_with_gathers(asked, program, format));
    return exit_ok;
  }
  write(asked, title_of(asked, plan) + "\n\n" + chevron::show::program_text(program));
  return exit_ok;
}

}  // namespace plan_program
