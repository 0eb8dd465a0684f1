#include "start.hpp"

#include <chrono>
#include <cstdio>
#include <optional>

#include <chevron/run/core/stop_request.hpp>

#include "common/programs.hpp"
#include "pictures.hpp"
#include "train.hpp"

namespace chevron::train {

int start(int argc, char** argv, gpu_side const* gpus) {
  task what;
  what.options = read_options(argc, argv);
  options& o = what.options;
  launch_environment const told = look_for_launcher(o, argv, gpus);
  choose_slices(o, o.attention >= 0 ? o.attention : o.model.attention_share());
  what.programs = make_programs(o);
  if (o.print_groups) {
    if (told.rank == 0) std::printf("%s", groups_of(o).c_str());
    return 0;
  }
  if (told.rank == 0) check_files(o);
  // Without a folder to save into, a signal ends the program as it ends others.
  std::optional<stop_signals> stop;
  if (!o.checkpoint.empty()) stop.emplace();
  if (o.stop_after > 0) request_stop_after(std::chrono::milliseconds(static_cast<long>(o.stop_after * 1000)));
  what.text = read_corpus({.paths = o.data, .least = o.model.context + 1});
  run_ranks(o, told, gpus, [&](rank_place const& where) { train_on_rank(what, where); });
  return 0;
}

}  // namespace chevron::train
