#include <doctest/doctest.h>

#include <chevron/plan/step_graph.hpp>
#include <chevron/schedule.hpp>
#include <chevron/tools/show/chrome_trace.hpp>

#include <nlohmann/json.hpp>

#include <map>
#include <string>
#include <utility>
#include <vector>

using namespace chevron;

namespace {

/// A picture as if it had been recorded: each message is a SEND of `send` after its producer, and a RECV from when its consumer's
/// rank was ready (at most 10 before) until the consumer began.
show::picture recorded(plan_view const& plan, costs const& each, double send) {
  show::picture out = show::picture_of(plan, each.view(), "measured");
  std::vector<show::box> messages;
  for (show::box const& b : out.boxes) {
    int const stage = static_cast<int>(b.op.stage), micro_batch = static_cast<int>(b.op.micro_batch);
    bool const forward = b.op.kind == kind::forward;
    if (step_graph(plan).crosses(b.op) >= 0) {
      messages.push_back(
          {b.rank, b.end, b.end + send, make_action(forward ? kind::send_forward : kind::send_backward, stage, micro_batch)});
    }
    if (step_graph(plan).comes_over(b.op) >= 0) {
      messages.push_back({b.rank, b.start - 10, b.start,
                          make_action(forward ? kind::receive_forward : kind::receive_backward, stage, micro_batch)});
    }
  }
  out.boxes.insert(out.boxes.end(), messages.begin(), messages.end());
  return out;
}

}  // namespace

TEST_CASE("in a trace slices of a track never overlap in part, and every flow leaves and arrives inside a slice") {
  int flows = 0, pairs = 0;
  catalogue::for_each([&](auto const& one) {
    plan const made = catalogue::make_plan(one.name, {4, 8, 0});
    if (made.problem) return;
    CAPTURE(one.name);
    // A send that takes longer than the message: it arrives while its sender still sends.
    for (double const send : {0.1, 1.0, 3.0}) {
      auto const text = show::chrome_trace(recorded(made, {.communication = 0.5}, send));
      auto const events = nlohmann::json::parse(text).at("traceEvents");
      std::map<std::pair<int, int>, std::vector<std::pair<double, double>>> tracks;
      for (auto const& e : events) {
        if (e.at("ph") != "X") continue;
        double const start = e.at("ts");
        tracks[{e.at("pid"), e.at("tid")}].push_back({start, start + e.at("dur").get<double>()});
        pairs += e.at("name").get<std::string>().find("OVERLAP") != std::string::npos ? 1 : 0;
      }
      bool apart = true;
      for (auto& [track, slices] : tracks) {
        std::sort(slices.begin(), slices.end());
        for (std::size_t i = 1; i < slices.size(); ++i) apart = apart && slices[i].first >= slices[i - 1].second - 1e-6;
      }
      CHECK(apart);
      std::map<int, std::pair<double, double>> times;
      for (auto const& e : events) {
        if (e.at("ph") != "s" && e.at("ph") != "f") continue;
        double const at = e.at("ts");
        (e.at("ph") == "s" ? times[e.at("id")].first : times[e.at("id")].second) = at;
        bool inside = false;
        for (auto const& [start, end] : tracks.at({e.at("pid"), e.at("tid")})) inside = inside || (start <= at && at <= end);
        CHECK(inside);
        ++flows;
      }
      for (auto const& [id, when] : times) CHECK(when.first <= when.second);
      CHECK(times.size() == static_cast<std::size_t>(messages(made)));
    }
  });
  CHECK(flows > 1000);
  CHECK(pairs > 0);
}
