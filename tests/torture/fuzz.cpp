// All input from outside: schedules, profiles, manifests, tensors, folders of Hugging Face, tokens, environment variables, texts
// of other ranks. Mutates valid texts; each must be read or refused, in time and within a limit of memory.
#include "tortures.hpp"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <iterator>
#include <numeric>
#include <random>

#include <chevron/csv/csv.hpp>
#include <chevron/csv/csv_check.hpp>
#include <chevron/schedule.hpp>
#include <chevron/show.hpp>
#include <chevron/tools/show/profile_file.hpp>

#include "chevron-finetune/decoder_config.hpp"
#include "common/token_windows.hpp"
#include "jobs.hpp"

#include "support/file_content.hpp"

namespace torture {

namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

/// The memory that reading a text may add: files are at most 16 MiB, and a tree of values takes several times its text.
constexpr rlim_t most_memory = rlim_t{1} << 30;
constexpr auto longest_batch = 30s;
constexpr std::size_t batch = 400;

/// A function that reads texts, and valid texts. `refused` counts the texts that it refused.
struct reader {
  std::string name;
  std::function<std::vector<std::string>(fs::path const&)> samples;
  std::function<bool(std::string const&, fs::path const&)> reads;  ///< false: refused
};

/// One checkpoint of a single rank, saved once in each process.
fs::path saved(fs::path const& work) {
  job_shape const shape{.schedule = "1F1B", .pipeline_ranks = 1, .micro_batches = 2};
  chevron::run_threads({.pipeline_ranks = 1}, [&](chevron::transport& comm) {
    chevron::trainer train(setup_of(shape, comm));
    auto const data = batch_of(shape, 0, 0);
    train.step(data.input, data.target);
    chevron::save_checkpoint(train, work / "saved", {{"data", "drawn from numbers"}});
  });
  return work / "saved" / "step-00000001";
}

/// A file of 24 tokens, and the index that Megatron-LM keeps of it: three sequences in three documents.
std::string token_index(fs::path const& bin, std::uint8_t dtype, std::size_t width) {
  std::string tokens, index("MMIDIDX\0\0", 9);
  auto const put = [](std::string& to, auto number) { to.append(reinterpret_cast<char const*>(&number), sizeof number); };
  for (std::uint64_t t = 0; t < 24; ++t) tokens.append(reinterpret_cast<char const*>(&t), width);
  write_content(bin, tokens);
  put(index, std::uint64_t{1}), put(index, dtype), put(index, std::uint64_t{3}), put(index, std::uint64_t{4});
  for (std::int32_t const length : {7, 7, 10}) put(index, length);
  for (std::int64_t const first : {0, 7, 14}) put(index, first * static_cast<std::int64_t>(width));
  for (std::int64_t const document : {0, 1, 2, 3}) put(index, document);
  return index;
}

/// All windows, so that each token is looked at.
void read_tokens(fs::path const& bin) {
  chevron::train::token_windows const set({bin}, 4, 1 << 16);
  std::vector<std::size_t> all(std::min<std::size_t>(set.size(), 10'000));
  std::iota(all.begin(), all.end(), std::size_t{0});
  set.batch(all);
}

template <class Read>
bool refuses_or_not(Read const& read) {
  try {
    read();
  } catch (std::bad_alloc const&) {
    throw;
  } catch (chevron::error const&) {
    return false;
  }
  return true;
}

std::vector<reader> readers() {
  return {
      {"schedule, CSV",
       [](fs::path const&) {
         std::vector<std::string> out;
         chevron::catalogue::for_each([&](auto const& one) {
           auto const plan = chevron::prove(chevron::catalogue::make_plan(one.name, {.ranks = 3, .micro_batches = 5}));
           out.push_back(chevron::show::csv(plan.view()));
           auto const program = chevron::lower(plan);
           out.push_back(chevron::show::csv_with_communication(program.view(), chevron::show::csv_waits::written));
         });
         return out;
       },
       [](std::string const& text, fs::path const&) {
         auto const read = chevron::read_csv(text);
         auto const found = chevron::check(read, text);
         if (found) chevron::describe(found, read, text);
         return !found;
       }},
      {"profile, JSON",
       [](fs::path const&) {
         chevron::profile p;
         p.schedule = "ZB-H1";
         p.size = {.ranks = 3, .micro_batches = 4, .chunks = 1};
         p.stages = 3, p.steps = 3, p.pipeline = 20, p.step = 21.5;
         for (int s = 0; s < 3; ++s) {
           p.forward.push_back(1 + s);
           p.backward.push_back(chevron::profile::not_measured);
           p.backward_input.push_back(0.5 * s);
           p.backward_weight.push_back(0.5);
         }
         p.communication = {0.1, 0.2};
         return std::vector<std::string>{chevron::write_profile(p)};
       },
       [](std::string const& text, fs::path const&) { return chevron::read_profile(text).problem.empty(); }},
      {"manifest of a checkpoint", [](fs::path const& work) { return std::vector<std::string>{content_of(saved(work) / "manifest.json")}; },
       [](std::string const& text, fs::path const& work) {
         fs::path const folder = work / "step-00000001";
         fs::create_directory(folder);
         write_content(folder / "manifest.json", text);
         return refuses_or_not([&] { chevron::detail::read_manifest(folder); });
       }},
      {"manifest with a true fingerprint",
       [](fs::path const& work) { return std::vector<std::string>{content_of(saved(work) / "manifest.json")}; },
       [](std::string text, fs::path const& work) {
         // A stranger can work it out, too.
         if (auto const end = text.rfind(chevron::detail::before_fingerprint); end != text.npos) {
           text.resize(end);
           chevron::detail::byte_fingerprint sum;
           sum.add(text.data(), text.size());
           text.append(chevron::detail::before_fingerprint).append(sum.text()).append(chevron::detail::after_fingerprint);
         }
         fs::path const folder = work / "step-00000001";
         fs::create_directory(folder);
         write_content(folder / "manifest.json", text);
         return refuses_or_not([&] { chevron::detail::read_manifest(folder); });
       }},
      {"tensors, safetensors",
       [](fs::path const& work) {
         std::vector<std::string> out;
         for (auto const& entry : fs::directory_iterator(saved(work))) {
           if (entry.path().extension() == ".safetensors") out.push_back(content_of(entry.path()));
         }
         return out;
       },
       [](std::string const& text, fs::path const& work) {
         write_content(work / "some.safetensors", text);
         return refuses_or_not([&] {
           chevron::safetensors_file const file(work / "some.safetensors");
           for (auto const& name : file.names()) file.read(name);
         });
       }},
      {"weights of Hugging Face, index",
       [](fs::path const& work) {
         chevron::write_safetensors(work / "model-00001-of-00001.safetensors",
                                    {{"a.weight", torch::ones({3, 2})}, {"b.weight", torch::ones({4})}});
         return std::vector<std::string>{R"({"metadata": {"total_size": 40}, "weight_map": {"a.weight": "model-00001-of-00001.safetensors",)"
                                         R"( "b.weight": "model-00001-of-00001.safetensors"}})"};
       },
       [](std::string const& text, fs::path const& work) {
         write_content(work / "model.safetensors.index.json", text);
         return refuses_or_not([&] {
           chevron::detail::weight_folder from(work);
           for (auto const& name : from.names()) from.copy(name, torch::empty(from.shape(name)));
         });
       }},
      {"a decoder's config.json",
       [](fs::path const&) {
         return std::vector<std::string>{
             R"({"model_type": "llama", "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,)"
             R"( "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,)"
             R"( "rope_theta": 10000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,)"
             R"( "high_freq_factor": 4.0, "original_max_position_embeddings": 32}, "tie_word_embeddings": true, "torch_dtype": "bfloat16"})",
             R"({"model_type": "qwen2", "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,)"
             R"( "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 50, "max_position_embeddings": 64, "use_sliding_window": false})"};
       },
       [](std::string const& text, fs::path const& work) {
         write_content(work / "config.json", text);
         return refuses_or_not([&] { chevron::finetune::read_decoder_config(work); });
       }},
      {"tokens, nanoGPT's", [](fs::path const&) { return std::vector<std::string>{std::string(50, '\1')}; },
       [](std::string const& text, fs::path const& work) {
         write_content(work / "tokens.bin", text);
         return refuses_or_not([&] { read_tokens(work / "tokens.bin"); });
       }},
      {"tokens, Megatron's index",
       [](fs::path const& work) {
         token_index(work / "tokens.bin", 8, 2);
         // The second is for other tokens than those that stay.
         return std::vector<std::string>{token_index(work / "tokens.bin", 8, 2), token_index(work / "others.bin", 4, 4)};
       },
       [](std::string const& text, fs::path const& work) {
         write_content(work / "tokens.idx", text);
         return refuses_or_not([&] { read_tokens(work / "tokens.bin"); });
       }},
      {"environment variables",
       [](fs::path const&) {
         return std::vector<std::string>{
             "RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500",
             "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 MASTER_ADDR=a MASTER_PORT=1",
             "SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=8 SLURM_LOCALID=3 SLURM_JOB_ID=77 SLURM_STEP_NODELIST=n[007-9,12],m3 SLURM_STEP_ID=0",
             "TORCHELASTIC_RUN_ID=x RANK=0 WORLD_SIZE=2 TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RESTART_COUNT=2 MASTER_ADDR=b "
             "MASTER_PORT=65535"};
       },
       [](std::string const& text, fs::path const&) {
         return refuses_or_not([&] {
           std::map<std::string, std::string> all;
           for (std::size_t at = 0; at < text.size();) {
             std::size_t const end = std::min(text.find(' ', at), text.size()), equal = text.find('=', at);
             if (equal < end) all[text.substr(at, equal - at)] = text.substr(equal + 1, end - equal - 1);
             at = end + 1;
           }
           auto const read = [&](std::string const& name) -> std::optional<std::string> {
             auto const found = all.find(name);
             return found == all.end() || found->second.empty() ? std::nullopt : std::optional(found->second);
           };
           chevron::read_environment(read);
         });
       }},
      {"what ranks tell each other",
       [](fs::path const&) {
         return std::vector<std::string>{
             chevron::detail::to_line(chevron::failure{.code = 4, .rank = 2, .step = 7, .action = "1F0", .reason = "it is late"}),
             chevron::detail::to_line(chevron::detail::entry_of(
                 5, {.peer = 1, .step = 3}, {}))};
       },
       [](std::string const& text, fs::path const&) {
         bool const is_wait = chevron::detail::wait_of(text).has_value();
         return is_wait || !chevron::detail::failure_of(text).reason.starts_with("an unreadable failure");
       }},
  };
}

std::string mutated(std::vector<std::string> const& samples, std::mt19937_64& draw) {
  static std::vector<std::string> const pieces{"0", "-1", "1e999", "18446744073709551616", "9223372036854775807", "2147483648", "nan", "null", "true",
                                               "\"\"", "{}", "[]", "{\"a\":", "[[[[", "]]]]", "\\u0000", "\xff\xfe", "\xef\xbb\xbf", "\r\n", "\t", ",", ":",
                                               "\x1f", "=", "[1-9999999999]", "[", "\0", "%s%n", "../../etc/passwd", "OVERLAP_F_B"};
  std::string out = samples[draw() % samples.size()];
  auto const below = [&](std::size_t n) { return n == 0 ? std::size_t{0} : static_cast<std::size_t>(draw() % n); };
  for (std::size_t changes = 1 + below(4); changes > 0; --changes) {
    std::size_t const at = below(out.size() + 1), some = std::min(below(40), out.size() - std::min(at, out.size()));
    switch (below(10)) {
      case 0:
      case 1:
        if (at < out.size()) out[at] = static_cast<char>(out[at] ^ (1 << below(8)));
        break;
      case 2: out.insert(at, pieces[below(pieces.size())]); break;
      case 3: out.erase(std::min(at, out.size()), some); break;
      case 4: out.insert(at, out.substr(std::min(at, out.size()), some)); break;
      case 5: out.resize(at); break;
      case 6: {  // a number becomes another
        std::size_t const digit = out.find_first_of("0123456789", at);
        if (digit == out.npos) break;
        std::size_t const end = std::min(out.find_first_not_of("0123456789", digit), out.size());
        out.replace(digit, end - digit, pieces[below(7)]);
        break;
      }
      case 7: {  // the tail of another
        std::string const& other = samples[below(samples.size())];
        out = out.substr(0, at) + other.substr(below(other.size()));
        break;
      }
      case 8: out.replace(std::min(at, out.size()), some, some, static_cast<char>(draw())); break;
      default:
        if (below(50) == 0) {  // rarely, since they are long: deep, or large
          std::string const& piece = pieces[below(pieces.size())];
          std::string many;
          for (std::size_t n = below(200000); n > 0; --n) many += piece;
          out.insert(at, many);
        }
    }
  }
  return out;
}

/// Mutates and reads in this process, whose memory is limited. `at` is the index of the current text, which the parent reads
/// if this process dies.
int read_many(reader const& r, std::uint64_t seed, std::size_t from, std::size_t to, std::size_t* at) {
  scratch_folder const work;
  auto const samples = r.samples(work.path);
  long pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  rlim_t const room = static_cast<rlim_t>(pages) * 4096 + most_memory;
  rlimit const limit{room, room};
  ::setrlimit(RLIMIT_AS, &limit);
  long refused = 0;
  for (std::size_t i = from; i < to; ++i) {
    *at = i;
    std::mt19937_64 draw(seed * 1'000'003 + i);
    std::string const text = i == from ? samples[0] : mutated(samples, draw);
    try {
      bool const well = r.reads(text, work.path);
      refused += !well;
      if (i == from && !well) {
        std::printf("FAILED: %s: the text that was not mutated is refused\n", r.name.c_str());
        return 1;
      }
    } catch (std::exception const& e) {
      std::printf("FAILED: %s: text %zu of seed %llu (%zu bytes) ends in %s\n", r.name.c_str(), i, static_cast<unsigned long long>(seed),
                  text.size(), e.what());
      return 1;
    }
  }
  std::printf("%s\n", to_line({.name = r.name, .tried = static_cast<long>(to - from), .refused = refused,
                               .harmless = static_cast<long>(to - from) - refused, .note = ""}).c_str());
  return 0;
}

}  // namespace

std::vector<result> fuzz(double seconds, std::uint64_t seed, std::size_t processes) {
  auto const all = readers();
  std::vector<result> out;
  for (reader const& r : all) out.push_back({.name = r.name, .note = ""});
  // Each process goes round the readers with numbers of its own, until the time is over.
  auto const until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::size_t round = 0;
  while (round == 0 || std::chrono::steady_clock::now() < until) {
    auto const piece = [&](std::size_t k) -> std::string {
      reader const& r = all[k % all.size()];
      std::size_t const from = (round * processes + k / all.size()) * batch;
      auto* const at = static_cast<std::size_t*>(::mmap(nullptr, sizeof(std::size_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
      auto const ran = run_apart([&] { return read_many(r, seed, from, from + batch, at); }, longest_batch);
      std::size_t const last = *at;
      ::munmap(at, sizeof *at);
      if (ran.code == 0 && !ran.hangs) return ran.output;
      return ran.output + "FAILED: " + r.name + ": text " + std::to_string(last) + " of seed " + std::to_string(seed) +
             (ran.hangs ? ": it takes too long" : ": exit code " + std::to_string(ran.code)) + "\n";
    };
    share_out(all.size() * processes, processes, piece, [&](std::size_t k, std::string const& said) {
      result& sum = out[k % all.size()];
      bool well = false;
      for (result const& one : results_in(said)) {
        sum.tried += one.tried, sum.refused += one.refused, sum.harmless += one.harmless;
        well = true;
      }
      if (!well) {
        ++sum.tried, ++sum.wrong;
        std::printf("%s", said.c_str());
        std::fflush(stdout);
      }
    });
    ++round;
  }
  return out;
}

}  // namespace torture
