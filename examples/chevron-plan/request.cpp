#include "request.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <system_error>

#include <range/v3/range/conversion.hpp>
#include <range/v3/view/join.hpp>

#include <chevron/base/format.hpp>
#include <chevron/base/new_file.hpp>
#include <chevron/catalogue/catalogue.hpp>
#include <chevron/tools/search/find.hpp>
#include <chevron/tools/show/profile_file.hpp>

#include "../common/nearest.hpp"
#include "../common/terminal.hpp"
#include "links.hpp"
#include "value_list.hpp"

namespace plan_program {
namespace {

using unknown::lower_case;
using unknown::nearest;

[[noreturn]] void refuse_output(std::string const& file, std::string const& flag, std::error_code const& fault) {
  throw usage(flag + " " + quoted(file) + " cannot be written (" + fault.message() +
              "): name a file in a folder that exists and that you may write to");
}

std::string joined(std::vector<std::string> const& words, std::string const& between = ", ") {
  return words | ranges::views::join(between) | ranges::to<std::string>();
}

/// A file's text. `name`: the flag and the file, for errors; `what`, `form`: what should be named instead; `most`: bytes.
std::string text_of(std::string const& file, std::string const& name, char const* what, char const* form, std::size_t most) {
  struct stat status {};
  auto const too_large = [&] {
    return usage(name + " is larger than " + std::to_string(most >> 20) + " MiB, and nothing of its kind is: name " + what);
  };
  if (stat(file.c_str(), &status) != 0) throw usage(name + " cannot be read (" + std::strerror(errno) + "): name " + what);
  bool const regular = S_ISREG(status.st_mode);
  // A pipe ends when its writer closes it; a terminal or another device might never end.
  if (!regular && !S_ISFIFO(status.st_mode) && !S_ISSOCK(status.st_mode)) throw usage(name + " is not a file: name " + form);
  if (static_cast<std::size_t>(status.st_size) > most) throw too_large();
  // A pipe can be read once, and commands look at a schedule several times.
  static std::map<std::string, std::string> read_before;
  if (auto const known = read_before.find(file); known != read_before.end()) return known->second;
  errno = 0;
  std::ifstream in(file, std::ios::binary);
  if (!regular) {
    std::string& text = read_before[file];
    char part[1 << 16];
    while (text.size() <= most && (in.read(part, sizeof part) || in.gcount() > 0))
      text.append(part, static_cast<std::size_t>(in.gcount()));
    if (!in.is_open() || in.bad())
      throw usage(name + " cannot be read (" + std::strerror(errno != 0 ? errno : EIO) + "): check that you may read it");
    if (text.size() > most) throw too_large();
    return text;
  }
  std::string text(static_cast<std::size_t>(status.st_size), 0);
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!in) throw usage(name + " cannot be read (" + std::strerror(errno != 0 ? errno : EIO) + "): check that you may read it");
  return text;
}

}  // namespace

std::optional<double> number_in(std::string const& value) {
  double number = 0;
  auto const [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc{} || end != value.data() + value.size()) return std::nullopt;
  return number;
}

int whole_number(std::string const& value, std::string const& flag, int lowest, int highest) {
  int number = 0;
  auto const [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc{} || end != value.data() + value.size() || number < lowest || number > highest) {
    throw usage(flag + " " + quoted(value) + " is not usable: give a whole number from " + std::to_string(lowest) + " to " +
                std::to_string(highest));
  }
  return number;
}

chevron::search::effort effort_of(request const& asked) {
  chevron::search::effort out;
  if (!asked.search.trials.empty()) out.trials = whole_number(asked.search.trials, "--trials", 1, 1'000'000'000);
  out.seed = static_cast<std::uint64_t>(whole_number(asked.search.seed, "--seed", 0, 2'000'000'000));
  return out;
}

double seconds_of(request const& asked) {
  std::string const& value = asked.search.seconds;
  if (value.empty()) return 0;
  auto const number = number_in(value);
  if (!number || !(*number > 0) || *number > 1e9)
    throw usage("--seconds " + quoted(value) + " is not usable: give a number of seconds above 0, such as 10 or 0.5");
  return *number;
}

double cost_number(std::string const& value, std::string const& flag) {
  auto const number = number_in(value);
  if (!number || !std::isfinite(*number) || *number < 0 || *number > 1e12)
    throw usage(flag + " " + quoted(value) + " is not a time: give a number from 0 to 1e12, such as 1 or 0.5");
  // Numbers nearer to 0 are printed as 0: a makespan, too.
  if (*number > 0 && *number < 1e-9)
    throw usage(flag + " " + quoted(value) + " is below 1e-9: give costs in a smaller unit, or 0");
  return *number;
}

double share_number(std::string const& value, std::string const& flag) {
  auto const number = number_in(value);
  if (!number || !(*number >= 0) || *number > 1)
    throw usage(flag + " " + quoted(value) + " is not a share: give a number from 0 to 1, such as 0.5");
  return *number;
}

int chunk_limit(request const& asked, int chunks) {
  std::string const& value = asked.memory_limit;
  if (value.empty()) return 0;
  auto const number = number_in(value);
  if (!number || !(*number > 0) || *number > 1e6)
    throw usage("--memory-limit " + quoted(value) + " is not usable: give a number of microbatches above 0, such as 4 or 4.5");
  int const whole = static_cast<int>(*number * chunks + 1e-9);
  if (whole > 0) return whole;
  throw usage("--memory-limit " + value + " is less than one chunk, which is " +
              (chunks == 1 ? "all" : "1/" + std::to_string(chunks)) + " of a microbatch's share of a rank: give at least " +
              chevron::show::number(1.0 / chunks) + ", or more --chunks");
}

std::int64_t byte_number(std::string const& value, std::string const& flag) {
  return bytes_up_to(std::int64_t{16} << 30, value, flag);
}

std::int64_t bytes_up_to(std::int64_t most, std::string const& value, std::string const& flag) {
  double number = -1;
  auto const [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  std::string unit = lower_case(std::string(end, value.data() + value.size()));
  if (unit.ends_with("b")) unit.pop_back();
  bool const binary = unit.ends_with("i");
  if (binary) unit.pop_back();
  std::string const prefixes = "kmgt";
  std::size_t const power = unit.empty() ? 0 : prefixes.find(unit) + 1;
  bool const known = unit.size() <= 1 && (unit.empty() ? !binary : power != 0);
  for (std::size_t i = 0; i < power && known; ++i) number *= binary ? 1024 : 1000;
  if (error != std::errc{} || !known || !(number >= 0) || number > static_cast<double>(most)) {
    std::string highest = chevron::show::bytes(most);
    highest.erase(highest.find(' '), 1);
    throw usage(flag + " " + quoted(value) + " is not a size: give bytes up to " + highest + ", such as 65536, 64KiB or 1.5GB");
  }
  return static_cast<std::int64_t>(std::llround(number));
}

chevron::occupies occupies_of(request const& asked) {
  using chevron::occupies;
  if (!asked.occupies_given && has_bandwidth(asked)) return occupies::wire;
  std::vector<std::string> names;
  for (auto const which : {occupies::nobody, occupies::sender, occupies::receiver, occupies::both, occupies::wire}) {
    names.emplace_back(name_of(which));
    if (names.back() == lower_case(asked.communication_occupies)) return which;
  }
  throw usage("--communication-occupies " + quoted(asked.communication_occupies) + " is not known: choose one of " +
              joined(names));
}

chevron::shape shape_of(request const& asked) {
  chevron::shape size;
  size.ranks = whole_number(asked.ranks, "--ranks", 1, 1024);
  size.micro_batches = whole_number(asked.micro_batches, "--microbatches", 1, 16384);
  size.chunks = asked.chunks.empty() ? 0 : whole_number(asked.chunks, "--chunks", 1, 64);
  if (chooses_slices(asked)) {
    throw usage(
        "--slices auto is chosen by comparing, and here one schedule is asked for: give a number, such as the one that "
        "compare --slices auto recommends");
  }
  size.slices = whole_number(asked.slices, "--slices", 1, chevron::max_micro_batches / size.micro_batches);
  int const stages = size.ranks * std::max(size.chunks, 1);
  if (stages > chevron::max_stages) {
    throw usage("--ranks " + asked.ranks + " with --chunks " + asked.chunks + " makes " + std::to_string(stages) +
                " stages, more than " + std::to_string(chevron::max_stages) + ": ask for fewer of either");
  }
  return size;
}

bool is_file(std::string const& schedule) {
  return schedule == "-" || schedule.find('/') != std::string::npos || lower_case(schedule).ends_with(".csv");
}

usage no_csv_file(request const& asked) {
  return usage("'" + asked.schedule +
               "' is no CSV file: the catalogue's schedules are all compared anyway; name a file that ends in .csv");
}

foreign read_file(request const& asked) {
  foreign out;
  out.file = asked.schedule;
  std::string const name = "--schedule " + quoted(asked.schedule);
  out.text = text_of(out.file == "-" ? "/dev/stdin" : out.file, name, "a CSV file that exists, or a schedule of the catalogue",
                     "a CSV file with a line of actions for each rank", std::size_t{1} << 29);
  out.read = chevron::read_csv(out.text);
  chevron::finding const& problem = out.read.plan.problem;
  if (problem && problem.broken == chevron::law::description) throw usage(name + ", " + describe(problem).str());
  if (!problem) {
    chevron::plan& plan = out.read.plan;
    auto const differs = [&](bool given, std::string const& flag, std::string const& typed, int highest, int has) {
      if (given && whole_number(typed, flag, 1, highest) != has) {
        throw usage(flag + " " + typed + " does not go with " + out.file + ", which has " + std::to_string(has) + ": leave " +
                    flag + " out");
      }
    };
    differs(asked.ranks_given, "--ranks", asked.ranks, chevron::max_csv_ranks, plan.size.ranks);
    differs(asked.micro_batches_given, "--microbatches", asked.micro_batches, chevron::max_micro_batches,
            plan.size.micro_batches);
    differs(asked.slices != "1" && !chooses_slices(asked), "--slices", asked.slices, chevron::max_micro_batches,
            plan.size.slices);
    if (!asked.chunks.empty()) differs(true, "--chunks", asked.chunks, chevron::max_stages, plan.size.chunks);
    // A program numbers its slots with 16 bits; a microbatch of a stage takes two receive slots at most.
    for (int r = 0; r < plan.size.ranks; ++r) {
      constexpr int most_forwards = 32767;
      auto const* const first = plan.actions.data + plan.begin.data[r];
      auto const* const last = plan.actions.data + plan.begin.data[r + 1];
      if (std::count_if(first, last, [](chevron::action a) { return a.kind == chevron::kind::forward; }) > most_forwards) {
        throw usage(name + ", line " + std::to_string(r + 1) + ", column 1: this rank has more than " +
                    std::to_string(most_forwards) +
                    " F, more than a program has slots for: give it fewer stages or the step fewer microbatches");
      }
    }
  }
  out.broken = check(out.read, out.text);
  return out;
}

std::string law_words(request const& asked, chevron::finding const& broken) {
  std::string where;
  std::string sentence = describe(broken).str();
  if (is_file(asked.schedule)) {
    foreign const from = read_file(asked);
    where = asked.schedule + ", ";
    sentence = describe(broken, from.read, from.text);
  }
  return "broken law '" + std::string(name_of(broken.broken)) + "': " + where + sentence;
}

chevron::plan plan_of(request const& asked) {
  if (is_file(asked.schedule)) {
    chevron::plan made = read_file(asked).read.plan;
    if (!asked.memory_limit.empty()) made.in_flight_limit = chunk_limit(asked, made.size.chunks * made.size.slices);
    return made;
  }
  std::vector<std::string> const names = all_names();
  if (asked.schedule.empty())
    throw usage("no schedule given: add --schedule FILE.csv or --schedule NAME, one of " + joined(names));
  if (!chevron::catalogue::contains(asked.schedule)) {
    if (asked.schedule.find('+') != std::string::npos) {
      throw usage("--schedule " + quoted(asked.schedule) +
                  " is not known: slack for slow links is written as in 1F1B+1@3-4, one forward more before the link between "
                  "ranks 3 and 4, and only 1F1B and ZB-H1 can have it");
    }
    std::string const like = nearest(asked.schedule, names);
    throw usage("--schedule " + quoted(asked.schedule) + " is not known" + (like.empty() ? "" : "; did you mean " + like + "?") +
                (like.empty() ? ": choose one of " : " There are ") + joined(names));
  }
  chevron::shape const size = shape_of(asked);
  chevron::plan made = plan_named(asked.schedule, size);
  if (made.problem && size.chunks != 0) {
    chevron::plan const without = plan_named(asked.schedule, {size.ranks, size.micro_batches, 0, size.slices});
    if (!without.problem) {
      throw usage("--chunks " + asked.chunks + " does not go with " + without.name.characters + ", which has " +
                  std::to_string(without.size.chunks) + " per rank by itself (" + describe(made.problem).str() +
                  "): leave --chunks out");
    }
  }
  if (made.problem) {
    throw usage("--schedule " + asked.schedule + " with --ranks " + asked.ranks + " --microbatches " + asked.micro_batches +
                ": " + describe(made.problem).str());
  }
  if (!asked.memory_limit.empty()) made.in_flight_limit = chunk_limit(asked, made.size.chunks * made.size.slices);
  return made;
}

std::optional<chevron::profile> profile_of(request const& asked) {
  if (asked.profile.empty()) return std::nullopt;
  std::string const name = "--profile " + quoted(asked.profile);
  if (!asked.cost_flag.empty())
    throw usage(asked.cost_flag + " does not go with " + name + ", which contains costs: give one of them");
  std::string const wanted = "a file that chevron-train --profile wrote";
  auto read = chevron::read_profile(text_of(asked.profile, name, wanted.c_str(), wanted.c_str(), chevron::largest_profile));
  if (!read.problem.empty()) throw usage(name + ": " + read.problem + "; name " + wanted);
  return read.value;
}

owned_costs costs_of(request const& asked, chevron::profile const& measured, std::vector<bool> const& split,
                     std::span<std::int16_t const> rank_of, std::string& problem) {
  int const boundaries = static_cast<int>(split.size()) - 1;
  chevron::profiled_costs made = chevron::costs_of(measured, split);
  problem = made.problem;
  if (!problem.empty()) return made;
  if (asked.communication_given)
    made.communication = value_list(asked.communication, "--communication", boundaries, between_stages, cost_number);
  else if (!made.communication_known && boundaries > 0 && measured.size.ranks != 1 && asked.bandwidth.empty())
    problem = "'communication' is null for every boundary: give --communication, in milliseconds";
  if (asked.hidden_given) made.hidden = share_number(asked.hidden, "--hidden");
  made.communication_occupies = occupies_of(asked);
  if (!asked.unshard.empty()) made.unshard = value_list(asked.unshard, "--unshard", boundaries + 1, "stages", cost_number);
  apply_links(asked, rank_of, made);
  return made;
}

owned_costs costs_of(request const& asked, std::vector<bool> const& split, std::span<std::int16_t const> rank_of) {
  if (auto const measured = profile_of(asked)) {
    std::string problem;
    owned_costs out = costs_of(asked, *measured, split, rank_of, problem);
    if (!problem.empty()) throw usage("--profile " + quoted(asked.profile) + ": " + problem);
    return out;
  }
  int const stages = static_cast<int>(split.size());
  owned_costs out;
  out.forward = value_list(asked.forward, "--forward", stages, "stages", cost_number);
  out.backward_input = value_list(asked.backward_input, "--backward-input", stages, "stages", cost_number);
  out.backward_weight = value_list(asked.backward_weight, "--backward-weight", stages, "stages", cost_number);
  out.communication = value_list(asked.communication, "--communication", stages - 1, between_stages, cost_number);
  out.hidden = share_number(asked.hidden, "--hidden");
  out.communication_occupies = occupies_of(asked);
  out.first_input_gradient = !asked.no_first_input_gradient;
  if (!asked.recompute.empty()) out.recompute = value_list(asked.recompute, "--recompute", stages, "stages", cost_number);
  if (!asked.unshard.empty()) out.unshard = value_list(asked.unshard, "--unshard", stages, "stages", cost_number);
  apply_links(asked, rank_of, out);
  double sum = 0;
  for (auto const* list : {&out.forward, &out.backward_input, &out.backward_weight}) {
    for (double cost : *list) sum += cost;
  }
  if (!(sum > 0)) throw usage("--forward, --backward-input and --backward-weight are all 0: give at least one cost above 0");
  return out;
}

std::string measured_words(chevron::profile const& measured, chevron::plan_view const& plan, double predicted) {
  using namespace chevron::show;
  if (!chevron::taken_under(measured, plan) || !(predicted > 0)) return {};
  double const off = predicted / measured.pipeline - 1;
  return "measured " + number(measured.pipeline) + " ms, the median of " + std::to_string(measured.steps) +
         (measured.steps == 1 ? " step" : " steps") +
         (measured.replicas > 1 ? " and " + std::to_string(measured.replicas) + " replicas" : "") + "; the prediction is " +
         percent(std::abs(off)) + (off < 0 ? " below" : " above");
}

owned_sizes sizes_of(request const& asked, int stages) {
  owned_sizes out;
  if (!asked.activation_bytes.empty())
    out.activation = value_list(asked.activation_bytes, "--activation-bytes", stages, "stages", byte_number);
  if (!asked.message_bytes.empty())
    out.message = value_list(asked.message_bytes, "--message-bytes", stages - 1, between_stages, byte_number);
  return out;
}

int steps_of(request const& asked, chevron::plan_view const& plan) {
  // Drawings of more are of no use to anybody.
  constexpr int most_actions = 4'000'000;
  int const most = std::min(chevron::max_micro_batches / plan.size.units(), most_actions / std::max(plan.total(), 1));
  return whole_number(asked.steps, "--steps", 1, std::max(most, 1));
}

void check_output(std::string const& file, std::string const& flag) {
  if (file.empty()) return;
  if (std::error_code const fault = chevron::detail::fault_of_writing(file)) refuse_output(file, flag, fault);
}

void check_output(request const& asked) { check_output(asked.output, "-o"); }

std::string format_of(request const& asked, std::vector<std::string> const& possible) {
  auto const has = [&](std::string const& format) {
    return std::find(possible.begin(), possible.end(), format) != possible.end();
  };
  if (!asked.format.empty()) {
    if (has(lower_case(asked.format))) return lower_case(asked.format);
    std::string const like = nearest(asked.format, possible);
    throw usage("--format " + quoted(asked.format) + " is not known" + (like.empty() ? "" : "; did you mean " + like + "?") +
                (like.empty() ? ": choose one of " : " There are ") + joined(possible));
  }
  std::string const ending = lower_case(std::filesystem::path(asked.output).extension().string());
  if (ending.empty() || ending == ".txt") return possible.front();
  if (has(ending.substr(1))) return ending.substr(1);
  throw usage("-o " + quoted(asked.output) + ": " + ending + " says no format this command has: choose one of " +
              joined(possible) + ", as the ending or by --format");
}

chevron::show::text_style style_of(request const& asked) {
  chevron::show::text_style style;
  bool const terminal = asked.output.empty() && isatty(STDOUT_FILENO) == 1;
  if (!asked.width.empty())
    style.width = whole_number(asked.width, "--width", 40, 10000);
  else if (terminal)
    style.width = terminal::columns(STDOUT_FILENO, 40, style.width);
  std::string const colour = lower_case(asked.colour);
  if (colour != "auto" && colour != "always" && colour != "never") {
    throw usage("--colour " + quoted(asked.colour) + " is not known: choose one of auto, always, never");
  }
  // https://no-color.org: set and not empty.
  char const* const no_colour = std::getenv("NO_COLOR");
  char const* const kind_of_terminal = std::getenv("TERM");
  bool const dumb = kind_of_terminal != nullptr && std::strcmp(kind_of_terminal, "dumb") == 0;
  style.colour = colour == "always" || (colour == "auto" && terminal && !dumb && (no_colour == nullptr || *no_colour == 0));
  for (char const* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    char const* const value = std::getenv(name);
    if (value == nullptr || *value == 0) continue;
    style.unicode = std::strcmp(value, "C") != 0 && std::strcmp(value, "POSIX") != 0;
    break;
  }
  return style;
}

void write(request const& asked, std::string const& content) {
  if (asked.output.empty()) {
    errno = 0;
    if (!(std::cout << content << std::flush))
      throw usage(std::string("standard output cannot be written (") + std::strerror(errno) + "): is the disk full?");
    return;
  }
  write_to(asked.output, "-o", content);
}

void write_to(std::string const& file, std::string const& flag, std::string const& content) {
  try {
    chevron::detail::write_file(file, content);
  } catch (std::system_error const& e) {
    refuse_output(file, flag, e.code());
  }
}

}  // namespace plan_program
