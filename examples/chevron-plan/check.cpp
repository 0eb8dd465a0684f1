#include <iostream>
#include <optional>
#include <utility>

#include <chevron/csv/csv.hpp>
#include <chevron/lower/check_program.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/tools/show/picture.hpp>
#include <chevron/tools/show/program_text.hpp>

#include "channel_verdict.hpp"
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
  std::optional<chevron::channel_model> const channels = model_asked(asked);
  if (channels && format != "promela")
    throw usage("--channels " + asked.channels.model + " of lower is for --format promela: add it, or ask check --channels");
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
    write(asked, chevron::show::promela(program, channels.value_or(chevron::channel_model::edge)));
    return exit_ok;
  }
  if (format != "text") {
    write(asked, chevron::show::csv_with_communication(
                     program, format == "csv-comms" ? chevron::show::csv_waits::left_out : chevron::show::csv_waits::written));
    return exit_ok;
  }
  write(asked, title_of(asked, plan) + "\n\n" + chevron::show::program_text(program));
  return exit_ok;
}

}  // namespace plan_program
