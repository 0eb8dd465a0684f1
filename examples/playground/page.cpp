// What the page calls, compiled to WebAssembly. Texts go in and out through this module's memory: `input(size)` gives the place
// for a request, each other function reads it there and returns the address of its answer, which ends with a zero.

#include <cstdlib>
#include <string>

#include <chevron/csv/csv.hpp>
#include <chevron/search.hpp>
#include <chevron/tools/show/json.hpp>

#include "../common/placements.hpp"
#include "engine.hpp"

#define EXPORTED(name) extern "C" __attribute__((export_name(#name)))

using namespace playground;

namespace {

std::string asked_text;
std::string answered;

char const* give(std::string text) {
  answered = std::move(text);
  return answered.c_str();
}

std::string refused(std::string const& why) { return "{\"problem\":" + chevron::show::json_string(why) + "}"; }

template <class Use>
char const* with_plan(Use use) {
  settings const asked = read_settings(asked_text);
  if (!asked.problem.empty()) return give(refused(asked.problem));
  return give(use(asked, make(asked)));
}

}  // namespace

EXPORTED(input) char* input(int size) {
  asked_text.assign(static_cast<std::size_t>(size), 0);
  return asked_text.data();
}

/// Names of the catalogue's schedules that train, as a JSON list.
EXPORTED(names) char const* names() {
  std::string out;
  chevron::catalogue::for_each([&](auto const& one) { out += (out.empty() ? "" : ",") + chevron::show::json_string(one.name); });
  return give("[" + out + "]");
}

/// The plan: law, numbers, what is drawn.
EXPORTED(show) char const* show_plan() { return with_plan(answer); }

/// What `chevron-plan show --format json` prints.
EXPORTED(json) char const* json_of() {
  return with_plan([](settings const& asked, judged const& of) {
    if (!of.playable) return refused(of.sentence);
    return chevron::show::json(of.plan, prices(asked, of.plan).view());
  });
}

EXPORTED(csv) char const* csv_of() {
  return with_plan(
      [](settings const&, judged const& of) { return of.playable ? chevron::show::csv(of.plan) : refused(of.sentence); });
}

EXPORTED(program) char const* program_of() {
  return with_plan(
      [](settings const& asked, judged const& of) { return of.playable ? as_program(asked, of) : refused(of.sentence); });
}

/// The search: what it found, as CSV, with its length, the bound and where it began.
EXPORTED(search) char const* search_for() {
  using namespace chevron;
  settings const asked = read_settings(asked_text);
  if (!asked.problem.empty()) return give(refused(asked.problem));
  auto const on = [&](auto where) {
    shape size{asked.ranks, asked.micro_batches, asked.chunks};
    if (size.chunks == 0) size.chunks = where.default_chunks;
    // Where stages live decides which link is slow.
    plan const placed = placed_on(where, size);
    if (placed.problem) return refused(describe(placed.problem).str());
    owned_costs const costs = prices(asked, placed);
    activation_limit memory;
    memory.most = asked.memory_limit > 0 ? static_cast<int>(asked.memory_limit * size.chunks + 1e-9) : 0;
    search::effort effort;
    effort.trials = asked.trials;
    effort.seed = static_cast<std::uint64_t>(asked.seed);
    search::found const found = search::find({.where = placed, .costs = costs.view(), .memory = memory}, effort);
    if (found.best.problem) return refused(describe(found.best.problem).str());
    return "{\"length\":" + show::exact(found.length) + ",\"bound\":" + show::exact(found.bound) +
           ",\"optimal\":" + (found.optimal() ? "true" : "false") + ",\"trials\":" + std::to_string(found.trials) +
           ",\"start\":" + show::json_string(found.start.characters) +
           ",\"published\":" + (found.published_length > 0 ? show::json_string(found.published.name.characters) : "null") +
           ",\"published_length\":" + show::exact(found.published_length) +
           ",\"csv\":" + show::json_string(show::csv(found.best)) + "}";
  };
  return placements::on(asked.placement, [&](auto const& where) { return give(on(where)); });
}

#ifdef __wasm__
// No exception leaves the engine: bad input is an answer. Debian's libc++abi for WebAssembly has no unwinder, so what would
// throw, which is only the lack of memory, stops the module, and the page says so.
extern "C" void* __cxa_allocate_exception(unsigned long) noexcept { __builtin_trap(); }
extern "C" void __cxa_throw(void*, void*, void*) { __builtin_trap(); }
#endif
