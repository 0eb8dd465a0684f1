// Programs for programs.py: every schedule of the catalogue up to a size, mutants, and faults that are known. Writes, into a
// folder, a line for each with the prover's verdict and the program's numbers, and for each number of ranks the model that reads
// them, so that SPIN's machine is compiled a few times and not once a program.
//
//   chevron-model-programs FOLDER MOST MUTANTS MUTANTS_OF_CHANNELS
//
// The last number is that of the mutants of each model of channels, with and without hosts that wait.

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include <chevron/lower/channel_order.hpp>
#include <chevron/lower/check_program.hpp>
#include <chevron/prove/in_flight.hpp>

#include "chevron-plan/promela.hpp"
#include "unit/prove/mutants.hpp"

using namespace chevron;
using namespace chevron::tests;

namespace {

/// The sizes of a model's arrays.
struct sizes {
  int stages = 1, edges = 1, activations = 1, receives = 1, sends = 1, code = 1, plan = 1, cells = 1, messages = 1;
};

constexpr std::int64_t small_below = 20;

std::map<int, sizes> models;  // by number of ranks
std::ofstream lines;

std::vector<std::int64_t> numbers_of(show::promela_tables const& t) {
  std::vector<std::int64_t> out{t.ranks, t.stages,          t.micro_batches, t.slices,        t.forward_only,
                                t.edges, t.in_flight_limit, t.byte_limit,    t.message_limit, t.channels};
  auto const add = [&](auto const& list) {
    out.push_back(static_cast<std::int64_t>(list.size()));
    out.insert(out.end(), list.begin(), list.end());
  };
  add(t.home);
  add(t.weight);
  add(t.input_weight);
  add(t.runs_again);
  add(t.activations);
  add(t.receives);
  add(t.sends);
  add(t.start);
  add(t.plan_start);
  add(t.edge);
  add(t.first_send);
  add(t.first_receive);
  add(t.send_turn);
  add(t.receive_turn);
  add(t.small);
  add(t.after_messages);
  add(t.code);
  add(t.plan);
  return out;
}

/// A line: sort, name, the law that the prover finds broken, SPIN's expected message (of faults), the numbers.
/// \param rules of channels; but for Chevron's own the messages match, and the verdict is that of `check_channel_order`
/// \param bytes of each boundary's messages, of which those of fewer than `small_below` are small; none: all sends are rendezvous
void write(std::string const& sort, std::string const& name, owned_program const& p, std::string const& expected = "-",
           channel_rules rules = {}, std::vector<std::int64_t> const& bytes = {}) {
  size_view const of_messages{.message = bytes.data(), .stride = 1};
  std::int64_t const below = bytes.empty() ? 0 : small_below;
  show::promela_tables const t = show::promela_tables_of(p.view(), rules, of_messages, below);
  bool const own = rules.are_own() && bytes.empty();
  finding const broken = own ? check(p.view()) : check_channel_order(p.view(), rules, of_messages, below);
  sizes& most = models[t.ranks];
  auto const grow = [](int& to, std::size_t size) { to = std::max(to, static_cast<int>(size)); };
  auto const grow_to_all = [&](int& to, std::vector<int> const& all) {
    for (int const each : all) to = std::max(to, each);
  };
  grow(most.stages, t.home.size());
  grow(most.edges, static_cast<std::size_t>(t.edges));
  grow_to_all(most.activations, t.activations);
  grow_to_all(most.receives, t.receives);
  grow_to_all(most.sends, t.sends);
  grow(most.code, t.code.size());
  grow(most.plan, t.plan.size());
  grow(most.messages, std::max(t.send_turn.size(), t.receive_turn.size()));
  grow(most.cells, static_cast<std::size_t>(t.stages * t.micro_batches));
  lines << sort << '\t' << name << '\t' << t.ranks << '\t' << name_of(broken.broken) << '\t' << expected << '\t';
  for (std::int64_t const n : numbers_of(t)) lines << n << ' ';
  lines << '\n';
}

/// The model whose tables are read when it runs: from the file PROGRAM, at the byte OFFSET.
std::string model_of(int ranks, sizes const& s) {
  std::string out;
  auto const define = [&](char const* name, int value) {
    out += std::string("#define ") + name + " " + std::to_string(value) + "\n";
  };
  bool const small = 2 * s.cells < 255;
  define("none", show::promela_tables::none);
  out += small ? "#define tensor byte\n" : "#define tensor int\n";
  out += "#define slot_number byte\n";  // 255 slots are more than programs of this size have
  define("pending", small ? 255 : 2 * s.cells + 1);
  define("MOST_RANKS", ranks);
  define("MOST_STAGES", s.stages);
  define("MOST_EDGES", s.edges);
  define("MOST_ACTIVATIONS", s.activations);
  define("MOST_RECEIVES", s.receives);
  define("MOST_SENDS", s.sends);
  define("MOST_MESSAGES", s.messages);
  define("MOST_SEQUENCES", s.cells);
  out += "#define prepare c_code { read_program(); }\n";
  std::string reads;
  for (char const* one : {"ranks", "stages", "micro_batches", "slices", "forward_only", "edges", "in_flight_limit", "byte_limit",
                          "message_limit", "channels"}) {
    out += std::string("hidden int ") + one + ";\n";
    reads += std::string("  ") + one + " = next_number(from);\n";
  }
  out += "hidden int buffered;\n";
  std::pair<char const*, int> const arrays[] = {
      {"home", s.stages},        {"weight", s.stages},         {"input_weight", s.stages}, {"runs_again", s.cells},
      {"activations", ranks},    {"receives", ranks},          {"sends", ranks},           {"start", ranks + 1},
      {"plan_start", ranks + 1}, {"edge", ranks * ranks},      {"first_send", s.edges},    {"first_receive", s.edges},
      {"send_turn", s.messages}, {"receive_turn", s.messages}, {"small", s.messages},      {"after_messages", s.code},
      {"code", s.code},          {"plan", s.plan}};
  for (auto const& [name, size] : arrays) {
    out += "hidden int " + std::string(name) + "[" + std::to_string(size) + "];\n";
    reads += std::string("  for (left = next_number(from), i = 0; i < left; ++i) ") + name + "[i] = next_number(from);\n";
  }
  // The preprocessor of spin leaves \# alone, for that of the C compiler.
  out +=
      "c_code {\n  \\#include <stdio.h>\n  \\#include <stdlib.h>\n"
      "static int next_number(FILE* from) {\n  int n;\n  if (fscanf(from, \"%d\", &n) != 1) exit(99);\n  return n;\n}\n"
      "static void read_program(void) {\n  int i, left;\n  FILE* from = fopen(getenv(\"PROGRAM\"), \"r\");\n"
      "  if (from == NULL || fseek(from, atol(getenv(\"OFFSET\")), SEEK_SET) != 0) exit(99);\n" +
      reads + "  buffered = atoi(getenv(\"BUFFERED\"));\n  fclose(from);\n}\n}\n";
  return out + std::string(show::promela_machine);
}

bool is(instruction const& one, char const* text) { return to_text(one.op).str() == text; }

/// 1F1B on 3 ranks with 3 microbatches, changed in one place, for each sort of fault.
void write_faults() {
  owned_program const whole = lower(prove(expand(catalogue::one_f_one_b, shape{3, 3, 0}))).copy();
  auto const changed = [&](char const* name, char const* expected, std::function<void(lists<instruction>&)> const& change) {
    owned_program p = whole;
    lists<instruction> all = lists_of(p.view());
    change(all);
    fill(all, p.instructions, p.begin);
    write("fault", name, p, expected);
  };
  auto const at = [](std::vector<instruction>& list, char const* text) {
    auto const found = std::find_if(list.begin(), list.end(), [&](instruction const& one) { return is(one, text); });
    if (found == list.end()) std::cerr << "no " << text << " in the program\n", std::exit(1);
    return found;
  };
  auto const without = [&](char const* name, char const* expected, std::size_t rank, char const* text) {
    changed(name, expected, [&](auto& all) { all[rank].erase(at(all[rank], text)); });
  };
  auto const exchanged = [&](char const* name, char const* expected, std::size_t rank, char const* one, char const* other) {
    changed(name, expected, [&](auto& all) { std::swap(*at(all[rank], one), *at(all[rank], other)); });
  };
  write("fault", "none", whole, "nothing");
  exchanged("two receives exchanged", "content==wanted", 1, "1RECV_F0", "1RECV_F1");
  exchanged("a computation that is not the planned one", "plan", 2, "2F1", "2B0");
  changed("a send is missing", "end", [&](auto& all) {
    all[0].erase(at(all[0], "0SEND_F2"));
    all[0].erase(at(all[0], "0WAIT_SEND_F2"));
  });
  without("a receive is missing", "received", 1, "1RECV_F0");
  without("a wait is missing", "sending", 0, "0WAIT_SEND_F2");
  without("a gradient's sum is missing", "summed", 1, "1REDUCE_GRAD");
  without("the optimizer's step is missing", "stepped", 1, "OPTIMIZER_STEP");
  without("a computation is missing", "gradient", 2, "2B2");
  changed("a sum before its last gradient", "added", [&](auto& all) {
    auto const sum = at(all[1], "1REDUCE_GRAD"), last = at(all[1], "1B2");
    std::rotate(last, sum, sum + 1);
  });
  changed("a slot that is in use", "graph", [&](auto& all) {
    std::uint16_t const in_use = at(all[0], "0F0")->slot;
    for (instruction& one : all[0]) {
      if (one.op.micro_batch == 1 && is_compute(one.op.kind)) one.slot = in_use;
    }
  });
  changed("ranks wait for each other with rendezvous sends only", "end nothing", [&](auto& all) {
    synchronous_sends(all, -1);
    deferred_receives(all, -1);
  });
  auto const limited = [&](char const* name, char const* expected, std::function<void(plan&)> const& limit) {
    owned_program p = whole;
    limit(p.source);
    write("fault", name, p, expected);
  };
  limited("more in flight than declared", "in_flight_limit", [](plan& p) { p.in_flight_limit = 2; });
  limited("more bytes than declared", "byte_limit",
          [](plan& p) { declare_bytes(p, (std::int64_t{9} << 30) - 1, chevron::sizes{.activation = std::int64_t{3} << 30}); });
  limited("more messages than declared", "message_limit", [](plan& p) { p.message_limit = 11; });
}

/// The same two computations of a rank exchanged in plan and program: messages and slots are as they were, the order is not.
owned_program in_another_order(dice& d, owned_program const& of) {
  owned_program out = of;
  lists<instruction> all = lists_of(out.view());
  lists<action> planned = lists_of(out.source.view());
  std::size_t const r = static_cast<std::size_t>(d.below(static_cast<int>(all.size())));
  if (planned[r].size() < 2) return out;
  int const a = d.below(static_cast<int>(planned[r].size()) - 1);
  int const b = d.one_in(2) ? a + 1 : d.below(static_cast<int>(planned[r].size()));
  std::vector<std::size_t> computes;
  for (std::size_t i = 0; i < all[r].size(); ++i) {
    if (is_compute(all[r][i].op.kind)) computes.push_back(i);
  }
  std::swap(planned[r][static_cast<std::size_t>(a)], planned[r][static_cast<std::size_t>(b)]);
  std::swap(all[r][computes[static_cast<std::size_t>(a)]], all[r][computes[static_cast<std::size_t>(b)]]);
  fill(all, out.instructions, out.begin);
  fill(planned, out.source.actions, out.source.begin);
  return out;
}

/// Waits for each send at once and posts receives late, on all ranks or on some: that may hang with rendezvous sends alone.
owned_program without_patience(dice& d, owned_program const& of) {
  owned_program out = of;
  lists<instruction> all = lists_of(out.view());
  for (int r = 0; r < out.source.size.ranks; ++r) {
    if (!d.one_in(4)) synchronous_sends(all, r);
    if (!d.one_in(4)) deferred_receives(all, r);
  }
  fill(all, out.instructions, out.begin);
  return out;
}

owned_program with_limits(dice& d, owned_program of) {
  plan& p = of.source;
  if (p.forward_only || d.one_in(3)) {
    p.message_limit = std::max(1, messages(p) - 1 + d.below(3));
  } else if (d.one_in(2)) {
    p.in_flight_limit = std::max(1, peak_in_flight(p) - 1 + d.below(2));
  } else {
    std::vector<std::int64_t> held, inputs;
    for (int s = 0; s < p.stages; ++s) {
      held.push_back((1 + d.below(4)) * std::int64_t{1} << 20);
      inputs.push_back((1 + d.below(static_cast<int>(held.back() >> 20))) * std::int64_t{1} << 20);
    }
    size_view const bytes{held.data(), nullptr, 1, inputs.data(), 1};
    declare_bytes(p, std::max<std::int64_t>(1, peak_bytes(p, bytes) - d.below(2)), bytes);
  }
  return of;
}

void write_mutants(int count, int most) {
  int written = 0;
  for (unsigned seed = 300000; written < count; ++seed) {
    dice d{std::mt19937(seed)};
    plan const p = lawful_plan(d);
    if (p.view().has_own_kinds()) continue;  // the model takes a plan's order as given, and knows no rows
    if (p.size.ranks > most || p.size.units() > most || p.stages > 2 * most) continue;
    owned_program const whole = lower(prove(p)).copy();
    if (whole.view().total() > 160) continue;  // SPIN's time goes with the orders there are
    int const sort = d.below(12);
    write("mutant", "mutant of seed " + std::to_string(seed),
          sort < 6    ? mutant(d, whole)
          : sort < 9  ? in_another_order(d, whole)
          : sort < 11 ? without_patience(d, whole)
                      : with_limits(d, whole));
    ++written;
  }
}

/// Mutants whose messages are moved later, over channels; in half of them, sends of some boundaries are small.
void write_channel_mutants(int count, int most, channel_rules rules) {
  std::string const sort = std::string(name_of(rules.model)) + (rules.hosts_wait ? ", hosts wait" : "");
  int written = 0;
  for (unsigned seed = 400000; written < count; ++seed) {
    dice d{std::mt19937(seed)};
    plan const p = lawful_plan(d);
    if (p.view().has_own_kinds() || p.size.ranks == 1 || p.size.ranks > most || p.size.units() > most || p.stages > 2 * most)
      continue;
    owned_program mutated = lower(prove(p)).copy();
    if (mutated.view().total() > 160) continue;
    lists<instruction> all = lists_of(mutated.view());
    // The messages in PyTorch's places are played over each model, those of `lower` hang over most: both are drawn.
    if (!d.one_in(3)) receives_with_sends(all);
    if (d.one_in(4)) synchronous_sends(all, d.below(p.size.ranks));
    later_messages(d, all);
    fill(all, mutated.instructions, mutated.begin);
    finding const f = check(mutated.view());
    if (f && f.broken != law::deadlock) continue;
    std::vector<std::int64_t> bytes;
    if (d.one_in(2)) {
      for (int s = 0; s + 1 < p.stages; ++s) bytes.push_back(d.one_in(4) ? small_below : small_below / 2);
    }
    write(sort, sort + " of seed " + std::to_string(seed), mutated, "-", rules, bytes);
    ++written;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::cerr << "usage: chevron-model-programs FOLDER MOST MUTANTS MUTANTS_OF_CHANNELS\n";
    return 2;
  }
  std::string const folder = argv[1];
  int const most = std::stoi(argv[2]), mutants = std::stoi(argv[3]), mutants_of_channels = std::stoi(argv[4]);
  lines.open(folder + "/programs.tsv");
  auto const add = [&](auto const& one) {
    for (int ranks = 1; ranks <= most; ++ranks) {
      for (int micro_batches = 1; micro_batches <= most; ++micro_batches) {
        plan made = expand(one, shape{ranks, micro_batches, 0});
        if (made.problem) {
          std::cerr << one.name << " at " << ranks << " ranks: " << describe(made.problem).str() << "\n";
          continue;
        }
        write("schedule", std::string(one.name) + " " + std::to_string(ranks) + " " + std::to_string(micro_batches),
              lower(prove(made)).copy());
      }
    }
  };
  catalogue::for_each(add);
  boost::hana::for_each(catalogue::recomputing, [&](auto const* one) { add(*one); });
  boost::hana::for_each(catalogue::evaluation, [&](auto const* one) { add(*one); });
  boost::hana::for_each(catalogue::sliced, [&](auto const* one) {
    for (int ranks = 1; ranks <= 3; ++ranks) {
      write("schedule", std::string(one->name) + "/2 " + std::to_string(ranks) + " 2",
            lower(prove(expand(*one, shape{.ranks = ranks, .micro_batches = 2, .slices = 2}))).copy());
    }
  });
  write_faults();
  write_mutants(mutants, most);
  for (bool const hosts_wait : {false, true}) {
    for (int model = 0; model < channel_models; ++model)
      write_channel_mutants(mutants_of_channels, most, {static_cast<channel_model>(model), hosts_wait});
  }
  for (auto const& [ranks, size] : models) {
    std::ofstream(folder + "/programs-" + std::to_string(ranks) + ".pml") << model_of(ranks, size);
  }
  lines.close();
  return lines ? 0 : 1;
}
