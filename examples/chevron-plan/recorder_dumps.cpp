#include "recorder_dumps.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <set>

#include <chevron/base/format.hpp>

#include "pickle.hpp"
#include "rank_list.hpp"
#include "request.hpp"

namespace plan_program {
namespace {

using nlohmann::json;

constexpr std::size_t most_bytes = std::size_t{1} << 28;
constexpr std::size_t most_operations = std::size_t{1} << 20;
constexpr int most_ranks = 16384;
char const* const remedy =
    "Remedy: name a folder that contains the dumps of PyTorch's flight recorder, one file a rank, or, if other files are beside "
    "them, the path that TORCH_NCCL_DEBUG_INFO_TEMP_FILE had, with which their names begin (/tmp/nccl_trace_rank_)";

/// A text with neither control characters nor invalid UTF-8.
std::string plain(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    int const length = chevron::show::utf8_length(text);
    auto const first = static_cast<unsigned char>(text.front());
    out += length == 0 || first < 0x20 || first == 0x7f ? "?" : text.substr(0, static_cast<std::size_t>(length));
    text.remove_prefix(static_cast<std::size_t>(std::max(length, 1)));
  }
  return out;
}

/// The rank in a file's name: the digits at its end, before an extension. Nothing without digits.
std::optional<int> rank_of_file(std::string const& file) {
  std::string name = std::filesystem::path(file).filename().string();
  for (char const* ending : {".json", ".pickle", ".pkl", ".bin"}) {
    if (name.ends_with(ending)) {
      name.resize(name.size() - std::string_view(ending).size());
      break;
    }
  }
  std::size_t first = name.size();
  while (first > 0 && name[first - 1] >= '0' && name[first - 1] <= '9') --first;
  int rank = 0;
  auto const [end, wrong] = std::from_chars(name.data() + first, name.data() + name.size(), rank);
  if (first == name.size() || wrong != std::errc{} || rank >= most_ranks) return std::nullopt;
  return rank;
}

/// Whether a file is a dump that was compressed after it was written.
bool is_compressed_dump(std::string const& file) {
  for (char const* ending : {".gz", ".zst", ".xz", ".bz2"}) {
    if (file.ends_with(ending)) return rank_of_file(file.substr(0, file.size() - std::string_view(ending).size())).has_value();
  }
  return false;
}

/// The files of a folder; a file alone; or the files of a folder whose names begin with the last part of the path.
std::set<std::string> files_at(std::string const& path) {
  namespace fs = std::filesystem;
  std::error_code wrong;
  if (fs::is_regular_file(path, wrong)) return {path};
  bool const is_folder = fs::is_directory(path, wrong);
  fs::path const parent = fs::path(path).parent_path(), folder = is_folder ? fs::path(path) : parent.empty() ? "." : parent;
  std::string const beginning = is_folder ? "" : fs::path(path).filename().string();
  std::set<std::string> out;
  wrong.clear();
  auto all = fs::directory_iterator(folder, wrong);
  for (; !wrong && all != fs::directory_iterator(); all.increment(wrong)) {
    if (all->is_regular_file(wrong) && all->path().filename().string().starts_with(beginning)) out.insert(all->path().string());
  }
  if (!wrong && out.empty() && !is_folder) wrong = std::make_error_code(std::errc::no_such_file_or_directory);
  if (wrong) throw usage("--flight-recorder '" + plain(path) + "' cannot be read (" + wrong.message() + "). " + remedy);
  return out;
}

/// Takes the values of one file, and names the first that does not fit.
class dump_reader {
 public:
  explicit dump_reader(std::string const& file) : file_(plain(file)) {}

  [[noreturn]] void fault(std::string const& words) const {
    throw usage("'" + file_ + "' is no dump of PyTorch's flight recorder: " + words + ". " + remedy);
  }

  rank_dump read(std::string const& text, int rank, std::map<std::string, recorded_group>& groups) {
    json const all = parsed(text);
    rank_dump out;
    out.file = file_;
    out.rank = rank;
    if (!all.is_object() || !all.contains("version")) fault("'version' is missing");
    if (!all["version"].is_string()) fault("'version' is no text");
    out.version = plain(all["version"].get<std::string>());
    if (!out.version.starts_with("2."))
      fault("it has format " + out.version.substr(0, 20) + ", and formats 2.x (PyTorch 2.5 and later) are read here");
    read_groups(all);
    json const none = json::array();
    json const& entries = all.contains("entries") ? all["entries"] : none;  // JSON without an operation has no 'entries'
    if (!entries.is_array()) fault("'entries' is no list");
    if (entries.size() > most_operations) fault("it has " + std::to_string(entries.size()) + " entries");
    std::vector<bool> is_p2p;
    std::int64_t next = 0;
    for (json const& entry : entries) {
      if (!entry.is_object()) fault("entry " + place() + " is no dictionary");
      std::int64_t const record = std::max<std::int64_t>(0, whole(entry, "record_id"));
      (out.operations.empty() ? out.overwritten : out.left_out) += std::max<std::int64_t>(0, record - next);
      next = record + 1;
      out.operations.push_back(operation(entry, rank));
      is_p2p.push_back(out.operations.back().peer >= 0 || is_true(entry, "is_p2p"));
      out.newest = std::max(out.newest, out.operations.back().created);
      for (char const* key : {"time_discovered_started_ns", "time_discovered_completed_ns"}) {
        if (auto const time = entry.find(key); time != entry.end() && time->is_number_integer())
          out.newest = std::max(out.newest, time->get<std::int64_t>());
      }
      ++entry_;
    }
    merge_batches(out.operations, is_p2p);
    for (auto& [key, group] : groups_) groups.emplace(key, std::move(group));
    return out;
  }

 private:
  std::string place() const { return std::to_string(entry_); }

  json parsed(std::string const& text) const {
    if (text.empty()) fault("it is empty");
    std::size_t const first = text.find_first_not_of(" \t\r\n");
    if (first != std::string::npos && text[first] == '{') {
      json out = json::parse(plain_bytes(text), nullptr, false);
      if (out.is_discarded()) fault("it is no JSON, or was cut off");
      return out;
    }
    try {
      return read_pickle(text);
    } catch (pickle_error const& wrong) {
      fault(wrong.what());
    }
  }
  /// JSON whose texts may contain any bytes.
  static std::string plain_bytes(std::string text) {
    for (std::size_t at = 0; at < text.size();) {
      int const length = chevron::show::utf8_length(std::string_view(text).substr(at));
      if (length == 0) text[at] = '?';
      at += static_cast<std::size_t>(std::max(length, 1));
    }
    return text;
  }

  std::int64_t whole(json const& entry, char const* key) const {
    auto const found = entry.find(key);
    if (found == entry.end()) fault("'" + std::string(key) + "' of entry " + place() + " is missing");
    return whole_value(*found, key);
  }
  std::int64_t whole_or(json const& entry, char const* key, std::int64_t otherwise) const {
    auto const found = entry.find(key);
    return found == entry.end() || found->is_null() ? otherwise : whole_value(*found, key);
  }
  std::int64_t whole_value(json const& value, char const* key) const {
    constexpr std::int64_t most = INT64_MAX / 4;
    bool const big = value.is_number_unsigned() && value.get<std::uint64_t>() > static_cast<std::uint64_t>(most);
    if (!value.is_number_integer() || big || value.get<std::int64_t>() < -most || value.get<std::int64_t>() > most)
      fault("'" + std::string(key) + "' of entry " + place() + " is no whole number below 2^61");
    return value.get<std::int64_t>();
  }
  std::string words(json const& entry, char const* key) const {
    auto const found = entry.find(key);
    if (found == entry.end() || !found->is_string()) fault("'" + std::string(key) + "' of entry " + place() + " is no text");
    return plain(found->get<std::string>());
  }

  /// `"[0, 1, 2]"` or a list of numbers.
  std::vector<int> ranks_in(json const& value, std::string const& group) const {
    json const list = value.is_string() ? json::parse(value.get<std::string>(), nullptr, false) : value;
    std::vector<int> out;
    if (!list.is_array()) fault("'ranks' of process group '" + group + "' is no list");
    for (json const& one : list) {
      if (!one.is_number_integer() || one.get<std::int64_t>() < 0 || one.get<std::int64_t>() >= most_ranks)
        fault("'ranks' of process group '" + group + "' has a rank that is no number from 0 to " +
              std::to_string(most_ranks - 1));
      out.push_back(one.get<int>());
    }
    return out;
  }
  void read_groups(json const& all) {
    auto const config = all.find("pg_config");
    if (config == all.end()) return;
    if (!config->is_object()) fault("'pg_config' is no dictionary");
    for (auto const& [name, one] : config->items()) {
      if (!one.is_object() || !one.contains("ranks")) continue;
      recorded_group group{plain(name), one.contains("desc") ? words(one, "desc") : std::string(),
                           ranks_in(one["ranks"], plain(name))};
      // PyTorch's Gloo backend names the default group "" here and "0" in its entries.
      if (group.name.empty()) group = {"0", "default_pg", group.ranks};
      std::string key = group.name;
      for (int const r : group.ranks) key += "," + std::to_string(r);  // ranks may use one name for several groups
      key_of_[group.name] = key;
      groups_[key] = std::move(group);
    }
  }

  recorded_tensors tensors(json const& entry, char const* sizes, char const* types) const {
    recorded_tensors out;
    auto const all = entry.find(sizes);
    if (all != entry.end() && !all->is_array()) fault("'" + std::string(sizes) + "' of entry " + place() + " is no list");
    if (all != entry.end()) {
      for (json const& one : *all) {
        if (!one.is_array()) fault("'" + std::string(sizes) + "' of entry " + place() + " has a size that is no list");
        out.sizes.emplace_back();
        for (json const& extent : one) out.sizes.back().push_back(whole_value(extent, sizes));
      }
    }
    if (auto const names = entry.find(types); names != entry.end() && names->is_array()) {
      for (json const& one : *names) {
        if (!one.is_string()) fault("'" + std::string(types) + "' of entry " + place() + " has a type that is no text");
        out.types.push_back(plain(one.get<std::string>()));
      }
    }
    return out;
  }

  /// The innermost line of the program outside of PyTorch, such as `train.py:123`.
  static std::string line_of(json const& entry) {
    auto const frames = entry.find("frames");
    if (frames == entry.end() || !frames->is_array()) return {};
    for (json const& one : *frames) {
      if (!one.is_object()) continue;
      auto const file = one.find("filename");
      auto const line = one.find("line");
      if (file == one.end() || !file->is_string() || line == one.end() || !line->is_number_integer()) continue;
      std::string const path = plain(file->get<std::string>());
      if (path.empty() || path[0] == '<' || path.find("/torch/") != std::string::npos) continue;
      return std::filesystem::path(path).filename().string() + ":" + std::to_string(line->get<std::int64_t>());
    }
    return {};
  }

  std::string group_key(json const& entry) {
    auto const found = entry.find("process_group");
    std::string name, description;
    if (found != entry.end() && found->is_array() && found->size() == 2 && (*found)[0].is_string() && (*found)[1].is_string()) {
      name = plain((*found)[0].get<std::string>());
      description = plain((*found)[1].get<std::string>());
    } else if (found != entry.end() && found->is_string()) {
      name = plain(found->get<std::string>());
    } else {
      fault("'process_group' of entry " + place() + " is neither a pair of texts nor a text");
    }
    if (name.empty()) name = "0";
    auto const [key, is_new] = key_of_.try_emplace(name, name);
    if (is_new) groups_[name] = {name, description, {}};
    if (!description.empty() && description != "undefined") groups_[key->second].description = description;
    return key->second;
  }

  recorded_operation operation(json const& entry, int rank) {
    recorded_operation out;
    out.group = group_key(entry);
    std::string name = words(entry, "profiling_name");
    if (auto const colon = name.find(':'); colon != std::string::npos) {
      out.backend = name.substr(0, colon);
      name.erase(0, colon + 1);
    }
    std::string peers;
    if (auto const blank = name.find(' '); blank != std::string::npos) {
      peers = name.substr(blank + 1);
      name.resize(blank);
    }
    out.name = name;
    if (name == "send" || name == "recv") out.peer = peer_in(peers, name == "send", groups_[out.group], rank);
    out.sequence = whole(entry, out.peer >= 0 || is_true(entry, "is_p2p") ? "p2p_seq_id" : "collective_seq_id");
    out.inputs = tensors(entry, "input_sizes", "input_dtypes");
    out.outputs = tensors(entry, "output_sizes", "output_dtypes");
    std::string const state = words(entry, "state");
    // Gloo's entries stay "scheduled"; PyTorch retires them when their work ends.
    out.completed = state == "completed" || (out.backend == "gloo" && is_true(entry, "retired"));
    out.created = whole_or(entry, "time_created_ns", 0);
    out.ended = whole_or(entry, "time_discovered_completed_ns", 0);
    out.timeout = std::max<std::int64_t>(0, std::min<std::int64_t>(whole_or(entry, "timeout_ms", 0), INT64_MAX / 4 / 1'000'000)) *
                  1'000'000;
    out.called_at = line_of(entry);
    return out;
  }
  static bool is_true(json const& entry, char const* key) {
    auto const found = entry.find(key);
    return found != entry.end() && found->is_boolean() && found->get<bool>();
  }
  /// `0->1` of a send, `1<-0` of a receive: ranks in the group.
  int peer_in(std::string const& peers, bool sends, recorded_group const& group, int rank) const {
    auto const arrow = peers.find(sends ? "->" : "<-");
    int mine = -1, other = -1;
    if (arrow != std::string::npos) {
      std::from_chars(peers.data(), peers.data() + arrow, mine);
      std::from_chars(peers.data() + arrow + 2, peers.data() + peers.size(), other);
    }
    if (mine < 0 || other < 0 || mine >= most_ranks || other >= most_ranks)
      fault("'profiling_name' of entry " + place() + " is a " + (sends ? "send" : "recv") + " without its ranks");
    if (group.ranks.empty()) return other;
    if (std::max(mine, other) >= static_cast<int>(group.ranks.size())) {
      fault("entry " + place() + " names rank " + std::to_string(std::max(mine, other)) + " of process group '" + group.name +
            "', which has " + std::to_string(group.ranks.size()));
    }
    if (group.ranks[static_cast<std::size_t>(mine)] != rank) {
      fault("entry " + place() + " is of rank " + std::to_string(group.ranks[static_cast<std::size_t>(mine)]) +
            ", and the file's name says rank " + std::to_string(rank));
    }
    return group.ranks[static_cast<std::size_t>(other)];
  }

  /// A batch ends in an entry named `coalesced`, with the sequence number of the operations before it, which have no state of
  /// their own. Gives them the state of that entry, and removes it. A group numbers its collectives and its messages apart, so
  /// a collective with a batch's number is none of its operations.
  static void merge_batches(std::vector<recorded_operation>& all, std::vector<bool> const& is_p2p) {
    std::vector<recorded_operation> out;
    std::vector<bool> out_is_p2p;
    int batches = 0;
    for (std::size_t k = 0; k < all.size(); ++k) {
      recorded_operation& one = all[k];
      if (one.name != "coalesced") {
        out.push_back(std::move(one));
        out_is_p2p.push_back(is_p2p[k]);
        continue;
      }
      std::size_t first = out.size();
      while (first > 0 && out[first - 1].group == one.group && out[first - 1].sequence == one.sequence &&
             out_is_p2p[first - 1] == is_p2p[k] && out[first - 1].batch < 0)
        --first;
      if (first == out.size()) {  // its operations were overwritten
        continue;
      }
      for (std::size_t i = first; i < out.size(); ++i) {
        out[i].batch = batches;
        out[i].completed = one.completed;
        out[i].ended = one.ended;
        if (out[i].timeout == 0) out[i].timeout = one.timeout;
      }
      ++batches;
    }
    all = std::move(out);
  }

  std::string file_;
  std::size_t entry_ = 0;
  std::map<std::string, std::string> key_of_;  // by name, in this file
  std::map<std::string, recorded_group> groups_;
};

std::string text_of(std::string const& file, std::int64_t& written) {
  std::string const name = "'" + plain(file) + "'";
  struct stat status {};
  if (stat(file.c_str(), &status) != 0 || !S_ISREG(status.st_mode))
    throw usage(name + " is not a file that can be read. " + remedy);
  if (static_cast<std::size_t>(status.st_size) > most_bytes)
    throw usage(name + " is larger than 256 MiB. Remedy: a smaller TORCH_FR_BUFFER_SIZE, the number of operations that are kept");
  std::ifstream in(file, std::ios::binary);
  std::string text(static_cast<std::size_t>(status.st_size), 0);
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!in) throw usage(name + " cannot be read. Remedy: check the file's permissions");
  written = std::int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec;
  return text;
}

/// `20`, or `20 to 35` of several numbers.
std::string count_words(std::vector<std::int64_t> const& counts) {
  auto const [least, most] = std::minmax_element(counts.begin(), counts.end());
  return std::to_string(*least) + (*least == *most ? "" : " to " + std::to_string(*most));
}

/// The operations that dumps lack, a sentence for each way in which they lack some.
std::vector<std::string> remarks_on_gaps(std::map<int, rank_dump> const& dumps) {
  std::vector<int> wrapped, with_gaps, pending;
  std::vector<std::int64_t> overwritten, left_out;
  for (auto const& [rank, dump] : dumps) {
    if (dump.is_whole()) continue;
    if (std::none_of(dump.operations.begin(), dump.operations.end(), [](auto const& one) { return one.completed; })) {
      pending.push_back(rank);
      continue;
    }
    if (dump.overwritten > 0) wrapped.push_back(rank), overwritten.push_back(dump.overwritten);
    if (dump.left_out > 0) with_gaps.push_back(rank), left_out.push_back(dump.left_out);
  }
  std::vector<std::string> out;
  if (!wrapped.empty()) {
    bool const one = wrapped.size() == 1;
    out.push_back(std::string(one ? "the buffer of " : "the buffers of ") + rank_list(wrapped) +
                  (one ? " has wrapped: " : " have wrapped: ") + count_words(overwritten) +
                  (one ? " operations before the first one in its dump were overwritten"
                       : " operations before the first ones in their dumps were overwritten"));
  }
  if (!with_gaps.empty()) {
    bool const one = with_gaps.size() == 1;
    out.push_back(std::string(one ? "the dump of " : "the dumps of ") + rank_list(with_gaps) +
                  (one ? " leaves out " : " leave out ") + count_words(left_out) +
                  (one ? " operations between those that it has" : " operations between those that they have") +
                  ": dump all operations, not the active ones alone");
  }
  if (!pending.empty()) {
    out.push_back(std::string(pending.size() == 1 ? "the dump of " : "the dumps of ") + rank_list(pending) +
                  (pending.size() == 1 ? " has" : " have") +
                  " pending operations alone: in dumps of all operations the rounds before show where a rank differs");
  }
  return out;
}

/// Ranks whose dumps end long before the newest dump begins: a launcher that starts a job again leaves the files of ranks that
/// have not written new ones.
std::vector<std::string> remarks_on_times(std::map<int, rank_dump> const& dumps) {
  auto const newest = std::max_element(dumps.begin(), dumps.end(),
                                       [](auto const& a, auto const& b) { return a.second.newest < b.second.newest; });
  std::int64_t longest = std::int64_t{600} * 1'000'000'000;  // PyTorch's own timeout
  for (auto const& one : newest->second.operations) longest = std::max(longest, one.timeout);
  std::int64_t const begin = newest->second.operations.empty() ? 0 : newest->second.operations.front().created;
  std::vector<int> old;
  std::vector<std::int64_t> seconds;
  for (auto const& [rank, dump] : dumps) {
    if (dump.newest <= 0 || dump.newest + longest >= begin) continue;
    old.push_back(rank);
    seconds.push_back((begin - dump.newest) / 1'000'000'000);
  }
  if (old.empty()) return {};
  return {std::string(old.size() == 1 ? "the dump of " : "the dumps of ") + rank_list(old) +
          (old.size() == 1 ? " ends " : " end ") + count_words(seconds) + " s before that of rank " +
          std::to_string(newest->first) + " begins, and may be of an earlier run: leave the files of one hang in the folder"};
}

}  // namespace

std::int64_t recorded_tensors::elements() const {
  std::int64_t out = 0;
  for (auto const& one : sizes) {
    std::int64_t product = 1;
    for (std::int64_t const extent : one) {
      if (extent != 0 && product > INT64_MAX / 4 / std::max<std::int64_t>(1, extent)) return INT64_MAX / 4;
      product *= std::max<std::int64_t>(0, extent);
    }
    out = std::min(out + product, INT64_MAX / 4);
  }
  return out;
}

std::int64_t sent_elements(recorded_operation const& send) {
  return send.inputs.sizes.empty() ? send.outputs.elements() : send.inputs.elements();
}
std::int64_t received_elements(recorded_operation const& receive) {
  return receive.outputs.sizes.empty() ? receive.inputs.elements() : receive.outputs.elements();
}
std::vector<std::string> const& types_of(recorded_operation const& one) {
  return one.inputs.types.empty() ? one.outputs.types : one.inputs.types;
}
bool same_types(recorded_operation const& a, recorded_operation const& b) {
  return types_of(a).empty() || types_of(b).empty() || types_of(a) == types_of(b);
}

recorder_dumps read_recorder_dumps(std::string const& path) {
  std::set<std::string> const files = files_at(path);
  recorder_dumps out;
  std::map<int, rank_dump> dumps;
  for (std::string const& file : files) {
    if (is_compressed_dump(file) && files.count(std::filesystem::path(file).replace_extension().string()) == 0)
      throw usage("'" + plain(file) + "' is compressed. Remedy: unpack the dumps (gunzip, unzstd, unxz, bunzip2)");
    std::optional<int> const rank = rank_of_file(file);
    if (!rank) continue;
    if (auto const same = dumps.find(*rank); same != dumps.end()) {
      throw usage("'" + same->second.file + "' and '" + plain(file) + "' are both of rank " + std::to_string(*rank) +
                  ". Remedy: leave the files of one hang in the folder");
    }
    std::int64_t written = 0;
    std::string const text = text_of(file, written);
    rank_dump& dump = dumps.emplace(*rank, dump_reader(file).read(text, *rank, out.groups)).first->second;
    dump.written = std::max(written, dump.newest);
  }
  if (dumps.empty()) {
    throw usage("--flight-recorder '" + plain(path) +
                "' contains no file whose name ends in a rank, such as nccl_trace_rank_0 or rank-0.json. " + remedy);
  }
  int last = dumps.rbegin()->first;
  for (auto const& [key, group] : out.groups) {
    for (int const r : group.ranks) last = std::max(last, r);
  }
  for (auto const& [rank, dump] : dumps) {
    for (recorded_operation const& one : dump.operations) last = std::max(last, one.peer);
  }
  out.by_rank.resize(static_cast<std::size_t>(last) + 1);
  // A rank whose dump does not list a group's members takes them from another rank's dump.
  for (auto& [rank, dump] : dumps) {
    for (recorded_operation& one : dump.operations) {
      recorded_group const& mine = out.groups[one.group];
      if (!mine.ranks.empty()) continue;
      for (auto const& [key, group] : out.groups) {
        if (group.name == mine.name && std::find(group.ranks.begin(), group.ranks.end(), rank) != group.ranks.end()) {
          if (one.peer >= 0 && one.peer < static_cast<int>(group.ranks.size()))
            one.peer = group.ranks[static_cast<std::size_t>(one.peer)];
          one.group = key;
          break;
        }
      }
    }
  }
  for (auto& [key, group] : out.groups) {
    if (!group.ranks.empty()) continue;
    if (group.name == "0" || group.description == "default_pg") {
      for (int r = 0; r <= last; ++r) group.ranks.push_back(r);
    } else {
      for (auto const& [rank, dump] : dumps) {
        if (std::any_of(dump.operations.begin(), dump.operations.end(), [&key = key](auto const& o) { return o.group == key; }))
          group.ranks.push_back(rank);
      }
      out.remarks.push_back("no dump lists the members of process group '" + group.name +
                            "': the ranks with an operation in this group count as its members");
    }
  }
  std::vector<std::string> const incomplete = remarks_on_gaps(dumps), old = remarks_on_times(dumps);
  out.remarks.insert(out.remarks.begin(), old.begin(), old.end());
  out.remarks.insert(out.remarks.end(), incomplete.begin(), incomplete.end());
  for (auto& [rank, dump] : dumps) {
    out.by_rank[static_cast<std::size_t>(rank)] = std::move(dump);
  }
  return out;
}

}  // namespace plan_program
