#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/version.h>

#include <chevron/lower/program.hpp>
#include <chevron/run/error.hpp>
#include <chevron/run/fingerprint.hpp>
#include <chevron/run/stage.hpp>
#include <chevron/run/transport.hpp>
#include <chevron/version.hpp>

/// \file
/// Do all ranks mean the same? Asked once, before the first step, since later a difference corrupts or hangs.

namespace chevron {

/// A number that stands for a whole program set: its plan, instructions and slots (FNV-1a over their fields).
inline std::uint64_t fingerprint(program_view const& program) {
  std::uint64_t hash = 14695981039346656037u;
  auto const mix = [&hash](std::uint64_t value) {
    for (int byte = 0; byte < 8; ++byte) {
      hash ^= (value >> (8 * byte)) & 0xff;
      hash *= 1099511628211u;
    }
  };
  plan_view const& plan = program.plan;
  mix(static_cast<std::uint64_t>(plan.size.ranks));
  mix(static_cast<std::uint64_t>(plan.size.micro_batches));
  mix(static_cast<std::uint64_t>(plan.stages));
  mix(plan.forward_only ? 1 : 0);
  for (int s = 0; s < plan.stages; ++s) mix(static_cast<std::uint64_t>(plan.rank_of[s]));
  for (int r = 0; r < plan.size.ranks; ++r) {
    mix(static_cast<std::uint64_t>(program.length(r)));
    for (int i = 0; i < program.length(r); ++i) {
      instruction const& x = program.at(r, i);
      mix(static_cast<std::uint64_t>(x.what.what) | static_cast<std::uint64_t>(x.what.fused) << 7 |
          static_cast<std::uint64_t>(x.what.stage) << 8 | static_cast<std::uint64_t>(x.what.micro_batch) << 24 |
          static_cast<std::uint64_t>(static_cast<std::uint16_t>(x.peer)) << 40);
      mix(static_cast<std::uint64_t>(x.slot) | static_cast<std::uint64_t>(x.source) << 16 |
          static_cast<std::uint64_t>(x.local) << 32);
    }
  }
  return hash;
}

/// A number that stands for a tensor's values, bit for bit.
inline std::uint64_t fingerprint(at::Tensor const& t) {
  at::Tensor const dense = t.detach().cpu().contiguous();
  detail::byte_fingerprint bytes;
  bytes.add(dense.const_data_ptr(), dense.nbytes());
  return bytes.value();
}

/// What a rank brings to the comparison: named values. Ranks that give the same name must give the same value.
class preflight_lines {
 public:
  void add(std::string name, std::string value) { text_ += std::move(name) + ": " + std::move(value) + "\n"; }

  void add(program_view const& program) {
    char const* const name = program.plan.name;
    add("schedule", *name != 0 ? name : "(unnamed)");
    add("pipeline ranks", std::to_string(program.plan.size.ranks));
    add("microbatches", std::to_string(program.plan.size.micro_batches));
    add("stages", std::to_string(program.plan.stages));
    add("program", std::to_string(fingerprint(program)));
  }

  /// \param values with the values of its parameters, since copies of a stage have to begin as one
  /// \param of_buffers with those of its buffers, too
  void add(int stage_number, stage const& s, bool values, bool of_buffers = true) {
    std::string const prefix = "stage " + std::to_string(stage_number);
    add(prefix + " parameters", std::to_string(s.parameters().size()));
    for (parameter const& p : s.parameters()) {
      std::string value = dtype_and_shape(p.value);
      if (!p.value.requires_grad()) value += " frozen";
      if (!p.tied_as.empty()) value += ", tied as " + p.tied_as;
      add(prefix + " " + p.name, value);
      if (values) add("values of " + prefix + " " + p.name, std::to_string(fingerprint(p.value)));
    }
    add(prefix + " buffers", std::to_string(s.buffers().size()));
    for (parameter const& b : s.buffers()) {
      std::string const name = prefix + " buffer " + b.name;
      add(name, b.value.defined() ? dtype_and_shape(b.value) : "undefined");
      if (values && of_buffers && b.value.defined()) add("values of " + name, std::to_string(fingerprint(b.value)));
    }
  }

  std::string const& text() const { return text_; }

 private:
  static std::string dtype_and_shape(at::Tensor const& t) {
    std::string out = std::string(c10::toString(t.scalar_type())) + " [";
    for (std::int64_t i = 0; i < t.dim(); ++i) out += (i == 0 ? "" : ", ") + std::to_string(t.size(i));
    return out + "]";
  }

  std::string text_;
};

/// Compares all ranks' lines. Collective; every rank throws the same.
/// \throws preflight_error naming the first line that differs, the two ranks and their values
inline void compare(transport& line, preflight_lines const& mine) {
  std::vector<std::string> const all = line.gather_text(mine.text());
  struct said {
    std::string name, value;
    std::size_t rank;
  };
  std::vector<said> known;
  for (std::size_t r = 0; r < all.size(); ++r) {
    std::size_t hint = 0;  // ranks mostly say the same lines in the same order
    for (std::size_t at = 0; at < all[r].size();) {
      std::size_t const end = all[r].find('\n', at);
      std::string const row = all[r].substr(at, end - at);
      at = end + 1;
      std::size_t const colon = row.find(": ");
      std::string const name = row.substr(0, colon), value = row.substr(colon + 2);
      std::size_t found = known.size();
      for (std::size_t tried = 0; tried < known.size() && found == known.size(); ++tried) {
        std::size_t const k = (hint + tried) % known.size();
        if (known[k].name == name) found = k;
      }
      if (found == known.size()) {
        known.push_back({name, value, r});
      } else if (known[found].value != value) {
        throw preflight_error("rank " + std::to_string(r) + " has `" + row + "` where rank " + std::to_string(known[found].rank) +
                                  " has `" + known[found].name + ": " + known[found].value +
                                  "`: start all ranks with the same program and options",
                              {line.where().global_rank, static_cast<int>(r), -1, "preflight"});
      }
      hint = found + 1;
    }
  }
}

/// The lines every job has.
inline preflight_lines common_lines(transport const& line) {
  preflight_lines lines;
  lines.add("chevron", CHEVRON_VERSION);
  lines.add("torch", TORCH_VERSION);
  lines.add("replicas", std::to_string(line.where().replicas));
  return lines;
}

}  // namespace chevron
