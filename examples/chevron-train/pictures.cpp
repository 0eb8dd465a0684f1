#include "pictures.hpp"

#include <array>
#include <string>
#include <utility>
#include <vector>

#include <chevron/plan/profile.hpp>
#include <chevron/tools/show/chrome_trace.hpp>
#include <chevron/tools/show/html.hpp>
#include <chevron/tools/show/profile_file.hpp>
#include <chevron/tools/show/svg.hpp>

#include "common/console.hpp"

namespace chevron::train {

void check_files(options const& o) {
  check_file("--metrics", o.metrics);
  check_folder("--tensorboard", o.tensorboard);
  check_file("--trace", o.trace);
  check_file("--timeline", o.timeline);
  check_file("--report", o.report);
  check_file("--profile", o.profile);
}

void write_files(options const& o, comparison const& outcome) {
  std::array const both{outcome.predicted_picture, outcome.measured_picture};
  std::vector<std::pair<std::string, std::string>> facts;
  if (!o.timeline.empty()) {
    write_file("--timeline", o.timeline, show::svg(both));
    facts.push_back({"timeline", o.timeline + ": step " + std::to_string(outcome.typical_step) +
                                     ", a typical one, predicted above measured"});
  }
  if (!o.report.empty()) {
    std::array const known{outcome.predicted_facts};
    write_file("--report", o.report, show::html(both, known));
    facts.push_back({"report", o.report + ": the same as a page to pan, zoom and point at"});
  }
  if (!o.trace.empty()) {
    write_file("--trace", o.trace, show::chrome_trace(both));
    facts.push_back({"trace", o.trace + ": the same for https://ui.perfetto.dev or chrome://tracing"});
  }
  if (!o.profile.empty()) {
    write_file("--profile", o.profile, write_profile(outcome.for_file));
    facts.push_back({"profile", o.profile + ": times of stages and messages, and bytes of stages, for chevron-plan "
                                            "show|compare|search|fit --profile"});
  }
  if (!facts.empty()) print_facts(facts);
}

}  // namespace chevron::train
