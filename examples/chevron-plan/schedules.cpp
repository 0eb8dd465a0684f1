#include <cstddef>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include <range/v3/algorithm/all_of.hpp>
#include <range/v3/range/conversion.hpp>
#include <range/v3/view/filter.hpp>
#include <range/v3/view/iota.hpp>

#include <chevron/catalogue/catalogue.hpp>

#include "request.hpp"
#include "table.hpp"

namespace plan_program {
namespace {

/// What a schedule is called in C++, and where it comes from.
struct source {
  std::string_view name, in_cpp, paper;
};

#define SOURCE(in_cpp, paper) \
  { chevron::catalogue::in_cpp.name, #in_cpp, paper }
constexpr source sources[] = {
    SOURCE(gpipe, "GPipe, arXiv 1811.06965"),
    SOURCE(one_f_one_b, "PipeDream-flush, arXiv 2006.09503; Megatron-LM, arXiv 2104.04473"),
    SOURCE(eager_1f1b, "arXiv 2211.05322"),
    SOURCE(looped_bfs, "arXiv 2211.05953"),
    SOURCE(interleaved_1f1b, "Megatron-LM, arXiv 2104.04473"),
    SOURCE(hanayo, "Hanayo, arXiv 2308.15762"),
    SOURCE(interleaved_zero_bubble, "PyTorch's ScheduleInterleavedZeroBubble"),
    SOURCE(zb_h1, "Zero Bubble, arXiv 2401.10241"),
    SOURCE(zb_h2, "Zero Bubble, arXiv 2401.10241"),
    SOURCE(zb_v, "Zero Bubble, arXiv 2401.10241; PyTorch's ScheduleZBVZeroBubble"),
    SOURCE(v_half, "Controllable Memory, arXiv 2405.15362"),
    SOURCE(v_min, "Controllable Memory, arXiv 2405.15362"),
    SOURCE(dual_pipe_v, "DeepSeek's DualPipe; PyTorch's ScheduleDualPipeV"),
    SOURCE(one_f_one_b_recompute, "Mario, PPoPP 2025; for stages that recompute"),
    SOURCE(seq_1f1b, "Seq1F1B, arXiv 2406.03488; with --slices"),
    SOURCE(seq_zb_h1, "Seq1F1B, arXiv 2406.03488, and Zero Bubble; with --slices"),
    SOURCE(seq_interleaved_1f1b, "SlimPipe, arXiv 2504.14519; with --slices"),
    SOURCE(forward_only, "PyTorch's _ScheduleForwardOnly; evaluation alone"),
};
#undef SOURCE

/// Every schedule of the catalogue is there, and in its order.
constexpr bool complete() {
  std::size_t at = 0;
  bool same = true;
  auto const next = [&](auto const& one) { same = same && at < std::size(sources) && sources[at++].name == one.name; };
  chevron::catalogue::for_each(next);
  boost::hana::for_each(chevron::catalogue::recomputing, [&](auto const* one) { next(*one); });
  boost::hana::for_each(chevron::catalogue::sliced, [&](auto const* one) { next(*one); });
  boost::hana::for_each(chevron::catalogue::evaluation, [&](auto const* one) { next(*one); });
  return same && at == std::size(sources);
}
static_assert(complete());

/// How many stages on each rank a schedule takes: 1, 2, or any (even) number.
std::string chunks_of(std::string const& name) {
  constexpr int most = 6;
  auto const takes = [&](int chunks) { return !plan_named(name, {.ranks = 2, .micro_batches = 4, .chunks = chunks}).problem; };
  auto const taken = ranges::views::closed_iota(1, most) | ranges::views::filter(takes) | ranges::to<std::vector>();
  auto const count = static_cast<int>(taken.size());
  bool const even = ranges::all_of(taken, [](int chunks) { return chunks % 2 == 0; });
  int const usual = plan_named(name, {.ranks = 2, .micro_batches = 4}).size.chunks;
  if (count == 1) return std::to_string(usual);
  return (count == most ? "any" : even ? "even" : "some") + std::string(", else ") + std::to_string(usual);
}

}  // namespace

std::vector<std::string> schedule_names() {
  std::vector<std::string> names;
  chevron::catalogue::for_each([&](auto const& one) { names.emplace_back(one.name); });
  return names;
}

std::vector<std::string> all_names() {
  std::vector<std::string> names = schedule_names();
  boost::hana::for_each(chevron::catalogue::recomputing, [&](auto const* one) { names.emplace_back(one->name); });
  boost::hana::for_each(chevron::catalogue::sliced, [&](auto const* one) { names.emplace_back(one->name); });
  boost::hana::for_each(chevron::catalogue::evaluation, [&](auto const* one) { names.emplace_back(one->name); });
  return names;
}

chevron::plan plan_named(std::string const& name, chevron::shape size) { return chevron::catalogue::make_plan(name, size); }

int run_list(request const& asked) {
  std::vector<table_row> rows{{"schedule", "in C++", "chunks", "source"}};
  for (source const& one : sources) {
    rows.push_back({std::string(one.name), std::string(one.in_cpp), chunks_of(std::string(one.name)), std::string(one.paper)});
  }
  write(asked, table_text(rows, {align::left}));
  return exit_ok;
}

}  // namespace plan_program
