// Checkpoints that were damaged: each must be refused, by the name of the damaged file, and leave the trainer as it was.
#include "tortures.hpp"

#include <algorithm>
#include <iterator>
#include <random>
#include <vector>

#include "jobs.hpp"

#include "support/file_content.hpp"

namespace torture {

namespace {

namespace fs = std::filesystem;

/// All that a checkpoint holds of a trainer, as bytes.
std::string bytes_of(chevron::trainer& train) {
  std::string out = std::to_string(train.next_step()) + ";";
  auto const add = [&](at::Tensor const& t) {
    if (!t.defined()) return;
    at::Tensor const whole = t.detach().contiguous();
    out.append(static_cast<char const*>(whole.const_data_ptr()), whole.nbytes());
  };
  for (chevron::stage const& s : train.stages()) {
    if (!s) continue;
    for (auto const* list : {&s.parameters(), &s.buffers()}) {
      for (chevron::parameter const& p : *list) add(p.value);
    }
  }
  if (train.optimizer() == nullptr) return out;
  for (auto& group : train.optimizer()->param_groups()) {
    for (at::Tensor const& p : group.params()) {
      auto const found = train.optimizer()->state().find(p.unsafeGetTensorImpl());
      if (found == train.optimizer()->state().end()) continue;
      auto const& state = static_cast<torch::optim::AdamWParamState const&>(*found->second);
      out += std::to_string(state.step()) + ";";
      add(state.exp_avg());
      add(state.exp_avg_sq());
    }
  }
  return out;
}

/// Does one thing to a checkpoint's folder.
/// \param older the checkpoint before
/// \returns the file that it was done to
fs::path damage(std::string const& kind, fs::path const& folder, fs::path const& older, std::mt19937_64& draw) {
  std::vector<fs::path> files;
  for (auto const& entry : fs::directory_iterator(folder)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  // Larger files do not hide the manifest.
  fs::path const file = files[draw() % files.size()];
  std::string bytes = content_of(file);
  if (kind == "flipped bit") {
    auto const bit = draw() % (8 * bytes.size());
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << (bit % 8)));
    write_content(file, bytes);
  } else if (kind == "truncated") {
    write_content(file, bytes.substr(0, draw() % bytes.size()));
  } else if (kind == "extended") {
    write_content(file, bytes + std::string(1 + draw() % 64, static_cast<char>(draw())));
  } else if (kind == "exchanged") {
    fs::path const other = files[draw() % files.size()];
    if (content_of(other) == bytes) return {};
    write_content(file, content_of(other));
  } else if (kind == "older") {
    std::string const before = content_of(older / file.filename());
    if (before == bytes) return {};
    write_content(file, before);
  } else {
    fs::remove(file);
  }
  return file;
}

}  // namespace

std::vector<result> damaged_checkpoints(std::size_t count, std::uint64_t seed) {
  job_shape const shape{.schedule = "1F1B", .pipeline_ranks = 2, .micro_batches = 2};
  std::vector<std::string> const kinds{"flipped bit", "flipped bit", "flipped bit", "flipped bit", "flipped bit", "flipped bit",
                                       "flipped bit", "flipped bit", "flipped bit", "flipped bit", "truncated",   "extended",
                                       "exchanged",   "older",       "removed"};
  std::vector<result> out;
  auto const over = run_apart([&] {
    std::map<std::string, result> by_kind;
    scratch_folder const work;
    // One trainer saves twice. Another one loads: its ranks take turns with this thread, which does the damage.
    std::string whole;
    chevron::run_threads({.pipeline_ranks = 2}, [&](chevron::transport& comm) {
      chevron::trainer train(setup_of(shape, comm));
      for (long step = 0; step < 2; ++step) {
        auto const data = batch_of(shape, step, 0);
        train.step(data.input, data.target);
        chevron::save_checkpoint(train, work.path / "whole", {{"data", "drawn from numbers"}});
      }
      auto const all = comm.all_gather_text(bytes_of(train));
      if (comm.topology().global_rank == 0) whole = all[0] + all[1];
    });
    std::mt19937_64 draw(seed);
    fs::path const last = work.path / "whole" / "step-00000002", older = work.path / "whole" / "step-00000001";
    chevron::run_threads({.pipeline_ranks = 2}, [&](chevron::transport& comm) {
      chevron::trainer train(setup_of(shape, comm));
      bool const leads = comm.topology().global_rank == 0;
      std::string before;
      for (std::size_t i = 0; i < count; ++i) {
        std::string told;
        if (leads) {
          fs::remove_all(work.path / "damaged");
          fs::create_directory(work.path / "damaged");
          fs::copy(last, work.path / "damaged" / last.filename());
          std::string const& kind = kinds[i % kinds.size()];
          fs::path const file = damage(kind, work.path / "damaged" / last.filename(), older, draw);
          told = kind + "\n" + file.filename().string();
        }
        std::string const both = comm.all_gather_text(told)[0];
        std::string const kind = both.substr(0, both.find('\n')), file = both.substr(both.find('\n') + 1);
        if (file.empty()) continue;
        if (before.empty()) before = bytes_of(train);
        std::string said;
        try {
          chevron::load_checkpoint(train, work.path / "damaged" / last.filename(), {{"data", "drawn from numbers"}});
        } catch (chevron::checkpoint_error const& e) {
          said = e.what();
        }
        auto const all = comm.all_gather_text(bytes_of(train));
        auto const olds = comm.all_gather_text(before);
        if (leads) {
          result& r = by_kind[kind];
          r.name = kind;
          ++r.tried;
          bool const names = said.find(file) != std::string::npos;
          bool const as_before = all == olds, as_saved = all[0] + all[1] == whole;
          bool const refused = !said.empty() && as_before;
          // A folder without its manifest is no checkpoint, whatever else it holds.
          bool const well = refused && (names || file == "manifest.json");
          if (refused) ++r.refused;
          if (said.empty() && as_saved) ++r.harmless;
          if (!well) {
            ++r.wrong;
            std::printf("FAILED: %s: %s %s, %s\n", file.c_str(), kind.c_str(), said.empty() ? "was loaded" : said.c_str(),
                        as_before ? "nothing changed" : as_saved ? "as it was saved" : "and the trainer is another");
          }
        }
        if (said.empty()) before.clear();
      }
    });
    for (auto const& [name, r] : by_kind) std::printf("%s\n", to_line(r).c_str());
    return 0;
  }, std::chrono::minutes(30));
  return results_of("damaged checkpoints", over);
}

}  // namespace torture
