#include "channel_verdict.hpp"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <vector>

#include <range/v3/range/conversion.hpp>
#include <range/v3/view/join.hpp>

#include <chevron/csv/csv.hpp>
#include <chevron/csv/csv_check.hpp>
#include <chevron/lower/channel_order.hpp>
#include <chevron/plan/channels.hpp>

#include "../common/nearest.hpp"
#include "value_list.hpp"

namespace plan_program {
namespace {

using chevron::channel_model;

/// The models, the strictest first: an order of messages that runs over `group` runs over all of them.
constexpr std::array<channel_model, chevron::channel_models> strictest_first{channel_model::group, channel_model::batched,
                                                                             channel_model::pair, channel_model::edge};

std::string listed(std::vector<std::string> names) {
  if (names.size() < 2) return names.empty() ? std::string() : names.front();
  std::string const last = names.back();
  names.pop_back();
  return (names | ranges::views::join(std::string(", ")) | ranges::to<std::string>()) + " and " + last;
}

}  // namespace

std::optional<channel_model> model_asked(request const& asked) {
  if (asked.channels.model.empty()) return std::nullopt;
  std::vector<std::string> names;
  for (channel_model const model : strictest_first) {
    names.emplace_back(name_of(model));
    if (names.back() == unknown::lower_case(asked.channels.model)) return model;
  }
  std::string const like = unknown::nearest(asked.channels.model, names);
  throw usage("--channels " + quoted(asked.channels.model) + " is not known" +
              (like.empty() ? "" : "; did you mean " + like + "?") + (like.empty() ? ": choose one of " : " There are ") +
              listed(names));
}

void refuse_channels(request const& asked) {
  std::string const flag = !asked.channels.model.empty()            ? "--channels " + asked.channels.model
                           : asked.channels.hosts_wait              ? "--hosts-wait"
                           : !asked.channels.buffered_below.empty() ? "--buffered-below " + asked.channels.buffered_below
                                                                    : "";
  if (!flag.empty())
    throw usage(flag + " of lower is for --format promela: add it, or ask check " + flag.substr(0, flag.find(' ')));
}

channel_sizes channel_sizes_of(request const& asked, int stages) {
  channel_sizes out{.messages = sizes_of(asked, stages)};
  if (!asked.channels.buffered_below.empty()) out.buffered_below = byte_number(asked.channels.buffered_below, "--buffered-below");
  if (out.buffered_below > 0 && out.messages.message.empty())
    throw usage("--buffered-below " + asked.channels.buffered_below +
                " needs the sizes of messages: add --message-bytes, one number or one for each boundary between stages");
  return out;
}

channel_verdict verdict_on_channels(request const& asked, foreign const* from, chevron::program_view const& program) {
  std::optional<channel_model> const wanted = model_asked(asked);
  channel_sizes const sizes = channel_sizes_of(asked, program.plan.stages);
  std::int64_t const below = sizes.buffered_below;
  bool const own = from != nullptr && from->read.dialect != chevron::csv_dialect::compute_only;
  std::string const text = own ? from->text : chevron::show::csv_with_communication(program, chevron::show::csv_waits::left_out);
  chevron::csv_schedule const read = chevron::read_csv(text);
  std::vector<std::string> proved, refused, cycles;
  chevron::finding first;  // of the model asked for, else of the least strict
  for (channel_model const model : strictest_first) {
    if (wanted && *wanted != model) continue;
    chevron::channel_rules const rules{model, asked.channels.hosts_wait};
    chevron::finding const f = check_channel_order(read.program.view(), rules, sizes.messages.view(), below);
    (f ? refused : proved).emplace_back(name_of(model));
    if (!f) continue;
    first = f;
    cycles.push_back("    " + std::string(name_of(model)) + ": " + describe(f, read, text) + "\n");
  }
  std::string const where = own ? asked.schedule + ", " : "in what lower --format csv-comms writes, ";
  channel_verdict out;
  if (proved.empty()) {
    out.broken = "broken law 'deadlock': " + where + describe(first, read, text);
    return out;
  }
  std::string const words = std::string(asked.channels.hosts_wait ? "; a rank waits at each message until it has ended" : "") +
                            (below > 0 ? "; a send of fewer bytes than " + asked.channels.buffered_below +
                                             " ends without its receive, all others may last until theirs"
                                       : "; a send may last until its receive");
  out.words = "  Channels: proved for " + listed(proved) + (refused.empty() ? "" : ", not for " + listed(refused)) +
              (own ? "" : ", of the messages that lower --format csv-comms writes") + words + ".\n";
  for (std::string const& cycle : cycles) out.words += cycle;
  return out;
}

}  // namespace plan_program
