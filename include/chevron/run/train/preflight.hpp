#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/version.h>

#include <chevron/base/format.hpp>
#include <chevron/lower/program.hpp>
#include <chevron/run/comm/agreement.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/fingerprint.hpp>
#include <chevron/run/core/tensor_fingerprint.hpp>
#include <chevron/run/stage/stage.hpp>
#include <chevron/run/train/trainer_options.hpp>
#include <chevron/version.hpp>

/// \file
/// The values that ranks compare before their first step: versions, program, options, stages.

namespace chevron {

/// Returns a fingerprint of a plan and of all ranks' programs: instructions and slots.
inline std::uint64_t fingerprint(program_view const& program) {
  detail::byte_fingerprint all;
  auto const add = [&all](auto... fields) {
    for (int const field : {static_cast<int>(fields)...}) all.add(&field, sizeof field);
  };
  plan_view const& plan = program.plan;
  add(plan.size.ranks, plan.size.units(), plan.stages, plan.forward_only);
  for (int s = 0; s < plan.stages; ++s) add(plan.rank_of[s]);
  for (int r = 0; r < plan.size.ranks; ++r) {
    add(program.length(r));
    for (int i = 0; i < program.length(r); ++i) {
      instruction const& x = program.at(r, i);
      add(x.op.kind, x.op.fused, x.op.stage, x.op.micro_batch, x.peer, x.slot, x.source, x.local);
    }
  }
  return all.value();
}

/// Adds a program's schedule, sizes and fingerprint to the compared values.
inline void add_program(named_values& out, program_view const& program) {
  char const* const name = program.plan.name;
  out.add("schedule", *name != 0 ? name : "(unnamed)");
  out.add("pipeline ranks", std::to_string(program.plan.size.ranks));
  out.add("microbatches", std::to_string(program.plan.size.micro_batches));
  if (program.plan.size.slices > 1) out.add("slices of a microbatch", std::to_string(program.plan.size.slices));
  out.add("stages", std::to_string(program.plan.stages));
  out.add("program", std::to_string(fingerprint(program)));
}

namespace detail {

/// Begins the name of a compared value: the size of a rank's piece of a cut tensor whose whole size is declared.
inline constexpr char const* size_of_piece = "size of the piece of ";

inline std::string dtype_and_shape(at::Tensor const& t) {
  std::string out = std::string(c10::toString(t.scalar_type())) + " [";
  for (std::int64_t i = 0; i < t.dim(); ++i) out += (i == 0 ? "" : ", ") + std::to_string(t.size(i));
  return out + "]";
}

}  // namespace detail

/// Adds the parameters, buffers, declared losses and carries of a stage to the compared values.
/// \param values true: adds fingerprints of parameters' values, since copies of a stage must start equal
/// \param of_buffers true: with `values`, adds fingerprints of buffers' values, too
/// \param where this rank's place, which goes into the names of cut parameters, so that only copies of one piece are compared
inline void add_stage(named_values& out, int stage_number, stage const& s, bool values, bool of_buffers, topology const& where) {
  std::string const prefix = "stage " + std::to_string(stage_number);
  auto const whose = [&](parameter const& p) {
    return p.held == over_shards::cut ? detail::piece_in_words(p, where) : std::string();
  };
  auto const add_cut = [&](std::string const& name, parameter const& p) {
    if (p.held != over_shards::cut) return;
    out.add(name, "cut along " + std::to_string(p.cut_along) + (p.cut_over == rank_group::experts ? " over experts" : "") +
                      (p.cut_blocks.size() > 1 ? " in " + std::to_string(p.cut_blocks.size()) + " blocks" : "") +
                      (p.cut_whole > 0 ? " of " + std::to_string(p.cut_whole) + " elements" : ""));
    if (p.cut_whole > 0) out.add(detail::size_of_piece + name + whose(p), std::to_string(p.value.size(p.cut_along)));
  };
  out.add(prefix + " parameters", std::to_string(s.parameters().size()));
  for (parameter const& p : s.parameters()) {
    std::string value = detail::dtype_and_shape(p.value);
    if (!p.value.requires_grad()) value += " frozen";
    if (!p.tied_as.empty()) value += ", tied as " + p.tied_as;
    if (p.held == over_shards::partial) value += ", partial";
    out.add(prefix + " " + p.name + whose(p), value);
    add_cut(prefix + " " + p.name, p);
    // On all ranks or on none: otherwise the graphs of their stages, and the collectives of their backwards, would differ.
    if (p.held == over_shards::cut) out.add(prefix + " " + p.name + " needs a gradient", p.value.requires_grad() ? "yes" : "no");
    if (values) out.add("values of " + prefix + " " + p.name + whose(p), std::to_string(fingerprint(p.value)));
  }
  for (stage_loss const& one : s.losses())
    out.add(prefix + " loss " + one.name,
            "factor " + detail::number_text(one.factor) + (one.weight ? ", with a weight of its own" : ""));
  std::size_t carry = 0;  // parts of a stage may have carries of one name
  for (stage_carry const& one : s.carries())
    out.add(prefix + " carry " + std::to_string(carry++) + ", " + one.name, one.detached ? "detached" : "with gradient");
  out.add(prefix + " buffers", std::to_string(s.buffers().size()));
  for (parameter const& b : s.buffers()) {
    std::string const name = prefix + " buffer " + b.name + whose(b);
    out.add(name, (b.value.defined() ? detail::dtype_and_shape(b.value) : "undefined") + (b.summed ? ", summed" : ""));
    add_cut(prefix + " buffer " + b.name, b);
    if (values && (of_buffers || b.summed) && b.value.defined())
      out.add("values of " + name, std::to_string(fingerprint(b.value)));
  }
}

/// Returns the values that every job compares: versions of Chevron and LibTorch, replicas, shards. \param comm the job's
/// transport
inline named_values common_values(transport const& comm) {
  named_values out;
  out.add("chevron", CHEVRON_VERSION);
  out.add("torch", TORCH_VERSION);
  out.add("replicas", std::to_string(comm.topology().replicas));
  if (comm.topology().shards > 1) out.add("shards", std::to_string(comm.topology().shards));
  if (comm.topology().expert_replicas > 1) out.add("experts over replicas", std::to_string(comm.topology().expert_replicas));
  return out;
}

namespace detail {

/// Cause and remedy where two shards of one stage, or two replicas over which its experts are divided, hold different tensors
/// that are not declared cut; empty for any other difference of two ranks.
inline std::string words_of_pieces(topology const& where, agreement_row const& first, agreement_row const& other) {
  int const replica = where.replica_of(first.rank), another = where.replica_of(other.rank);
  bool const same_stage = replica / where.expert_replicas == another / where.expert_replicas &&
                          where.pipeline_rank_of(first.rank) == where.pipeline_rank_of(other.rank);
  std::string const values = "values of ", stage = "stage ";
  bool const of_values = first[0].starts_with(values);
  std::string const name = of_values ? first[0].substr(values.size()) : first[0];
  std::size_t const space = name.starts_with(stage) ? name.find(' ', stage.size()) : name.npos;
  auto const after_shape = [](std::string const& value) { return value.substr(std::min(value.find(']'), value.size())); };
  // Dtype and shape, then words that are equal.
  bool const is_shape = first[1].find(']') != first[1].npos && after_shape(first[1]) == after_shape(other[1]);
  if (!same_stage || space == name.npos || !(of_values || is_shape)) return "";
  std::string const number = name.substr(stage.size(), space - stage.size());
  std::string tensor = name.substr(space + 1);
  if (std::string const buffer = "buffer "; tensor.starts_with(buffer)) tensor = tensor.substr(buffer.size());
  bool const of_shards = replica == another;
  auto const both = [](int one, int two) { return std::to_string(one) + " and " + std::to_string(two); };
  std::string const experts = "if each holds experts of its own, stage.experts(\"" + tensor + "\"); ";
  return (of_shards ? "shards " + both(where.shard_of(first.rank), where.shard_of(other.rank))
                    : "replicas " + both(replica, another)) +
         " hold different " + (of_values ? "values" : "tensors (" + first[1] + " and " + other[1] + ")") + " of stage " + number +
         "'s " + tensor + ", which is not declared cut. Remedy: " +
         (of_shards ? "if each holds a piece, stage.cut(\"" + tensor + "\", dimension); " : "") + experts +
         "if each holds the whole, begin with equal values on all of them, drawn from seeds that do not depend on the rank";
}

/// Compares the sizes of cut tensors with the sums of their pieces. \param all the compared rows of all ranks
/// \throws preflight_error, the same on every rank, if the pieces do not add up to `cut_options::whole`
inline void check_sizes_of_pieces(std::vector<agreement_row> const& all, int rank) {
  struct pieces {
    std::string declared;                       // `cut along 0 of 32 elements`
    std::map<std::string, std::int64_t> sizes;  // by piece: ` of shard 1`
  };
  std::map<std::string, pieces> found;  // by stage and name
  std::string const begin = size_of_piece;
  for (agreement_row const& row : all) {
    std::string const &name = row[0], &value = row[1];
    if (!name.starts_with(begin)) {
      if (value.starts_with("cut ") && value.ends_with(" elements")) found[name].declared = value;
      continue;
    }
    std::size_t const whose = std::max(name.rfind(" of shard ") + 1, name.rfind(" of expert rank ") + 1) - 1;
    found[name.substr(begin.size(), whose - begin.size())].sizes[name.substr(whose)] = std::stoll(value);
  }
  for (auto const& [name, of] : found) {
    std::int64_t sum = 0;
    std::string words;
    for (auto const& [whose, size] : of.sizes) {
      sum += size;
      words += (words.empty() ? "" : " + ") + std::to_string(size);
    }
    if (of.declared.ends_with(" of " + std::to_string(sum) + " elements")) continue;
    throw preflight_error(name + " is declared " + of.declared + ", but its pieces have " + words +
                              (of.sizes.size() > 1 ? " = " + std::to_string(sum) : "") +
                              " along that dimension. Remedy: the dimension along which it is cut, and the size of the whole "
                              "tensor in that dimension",
                          {rank, -1, -1, "preflight"});
  }
}

/// Compares the values that ranks give before their first step. Collective.
/// \throws preflight_error, the same on every rank, naming a value that differs, or a cut tensor whose pieces have other sizes
/// than declared
inline void compare_ranks(transport& comm, named_values const& lines) {
  topology const& where = comm.topology();
  auto const words = [&](agreement_row const& first, agreement_row const& other) { return words_of_pieces(where, first, other); };
  check_sizes_of_pieces(check_consistency(comm, lines, words), where.global_rank);
}

/// Returns the values that a trainer's constructor compares.
inline named_values lines_of(program_view const& p, transport const& comm, trainer_options const& options,
                             std::vector<stage> const& stages) {
  named_values out = common_values(comm);
  add_program(out, p);
  add(out, options);
  for (std::size_t s = 0; s < stages.size(); ++s) {
    if (stages[s])
      add_stage(out, static_cast<int>(s), stages[s], comm.topology().replicas * comm.topology().shards > 1,
                options.broadcast_buffers, comm.topology());
  }
  return out;
}

/// Checks that all ranks were given the same program, and that training can continue with the program. Collective.
/// \param now the program in use \param accumulating whether accumulated gradients wait for their step
/// \throws preflight_error naming a rank with another program; usage_error, the same on every rank, for a program that cannot
/// replace `now`
inline void check_change(transport& comm, program_view const& now, program_view const& next, bool accumulating) {
  comm.check_usable();
  collective_scope const doing(comm, "changing the schedule");
  named_values lines = common_values(comm);
  add_program(lines, next);
  lines.add("gradients that wait for their step", accumulating ? "yes" : "no");
  check_consistency(comm, lines);
  auto const refuse = [&](std::string const& why) {
    throw usage_error("the schedule cannot change: " + why, {.rank = comm.topology().global_rank});
  };
  if (accumulating) refuse("gradients wait for their step. Remedy: change it after step()");
  if (next.plan.forward_only) refuse("the new program only runs forward. Remedy: one that trains");
  auto const differs = [&](char const* what, int a, int b) {
    if (a != b)
      refuse("the new program has " + std::to_string(b) + " " + what + ", the old one " + std::to_string(a) +
             ". Remedy: one of the same size, or another trainer");
  };
  differs("ranks", now.plan.size.ranks, next.plan.size.ranks);
  differs("microbatches", now.plan.size.micro_batches, next.plan.size.micro_batches);
  differs("slices", now.plan.size.slices, next.plan.size.slices);
  differs("stages", now.plan.stages, next.plan.stages);
  for (int s = 0; s < now.plan.stages; ++s) {
    if (now.plan.rank_of_stage(s) == next.plan.rank_of_stage(s)) continue;
    refuse("stage " + std::to_string(s) + " is on rank " + std::to_string(now.plan.rank_of_stage(s)) +
           ", and the new program has it on rank " + std::to_string(next.plan.rank_of_stage(s)) +
           ". Remedy: a program for the same placement");
  }
}

/// Checks that a program is for as many ranks as the pipeline has. \throws usage_error if not
inline void check_ranks(program_view const& program, transport const& comm) {
  if (int const ranks = comm.topology().pipeline_ranks; program.plan.size.ranks != ranks) {
    throw usage_error("the program is for " + std::to_string(program.plan.size.ranks) + " pipeline ranks, there are " +
                      std::to_string(ranks));
  }
}

/// Checks a trainer's arguments. \throws usage_error as `check_ranks`, for a program that only runs forward, and without a loss
inline void check_setup(program_view const& program, transport const& comm, bool has_loss) {
  check_ranks(program, comm);
  if (program.plan.forward_only)
    throw usage_error("this program only runs forward: train with a plan that has backwards, evaluate with this one");
  if (!has_loss) throw usage_error("a trainer needs a loss function");
}

}  // namespace detail
}  // namespace chevron
