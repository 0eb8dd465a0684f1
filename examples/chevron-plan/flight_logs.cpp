#include "flight_logs.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

#include <nlohmann/json.hpp>

#include <chevron/base/format.hpp>

#include "request.hpp"

namespace plan_program {
namespace {

using nlohmann::json;

constexpr std::size_t most_bytes = std::size_t{1} << 20;
constexpr std::size_t most_files = 16384;
constexpr int most_ranks = 16384;
/// Ranks of one job write within seconds of each other; a file that is older was left by a run before.
constexpr std::int64_t same_failure = std::int64_t{60} * 1'000'000'000;
char const* const remedy = "name files that a run with CHEVRON_FLIGHT_LOGS wrote";

/// In words for people: without what a terminal would take for a command, and with nothing but UTF-8.
std::string plain(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    int const length = chevron::show::utf8_length(text);
    auto const first = static_cast<unsigned char>(text.front());
    if (length == 0 || first < 0x20 || first == 0x7f) {
      out += length == 0 ? "?" : " ";
      text.remove_prefix(1);
    } else {
      out += text.substr(0, static_cast<std::size_t>(length));
      text.remove_prefix(static_cast<std::size_t>(length));
    }
  }
  return out;
}

std::string text_of(std::string const& file) {
  std::string const name = "'" + plain(file) + "'";
  struct stat status {};
  if (stat(file.c_str(), &status) != 0) throw usage(name + " cannot be read (" + std::strerror(errno) + "): " + remedy);
  if (!S_ISREG(status.st_mode)) throw usage(name + " is not a file: " + remedy);
  if (static_cast<std::size_t>(status.st_size) > most_bytes)
    throw usage(name + " is larger than 1 MiB, which no flight log is: " + remedy);
  std::ifstream in(file, std::ios::binary);
  std::string text(static_cast<std::size_t>(status.st_size), 0);
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!in) throw usage(name + " cannot be read: check that you may read it");
  return text;
}

/// Takes values out of one file, and says what is wrong with the first that does not fit.
class reader {
 public:
  explicit reader(std::string file) : name_("'" + plain(file) + "'") {}

  [[noreturn]] void fault(std::string const& what) const { throw usage(name_ + " is no flight log: " + what + "; " + remedy); }

  json const& member(json const& of, char const* key) const {
    auto const found = of.is_object() ? of.find(key) : of.end();
    if (!of.is_object() || found == of.end()) fault("'" + std::string(key) + "' is missing");
    return *found;
  }
  std::int64_t whole(json const& value, char const* what, std::int64_t least, std::int64_t most) const {
    bool const big = value.is_number_unsigned() && value.get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX);
    if (!value.is_number_integer() || big || value.get<std::int64_t>() < least || value.get<std::int64_t>() > most) {
      fault("'" + std::string(what) + "' is " + plain(value.dump().substr(0, 60)) + ", not a whole number from " +
            std::to_string(least) + " to " + std::to_string(most));
    }
    return value.get<std::int64_t>();
  }
  std::int64_t whole_at(json const& of, char const* key, std::int64_t least, std::int64_t most) const {
    return whole(member(of, key), key, least, most);
  }
  int number_at(json const& of, char const* key, int least, int most) const {
    return static_cast<int>(whole_at(of, key, least, most));
  }
  std::string words(json const& value, char const* what) const {
    if (!value.is_string()) fault("'" + std::string(what) + "' is no text");
    return plain(value.get<std::string>());
  }
  std::string words_at(json const& of, char const* key) const { return words(member(of, key), key); }

  flight_log read(std::string const& text) const {
    // Messages of errors may hold any bytes.
    std::string clean = text;
    for (std::size_t at = 0; at < clean.size();) {
      int const length = chevron::show::utf8_length(std::string_view(clean).substr(at));
      if (length == 0) clean[at] = '?';
      at += static_cast<std::size_t>(std::max(length, 1));
    }
    json const all = json::parse(clean, nullptr, false);
    if (all.is_discarded()) fault(text.empty() ? "it is empty" : "it is no JSON, or was cut off");
    if (!all.is_object() || !all.contains("chevron_ring")) fault("'chevron_ring' is missing");
    if (json const& format = all["chevron_ring"]; format != 1)
      fault("it has format " + plain(format.dump().substr(0, 20)) + ", and 1 is read here");
    constexpr std::int64_t least = INT64_MIN / 4, most = INT64_MAX / 4;
    flight_log out;
    out.pipeline_ranks = number_at(all, "pipeline_ranks", 1, most_ranks);
    out.replicas = number_at(all, "replicas", 1, most_ranks / out.pipeline_ranks);
    if (all.contains("shards")) out.shards = number_at(all, "shards", 1, most_ranks / out.pipeline_ranks / out.replicas);
    out.rank = number_at(all, "rank", 0, out.world() - 1);
    out.schedule = words_at(all, "schedule");
    out.micro_batches = number_at(all, "microbatches", 0, chevron::max_micro_batches);
    if (all.contains("slices")) out.slices = number_at(all, "slices", 1, chevron::max_micro_batches);
    out.chunks = number_at(all, "chunks", 0, chevron::max_stages);
    json const& forward = member(all, "forward_only");
    if (!forward.is_boolean()) fault("'forward_only' is neither true nor false");
    out.forward_only = forward.get<bool>();
    json const& plan = member(all, "plan");
    if (!plan.is_array() || (!plan.empty() && plan.size() != static_cast<std::size_t>(out.pipeline_ranks)))
      fault("'plan' has not a row for each pipeline rank");
    for (json const& row : plan) out.plan.push_back(words(row, "plan"));
    json const& told = member(all, "failure");
    out.told = {number_at(told, "code", 0, 255), number_at(told, "rank", -1, out.world() - 1),
                static_cast<long>(whole_at(told, "step", -1, most)), words_at(told, "action"), words_at(told, "reason")};
    json const& waiting = member(all, "waiting");
    if (!waiting.is_null()) {
      ring_wait one{.peer = number_at(waiting, "peer", -1, out.world() - 1),
                    .step = static_cast<long>(whole_at(waiting, "step", -1, most)),
                    .action = words_at(waiting, "action"),
                    .what = {},
                    .text = words_at(waiting, "text"),
                    .until = whole_at(waiting, "until", least, most)};
      one.what = action_of(one.action, out.slices);
      out.waiting = std::move(one);
    }
    out.written = whole_at(all, "written", least, most);
    out.wall_clock_ahead = whole_at(all, "wall_clock_ahead", least, most);
    out.left_out = static_cast<long>(whole_at(all, "left_out", 0, most));
    json const& actions = member(all, "actions");
    if (!actions.is_array()) fault("'actions' is no list");
    for (json const& one : actions) {
      if (!one.is_array() || one.size() != 5)
        fault("an entry of 'actions' has not step, action, and when it was reached, begun and ended");
      auto const what = action_of(words(one[1], "actions"), out.slices);
      if (!what) fault("'" + plain(one[1].get<std::string>()) + "' in 'actions' is no action");
      ring_action made{static_cast<long>(whole(one[0], "actions", -1, most)),
                       *what,
                       whole(one[2], "actions", least, most),
                       whole(one[3], "actions", least, most),
                       {}};
      if (!one[4].is_null()) made.end = whole(one[4], "actions", least, most);
      out.actions.push_back(made);
    }
    return out;
  }

 private:
  std::string name_;
};

std::vector<std::string> files_of(std::vector<std::string> const& named) {
  std::vector<std::string> out;
  for (std::string const& name : named) {
    std::error_code wrong;
    if (!std::filesystem::is_directory(name, wrong)) {
      out.push_back(name);
      continue;
    }
    std::set<std::string> found;
    auto all = std::filesystem::directory_iterator(name, wrong);
    for (; !wrong && all != std::filesystem::directory_iterator(); all.increment(wrong)) {
      std::string const file = all->path().filename().string();
      if (file.starts_with("rank-") && file.ends_with(".json")) found.insert(all->path().string());
    }
    if (wrong) throw usage("'" + plain(name) + "' cannot be read (" + wrong.message() + "): " + remedy);
    if (found.empty()) {
      throw usage(
          "'" + plain(name) +
          "' holds no rank-*.json: name the folder that CHEVRON_FLIGHT_LOGS named when the job failed; ranks that were killed "
          "write none; for dumps of PyTorch's flight recorder add --flight-recorder before the folder");
    }
    out.insert(out.end(), found.begin(), found.end());
  }
  if (out.size() > most_files)
    throw usage(std::to_string(out.size()) + " files are more than " + std::to_string(most_files) + ": " + remedy);
  return out;
}

/// Why two flight logs cannot be of one job; empty: they can.
std::string difference(flight_log const& a, flight_log const& b) {
  auto const ranks = [](flight_log const& r) {
    return std::to_string(r.pipeline_ranks) + " pipeline ranks \xc3\x97 " + std::to_string(r.replicas) +
           (r.shards > 1 ? " \xc3\x97 " + std::to_string(r.shards) + " shards" : "");
  };
  // Who failed before it had a plan knows how many ranks there are, not more.
  if (a.world() != b.world() ||
      (!a.plan.empty() && !b.plan.empty() && (a.pipeline_ranks != b.pipeline_ranks || a.shards != b.shards)))
    return "of " + ranks(a) + ", and of " + ranks(b);
  if (a.plan.empty() || b.plan.empty() || a.forward_only != b.forward_only) return {};
  if (a.schedule != b.schedule) return "of " + a.schedule + ", and of " + b.schedule;
  if (a.plan != b.plan) return "of different plans";
  return {};
}

}  // namespace

flight_log const& flight_logs::any() const {
  auto const has = std::find_if(by_rank.begin(), by_rank.end(), [](auto const& r) { return r && !r->plan.empty(); });
  return has != by_rank.end() ? **has
                              : **std::find_if(by_rank.begin(), by_rank.end(), [](auto const& r) { return r.has_value(); });
}

std::optional<chevron::action> action_of(std::string_view text, int slices) {
  using chevron::kind;
  if (text == "OPTIMIZER_STEP") return chevron::make_action(kind::optimizer_step, 0, 0);
  int stage = 0, micro_batch = 0;
  auto const take = [&](int& value, int most) {
    auto const [end, wrong] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (wrong != std::errc{} || value < 0 || value > most) return false;
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    return true;
  };
  if (!take(stage, chevron::max_stages - 1)) return std::nullopt;
  auto const letters = text.substr(0, std::min(text.find_first_of("0123456789"), text.size()));
  text.remove_prefix(letters.size());
  for (int k = 0; k < chevron::program_kinds; ++k) {
    auto const what = static_cast<kind>(k);
    if (what == kind::optimizer_step || letters != chevron::letters_of(what)) continue;
    if (!chevron::is_of_stage(what) && !take(micro_batch, chevron::max_micro_batches)) return std::nullopt;
    if (!chevron::is_of_stage(what) && slices > 1) {
      if (!text.starts_with('.')) return std::nullopt;
      text.remove_prefix(1);
      int slice = 0;
      if (!take(slice, slices - 1) || micro_batch > (chevron::max_micro_batches - slice) / slices) return std::nullopt;
      micro_batch = micro_batch * slices + slice;
    }
    if (!text.empty()) return std::nullopt;
    return chevron::make_action(what, stage, micro_batch);
  }
  return std::nullopt;
}

flight_logs read_flight_logs(std::vector<std::string> const& named) {
  if (named.empty())
    throw usage("no flight log given: name the folder that CHEVRON_FLIGHT_LOGS named when the job failed, or files of it");
  std::vector<flight_log> all;
  for (std::string const& file : files_of(named)) {
    all.push_back(reader(file).read(text_of(file)));
    all.back().file = plain(file);
  }
  auto const newest = std::max_element(all.begin(), all.end(), [](flight_log const& a, flight_log const& b) {
    return a.written_on_the_wall() < b.written_on_the_wall();
  });
  flight_logs out;
  out.by_rank.resize(static_cast<std::size_t>(newest->world()));
  std::int64_t const latest = newest->written_on_the_wall();
  std::string const model = newest->file;
  for (flight_log& one : all) {
    std::int64_t const older = latest - one.written_on_the_wall();
    if (older > same_failure) {
      out.remarks.push_back(one.file + " is " + chevron::show::number(static_cast<double>(older) * 1e-9, 3) +
                            " s older than the newest: it is of a failure before, and was left aside");
      continue;
    }
    if (std::string const other = difference(one, *newest); !other.empty())
      throw usage("'" + one.file + "' and '" + model + "' are of different jobs (" + other + "): name files of one");
    auto& place = out.by_rank[static_cast<std::size_t>(one.rank)];
    if (place)
      throw usage("'" + place->file + "' and '" + one.file + "' are both of rank " + std::to_string(one.rank) +
                  ": name files of one failure");
    place = one;
  }
  return out;
}

}  // namespace plan_program
